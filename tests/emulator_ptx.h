// The instructions and functions of CUDA that kernels use, for emulator.h. emulation.py calls ptx_X for the instruction X, dots and
// colons as underscores, with its operands in the order of the PTX text.
#pragma once
#include <unistd.h>
#include "emulator.h"

using cta::u16;
using cta::u32;
using cta::u64;
using cta::u8;
using cta::collective;

inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline u32 __umulhi(u32 x, u32 y) { return static_cast<u64>(x) * y >> 32; }
inline u32 __popc(u32 x) { return __builtin_popcount(x); }
[[noreturn]] inline void __trap() { cta::fail("it traps"); }
inline void __syncthreads() { cta::barrier(); }
inline u32 __cvta_generic_to_shared(const void*) { return cta::kBase; }

inline float __fsqrt_rn(float x) { return std::sqrt(x); }
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };

// ---- elements

inline float from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
// A format of finite numbers.
inline float from_small(u32 x, u32 exponent, u32 mantissa, int bias) {
  const u32 e = x >> mantissa & ((1u << exponent) - 1), m = x & ((1u << mantissa) - 1);
  const float value = e ? std::ldexp(1.0f + std::ldexp(static_cast<float>(m), -static_cast<int>(mantissa)), static_cast<int>(e) - bias)
                        : std::ldexp(static_cast<float>(m), 1 - bias - static_cast<int>(mantissa));
  return x >> (exponent + mantissa) & 1 ? -value : value;
}
inline float from_f16(u16 x) {
  if ((x & 0x7c00) == 0x7c00) return (x & 0x3ff ? NAN : INFINITY) * (x >> 15 ? -1.0f : 1.0f);
  return from_small(x, 5, 10, 15);
}
inline float from_e4m3(u8 x) { return (x & 0x7f) == 0x7f ? NAN : from_small(x, 4, 3, 7); }
inline u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u16 to_f16(float x) {
  const _Float16 y = static_cast<_Float16>(x);
  u16 bits;
  memcpy(&bits, &y, 2);
  return bits;
}

// ---- collectives

template <class T, class From>
T shuffle(const char* what, T x, u32 by, const From& from) {  // `by` is each lane's own
  struct { T given; T found; u32 by; } own{x, T(), by};
  collective(what, &own, [&](void** lanes) {
    for (u32 i = 0; i < 32; ++i) {
      auto* mine = static_cast<decltype(own)*>(lanes[i]);
      const u32 source = from(i, mine->by);
      mine->found = static_cast<decltype(own)*>(lanes[source < 32 ? source : i])->given;
    }
  });
  return own.found;
}
template <class T>
T __shfl_sync(u32, T x, u32 from, u32 width = 32) {
  return shuffle("shfl", x, from, [=](u32 i, u32 by) { return i / width * width + by % width; });
}
template <class T> T __shfl_xor_sync(u32, T x, u32 by) { return shuffle("shfl.xor", x, by, [](u32 i, u32 by) { return i ^ by; }); }
template <class T> T __shfl_up_sync(u32, T x, u32 by) { return shuffle("shfl.up", x, by, [](u32 i, u32 by) { return i - by; }); }
template <class T> T __shfl_down_sync(u32, T x, u32 by) { return shuffle("shfl.down", x, by, [](u32 i, u32 by) { return i + by; }); }
template <class T, class Work>
T reduce(const char* what, T x, const Work& work) {
  struct { T given; T found; } own{x, T()};
  collective(what, &own, [&](void** lanes) {
    T values[32];
    for (u32 i = 0; i < 32; ++i) values[i] = static_cast<decltype(own)*>(lanes[i])->given;
    for (u32 i = 0; i < 32; ++i) static_cast<decltype(own)*>(lanes[i])->found = work(values);
  });
  return own.found;
}
inline u32 __ballot_sync(u32, bool x) {
  return reduce("ballot", static_cast<u32>(x), [](const u32* values) {
    u32 bits = 0;
    for (u32 i = 0; i < 32; ++i) bits |= (values[i] != 0) << i;
    return bits;
  });
}
template <class T> T __reduce_max_sync(u32, T x) {
  return reduce("redux.max", x, [](const T* values) {
    T most = values[0];
    for (u32 i = 1; i < 32; ++i) most = values[i] > most ? values[i] : most;
    return most;
  });
}
inline void __syncwarp() {
  const u32 warp = cta::current->index / 32;
  reduce("syncwarp", 0u, [&](const u32*) { ++cta::warps[warp].synced; return 0u; });
}

