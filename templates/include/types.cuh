// Plain types: device code here includes no CUDA or C++ header, so that NVRTC needs nothing but its own library.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using f32 = float;

#define DG_DEVICE __device__ __forceinline__

// The compute capability that is compiled for, times 100, such as 900; 0 on the host.
#ifdef __CUDA_ARCH__
enum : u32 { kCapability = __CUDA_ARCH__ };
#else
enum : u32 { kCapability = 0 };
#endif

// What cuTensorMapEncodeTiled fills in; opaque, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// A compile-time number as a function argument.
template <u32 kNumber>
struct Index {
  enum : u32 { kValue = kNumber };
};

// One of two types.
template <bool kFirst, class First, class Second>
struct ChoiceOf {
  using Type = First;
};
template <class First, class Second>
struct ChoiceOf<false, First, Second> {
  using Type = Second;
};
template <bool kFirst, class First, class Second>
using Choice = typename ChoiceOf<kFirst, First, Second>::Type;

// The same value, hidden from the compiler, which would otherwise recompute cheap values at each use.
DG_DEVICE u32 opaque(u32 value) {
  u32 same;
  asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

DG_DEVICE constexpr u32 ceil_div(u32 x, u32 y) { return (x + y - 1) / y; }
DG_DEVICE constexpr u32 min_of(u32 x, u32 y) { return x < y ? x : y; }
DG_DEVICE constexpr u32 max_of(u32 x, u32 y) { return x < y ? y : x; }
// The larger ones of 16-bit numbers, of which a word has two. None has its highest bit set, which says here where x is not less than y.
DG_DEVICE constexpr u32 max_of_halves(u32 x, u32 y) {
  const u32 mask = (((x | 0x80008000) - y) >> 15 & 0x00010001) * 0xFFFF;
  return (x & mask) | (y & ~mask);
}
// The highest bit that is set, as a number.
DG_DEVICE constexpr u32 top_bit(u32 x) { return (x & (x - 1)) == 0 ? x : top_bit(x & (x - 1)); }
