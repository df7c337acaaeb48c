// Conversions between float32 and FP8 (E4M3). GPUs before compute capability 8.9 have no instructions for them.
#pragma once
#include "types.cuh"

// The byte of a value: rounded to the nearest, ties to even; at most 448; NaN without its sign. The same bits as
// cvt.rn.satfinite.e4m3x2.f32 gives.
DG_DEVICE u32 e4m3_of(float value) {
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFF, held = min_of(magnitude, 0x43E00000);
  const u32 normal = ((held + 0x7FFFF + (held >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 a step is 2^-9, as it is of float32 from 2^14 on.
  const u32 small = __float_as_uint(__fadd_rn(__uint_as_float(held), 16384.0f)) - 0x46800000;
  const u32 rounded = (bits >> 24 & 0x80) | (held < 0x3C800000 ? small : normal);
  return magnitude > 0x7F800000 ? 0x7F : rounded;
}

// Four values as bytes, the first in the lowest.
DG_DEVICE u32 to_e4m3(float a, float b, float c, float d) {
  if constexpr (kCapability >= 890) {
    u32 packed;
    asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        " mov.b32 %0, {low, high};\n}"
        : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
  } else {
    return e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
  }
}

// The value of a byte. Shifted by 20 bits its magnitude is that of a float32 with an exponent that is 120 too small.
DG_DEVICE float of_e4m3(u32 byte) {
  const u32 magnitude = byte & 0x7F;
  const float value = __fmul_rn(__uint_as_float(magnitude << 20), __uint_as_float(0x7B800000));  // 2^120
  return __uint_as_float((byte & 0x80) << 24 | (magnitude == 0x7F ? 0x7FFFFFFF : __float_as_uint(value)));
}
