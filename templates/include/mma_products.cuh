// What a warp multiplies in a step of K, of 32 bytes: fragments of both operands, and the instructions.
#pragma once
#include "mma_ptx.cuh"

template <u32 kKind, u32 kTilesM, u32 kTilesN>
struct MmaProducts {
  using Sums = float[kTilesM][kTilesN * 4];
  struct Fragments {
    u32 left[kTilesM][4], right[kTilesN][2];
  };

  static DG_DEVICE void clear(Sums& sum) {
#pragma unroll
    for (u32 i = 0; i < kTilesM; ++i)
#pragma unroll
      for (u32 j = 0; j < kTilesN * 4; ++j) sum[i][j] = 0.0f;
  }

  // Neighbours share fragments of one side, of the left one where they can: these have more registers. Instructions that scale take the
  // scales of `factors`.
  template <class Factors>
  static DG_DEVICE void add(Sums& sum, const Fragments& x, const Factors& factors) {
    if constexpr (kKind == kMmaWidened) {
      // A word has four bytes of K. Those of both operands are in the same order, in which they need not be neighbours in the product: the
      // first and the third are elements 2 i and 2 i + 1 of 16, and the others 2 i + 8 and 2 i + 9.
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        u32 right[kTilesN][2];
#pragma unroll
        for (u32 j = 0; j < kTilesN; ++j) widen(x.right[j][half], right[j][0], right[j][1]);
#pragma unroll
        for (u32 i = 0; i < kTilesM; ++i) {
          u32 left[4];
          widen(x.left[i][2 * half], left[0], left[2]);
          widen(x.left[i][2 * half + 1], left[1], left[3]);
#pragma unroll
          for (u32 j = 0; j < kTilesN; ++j) multiply_add<kMmaF16>(&sum[i][j * 4], left, right[j]);
        }
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (u32 j = 0; j < kTilesN; ++j) {
          const u32 column = i % 2 ? kTilesN - 1 - j : j;
          multiply_add<kKind>(&sum[i][column * 4], x.left[i], x.right[column], factors.of_left(i), factors.of_right(column));
        }
      }
    }
  }

 private:
  // Four bytes of E4M3 as FP16, which has all their values: exponents are one bit longer, and their bias is eight more.
  static DG_DEVICE void widen(u32 x, u32& even, u32& odd) {
    even = widen_pair(x << 8);
    odd = widen_pair(x);
  }
  // Of two bytes, each in the upper half of 16 bits. NaN has the bits of 480, and 448 is the largest number. So 480 * 144 alone is
  // infinite, and NaN times zero. Integers would need a branch.
  static DG_DEVICE u32 widen_pair(u32 x) {
    const u32 small = (x & 0x80008000) | (x >> 1 & 0x3f803f80);  // divided by 256
    const u32 large = multiply_halves(small, 0x78807880), zero = 0;
    return multiply_add_halves(large, zero, multiply_halves(small, 0x5c005c00));
  }
};
