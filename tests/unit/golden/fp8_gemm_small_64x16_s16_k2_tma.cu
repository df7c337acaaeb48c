#include "fp8_small.cuh"

struct Tile {
  enum : u32 { kBlockN = 16, kShares = 2, kStages = 8 };
  enum : u32 { kShapeM = 0, kShapeN = 0, kShapeK = 0 };  // 0: given at run time
  enum : bool { kWholeRows = true };  // rows of D begin on 16-byte boundaries
  enum : u32 { kSharedBytes = 180480 };
};

struct Mma {
  enum : u32 { kN = 16 };

  // partial = a * b, or partial += a * b if `keep` is not 0. The old sums are an operand even where they are dropped:
  // with `keep` unknown to the compiler, it cannot take a second set of registers to start before they have been read.
  static DG_DEVICE void start(float (&partial)[kN / 2], u64 a, u64 b, u32 keep) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7},"
        " %8, %9, p, 1, 1;\n}"
        : "+f"(partial[0]), "+f"(partial[1]), "+f"(partial[2]), "+f"(partial[3]), "+f"(partial[4]), "+f"(partial[5]), "+f"(partial[6]), "+f"(partial[7])        : "l"(a), "l"(b), "r"(keep));
  }

  // partial += a * b
  static DG_DEVICE void accumulate(float (&partial)[kN / 2], u64 a, u64 b) {
    asm volatile(
        "{\n .reg .pred p;\n setp.eq.b32 p, 0, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7},"
        " %8, %9, p, 1, 1;\n}"
        : "+f"(partial[0]), "+f"(partial[1]), "+f"(partial[2]), "+f"(partial[3]), "+f"(partial[4]), "+f"(partial[5]), "+f"(partial[6]), "+f"(partial[7])        : "l"(a), "l"(b));
  }
};

extern "C" __global__ void __launch_bounds__(256, 1)
    fp8_gemm_small_64x16_s16_k2_tma(const u8* a, const u8* b, i64 a_stride, i64 b_stride, u32 m, u32 n, u32 k, u32 b_late,
    const float* scale_a, const float* scale_b, i64 scale_a_stride, i64 scale_b_stride_n, i64 scale_b_stride_k, u16* d,
    i64 d_stride) {
  extern __shared__ __align__(1024) u8 shared[];
  const Fp8SmallArguments arguments{a, b, a_stride, b_stride, m, n, k, b_late, scale_a, scale_b, scale_a_stride,
                                    scale_b_stride_n, scale_b_stride_k, d, d_stride};
  Fp8Small<Tile, Mma>(arguments, shared_address(shared)).run();
}
