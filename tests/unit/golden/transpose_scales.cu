#include "transpose.cuh"

extern "C" __global__ void __launch_bounds__(256)
    transpose_scales(const float* input, float* output, u32 rows, u32 columns, i64 stride_row, i64 stride_column, i64 stride_batch, u32 padded_rows) {
  transpose_scales<64, 256>(input, output, rows, columns, stride_row, stride_column,
                                                          stride_batch, padded_rows);
}
