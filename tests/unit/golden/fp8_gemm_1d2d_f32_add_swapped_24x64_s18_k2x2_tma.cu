#include "fp8_scaled_swapped.cuh"

struct Constants {
  enum : u32 { kBlockM = 24, kStages = 18 };
  enum : u32 { kConsumers = 2, kClusterK = 2 };
  enum : u32 { kProducerRegisters = 40, kConsumerRegisters = 232 };
  enum : u32 { kShapeM = 0, kShapeN = 0, kShapeK = 0 };  // 0: given at run time
  enum : u32 { kScaling = k1D2D, kElement = kF32, kAccumulate = kReads };
  enum : bool { kTmaStore = true };
  enum : u32 { kSharedBytes = 217664 };
};

struct Mma {
  enum : u32 { kN = 24 };
  // From one instruction to the next, in the descriptors' units of 16 bytes.
  enum : u32 { kStepA = kStepKMajor, kStepB = kStepKMajor };

  // sum = a * b, or sum += a * b if `keep` is not 0; a and b are descriptors of a block of K. The compiler must not know a `keep`
  // that is 0: then the old sums stay an operand, and it cannot use a second set of registers.
  static DG_DEVICE void multiply(float (&sum)[kN / 2], u64 a, u64 b, u32 keep) {
    asm volatile(
        "{\n .reg .pred keeps, adds;\n .reg .b64 a<4>, b<4>;\n"
        " setp.ne.b32 keeps, %14, 0;\n setp.eq.b32 adds, 0, 0;\n"
        " add.s64 a0, %12, 0 * %15;\n"
        " add.s64 b0, %13, 0 * %16;\n"
        " add.s64 a1, %12, 1 * %15;\n"
        " add.s64 b1, %13, 1 * %16;\n"
        " add.s64 a2, %12, 2 * %15;\n"
        " add.s64 b2, %13, 2 * %16;\n"
        " add.s64 a3, %12, 3 * %15;\n"
        " add.s64 b3, %13, 3 * %16;\n"
        " wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11},"
        " a0, b0, keeps, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11},"
        " a1, b1, adds, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11},"
        " a2, b2, adds, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11},"
        " a3, b3, adds, 1, 1;\n"
        "}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11])        : "l"(a), "l"(b), "r"(keep), "n"(+kStepA), "n"(+kStepB));
  }

  // Call after the wait for the products. It keeps the compiler from moving uses of the sums before that wait.
  static DG_DEVICE void settle(float (&sum)[kN / 2]) {
    asm volatile("" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11])::"memory");
  }
};

struct Arguments {
  u32 m;
  u32 n;
  u32 k;
  u32 last_rows;
  u32 last_columns;
  u32 early_stages;
  const Raster* raster;
  u32 evict_first;
  u8* d;
  i64 d_stride;
  const u8* c;
  i64 c_stride;
  const float* scale_b;
  i64 scale_b_stride_n;
  i64 scale_b_stride_k;
  const TensorMap* map_scale_a;
  const TensorMap* map_a;
  const TensorMap* map_b;
  const TensorMap* map_a_last;
  const TensorMap* map_b_last;
};

extern "C" __global__ void __launch_bounds__(384, 1)
    fp8_gemm_1d2d_f32_add_swapped_24x64_s18_k2x2_tma(u32 m, u32 n, u32 k, u32 last_rows, u32 last_columns, u32 early_stages, const __grid_constant__ Raster raster, u32 evict_first, u8* d, i64 d_stride, const u8* c, i64 c_stride, const float* scale_b, i64 scale_b_stride_n, i64 scale_b_stride_k, const __grid_constant__ TensorMap map_scale_a, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_a_last, const __grid_constant__ TensorMap map_b_last) {
  extern __shared__ __align__(1024) u8 shared[];
  Arguments arguments{};
  arguments.m = m;
  arguments.n = n;
  arguments.k = k;
  arguments.last_rows = last_rows;
  arguments.last_columns = last_columns;
  arguments.early_stages = early_stages;
  arguments.raster = &raster;
  arguments.evict_first = evict_first;
  arguments.d = d;
  arguments.d_stride = d_stride;
  arguments.c = c;
  arguments.c_stride = c_stride;
  arguments.scale_b = scale_b;
  arguments.scale_b_stride_n = scale_b_stride_n;
  arguments.scale_b_stride_k = scale_b_stride_k;
  arguments.map_scale_a = &map_scale_a;
  arguments.map_a = &map_a;
  arguments.map_b = &map_b;
  arguments.map_a_last = &map_a_last;
  arguments.map_b_last = &map_b_last;
  Fp8ScaledSwapped<Constants, Mma, Arguments>(arguments, shared_address(shared)).run();
}
