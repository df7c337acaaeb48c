#include "fp8_gemm.cuh"

struct Tile {
  enum : u32 { kBlockM = 128, kBlockN = 192 };
  enum : u32 { kStages = 4, kConsumers = 2 };
  enum : u32 { kClusterM = 2, kClusterN = 1 };
  enum : u32 { kClusterK = 1 };
  enum : u32 { kPartials = 1, kTurns = 2 };
  enum : u32 { kProducerRegisters = 40, kConsumerRegisters = 232 };
  enum : u32 { kShapeM = 0, kShapeN = 2112, kShapeK = 7168 };  // 0: given at run time
  enum : bool { kPersistent = true, kTmaStore = false };
  enum : u32 { kSharedBytes = 165952 };
};

struct Mma {
  enum : u32 { kN = 192 };

  // partial = a * b, or partial += a * b if `keep` is not 0; a and b are descriptors of a block of K. The compiler must not know
  // `keep`: then the old sums stay an operand, and it cannot use a second set of registers.
  static DG_DEVICE void multiply(float (&partial)[kN / 2], u64 a, u64 b, u32 keep) {
    asm volatile(
        "{\n .reg .pred keeps, adds;\n .reg .b64 a<4>, b<4>;\n"
        " setp.ne.b32 keeps, %98, 0;\n setp.eq.b32 adds, 0, 0;\n"
        " add.s64 a0, %96, 0 * %99;\n"
        " add.s64 b0, %97, 0 * %99;\n"
        " add.s64 a1, %96, 1 * %99;\n"
        " add.s64 b1, %97, 1 * %99;\n"
        " add.s64 a2, %96, 2 * %99;\n"
        " add.s64 b2, %97, 2 * %99;\n"
        " add.s64 a3, %96, 3 * %99;\n"
        " add.s64 b3, %97, 3 * %99;\n"
        " wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95},"
        " a0, b0, keeps, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95},"
        " a1, b1, adds, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95},"
        " a2, b2, adds, 1, 1;\n"
        " wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95},"
        " a3, b3, adds, 1, 1;\n"
        "}"
        : "+f"(partial[0]), "+f"(partial[1]), "+f"(partial[2]), "+f"(partial[3]), "+f"(partial[4]), "+f"(partial[5]), "+f"(partial[6]), "+f"(partial[7]), "+f"(partial[8]), "+f"(partial[9]), "+f"(partial[10]), "+f"(partial[11]), "+f"(partial[12]), "+f"(partial[13]), "+f"(partial[14]), "+f"(partial[15]), "+f"(partial[16]), "+f"(partial[17]), "+f"(partial[18]), "+f"(partial[19]), "+f"(partial[20]), "+f"(partial[21]), "+f"(partial[22]), "+f"(partial[23]), "+f"(partial[24]), "+f"(partial[25]), "+f"(partial[26]), "+f"(partial[27]), "+f"(partial[28]), "+f"(partial[29]), "+f"(partial[30]), "+f"(partial[31]), "+f"(partial[32]), "+f"(partial[33]), "+f"(partial[34]), "+f"(partial[35]), "+f"(partial[36]), "+f"(partial[37]), "+f"(partial[38]), "+f"(partial[39]), "+f"(partial[40]), "+f"(partial[41]), "+f"(partial[42]), "+f"(partial[43]), "+f"(partial[44]), "+f"(partial[45]), "+f"(partial[46]), "+f"(partial[47]), "+f"(partial[48]), "+f"(partial[49]), "+f"(partial[50]), "+f"(partial[51]), "+f"(partial[52]), "+f"(partial[53]), "+f"(partial[54]), "+f"(partial[55]), "+f"(partial[56]), "+f"(partial[57]), "+f"(partial[58]), "+f"(partial[59]), "+f"(partial[60]), "+f"(partial[61]), "+f"(partial[62]), "+f"(partial[63]), "+f"(partial[64]), "+f"(partial[65]), "+f"(partial[66]), "+f"(partial[67]), "+f"(partial[68]), "+f"(partial[69]), "+f"(partial[70]), "+f"(partial[71]), "+f"(partial[72]), "+f"(partial[73]), "+f"(partial[74]), "+f"(partial[75]), "+f"(partial[76]), "+f"(partial[77]), "+f"(partial[78]), "+f"(partial[79]), "+f"(partial[80]), "+f"(partial[81]), "+f"(partial[82]), "+f"(partial[83]), "+f"(partial[84]), "+f"(partial[85]), "+f"(partial[86]), "+f"(partial[87]), "+f"(partial[88]), "+f"(partial[89]), "+f"(partial[90]), "+f"(partial[91]), "+f"(partial[92]), "+f"(partial[93]), "+f"(partial[94]), "+f"(partial[95])        : "l"(a), "l"(b), "r"(keep), "n"(+kInstructionStep));
  }

