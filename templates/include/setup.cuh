// What has to be there before the warps of a CTA meet.
#pragma once
#include "barrier.cuh"
#include "fp8_gemm_arguments.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// One thread of the calling warp fetches the tensor maps and makes the barriers: the ring's, and where shares of K are
// exchanged, those too. To be called by a warp that loads nothing: those that do have to find their first tile meanwhile.
template <bool kTmaStore, bool kExchanges, class Barriers, class Exchange>
DG_DEVICE void set_up(const Fp8GemmArguments& arg, const Barriers& barriers, const Exchange& exchange, u32 rank_k) {
  if (elect_one()) {
    tma_prefetch_map(arg.map_a);
    tma_prefetch_map(arg.map_b);
    tma_prefetch_map(arg.map_scale_a);
    if constexpr (kTmaStore) tma_prefetch_map(arg.map_d);
    barriers.init();
    if constexpr (kExchanges) exchange.init(rank_k);
    barrier_init_fence();
  }
  __syncwarp();
}
