// The parameters of the FP8 GEMM kernels. Fields are assigned by name from the kernel's parameters; see the templates.
#pragma once
#include "raster.cuh"
#include "types.cuh"

struct Fp8GemmArguments {
  const TensorMap *map_a, *map_scale_a;
  const TensorMap* map_d;   // null in kernels that do not store by TMA
  const TensorMap* map_b[4];  // one for each segment of a tile's columns (see columns.cuh)
  const TensorMap *map_a_last, *map_b_last, *map_scale_a_last;  // maps of edge boxes (see edge_boxes.cuh)
  const float* scale_b;
  i64 scale_b_stride_n, scale_b_stride_k;
  u16* d;
  i64 d_stride;
  u32 m, n, k;
  u32 last_rows;     // rows of A and of its scales in an edge box
  u32 last_columns;  // rows of B in the edge box
  const Raster* raster;
  u32 early_stages;  // stages of B to load before the previous kernel has ended; 0: it may write B and its scales
  u32 evict_first;  // EvictFirst: operands with the L2 policy evict-first
};
