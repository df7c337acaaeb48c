#include "half_gemm.cuh"

struct Constants {
  enum : u32 { kBlockM = 64, kBlockN = 64 };
  enum : u32 { kClusterM = 1, kClusterN = 1 };
  enum : bool { kSwapped = false };  // whether rows of B are the rows of wgmma
  enum : u32 { kBuffers = 1 };  // staging buffers of a consumer
  enum : bool { kLate = true };  // whether a tile is stored while the next tile's products run
  enum : bool { kMnMajorA = false };
  enum : u32 { kStages = 13, kConsumers = 1, kClusterK = 1 };
  enum : u32 { kProducerRegisters = 40, kConsumerRegisters = 208 };
  enum : u32 { kShapeM = 0, kShapeN = 0, kShapeK = 0 };  // 0: given at run time
  enum : bool { kTmaStore = true, kMnMajorB = true };
  enum : u32 { kElement = kBf16, kAccumulate = kNothing };
  enum : u32 { kGrouping = kIndex, kSegments = 32 };
  enum : u32 { kRowsOfA = 64 };  // of a box; 0: all of a tile
  enum : u32 { kSharedBytes = 223056 };
};

struct Mma {
  enum : u32 { kN = 64 };
  // From one instruction to the next, in the descriptors' units of 16 bytes.
  enum : u32 { kStepA = kStepKMajor, kStepB = kStepMnMajor };

  // sum = a * b, or sum += a * b if `keep` is not 0; a and b are descriptors of a block of K. The compiler must not know a `keep`
  // that is 0: then the old sums stay an operand, and it cannot use a second set of registers.
  static DG_DEVICE void multiply(float (&sum)[kN / 2], u64 a, u64 b, u32 keep) {
    asm volatile(
        "{\n .reg .pred keeps, adds;\n .reg .b64 a<4>, b<4>;\n"
        " setp.ne.b32 keeps, %34, 0;\n setp.eq.b32 adds, 0, 0;\n"
        " add.s64 a0, %32, 0 * %35;\n"
        " add.s64 b0, %33, 0 * %36;\n"
        " add.s64 a1, %32, 1 * %35;\n"
        " add.s64 b1, %33, 1 * %36;\n"
        " add.s64 a2, %32, 2 * %35;\n"
        " add.s64 b2, %33, 2 * %36;\n"
        " add.s64 a3, %32, 3 * %35;\n"
        " add.s64 b3, %33, 3 * %36;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " a0, b0, keeps, 1, 1, 0, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " a1, b1, adds, 1, 1, 0, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " a2, b2, adds, 1, 1, 0, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " a3, b3, adds, 1, 1, 0, 1;\n"
        "}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])        : "l"(a), "l"(b), "r"(keep), "n"(+kStepA), "n"(+kStepB));
  }

  // Call after the wait for the products. It keeps the compiler from moving uses of the sums before that wait.
  static DG_DEVICE void settle(float (&sum)[kN / 2]) {
    asm volatile("" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])::"memory");
  }
};

struct Arguments {
  u32 m;
  u32 n;
  u32 k;
  u32 last_rows;
  u32 last_columns;
  u32 early_stages;
  const GroupRaster* raster;
  u32 evict_first;
  u8* d;
  i64 d_stride;
  const TensorMap* map_a;
  const TensorMap* map_b;
  const TensorMap* map_d;
  const TensorMap* map_a_last;
  const TensorMap* map_b_last;
  u32 groups;
  u32 alignment;
  const int* layout;
};

extern "C" __global__ void __launch_bounds__(256, 2)
    m_grouped_bf16_gemm_nn_64x64_s13_contiguous_g32_tma(u32 m, u32 n, u32 k, u32 last_rows, u32 last_columns, u32 early_stages, const __grid_constant__ GroupRaster raster, u32 evict_first, u8* d, i64 d_stride, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_a_last, const __grid_constant__ TensorMap map_b_last, u32 groups, u32 alignment, const int* layout) {
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
  arguments.map_a = &map_a;
  arguments.map_b = &map_b;
  arguments.map_d = &map_d;
  arguments.map_a_last = &map_a_last;
  arguments.map_b_last = &map_b_last;
  arguments.groups = groups;
  arguments.alignment = alignment;
  arguments.layout = layout;
  HalfGemm<Constants, Mma, Arguments>(arguments, shared_address(shared)).run();
}
