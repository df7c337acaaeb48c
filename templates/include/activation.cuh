// Activations of final sums. Each is a struct with `apply`, which changes two sums of a thread; its name is that in Python, in the form
// of a C++ name. Signs of zeros stay, NaN stays NaN and changes no other sum, and a function whose limit is 0 times infinity gives NaN
// for minus infinity, as in torch.
#pragma once
#include "types.cuh"

// Tests compile these functions for the host, with approximations of their own.
#ifndef DG_HOST
DG_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DG_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger one; NaN if x is NaN.
DG_DEVICE float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
// The larger one; `y` if x is NaN.
DG_DEVICE float max_or_other(float x, float y) { return fmaxf(x, y); }
#endif

// The special function unit is the bottleneck of most activations: it takes 16 operands a clock, and all others 64 or 128. So two
// numbers share one reciprocal. They are between 1 and 2^20, so that their product has one.
DG_DEVICE void reciprocals(float& a, float& b) {
  const float both = reciprocal_approx(a * b), of_b = both * a;
  a = both * b;
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
    a *= a;
    b *= b;
  }
};

// x times the logistic function of `z`, which has the sign of x. With e = exp(-|z|), which is at most 1, that is 1 / (1 + e) or
// e / (1 + e): both are exact to some units in the last place, however small they are.
DG_DEVICE void gate(float& x, float& y, float z_of_x, float z_of_y) {
  constexpr float kLog2E = 1.44269504f, kNothing = -200.0f;  // 2^-200 is 0 here
  const float e = exp2_approx(max_or_other(-kLog2E * fabsf(z_of_x), kNothing));
  const float f = exp2_approx(max_or_other(-kLog2E * fabsf(z_of_y), kNothing));
  float r = 1.0f + e, s = 1.0f + f;
  reciprocals(r, s);
  x *= r * (x < 0.0f ? e : 1.0f);
  y *= s * (y < 0.0f ? f : 1.0f);
}

struct Silu {
  static DG_DEVICE void apply(float& a, float& b) { gate(a, b, a, b); }
};

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x times the logistic function of 2 u.
struct Gelu {
  static DG_DEVICE float twice_u(float x) { return x * (1.59576912f + 0.0713548162726f * (x * x)); }
  static DG_DEVICE void apply(float& a, float& b) { gate(a, b, twice_u(a), twice_u(b)); }
};

// x times the normal distribution function P. P(-a) exp(a^2 / 2) is a polynomial in 1 / (1 + 0.3 a) with a relative error of at most
// 2^-18 for a from 0 to 14.2, where P(-a) is 0 in float32.
struct GeluErf {
  static DG_DEVICE void apply(float& a, float& b) {
    float x = -max_or_other(-fabsf(a), -14.0f), y = -max_or_other(-fabsf(b), -14.0f);
    float t = 1.0f + 0.3f * x, u = 1.0f + 0.3f * y;
    reciprocals(t, u);
    a *= distribution(a, x, t);
    b *= distribution(b, y, u);
  }

 private:
  // P(value), where `x` is its magnitude.
  static DG_DEVICE float distribution(float value, float x, float t) {
    float p = -0.0845938474f;
    p = p * t + 0.240573749f;
    p = p * t - 0.048643589f;
    p = p * t + 0.164761961f;
    p = p * t + 0.106706388f;
    p = p * t + 0.121274136f;
    p = p * t - 7.97288230e-5f;
    p *= exp2_approx(-0.721347520f * x * x);
    return value < 0.0f ? p : 1.0f - p;
  }
};