template <class T> u32 __match_any_sync(u32, T x) {
  struct { T given; u32 found; } own{x, 0};
  collective("match.any", &own, [&](void** lanes) {
    for (u32 i = 0; i < 32; ++i) {
      auto* mine = static_cast<decltype(own)*>(lanes[i]);
      for (u32 j = 0; j < 32; ++j) mine->found |= (mine->given == static_cast<decltype(own)*>(lanes[j])->given) << j;
    }
  });
  return own.found;
}
// A fiber runs until it waits, so that no other thread comes between.
inline u32 atomicAdd(u32* at, u32 x) { const u32 before = *at; *at += x; return before; }

// ---- shared memory

inline void ptx_cp_async_cg_shared_global_L2_128B(u32 to, const u8* from, u32 size, u32 count) {
  cta::Copy copy{to, {}};
  if (count > size) cta::fail("a copy of %u bytes from %u", size, count);
  if (reinterpret_cast<u64>(from) % 16 && count) cta::fail("a copy from an address that is not a multiple of 16");
  if (count) cta::global(from, count, 1), memcpy(copy.bytes, from, count);
  cta::touch(to, size, true);
  for (u32 i = 0; i < 4; ++i) ++cta::words[to / 4 + i].in_flight;
  cta::current->open.push_back(copy);
}
inline void ptx_cp_async_cg_shared_global_L2_cache_hint_L2_128B(u32 to, const u8* from, u32 size, u32 count, u64) {
  ptx_cp_async_cg_shared_global_L2_128B(to, from, size, count);
}
inline void ptx_cp_async_commit_group() {
  cta::current->groups.push_back(std::move(cta::current->open));
  cta::current->open.clear();
}
inline void ptx_cp_async_wait_group(u32 pending) {
  auto& groups = cta::current->groups;
  while (groups.size() > pending) {
    for (const cta::Copy& copy : groups.front()) {
      cta::touch(copy.to, 16, true, true);
      for (u32 i = 0; i < 4; ++i) --cta::words[copy.to / 4 + i].in_flight;
      memcpy(cta::memory + copy.to, copy.bytes, 16);
    }
    groups.erase(groups.begin());
  }
}
inline void ptx_ld_shared_u32(u32& x, u32 at) { x = cta::read<u32>(at); }
inline void ptx_st_shared_u32(u32 at, u32 x) { cta::write(at, x); }
inline void ptx_ld_shared_v4_f32(float& x, float& y, float& z, float& w, u32 at) {
  const float4 all = cta::read<float4>(at);
  x = all.x, y = all.y, z = all.z, w = all.w;
}
inline void ptx_st_shared_v4_f32(u32 at, float x, float y, float z, float w) { cta::write(at, float4{x, y, z, w}); }

struct Matrices {
  u32 address;
  u32* x[4];
};
// Matrix i has the rows that lanes 8 i to 8 i + 7 point to.
inline void load_matrices(const char* what, Matrices own, u32 count, bool transposed) {
  collective(what, &own, [&](void** lanes) {
    for (u32 i = 0; i < count; ++i) {
      u16 matrix[8][8];
      for (u32 row = 0; row < 8; ++row) {
        struct Row { u16 elements[8]; };
        const Row read = cta::read<Row>(static_cast<Matrices*>(lanes[8 * i + row])->address);
        memcpy(matrix[row], &read, 16);
      }
      for (u32 lane = 0; lane < 32; ++lane) {
        const u32 row = lane / 4, column = lane % 4 * 2;
        const u32 low = transposed ? matrix[column][row] : matrix[row][column];
        const u32 high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
        *static_cast<Matrices*>(lanes[lane])->x[i] = low | high << 16;
      }
    }
  });
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 at) {
  load_matrices("ldmatrix.x4", {at, {&a, &b, &c, &d}}, 4, false);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 at) {
  load_matrices("ldmatrix.x4.trans", {at, {&a, &b, &c, &d}}, 4, true);
}
// ---- products

