// What has to be there before the warps of a CTA meet.
#pragma once
#include "barrier.cuh"
#include "fp8_gemm_arguments.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// The maps that loads begin with. To be called by a thread that has nothing else to do yet.
template <u32 kSegments>
DG_DEVICE void prefetch_maps(const Fp8GemmArguments& arg, u32 block_m, u32 block_n) {
#pragma unroll
  for (u32 segment = 0; segment < kSegments; ++segment) tma_prefetch_map(arg.map_b[segment]);
  tma_prefetch_map(arg.map_a);
  tma_prefetch_map(arg.map_scale_a);
  if (arg.last_columns < block_n) tma_prefetch_map(arg.map_b_last);
  if (arg.last_rows < block_m) {
    tma_prefetch_map(arg.map_a_last);
    tma_prefetch_map(arg.map_scale_a_last);
  }
}

// One thread of the calling warp makes the barriers: the ring's, and where shares of K are exchanged, those too. To be
// called by a warp that loads nothing: those that do have to find their first tile meanwhile.
template <bool kExchanges, class Barriers, class Exchange>
DG_DEVICE void init_barriers(const Barriers& barriers, const Exchange& exchange, u32 rank_k) {
  if (elect_one()) {
    barriers.init();
    if constexpr (kExchanges) exchange.init(rank_k);
    barrier_init_fence();
  }
  __syncwarp();
}
