// Activations of final sums. Each is a struct with `apply`, which changes two sums of a thread; its name is that in Python, in the form
// of a C++ name. Signs of zeros stay, NaN stays NaN and changes no other sum, and a function whose limit is 0 times infinity gives NaN
// for minus infinity, as in torch.
#pragma once
#include "activation.cuh"

// The larger one; NaN if x is NaN.
DG_DEVICE float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

struct Identity {
  static DG_DEVICE void apply(float&, float&) {}
};

struct Relu {
  static DG_DEVICE void apply(float& a, float& b) {
    a = max_or_nan(a, 0.0f);
    b = max_or_nan(b, 0.0f);
  }
};

// The square of relu.
struct Relu2 {
  static DG_DEVICE void apply(float& a, float& b) {
    Relu::apply(a, b);
    a = __fmul_rn(a, a);
    b = __fmul_rn(b, b);
  }
};

// One reciprocal for two sums would save time, but bits of a result would then depend on the other sum, which in swapped kernels is
// another token's.
struct Silu {
  static DG_DEVICE void apply(float& a, float& b) {
    a = silu(a);
    b = silu(b);
  }
};

struct Gelu {
  static DG_DEVICE void apply(float& a, float& b) {
    a = gelu_tanh(a);
    b = gelu_tanh(b);
  }
};

// x times the normal distribution function P. P(-a) exp(a^2 / 2) is a polynomial in 1 / (1 + 0.3 a) with a relative error of at most
// 2^-18 for a from 0 to 14.2, where P(-a) is 0 in float32.
struct GeluErf {
  static DG_DEVICE float of(float x) {
    constexpr float kP[] = {0.240573749f, -0.048643589f, 0.164761961f, 0.106706388f, 0.121274136f, -7.97288230e-5f};
    const float t = reciprocal_approximate(__fmaf_rn(fabsf(x), 0.3f, 1.0f));
    float p = -0.0845938474f;
#pragma unroll
    for (u32 i = 0; i < 6; ++i) p = __fmaf_rn(p, t, kP[i]);
    p = __fmul_rn(p, exp2_approximate(__fmul_rn(__fmul_rn(x, x), -0.721347520f)));
    return __fmul_rn(x, x < 0.0f ? p : __fsub_rn(1.0f, p));
  }
  static DG_DEVICE void apply(float& a, float& b) {
    a = of(a);
    b = of(b);
  }
};
