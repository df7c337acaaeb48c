// The parameters of the BF16 and FP16 GEMM kernels. Fields are assigned by name from the kernel's parameters; see the templates.
#pragma once
#include "raster.cuh"
#include "types.cuh"

struct HalfArguments {
  const TensorMap *map_a, *map_b;
  const TensorMap *map_a_last, *map_b_last;  // maps of edge boxes (see edge_boxes.cuh); unused for MN-major operands
  const TensorMap* map_d;  // null in kernels that do not store by TMA
  const u8* c;             // null in kernels that add nothing
  i64 c_stride;            // in elements, as d_stride
  u8* d;
  i64 d_stride;
  u32 m, n, k;
  u32 last_rows, last_columns;  // rows of A and of B in an edge box
  const Raster* raster;
  u32 early_stages;  // stages of B to load before the previous kernel has ended; 0: it may write B
  u32 evict_first;   // EvictFirst: operands with the L2 policy evict-first
};
