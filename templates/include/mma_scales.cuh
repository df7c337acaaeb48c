// Promotion of FP8 with mma.sync: the sums over 128 of K are multiplied by a row's scale of A and a scale of B, and added in float32.
#pragma once
#include "groups.cuh"
#include "mma_ptx.cuh"

// A scale of A is that of a row of D in 128 of K, and a scale of B that of 128 columns of D, of which a warp has a part. They are loaded
// one block of K ahead.
template <u32 kTilesM, u32 kTilesN, bool kSwapped>
struct MmaScales {
  // Rows of D in a thread: two in each tile of 16, or with kSwapped in each of eight.
  enum : u32 { kRows = kSwapped ? kTilesN * 2 : kTilesM * 2 };
  using Sums = float[kTilesM][kTilesN * 4];

  struct Factors {
    float row[kRows];

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
