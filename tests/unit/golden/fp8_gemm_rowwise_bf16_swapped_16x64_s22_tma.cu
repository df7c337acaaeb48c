#include "fp8_scaled_swapped.cuh"

struct Constants {
  enum : u32 { kBlockM = 16, kStages = 22 };
  enum : u32 { kConsumers = 1, kClusterK = 1 };
  enum : u32 { kProducerRegisters = 40, kConsumerRegisters = 216 };
  enum : u32 { kShapeM = 0, kShapeN = 0, kShapeK = 0 };  // 0: given at run time
  enum : u32 { kScaling = kRowwise, kElement = kBf16, kAccumulate = kNothing };
  enum : bool { kTmaStore = true };
  enum : u32 { kSharedBytes = 227680 };
};

struct Mma {
  enum : u32 { kN = 16 };
  // From one instruction to the next, in the descriptors' units of 16 bytes.
  enum : u32 { kStepA = kStepKMajor, kStepB = kStepKMajor };

  // sum = a * b, or sum += a * b if `keep` is not 0; a and b are descriptors of a block of K. The compiler must not know a `keep`
  // that is 0: then the old sums stay an operand, and it cannot use a second set of registers.
  static DG_DEVICE void multiply(float (&sum)[kN / 2], u64 a, u64 b, u32 keep) {
    asm volatile(
        "{\n .reg .pred keeps, adds;\n .reg .b64 a<4>, b<4>;\n"
        " setp.ne.b32 keeps, %10, 0;\n setp.eq.b32 adds, 0, 0;\n"
        " add.s64 a0, %8, 0 * %11;\n"
        " add.s64 b0, %9, 0 * %12;\n"
        " add.s64 a1, %8, 1 * %11;\n"
        " add.s64 b1, %9, 1 * %12;\n"
        " add.s64 a2, %8, 2 * %11;\n"
        " add.s64 b2, %9, 2 * %12;\n"
        " add.s64 a3, %8, 3 * %11;\n"
        " add.s64 b3, %9, 3 * %12;\n"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7},"
        " a0, b0, keeps, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7},"
        " a1, b1, adds, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7},"
        " a2, b2, adds, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7},"
        " a3, b3, adds, 1, 1;\n"
        "}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])        : "l"(a), "l"(b), "r"(keep), "n"(+kStepA), "n"(+kStepB));
  }

  // Call after the wait for the products. It keeps the compiler from moving uses of the sums before that wait.
  static DG_DEVICE void settle(float (&sum)[kN / 2]) {
    asm volatile("" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])::"memory");
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
  const float* scale_a;
  i64 scale_a_stride;
  const float* scale_b;
  i64 scale_b_stride;
  const TensorMap* map_a;
  const TensorMap* map_b;
  const TensorMap* map_a_last;
  const TensorMap* map_b_last;
};

extern "C" __global__ void __launch_bounds__(256, 2)
    fp8_gemm_rowwise_bf16_swapped_16x64_s22_tma(u32 m, u32 n, u32 k, u32 last_rows, u32 last_columns, u32 early_stages, const __grid_constant__ Raster raster, u32 evict_first, u8* d, i64 d_stride, const float* scale_a, i64 scale_a_stride, const float* scale_b, i64 scale_b_stride, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_a_last, const __grid_constant__ TensorMap map_b_last) {
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
  arguments.scale_a = scale_a;
  arguments.scale_a_stride = scale_a_stride;
  arguments.scale_b = scale_b;
  arguments.scale_b_stride = scale_b_stride;
  arguments.map_a = &map_a;
  arguments.map_b = &map_b;
  arguments.map_a_last = &map_a_last;
  arguments.map_b_last = &map_b_last;
  Fp8ScaledSwapped<Constants, Mma, Arguments>(arguments, shared_address(shared)).run();
}
