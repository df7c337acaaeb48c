// Transposes scale factors into the layout that TMA loads: element (row, column) goes to output[column * padded_rows + row].
// Rows from `rows` to `padded_rows` are zero.
#pragma once
#include "barrier.cuh"

// One CTA moves kTileRows rows x 32 columns through shared memory, so that reads run along a row-major input's columns
// and writes along the output's rows. CTAs are numbered by batch, then rows, then columns.
template <u32 kTileRows, u32 kThreads>
DG_DEVICE void transpose_scales(const float* input, float* output, u32 rows, u32 columns, i64 stride_row,
                                i64 stride_column, i64 stride_batch, u32 padded_rows) {
  __shared__ float tile[32][kTileRows + 1];
  const u32 across = ceil_div(columns, 32), tiles = ceil_div(padded_rows, kTileRows) * across;
  const u32 batch = blockIdx.x / tiles, place = blockIdx.x % tiles;
  const u32 first_row = place / across * kTileRows, first_column = place % across * 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  input += batch * stride_batch;
  output += static_cast<i64>(batch) * columns * padded_rows;
  for (u32 i = threadIdx.x; i < kTileRows * 32; i += kThreads) {
    const u32 row = first_row + i / 32, column = first_column + i % 32;
    tile[i % 32][i / 32] =
        row < rows && column < columns ? input[row * stride_row + column * stride_column] : 0.0f;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < kTileRows * 32; i += kThreads) {
    const u32 row = first_row + i % kTileRows, column = first_column + i / kTileRows;
    if (row < padded_rows && column < columns)
      output[static_cast<i64>(column) * padded_rows + row] = tile[i / kTileRows][i % kTileRows];
  }
}
