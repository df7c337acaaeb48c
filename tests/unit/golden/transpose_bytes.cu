#include "transpose_bytes.cuh"

extern "C" __global__ void __launch_bounds__(256)
    transpose_bytes(const u8* input, u8* output, u32 rows, u32 columns, i64 stride) {
  transpose_bytes<256>(input, output, rows, columns, stride);
}
