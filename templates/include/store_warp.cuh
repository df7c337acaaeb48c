// The store warp of a persistent `Fp8Gemm` CTA.
#pragma once
#include "next_tile_hint.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// One warp of the producer warpgroup stores finished tiles by TMA, so that consumers go on at once. It stores a few boxes at a
// time, because TMA loads queue behind TMA stores. It also publishes the next tile (see next_tile_hint.cuh).
template <class Gemm>
DG_DEVICE void store_tiles(const Gemm& gemm, typename Gemm::Scheduler tile) {
  using Areas = typename Gemm::Areas;
  constexpr u32 kParts = Gemm::kStoreParts;
  const u32 lane = threadIdx.x % 32;
  NextTileHint hint = gemm.hint();
  auto next = tile, ahead = tile;
  const auto look_ahead = [&] {
    if constexpr (Gemm::kHints) {
      next = ahead;
      ahead.advance();
      hint.template publish<Gemm::kNeedsRow>(ahead, lane == 0);
      __syncwarp();
    }
  };
  const auto go_on = [&] {
    if constexpr (Gemm::kHints) tile = next;
    else tile.advance();
  };
  look_ahead();
  if constexpr (Gemm::kHints) NextTileHint::allow_first<Gemm::kConsumers>();
  wait_for_previous_kernel();
  for (; tile.valid(); go_on()) {
    look_ahead();
    if (elect_one()) tma_store_wait_read<0>();  // the previous tile has been read
    __syncwarp();
    Areas::free_all();
#pragma unroll 1  // few registers
    for (u32 i = 0; i < Gemm::kConsumers * kParts; ++i) {
      const u32 consumer = i % Gemm::kConsumers, part = i / Gemm::kConsumers;
      const u32 row = tile.row + consumer * 64 * Gemm::kSlices, column = gemm.rank_k() * Gemm::kColumns;
      Areas::template wait_until_full<kParts>(consumer, part);
      if (elect_one()) {  // ptxas knows that this is one thread
        const u32 area = gemm.shared + Areas::offset(consumer, 0);
        fence_shared_to_tma();
        Gemm::Store::template store<kParts>(gemm.arg.map_d, area, row, column, Gemm::columns_of(tile), gemm.m(), gemm.n(), part,
                                            LatePolicy{(gemm.arg.evict_first & kEvictD) != 0});
      }
      __syncwarp();
    }
  }
  if (elect_one()) tma_store_wait_read<0>();  // shared memory must outlive the reads
}
