// Promotion of FP8 with mma.sync: the sums over 128 of K are multiplied by scales of A and of B, and added in float32.
#pragma once
#include "groups.cuh"
#include "mma_ptx.cuh"

// What instructions scale by without scales of their own.
struct MmaOnes {
  static DG_DEVICE u32 of_left(u32) { return kExponentOfOne; }
  static DG_DEVICE u32 of_right(u32) { return kExponentOfOne; }
};

// A scale of A is that of a row of D in 128 of K, and a scale of B that of 128 columns of D, of which a warp has a part. They are loaded
// one block of K ahead.
template <u32 kTilesM, u32 kTilesN, bool kSwapped>
struct MmaScales {
  // Rows of D in a thread: two in each tile of 16, or with kSwapped in each of eight.
  enum : u32 { kRows = kSwapped ? kTilesN * 2 : kTilesM * 2 };
  using Sums = float[kTilesM][kTilesN * 4];

  struct Factors : MmaOnes {
    float row[kRows];

    DG_DEVICE void multiply(float by) {
#pragma unroll
      for (float& each : row) each = __fmul_rn(each, by);
    }
    DG_DEVICE void promote(Sums& sum, const Sums& partial) const {
#pragma unroll
      for (u32 i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (u32 j = 0; j < kTilesN * 4; ++j)
          sum[i][j] = __fmaf_rn(partial[i][j], row[kSwapped ? j / 4 * 2 + j % 2 : i * 2 + j % 4 / 2], sum[i][j]);
      }
    }
  };

  float of_rows[kRows], of_columns;
  const float *a, *b;  // of the next block
  u32 rows;            // from this thread's first one up to the end

  // `row` and `column` are the warp's first ones in D, `first` is the first block of K, of `blocks` in all.
  template <class Kernel, class Group>
  DG_DEVICE MmaScales(const Kernel& kernel, u32 row, u32 column, u32 end, Group group, u32 first, u32 blocks, u32 lane) {
    const auto& arg = kernel.arg;
    const u32 own = row + (kSwapped ? lane % 4 * 2 : lane / 4);
    rows = end > own ? end - own : 0;
    i64 block = first, at = own;
    b = arg.scale_b + column / 128 * arg.scale_b_stride_n + first * arg.scale_b_stride_k;
    if constexpr (Kernel::kGrouped) {
      b += static_cast<i64>(group) * arg.scale_b_stride_g;
      if constexpr (Kernel::Layout::kGrouping == kMasked) {  // a group's scales have its rows, and come after those of the group before
        block += static_cast<i64>(group) * blocks;
        at -= static_cast<i64>(group) * kernel.m();
      }
    }
    a = arg.scale_a + block * arg.scale_a_stride + at;
  }

  // Those of the next block; after it comes the one that is `blocks` further.
  template <class Kernel>
  DG_DEVICE void load(const Kernel& kernel, u32 blocks = 1) {
#pragma unroll
    for (u32 i = 0; i < kRows; ++i) {
      const u32 row = kSwapped ? i / 2 * 8 + i % 2 : i * 8;
      of_rows[i] = row < rows ? load_global(a + row) : 0.0f;
    }
    of_columns = load_global(b);
    a += blocks * kernel.arg.scale_a_stride;
    b += blocks * kernel.arg.scale_b_stride_k;
  }

  DG_DEVICE Factors take() const {
    Factors x;
#pragma unroll
    for (u32 i = 0; i < kRows; ++i) x.row[i] = __fmul_rn(of_rows[i], of_columns);
    return x;
  }
};

// Scales that are powers of two, of 1x128 for A and for B. Byte i of word j of a row is the exponent of the block 4 j + i of K. With
// kInside instructions scale products, and sums are added as they are. Elsewhere exponents become those of floats. kSpread: see MmaOperand.
template <u32 kTilesM, u32 kTilesN, bool kSwapped, bool kSpread, bool kInside>
struct MmaExponents {
  enum : u32 { kEach = kInside ? 1 : 2 };  // rows of a tile of 16 in a thread, and columns of a tile of 8
  using Sums = float[kTilesM][kTilesN * 4];

  struct Factors {
    u32 left[kTilesM * kEach], right[kTilesN * kEach];

