// FP8 promotion: the tensor core's sum over one block of K, scaled and added to float32.
#pragma once
#include "types.cuh"

// Scale factors of B for the columns of one tile, 1 x 128 blocks of K at a time in registers: lane l of each warp holds
// the factors of K block (32 * chunk + l), one coalesced load serves 32 blocks, and the next chunk is fetched while
// this one is used. Any strides, so no layout of B's scales ever needs a copy.
template <u32 kRows>
struct ColumnScales {
  const float* base;
  i64 stride_n, stride_k;
  u32 rows, blocks, lane;
  u32 first_row;
  float now[kRows], next[kRows];

  DG_DEVICE ColumnScales(const float* base, i64 stride_n, i64 stride_k, u32 rows, u32 blocks, u32 lane)
      : base(base), stride_n(stride_n), stride_k(stride_k), rows(rows), blocks(blocks), lane(lane) {}

  // Starts fetching the first chunk of a tile whose first column lies in scale row `row`.
  DG_DEVICE void open(u32 row) {
    first_row = row;
    fetch(0);
  }

  // The factors for K block `block`; blocks are asked for in order.
  DG_DEVICE void get(u32 block, float (&scale)[kRows]) {
    if (block % 32 == 0) {
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) now[r] = next[r];
      fetch(block + 32);
    }
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) scale[r] = __shfl_sync(0xffffffffu, now[r], block % 32);
  }

 private:
  DG_DEVICE void fetch(u32 block) {
    const u32 mine = block + lane;
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      const bool inside = mine < blocks && first_row + r < rows;
      next[r] = inside ? __ldg(base + (first_row + r) * stride_n + mine * stride_k) : 0.0f;
    }
  }
};

// sum += scale_a * scale_b * partial over one m64 x kColumns accumulator tile. In a thread's registers, 4j..4j+3 are
// two columns of row `lane / 4` and the same two of the row eight below, in 8-column chunk j. `first_columns` of the
// whole tile lie in B's first block row; the border falls on a multiple of kGroup, so that the choice of factor is made
// once a group, and not at all where a tile cannot straddle a border.
template <u32 kColumns, u32 kOffset, u32 kGroup, u32 kRows>
DG_DEVICE void promote(float* sum, const float* partial, const float (&scale_a)[2], const float (&scale_b)[kRows],
                       u32 first_columns) {
  if constexpr (kRows == 1) {
    const float low = scale_a[0] * scale_b[0], high = scale_a[1] * scale_b[0];
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; ++i) sum[i] += ((i & 2) ? high : low) * partial[i];
  } else {
    const float low0 = scale_a[0] * scale_b[0], high0 = scale_a[1] * scale_b[0];
    const float low1 = scale_a[0] * scale_b[1], high1 = scale_a[1] * scale_b[1];
#pragma unroll
    for (u32 group = 0; group < ceil_div(kColumns, kGroup); ++group) {
      const bool first = kOffset + group * kGroup < first_columns;
      const float low = first ? low0 : low1, high = first ? high0 : high1;
#pragma unroll
      for (u32 i = group * kGroup / 2; i < min_of((group + 1) * kGroup, kColumns) / 2; ++i)
        sum[i] += ((i & 2) ? high : low) * partial[i];
    }
  }
}
