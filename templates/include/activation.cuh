// Activations in float32, by the approximate exponential and reciprocal: 2^x to 2 ulp, 1 / x to 1 ulp, subnormal results are zero.
// NaN stays NaN. Steps are intrinsics, so that the compiler fuses no multiplication with an addition in one kernel and not in another.
#pragma once
#include "types.cuh"

DG_DEVICE float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

DG_DEVICE float reciprocal_approximate(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// 1 / (1 + 2^x)
DG_DEVICE float sigmoid_exp2(float x) { return reciprocal_approximate(1.0f + exp2_approximate(x)); }

DG_DEVICE float silu(float x) { return x * sigmoid_exp2(x * -1.4426950408889634f); }

// NaN if either is.
DG_DEVICE float smaller(float x, float y) {
  float found;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
  return found;
}

// silu(gate) * up, of which gate is capped at a limit, and up is held between -limit and limit.
DG_DEVICE float silu_mul(float gate, float up) { return __fmul_rn(silu(gate), up); }
DG_DEVICE float silu_mul(float gate, float up, float limit) {
  return silu_mul(smaller(gate, limit), -smaller(-smaller(up, limit), limit));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as a sigmoid, whose small values are exact where 1 + tanh cancels.
DG_DEVICE float gelu_tanh(float x) {
  constexpr float kLinear = -2.0f * 0.7978845608028654f * 1.4426950408889634f;
  const float square = __fmul_rn(x, x);
  return __fmul_rn(x, sigmoid_exp2(__fmul_rn(x, __fmaf_rn(square, kLinear * 0.044715f, kLinear))));
}

// x (1 + erf(x / sqrt(2))) / 2 = x erfc(-x / sqrt(2)) / 2. For z >= 0, erfc(z) = t exp(-z^2 + p(t)) with t = 1 / (1 + z / 2) and a
// polynomial p of degree 9 (Press et al., Numerical Recipes, "erfcc"), to 1.2e-7 of its value, however small it is.
DG_DEVICE float gelu_erf(float x) {
  constexpr float kP[] = {0.17087277f, -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                          -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
  constexpr float kLog2e = 1.4426950408889634f;
  const float t = reciprocal_approximate(__fmaf_rn(fabsf(x), 0.5f * 0.7071067811865476f, 1.0f));
  float p = kP[0] * kLog2e;
#pragma unroll
  for (u32 i = 1; i < 10; ++i) p = __fmaf_rn(p, t, kP[i] * kLog2e);
  const float square = __fmul_rn(x, x);
  const float half = __fmul_rn(__fmul_rn(t, 0.5f), exp2_approximate(__fmaf_rn(square, -0.5f * kLog2e, p)));
  return __fmul_rn(x, x < 0.0f ? half : 1.0f - half);
}
