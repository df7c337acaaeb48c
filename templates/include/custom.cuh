// Types for users' own kernels. Their names are those of parameter declarations. Narrow floats convert to and from float.
#pragma once
#include "e4m3.cuh"

using f64 = double;
using i8 = signed char;
using i32 = int;

struct bf16 {
  u16 bits;

  bf16() = default;
  DG_DEVICE bf16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  DG_DEVICE operator float() const {
    float value;
    asm("{\n .reg .b16 zero;\n mov.b16 zero, 0;\n mov.b32 %0, {zero, %1};\n}" : "=f"(value) : "h"(bits));
    return value;
  }
};

struct f16 {
  u16 bits;

  f16() = default;
  DG_DEVICE f16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  DG_DEVICE operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

// Values above 448 become 448.
struct e4m3 {
  u8 bits;

  e4m3() = default;
  DG_DEVICE e4m3(float value) {
    if constexpr (kCapability >= 890) {
      u16 pair;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
      bits = static_cast<u8>(pair);
    } else {
      bits = static_cast<u8>(e4m3_of(value));
    }
  }
  DG_DEVICE operator float() const {
    if constexpr (kCapability >= 890) {
      u32 halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(bits)));
      return f16_of(halves);
    } else {
      return of_e4m3(bits);
    }
  }

 private:
  static DG_DEVICE float f16_of(u32 halves) {
    f16 low;
    low.bits = static_cast<u16>(halves);
    return low;
  }
};
