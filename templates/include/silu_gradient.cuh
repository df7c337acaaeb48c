// The gradient of silu(gate) * up with respect to gate and up, of which a matrix has gate in the left half of its columns.
#pragma once
#include "quantize.cuh"

// The gradient of the product: rows are `stride` elements apart.
struct GradientInput {
  const u8* elements;
  i64 stride;
};

DG_DEVICE float silu_gradient(float gate, float up, float d, bool is_of_up) {
  const float sigmoid = sigmoid_exp2(__fmul_rn(gate, -1.4426950408889634f));
  if (is_of_up) return __fmul_rn(d, __fmul_rn(gate, sigmoid));
  return __fmul_rn(__fmul_rn(__fmul_rn(d, up), sigmoid), __fmaf_rn(gate, __fsub_rn(1.0f, sigmoid), 1.0f));
}

// The gradient for eight columns from `column` on of rows row, row + 1, ... Elements that do not exist are zeros.
template <u32 kSource, u32 kRows>
DG_DEVICE void load_silu_gradient(const QuantizedInput& from, const GradientInput& product, u32 row, u32 column,
                                  EightElements<kSource, true> (&v)[kRows]) {
  using Elements = EightElements<kSource, true>;
  constexpr u32 kBytes = Elements::kBytes, kRead = Elements::kRead;
  const u32 half = from.columns / 2;
  const i64 step = from.stride * kBytes, product_step = product.stride * kBytes, right = static_cast<i64>(half) * kBytes;
  const u64 places = reinterpret_cast<u64>(from.elements) | reinterpret_cast<u64>(product.elements) | static_cast<u64>(step) |
                     static_cast<u64>(product_step);
  if ((places & 15) == 0 && half % 8 == 0) {
    const bool is_of_up = column >= half;
    const i64 place = static_cast<i64>(is_of_up ? column - half : column) * kBytes;
    const auto element = [](const u32 (&eight)[kRead], u32 i) {
      if constexpr (kSource == kSourceF32) return __uint_as_float(eight[i]);
      else return Elements::widen(i % 2 == 0 ? eight[i / 2] & 0xFFFF : eight[i / 2] >> 16);
    };
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      const bool exist = row + r < from.rows && column < from.columns;
      const u8* const at = from.elements + (row + r) * step + place;
      u32 gate[kRead], up[kRead], d[kRead];
#pragma unroll
      for (u32 i = 0; i < kRead; i += 4) {
        load_sixteen(at + i * 4, exist, &gate[i]);
        load_sixteen(at + right + i * 4, exist && !is_of_up, &up[i]);
        load_sixteen(product.elements + (row + r) * product_step + place + i * 4, exist, &d[i]);
      }
#pragma unroll
      for (u32 i = 0; i < 8; ++i)
        v[r].words[i] = __float_as_uint(silu_gradient(element(gate, i), element(up, i), element(d, i), is_of_up));
    }
  } else {
    const auto element = [](const u8* at) {
      if constexpr (kSource == kSourceF32) return *reinterpret_cast<const float*>(at);
      else return Elements::widen(*reinterpret_cast<const u16*>(at));
    };
#pragma unroll
    for (u32 r = 0; r < kRows; ++r)
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const bool is_of_up = column + i >= half;
        const i64 place = static_cast<i64>(is_of_up ? column + i - half : column + i) * kBytes;
        const u8* const at = from.elements + (row + r) * step + place;
        v[r].words[i] = row + r < from.rows && column + i < from.columns
                            ? __float_as_uint(silu_gradient(element(at), element(at + right),
                                                            element(product.elements + (row + r) * product_step + place), is_of_up))
                            : 0;
      }
  }
}
