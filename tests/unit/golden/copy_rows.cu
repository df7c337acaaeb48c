#include "copy_rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_rows(const u16* input, u16* output, u32 rows, u32 columns, i64 stride_row, i64 stride_column, u32 padded_columns) {
  copy_rows<64, 64, 256>(input, output, rows, columns, stride_row,
                                                                          stride_column, padded_columns);
}
