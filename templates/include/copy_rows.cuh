// Copies a matrix of 2-byte elements, of any strides, to where TMA can read it: element (row, column) goes to
// output[row * padded_columns + column]. Columns from `columns` to `padded_columns` are zero.
#pragma once
#include "barrier.cuh"

// A CTA moves a tile through shared memory, so that reads run along whichever dimension of the input has the smaller stride and
// writes along the output's rows, two elements at a time. A grid of any size does all tiles.
template <u32 kTileRows, u32 kTileColumns, u32 kThreads>
DG_DEVICE void copy_rows(const u16* input, u16* output, u32 rows, u32 columns, i64 stride_row, i64 stride_column,
                         u32 padded_columns) {
  constexpr u32 kElements = kTileRows * kTileColumns, kPairs = kTileColumns / 2;
  // Two more elements a row, so that threads that store down a column use different banks.
  __shared__ alignas(4) u16 tile[kTileRows][kTileColumns + 2];
  const bool down = stride_row < stride_column;
  const u32 across = ceil_div(padded_columns, kTileColumns);
  const i64 tiles = static_cast<i64>(ceil_div(rows, kTileRows)) * across;
  wait_for_previous_kernel();
  allow_next_kernel();
  for (i64 index = blockIdx.x; index < tiles; index += gridDim.x) {
    const u32 first_row = static_cast<u32>(index / across) * kTileRows;
    const u32 first_column = static_cast<u32>(index % across) * kTileColumns;
#pragma unroll
    for (u32 step = 0; step < kElements / kThreads; ++step) {
      const u32 i = step * kThreads + threadIdx.x;
      const u32 y = down ? i % kTileRows : i / kTileColumns, x = down ? i / kTileRows : i % kTileColumns;
      const u32 row = first_row + y, column = first_column + x;
      tile[y][x] = row < rows && column < columns ? input[row * stride_row + column * stride_column] : u16(0);
    }
    __syncthreads();
#pragma unroll
    for (u32 step = 0; step < kElements / 2 / kThreads; ++step) {
      const u32 i = step * kThreads + threadIdx.x, y = i / kPairs, x = i % kPairs * 2;
      const u32 row = first_row + y, column = first_column + x;
      if (row < rows && column < padded_columns)
        *reinterpret_cast<u32*>(output + static_cast<i64>(row) * padded_columns + column) =
            *reinterpret_cast<const u32*>(&tile[y][x]);
    }
    __syncthreads();
  }
}