struct Product {
  const float* c;
  float* d;
  u32 a[4], b[2];
  u32 of_a = 0x7f, of_b = 0x7f;  // a scale in the lowest byte, ue8m0
};
inline double from_ue8m0(u32 x) { return (x & 0xff) == 0xff ? NAN : ldexp(1.0, static_cast<int>(x & 0xff) - 127); }
// m16n8k16 of 16-bit elements if kEach is 2, and m16n8k32 of bytes if it is 4: elements of a word. Sums are exact before they are rounded.
template <u32 kEach, class Element>
void multiply(const char* what, Product own, const Element& element) {
  collective(what, &own, [&](void** lanes) {
    constexpr u32 kDepth = 8 * kEach;
    double a[16][kDepth], b[kDepth][8];
    for (u32 lane = 0; lane < 32; ++lane) {
      const auto& x = *static_cast<Product*>(lanes[lane]);
      const u32 group = lane >> 2, in_group = lane % 4;
      for (u32 i = 0; i < 4 * kEach; ++i) {
        const bool low = i < kEach || (i >= 2 * kEach && i < 3 * kEach);
        a[low ? group : group + 8][in_group * kEach + i % kEach + (i < 2 * kEach ? 0 : 4 * kEach)] = element(x.a[i / kEach], i % kEach);
      }
      for (u32 i = 0; i < 2 * kEach; ++i)
        b[in_group * kEach + i % kEach + (i < kEach ? 0 : 4 * kEach)][group] = element(x.b[i / kEach], i % kEach);
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      const auto& x = *static_cast<Product*>(lanes[lane]);
      for (u32 i = 0; i < 4; ++i) {
        const u32 row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
        double sum = 0.0;
        for (u32 k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
        const u32 of_a = static_cast<Product*>(lanes[row % 8 * 4 + row / 8])->of_a, of_b = static_cast<Product*>(lanes[column * 4])->of_b;
        x.d[i] = static_cast<float>(x.c[i] + sum * from_ue8m0(of_a) * from_ue8m0(of_b));
      }
    }
  });
}
#define DG_PRODUCT(name, each, element)                                                                                                  \
  inline void name(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1,       \
                   float c2, float c3) {                                                                                                 \
    const float c[4] = {c0, c1, c2, c3};                                                                                                 \
    float d[4];                                                                                                                          \
    multiply<each>(#name, {c, d, {a0, a1, a2, a3}, {b0, b1}}, [](u32 word, u32 i) { return element(word >> 32 / each * i); });           \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                                          \
  }
DG_PRODUCT(ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 2, from_bf16)
DG_PRODUCT(ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 2, from_f16)
DG_PRODUCT(ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32, 4, from_e4m3)
// With a scale for 32 of K of each row of A and column of B.
inline void ptx_mma_sync_aligned_m16n8k32_row_col_kind_mxf8f6f4_block_scale_scale_vec_1X_f32_e4m3_e4m3_f32_ue8m0(
    float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3,
    u32 scale_a, u16 byte_a, u16 thread_a, u32 scale_b, u16 byte_b, u16 thread_b) {
  if (byte_a | thread_a | byte_b | thread_b) cta::fail("scales of other bytes or threads");
  const float c[4] = {c0, c1, c2, c3};
  float d[4];
  const auto element = [](u32 word, u32 i) { return from_e4m3(word >> 8 * i); };
  multiply<4>("block_scale", {c, d, {a0, a1, a2, a3}, {b0, b1}, scale_a, scale_b}, element);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

// ---- global memory, registers and conversions

inline void ptx_ld_global_f32(float& x, const void* at) { x = cta::load<float>(at); }
inline void ptx_ld_global_u8(u32& x, const void* at) { x = cta::load<u8>(at); }
inline void ptx_ld_global_u16(u16& x, const void* at) { x = cta::load<u16>(at); }
inline void ptx_ld_global_u32(u32& x, const void* at) { x = cta::load<u32>(at); }
inline void ptx_ld_global_s32(int& x, const void* at) { x = cta::load<int>(at); }
inline void ptx_ld_global_v2_f32(float& x, float& y, const void* at) {
  struct Two { float x, y; };
  const Two both = cta::load<Two>(at);
  x = both.x, y = both.y;
}
inline void ptx_st_global_f32(void* at, float x) { cta::store(at, x); }
inline void ptx_st_global_u16(void* at, u16 x) { cta::store(at, x); }
inline void ptx_st_global_u32(void* at, u32 x) { cta::store(at, x); }
inline void ptx_st_global_v2_f32(void* at, float x, float y) {
  struct Two { float x, y; };
  cta::store(at, Two{x, y});
}
inline void ptx_st_global_v4_u32(void* at, u32 x, u32 y, u32 z, u32 w) {
  struct Four { u32 x, y, z, w; };
  cta::store(at, Four{x, y, z, w});
}
inline void ptx_ld_global_v4_u32(u32& x, u32& y, u32& z, u32& w, const void* at) {
  const uint4 all = cta::load<uint4>(at);
  x = all.x, y = all.y, z = all.z, w = all.w;
}
inline void ptx_st_global_v2_u32(void* at, u32 x, u32 y) { cta::store(at, uint2{x, y}); }
template <class T> void ptx_mov_u32(u32& x, T y) { x = y; }
template <class T> void ptx_mov_u16(u16& x, T y) { x = y; }
inline void ptx_mov_f32(float& x, float y) { x = y; }
template <class T, class U> void ptx_mov_b32(T& x, U y) { static_assert(sizeof(T) == 4 && sizeof(U) == 4); memcpy(&x, &y, 4); }
inline void ptx_mov_b32(u32& x, u16 low, u16 high) { x = low | static_cast<u32>(high) << 16; }
inline void ptx_mov_b32(u16& low, u16& high, u32 x) { low = x, high = x >> 16; }
inline void ptx_ld_relaxed_gpu_global_u64(u64& x, const void* at) { x = cta::load<u64>(at); }
inline void ptx_st_relaxed_gpu_global_u64(void* at, u64 x) { cta::store(at, x); }
inline void ptx_st_global_v4_f32(void* at, float x, float y, float z, float w) {
  struct Four { float x, y, z, w; };
  cta::store(at, Four{x, y, z, w});
}
inline void ptx_ld_relaxed_gpu_global_v4_f32(float& x, float& y, float& z, float& w, const void* at) {
  struct Four { float x, y, z, w; };
  const Four all = cta::load<Four>(at);
  x = all.x, y = all.y, z = all.z, w = all.w;
}
inline void ptx_atom_relaxed_gpu_global_cas_b64(u64& before, void* at, u64 expected, u64 x) {
  before = cta::load<u64>(at);
  if (before == expected) cta::store(at, x);
}
inline void ptx_atom_acquire_gpu_global_add_u64(u64& before, void* at, u64 x) {
  before = cta::load<u64>(at);
  cta::store(at, before + x);
}
inline void ptx_fence_acq_rel_gpu() {}
inline void ptx_st_release_sys_global_u32(void* at, u32 x) {
  cta::global(at, 4, 4);
  __atomic_store_n(static_cast<u32*>(at), x, __ATOMIC_RELEASE);
}
inline void ptx_ld_acquire_sys_global_u32(u32& x, const void* at) {
  cta::global(at, 4, 4);
  x = __atomic_load_n(static_cast<const u32*>(at), __ATOMIC_ACQUIRE);
}
inline void ptx_nanosleep_u32(u32) { usleep(20); }  // others are threads of the process
inline void ptx_prmt_b32(u32& d, u32 a, u32 b, u32 which) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  d = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 byte = bytes >> (which >> 4 * i & 7) * 8 & 0xff, sign = byte >> 7 ? 0xff : 0;
    d |= (which >> 4 * i & 8 ? sign : byte) << 8 * i;
  }
}
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return (static_cast<u64>(high) << 32 | low) >> (shift & 31); }
inline void ptx_mul_rn_bf16x2(u32& d, u32 a, u32 b) {
  d = to_bf16(from_bf16(a) * from_bf16(b)) | static_cast<u32>(to_bf16(from_bf16(a >> 16) * from_bf16(b >> 16))) << 16;
}
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
  u32 d;
  ptx_prmt_b32(d, a, b, which);
  return d;
}
inline void ptx_cvt_u16_u32(u16& d, u32 x) { d = static_cast<u16>(x); }
inline void ptx_mul_rn_f16x2(u32& d, u32 x, u32 y) {
  d = to_f16(from_f16(x) * from_f16(y)) | static_cast<u32>(to_f16(from_f16(x >> 16) * from_f16(y >> 16))) << 16;
}
inline void ptx_fma_rn_f16x2(u32& d, u32 x, u32 y, u32 z) {  // float64 holds a product of FP16 and its sum
  const auto each = [&](u32 by) {
    const double sum = static_cast<double>(from_f16(x >> by)) * from_f16(y >> by) + from_f16(z >> by);
    u16 bits;
    const _Float16 rounded = static_cast<_Float16>(sum);
    memcpy(&bits, &rounded, 2);
    return static_cast<u32>(bits) << by;
  };
  d = each(0) | each(16);
}
inline void ptx_setp_ne_u32(bool& p, u32 x, u32 y) { p = x != y; }
inline void ptx_cvt_rn_bf16x2_f32(u32& d, float high, float low) { d = to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16; }
inline void ptx_cvt_rn_f16x2_f32(u32& d, float high, float low) { d = to_f16(low) | static_cast<u32>(to_f16(high)) << 16; }
inline void ptx_cvt_rn_f16x2_e4m3x2(u32& d, u16 x) { d = to_f16(from_e4m3(x)) | static_cast<u32>(to_f16(from_e4m3(x >> 8))) << 16; }
inline void ptx_cvt_f32_f16(float& d, u16 x) { d = from_f16(x); }
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline void ptx_ex2_approx_ftz_f32(float& d, float x) { d = flushed(std::exp2(x)); }
inline void ptx_rcp_approx_ftz_f32(float& d, float x) { d = flushed(1.0f / x); }
inline void ptx_min_NaN_f32(float& d, float x, float y) { d = x < y || x != x ? x : y; }
inline void ptx_max_NaN_f32(float& d, float x, float y) { d = x > y || x != x ? x : y; }
[[noreturn]] inline void ptx_unknown(const char* text) { cta::fail("an instruction that is not emulated: %s", text); }