    DG_DEVICE u32 of_left(u32 i) const { return left[i * kEach]; }
    DG_DEVICE u32 of_right(u32 i) const { return right[i * kEach]; }

    DG_DEVICE void multiply(float by) {
#pragma unroll
      for (u32& each : right) each = __float_as_uint(__fmul_rn(__uint_as_float(each), by));
    }

    DG_DEVICE void promote(Sums& sum, const Sums& partial) const {
#pragma unroll
      for (u32 i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (u32 j = 0; j < kTilesN * 4; ++j) {
          if constexpr (kInside) {
            sum[i][j] = __fadd_rn(sum[i][j], partial[i][j]);
          } else {
            const float row = __uint_as_float(left[i * 2 + j % 4 / 2]), column = __uint_as_float(right[j / 4 * 2 + j % 2]);
            sum[i][j] = __fmaf_rn(partial[i][j], __fmul_rn(row, column), sum[i][j]);
          }
        }
      }
    }
  };

  // Of an operand: the first word of this thread's first row, the words between two blocks of K, and rows from there up to the end.
  struct Side {
    const u8* from;
    i64 stride;
    u32 rows;
  };
  Factors next;
  Side left, right;
  u32 block;  // the next one

  // As those of `MmaScales`.
  template <class Kernel, class Group>
  DG_DEVICE MmaExponents(const Kernel& kernel, u32 row, u32 column, u32 end, Group group, u32 first, u32 blocks, u32 lane) : block(first) {
    const auto& arg = kernel.arg;
    const u32 of_left = lane / 4 + (kInside ? lane % 2 * 8 : 0), of_right = place(kInside ? lane / 4 : lane % 4 * 2);
    i64 words_a = 0, words_b = 0, before = 0;
    if constexpr (Kernel::kGrouped) {  // a group's scales come after those of the group before
      words_b = static_cast<i64>(group) * ceil_div(blocks, 4);
      if constexpr (Kernel::Layout::kGrouping == kMasked) words_a = words_b, before = static_cast<i64>(group) * kernel.m();
    }
    const auto side = [](const u8* scales, i64 stride, i64 words, u32 own, u32 end, i64 before) {
      return Side{scales + (words * stride + own - before) * 4, stride * 4, end > own ? end - own : 0};
    };
    const Side a = side(arg.scale_a, arg.scale_a_stride, words_a, row + (kSwapped ? of_right : of_left), end, before);
    const Side b = side(arg.scale_b, arg.scale_b_stride, words_b, column + (kSwapped ? of_left : of_right), kernel.n(), 0);
    left = kSwapped ? b : a, right = kSwapped ? a : b;
  }

  template <class Kernel>
  DG_DEVICE void load(const Kernel&, u32 blocks = 1) {
    const auto exponent = [&](const Side& side, u32 row) {
      return row < side.rows ? load_byte(side.from + block / 4 * side.stride + block % 4 + row * 4) : 0;
    };
#pragma unroll
    for (u32 i = 0; i < kTilesM * kEach; ++i) next.left[i] = exponent(left, i * (16 / kEach));
#pragma unroll
    for (u32 i = 0; i < kTilesN * kEach; ++i) next.right[i] = exponent(right, (kSpread ? i / kEach / 4 * 32 + i / kEach % 4 * 2 : i / kEach * 8) + i % kEach);
    block += blocks;
  }

  // Of a column of a product, among those of the warp.
  static DG_DEVICE u32 place(u32 column) { return kSpread ? column / 2 * 8 + column % 2 : column; }

  DG_DEVICE Factors take() const {
    Factors x = next;
    if constexpr (!kInside) {
#pragma unroll
      for (u32& each : x.left) each <<= 23;
#pragma unroll
      for (u32& each : x.right) each <<= 23;
    }
    return x;
  }
};

// Those of a kernel's constants.
template <class Tile, u32 kTilesM, u32 kTilesN, bool kSwapped, bool kSpread>
using MmaScalesOf = Choice<Tile::kExponents, MmaExponents<kTilesM, kTilesN, kSwapped, kSpread, Tile::kMma == kMmaE4m3Scaled>,
                           MmaScales<kTilesM, kTilesN, kSwapped>>;
