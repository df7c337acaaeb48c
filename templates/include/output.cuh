// Elements of D: the conversion of float32 sums before they are stored. All stores go through here.
#pragma once
#include "types.cuh"

enum Element : u32 { kBf16, kF16, kF32, kE4m3 };

// How C is added to the product. kNothing: there is no C. kReads: consumers read C and add it. kReduces: C is D and float32, and
// TMA adds the product to D in L2.
enum Accumulate : u32 { kNothing, kReads, kReduces };

template <u32 kElement>
struct Output {
  enum : u32 { kBytes = kElement == kF32 ? 4 : kElement == kE4m3 ? 1 : 2 };

  // Two neighbours of a thread's registers as one word of 16-bit elements, rounded to nearest. FP16 overflows to infinity.
  static DG_DEVICE u32 apply(float low, float high) {
    static_assert(kElement <= kF16, "float32 elements are words of their own, and FP8 has scales");
    u32 packed;
    if constexpr (kElement == kBf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }

  // One element of D or C, which is `index` elements from `base`.
  static DG_DEVICE float load(const u8* base, i64 index) {
    const u8* at = base + index * kBytes;
    float value;
    if constexpr (kElement == kF32) {
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    } else {
      u16 bits;
      asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(at) : "memory");
      value = widen(bits);
    }
    return value;
  }

  // Two elements next to each other, at a multiple of their size.
  static DG_DEVICE void load_pair(const u8* base, i64 index, float& first, float& second) {
    const u8* at = base + index * kBytes;
    if constexpr (kElement == kF32) {
      asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "l"(at) : "memory");
    } else {
      u32 bits;
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
      first = widen(static_cast<u16>(bits));
      second = widen(static_cast<u16>(bits >> 16));
    }
  }

  // The same, or zeros. There is no branch, which would take registers.
  static DG_DEVICE float load_if(bool exist, const u8* base, i64 index) {
    const u8* at = base + index * kBytes;
    if constexpr (kElement == kF32) {
      float value;
      asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.f32 %0, 0f00000000;\n @p ld.global.f32 %0, [%1];\n}"
                   : "=&f"(value) : "l"(at), "r"(static_cast<u32>(exist)) : "memory");
      return value;
    } else {
      u16 bits;
      asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u16 %0, 0;\n @p ld.global.u16 %0, [%1];\n}"
                   : "=&h"(bits) : "l"(at), "r"(static_cast<u32>(exist)) : "memory");
      return widen(bits);
    }
  }

  static DG_DEVICE void load_pair_if(bool exist, const u8* base, i64 index, float& first, float& second) {
    const u8* at = base + index * kBytes;
    if constexpr (kElement == kF32) {
      asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.f32 %0, 0f00000000;\n mov.f32 %1, 0f00000000;\n"
                   " @p ld.global.v2.f32 {%0, %1}, [%2];\n}"
                   : "=&f"(first), "=&f"(second) : "l"(at), "r"(static_cast<u32>(exist)) : "memory");
    } else {
      u32 bits;
      asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n @p ld.global.u32 %0, [%1];\n}"
                   : "=&r"(bits) : "l"(at), "r"(static_cast<u32>(exist)) : "memory");
      first = widen(static_cast<u16>(bits));
      second = widen(static_cast<u16>(bits >> 16));
    }
  }

  static DG_DEVICE void store(u8* base, i64 index, float value) {
    u8* at = base + index * kBytes;
    if constexpr (kElement == kF32) {
      asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
    } else {
      const u16 bits = static_cast<u16>(apply(value, 0.0f));
      asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(bits) : "memory");
    }
  }

 private:
  static DG_DEVICE float widen(u16 bits) {
    float value;
    if constexpr (kElement == kBf16) {
      const u32 word = static_cast<u32>(bits) << 16;
      asm("mov.b32 %0, %1;" : "=f"(value) : "r"(word));
    } else {
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    }
    return value;
  }
};
