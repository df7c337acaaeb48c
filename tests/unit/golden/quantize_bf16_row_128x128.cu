#include "quantize_rows.cuh"

using Kernel = QuantizeRows<kSourceBf16, false, false, false, 128, 128, 256>;

extern "C" __global__ void __launch_bounds__(256, 4)
    quantize_bf16_row_128x128(const u8* input, i64 input_stride, u32 rows, u32 columns, u32 band, u32 epsilon, u32 power_of_two, u8* values, i64 stride, float* scales, i64 scale_stride_row, i64 scale_stride_column) {
  const auto output = [](u8* values, i64 stride, float* scales, i64 scale_stride_row, i64 scale_stride_column) {
    const u32 odd = static_cast<u32>(reinterpret_cast<u64>(values) | static_cast<u64>(stride)) & 15;
    return QuantizedOutput{values, stride, scales, scale_stride_row, scale_stride_column, odd};
  };
  const QuantizedInput from{input, input_stride, rows, columns, nullptr, rows, nullptr};
  const ScaleRule rule{epsilon, power_of_two != 0};
  Kernel::run(from, band, rule, output(values, stride, scales, scale_stride_row, scale_stride_column));
}
