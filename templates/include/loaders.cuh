// The loaders of tokens and of their scales, for every GEMM kernel. Gemm gives the tile's sizes, offsets in shared memory, tensor
// maps and barriers. One thread runs each loader.
#pragma once
#include "barrier.cuh"
#include "edge_boxes.cuh"
#include "pipeline.cuh"
#include "tma.cuh"

// A's rows of every tile. In a cluster each CTA along n loads a part and multicasts it.
template <class Gemm>
DG_DEVICE void load_tokens(const Gemm& gemm, typename Gemm::Scheduler tile) {
  ProducerCursor cursor;
  const auto order = gemm.order();
  const u32 part = gemm.tokens_part();
  for (; tile.valid(); tile.advance()) {
    const u32 loaded = gemm.tokens_loaded(tile.row);
    with_map<Gemm::kTokensBox, Gemm::kClusters>(part, loaded, gemm.arg.map_a, gemm.arg.map_a_last, [&](const TensorMap* map) {
      wait_for_previous_kernel();
      allow_next_kernel();
      gemm.barriers.fill(cursor, order.length, [&](u32 step, u32 stage) {
        const u32 a = gemm.shared + Gemm::kOffsetA + stage * Gemm::kBytesA + part * Gemm::kBlockK;
        gemm.barriers.take_part(stage);
        if (!map) return;
        if constexpr (Gemm::kClusterN > 1) {
          tma_load_multicast(a, map, gemm.barriers.full(stage), order.step_block(step) * Gemm::kBlockK,
                             tile.row + part, Gemm::kAll);
        } else {
          tma_load(a, map, gemm.barriers.full(stage), order.step_block(step) * Gemm::kBlockK, tile.row);
        }
      });
    });
  }
}

// Without scales to load: only sets the number of bytes that each full barrier expects of all loaders. Returns its position in the
// ring.
template <class Gemm>
DG_DEVICE ProducerCursor expect_loads(const Gemm& gemm, typename Gemm::Scheduler tile) {
  ProducerCursor cursor;
  const auto order = gemm.order();
  for (; tile.valid(); tile.advance()) {
    const u32 bytes = (gemm.weights_loaded(tile) + gemm.tokens_loaded(tile.row)) * Gemm::kBlockK;
    gemm.barriers.fill(cursor, order.length, [&](u32, u32 stage) { barrier_arrive_expect(gemm.barriers.full(stage), bytes); });
  }
  return cursor;
}

// A's scales of every tile. This loader has the least to do, so it also sets the number of bytes that each full barrier expects of
// all loaders. Returns its position in the ring.
template <class Gemm>
DG_DEVICE ProducerCursor load_scales(const Gemm& gemm, typename Gemm::Scheduler tile) {
  ProducerCursor cursor;
  const auto order = gemm.order();
  for (; tile.valid(); tile.advance()) {
    const u32 loaded = gemm.tokens_loaded(tile.row);
    const u32 bytes = gemm.weights_loaded(tile) * Gemm::kBlockK + loaded * (Gemm::kBlockK + 4);
    with_map<Gemm::kBlockM, Gemm::kClusters>(0, loaded, gemm.arg.map_scale_a, gemm.arg.map_scale_a_last,
                                             [&](const TensorMap* map) {
      wait_for_previous_kernel();
      gemm.barriers.fill(cursor, order.length, [&](u32 step, u32 stage) {
        barrier_arrive_expect(gemm.barriers.full(stage), bytes);
        const u32 to = gemm.shared + Gemm::kOffsetScale + stage * Gemm::kBytesScale;
        if (map) tma_load(to, map, gemm.barriers.full(stage), tile.row, order.step_block(step));
      });
    });
  }
  return cursor;
}
