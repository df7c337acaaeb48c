// Prologue: tensor map prefetch and mbarrier initialisation, before the first barrier of the CTA or cluster.
#pragma once
#include "barrier.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// Prefetches the tensor maps of the first loads. Call it from a consumer thread, which is idle then.
template <u32 kSegments, bool kScaleMaps = true, class Arguments>
DG_DEVICE void prefetch_maps(const Arguments& arg, u32 block_m, u32 block_n) {
#pragma unroll
  for (u32 segment = 0; segment < kSegments; ++segment) tma_prefetch_map(arg.map_b[segment]);
  tma_prefetch_map(arg.map_a);
  if constexpr (kScaleMaps) tma_prefetch_map(arg.map_scale_a);
  if (arg.last_columns < block_n) tma_prefetch_map(arg.map_b_last);
  if (arg.last_rows < block_m) {
    tma_prefetch_map(arg.map_a_last);
    if constexpr (kScaleMaps) tma_prefetch_map(arg.map_scale_a_last);
  }
}

// One thread of the calling warp initialises the mbarriers: those of the ring and, with split K, of the exchange. Call it from
// the warp that loads nothing, since the loaders compute their first tile meanwhile.
template <bool kExchanges, class Barriers, class Exchange>
DG_DEVICE void init_barriers(const Barriers& barriers, const Exchange& exchange, u32 rank_k) {
  if (elect_one()) {
    barriers.init();
    if constexpr (kExchanges) exchange.init(rank_k);
    barrier_init_fence();
  }
  __syncwarp();
}
