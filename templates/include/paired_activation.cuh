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

// The special function unit is the bottleneck of most activations: it takes 16 operands a clock, and all others 64 or 128. So two
// numbers share one reciprocal. They are between 1 and 2^20, so that their product has one.
DG_DEVICE void reciprocals(float& a, float& b) {
  const float both = reciprocal_approximate(__fmul_rn(a, b)), of_b = __fmul_rn(both, a);
  a = __fmul_rn(both, b);
  b = of_b;
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

// exp(-|z|), and 0 if z is NaN. 2^-200 is 0 in float32.
DG_DEVICE float falling(float z) { return exp2_approximate(fmaxf(__fmul_rn(fabsf(z), -1.44269504f), -200.0f)); }

// x times the logistic function of `z`, which has the sign of x. With e = exp(-|z|), which is at most 1, that is 1 / (1 + e) or
// e / (1 + e): both are exact to some units in the last place, however small they are.
DG_DEVICE void gate(float& x, float& y, float z_of_x, float z_of_y) {
  const float e = falling(z_of_x), f = falling(z_of_y);
  float r = __fadd_rn(1.0f, e), s = __fadd_rn(1.0f, f);
  reciprocals(r, s);
  x = __fmul_rn(x, __fmul_rn(r, x < 0.0f ? e : 1.0f));
  y = __fmul_rn(y, __fmul_rn(s, y < 0.0f ? f : 1.0f));
}

struct Silu {
  static DG_DEVICE void apply(float& a, float& b) { gate(a, b, a, b); }
};

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x times the logistic function of 2 u.
struct Gelu {
  static DG_DEVICE float twice_u(float x) {
    return __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), 0.0713548162726f, 1.59576912f));
  }
  static DG_DEVICE void apply(float& a, float& b) { gate(a, b, twice_u(a), twice_u(b)); }
};

// x times the normal distribution function P. P(-a) exp(a^2 / 2) is a polynomial in 1 / (1 + 0.3 a) with a relative error of at most
// 2^-18 for a from 0 to 14.2, where P(-a) is 0 in float32.
struct GeluErf {
  static DG_DEVICE void apply(float& a, float& b) {
    const float x = fminf(fabsf(a), 14.0f), y = fminf(fabsf(b), 14.0f);  // 14 for NaN
    float t = __fmaf_rn(x, 0.3f, 1.0f), u = __fmaf_rn(y, 0.3f, 1.0f);
    reciprocals(t, u);
    a = __fmul_rn(a, distribution(a, x, t));
    b = __fmul_rn(b, distribution(b, y, u));
  }

 private:
  // P(value), where `x` is its magnitude.
  static DG_DEVICE float distribution(float value, float x, float t) {
    constexpr float kP[] = {0.240573749f, -0.048643589f, 0.164761961f, 0.106706388f, 0.121274136f, -7.97288230e-5f};
    float p = -0.0845938474f;
#pragma unroll
    for (u32 i = 0; i < 6; ++i) p = __fmaf_rn(p, t, kP[i]);
    p = __fmul_rn(p, exp2_approximate(__fmul_rn(__fmul_rn(x, x), -0.721347520f)));
    return value < 0.0f ? p : __fsub_rn(1.0f, p);
  }
};
