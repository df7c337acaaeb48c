#include "quantize_tile.cuh"

using Kernel = QuantizeTile<kSourceBf16, kRow, kColumn, true, 512>;

extern "C" __global__ void __launch_bounds__(512, 2)
    quantize_silu_bf16_row_t_column(const u8* input, i64 input_stride, u32 rows, u32 columns, u32 band, u32 epsilon, u32 power_of_two, u8* values, i64 stride, float* scales, i64 scale_stride_row, i64 scale_stride_column, u8* t_values, i64 t_stride, float* t_scales, i64 t_scale_stride_row, i64 t_scale_stride_column) {
  const auto output = [](u8* values, i64 stride, float* scales, i64 scale_stride_row, i64 scale_stride_column) {
    const u32 odd = static_cast<u32>(reinterpret_cast<u64>(values) | static_cast<u64>(stride)) & 15;
    return QuantizedOutput{values, stride, scales, scale_stride_row, scale_stride_column, odd};
  };
  const QuantizedInput from{input, input_stride, rows, columns, nullptr, rows, nullptr};
  const ScaleRule rule{epsilon, power_of_two != 0};
  __shared__ Kernel::Shared shared;
  Kernel::run(from, band, rule, output(values, stride, scales, scale_stride_row, scale_stride_column), output(t_values, t_stride, t_scales, t_scale_stride_row, t_scale_stride_column), shared);
}
