// The arithmetic of casts to FP8 (E4M3). A block of a matrix is cast to value / scale, where scale = max(largest magnitude, epsilon) /
// 448, or the next power of two. Scales below 2^-128 would have no reciprocal in float32: except for 0, they count as that. Every
// step is an IEEE float32 operation, so that torch computes the same bytes (see quantisation.py).
#pragma once
#include "activation.cuh"
#include "e4m3.cuh"

struct ScaleRule {
  u32 epsilon;  // float32 bits
  bool power_of_two;

  // Magnitudes are compared as integers, so that NaN is the largest.
  DG_DEVICE float scale(u32 largest) const { return rounded(__fdiv_rn(__uint_as_float(max_of(largest, epsilon)), 448.0f)); }

  // The factor for values: 1 / scale. Blocks of zeros without an epsilon stay zeros.
  static DG_DEVICE float inverse(float scale) {
    const float exact = __frcp_rn(scale), largest = __uint_as_float(0x7F7FFFFF);
    return scale == 0.0f ? 0.0f : exact > largest ? largest : exact;
  }

  // The same bits for an epsilon of 2^-100 or more, without branches. __fdiv_rn and __frcp_rn call a function for subnormal numbers, and
  // beside calls ptxas serialises products in flight.
  DG_DEVICE float scale_of_normal(u32 largest) const {
    const float x = __uint_as_float(max_of(largest, epsilon)), near = __fmul_rn(x, 1.0f / 448.0f);
    const float exact = __fmaf_rn(__fmaf_rn(near, -448.0f, x), 1.0f / 448.0f, near);
    return rounded(__float_as_uint(x) == 0x7F800000 ? x : exact);
  }
  static DG_DEVICE float inverse_of_normal(float scale) {
    const float near = reciprocal_approximate(scale), exact = __fmaf_rn(__fmaf_rn(-scale, near, 1.0f), near, near);
    return __float_as_uint(scale) == 0x7F800000 ? 0.0f : exact;
  }

 private:
  DG_DEVICE float rounded(float scale) const {
    const u32 exact = __float_as_uint(scale), bits = exact == 0 ? 0 : max_of(exact, 0x00200000);
    return __uint_as_float(power_of_two && bits <= 0x7F800000 ? (bits + 0x007FFFFF) & 0x7F800000 : bits);
  }
};
