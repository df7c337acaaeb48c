// PTX of the kernels that multiply with mma.sync, one function for an instruction. All of it is in compute capability 8.0, but for the
// products of FP8 and what says so. tests/emulation.py runs these functions on a CPU.
#pragma once
#include "types.cuh"

// What multiplies: BF16 or FP16 in m16n8k16; E4M3 in m16n8k32, from compute capability 8.9 on; the same with a power of two for
// each 32 of K in the instruction, which GeForce cards of 12.0 run at twice the rate of the one without; or E4M3 that is widened to FP16.
enum MmaKind : u32 { kMmaBf16, kMmaF16, kMmaE4m3, kMmaE4m3Scaled, kMmaWidened };

// Copies 16 bytes to shared memory in the background: the first `bytes` from global memory, and then zeros.
DG_DEVICE void copy_async(u32 to, const u8* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The L2 policy evict-first, as in tma.cuh, for operands that are not needed again soon.
enum : u64 { kEvictFirst = 0x12F0000000000000 };
DG_DEVICE void copy_async(u32 to, const u8* from, u32 bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}

// Fetches into L2; the first function from compute capability 9.0 on, for addresses and counts that are multiples of 16.
DG_DEVICE void prefetch_bytes(const u8* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DG_DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Ends a group of this thread's copies, which may be empty.
DG_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups of copies, but for the last kPending.
template <u32 kPending>
DG_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements, or of pairs of bytes. Lane i gives the address of row i % 8 of matrix i / 8. A lane gets two
// neighbours of row lane / 4 of each; transposed, it gets them of column lane / 4.
template <bool kTransposed>
DG_DEVICE void load_matrices(u32 address, u32& x0, u32& x1, u32& x2, u32& x3) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3) : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3) : "r"(address));
  }
}

// sum += A B for 16 rows, 8 columns, and 32 bytes of K of a row. With kMmaE4m3Scaled the lowest byte of a lane's `of_a` is the exponent of
// row lane / 4, or of row lane / 4 + 8 if the lane is odd, and that of `of_b` is of column lane / 4; both ue8m0.
enum : u32 { kExponentOfOne = 0x7f };
template <u32 kKind>
DG_DEVICE void multiply_add(float* sum, const u32 (&a)[4], const u32 (&b)[2], u32 of_a = kExponentOfOne, u32 of_b = kExponentOfOne) {
  if constexpr (kKind == kMmaBf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (kKind == kMmaF16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (kKind == kMmaE4m3Scaled) {
    const u16 first = 0;  // the byte; and of four lanes those that have scales: two of A's, and one of B's
    asm volatile("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, %12};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(of_a), "r"(of_b), "h"(first));
  } else {
    static_assert(kKind == kMmaE4m3, "widened operands are multiplied as FP16");
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// The products of two pairs of FP16, subnormal ones too.
DG_DEVICE u32 multiply_halves(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// x y + z, rounded once.
DG_DEVICE u32 multiply_add_halves(u32 x, u32 y, u32 z) {
  u32 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}

// Four bytes of E4M3 as FP16; from compute capability 8.9 on.
DG_DEVICE void widen_fp8(u32 x, u32& low, u32& high) {
  asm("{\n .reg .b16 first, second;\n mov.b32 {first, second}, %2;\n"
      " cvt.rn.f16x2.e4m3x2 %0, first;\n cvt.rn.f16x2.e4m3x2 %1, second;\n}" : "=r"(low), "=r"(high) : "r"(x));
}

// The bytes of x that four digits of `which` name; with 8 added, bytes of their signs.
DG_DEVICE u32 permute_bytes(u32 x, u32 which) {
  u32 y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(which));
  return y;
}

DG_DEVICE float load_global(const float* from) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

DG_DEVICE u32 load_byte(const u8* from) {
  u32 x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

DG_DEVICE void store_words(u8* to, u32 x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }
DG_DEVICE void store_words(u8* to, float x, float y) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
DG_DEVICE void store_words(u8* to, const u32 (&x)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
