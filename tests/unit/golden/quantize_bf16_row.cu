#include "quantize.cuh"

using Kernel = Quantize<kSourceBf16, kRow, kNothingShared, false, 256>;

extern "C" __global__ void __launch_bounds__(256, 2)
    quantize_bf16_row(const u8* input, i64 input_stride, u32 rows, u32 columns, u32 epsilon, u32 power_of_two, u8* values, i64 stride, float* scales, i64 scale_stride_row, i64 scale_stride_column) {
  __shared__ Kernel::Shared shared;
  const auto output = [](u8* values, i64 stride, float* scales, i64 scale_stride_row, i64 scale_stride_column) {
    const bool wide = ((reinterpret_cast<u64>(values) | static_cast<u64>(stride)) & 7) == 0;
    return QuantizedOutput{values, stride, scales, scale_stride_row, scale_stride_column, wide};
  };
  Kernel::run(input, input_stride, rows, columns, ScaleRule{epsilon, power_of_two != 0}, output(values, stride, scales, scale_stride_row, scale_stride_column),
              QuantizedOutput{}, shared);
}
