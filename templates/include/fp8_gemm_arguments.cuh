// What every FP8 GEMM kernel is given.
#pragma once
#include "raster.cuh"
#include "types.cuh"

enum EvictFirst : u32 { kEvictB = 1, kEvictD = 2 };

struct Fp8GemmArguments {
  const TensorMap *map_a, *map_scale_a;
  const TensorMap* map_d;   // only of kernels that store by TMA
  const TensorMap* map_b[4];  // for each segment of a tile's columns (see columns.cuh)
  const TensorMap *map_a_last, *map_b_last, *map_scale_a_last;  // whose boxes end at the edge (see edge_boxes.cuh)
  const TensorMap* unread[2];  // keep the binaries as they were: register numbers follow the layout
  const float* scale_b;
  i64 scale_b_stride_n, scale_b_stride_k;
  u16* d;
  i64 d_stride;
  u32 m, n, k;
  u32 last_rows;     // rows of A, and of its scales, that are loaded for the last row of tiles
  u32 last_columns;  // rows of the box of B that ends at the edge
  const Raster* raster;
  u32 early_stages; // of B, loaded before the previous kernel has ended; if 0, nor are its scales: it may write both
  u32 evict_first;  // bits of EvictFirst: what leaves L2 before anything else does
};