  // Call after the wait for the products. It keeps the compiler from moving uses of the sums before that wait.
  static DG_DEVICE void settle(float (&partial)[kN / 2]) {
    asm volatile("" : "+f"(partial[0]), "+f"(partial[1]), "+f"(partial[2]), "+f"(partial[3]), "+f"(partial[4]), "+f"(partial[5]), "+f"(partial[6]), "+f"(partial[7]), "+f"(partial[8]), "+f"(partial[9]), "+f"(partial[10]), "+f"(partial[11]), "+f"(partial[12]), "+f"(partial[13]), "+f"(partial[14]), "+f"(partial[15]), "+f"(partial[16]), "+f"(partial[17]), "+f"(partial[18]), "+f"(partial[19]), "+f"(partial[20]), "+f"(partial[21]), "+f"(partial[22]), "+f"(partial[23]), "+f"(partial[24]), "+f"(partial[25]), "+f"(partial[26]), "+f"(partial[27]), "+f"(partial[28]), "+f"(partial[29]), "+f"(partial[30]), "+f"(partial[31]), "+f"(partial[32]), "+f"(partial[33]), "+f"(partial[34]), "+f"(partial[35]), "+f"(partial[36]), "+f"(partial[37]), "+f"(partial[38]), "+f"(partial[39]), "+f"(partial[40]), "+f"(partial[41]), "+f"(partial[42]), "+f"(partial[43]), "+f"(partial[44]), "+f"(partial[45]), "+f"(partial[46]), "+f"(partial[47]), "+f"(partial[48]), "+f"(partial[49]), "+f"(partial[50]), "+f"(partial[51]), "+f"(partial[52]), "+f"(partial[53]), "+f"(partial[54]), "+f"(partial[55]), "+f"(partial[56]), "+f"(partial[57]), "+f"(partial[58]), "+f"(partial[59]), "+f"(partial[60]), "+f"(partial[61]), "+f"(partial[62]), "+f"(partial[63]), "+f"(partial[64]), "+f"(partial[65]), "+f"(partial[66]), "+f"(partial[67]), "+f"(partial[68]), "+f"(partial[69]), "+f"(partial[70]), "+f"(partial[71]), "+f"(partial[72]), "+f"(partial[73]), "+f"(partial[74]), "+f"(partial[75]), "+f"(partial[76]), "+f"(partial[77]), "+f"(partial[78]), "+f"(partial[79]), "+f"(partial[80]), "+f"(partial[81]), "+f"(partial[82]), "+f"(partial[83]), "+f"(partial[84]), "+f"(partial[85]), "+f"(partial[86]), "+f"(partial[87]), "+f"(partial[88]), "+f"(partial[89]), "+f"(partial[90]), "+f"(partial[91]), "+f"(partial[92]), "+f"(partial[93]), "+f"(partial[94]), "+f"(partial[95])::"memory");
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    fp8_gemm_128x192_s4_p1_c2x1_direct_n2112_k7168(u32 m, u32 n, u32 k, u32 last_rows, u32 last_columns, u32 early_stages, const __grid_constant__ Raster raster, u32 evict_first, const float* scale_b, i64 scale_b_stride_n, i64 scale_b_stride_k, u16* d, i64 d_stride, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_scale_a, const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_a_last, const __grid_constant__ TensorMap map_b_last, const __grid_constant__ TensorMap map_scale_a_last, const __grid_constant__ TensorMap map_b_1) {
  extern __shared__ __align__(1024) u8 shared[];
  Fp8GemmArguments arguments{};
  arguments.m = m;
  arguments.n = n;
  arguments.k = k;
  arguments.last_rows = last_rows;
  arguments.last_columns = last_columns;
  arguments.early_stages = early_stages;
  arguments.raster = &raster;
  arguments.evict_first = evict_first;
  arguments.scale_b = scale_b;
  arguments.scale_b_stride_n = scale_b_stride_n;
  arguments.scale_b_stride_k = scale_b_stride_k;
  arguments.d = d;
  arguments.d_stride = d_stride;
  arguments.map_a = &map_a;
  arguments.map_b[0] = &map_b;
  arguments.map_scale_a = &map_scale_a;
  arguments.map_d = &map_d;
  arguments.map_a_last = &map_a_last;
  arguments.map_b_last = &map_b_last;
  arguments.map_scale_a_last = &map_scale_a_last;
  arguments.map_b[1] = &map_b_1;
  Fp8Gemm<Tile, Mma>(arguments, shared_address(shared)).run();
}
