// The loaders of tokens and of their scales, for every GEMM kernel. Gemm gives the tile's sizes, offsets in shared memory, tensor
// maps and barriers. One thread runs each loader.
#pragma once
#include "barrier.cuh"
#include "edge_boxes.cuh"
#include "pipeline.cuh"
#include "tma.cuh"

// When the next kernel of the stream may start: as soon as this one reads its operands, so that constant weights are loaded early. But
// where a few rows of tiles read the same B and K is long, not before this CTA's last loads are issued: in graphs of 96 to 128 tokens an
// early start took up to 15% longer (unpromised, BF16 128 x 10240 x 5120: 46.1 and 39.5 us; FP8 128 x 5120 x 13824: 30.6 and 27.7; H100).
// With one row of tiles or short K, a late start took up to 15% longer with constant weights (FP8 86 x 6144 x 1024).
DG_DEVICE bool starts_next_late(u32 m, u32 k, u32 block_m) { return m > block_m && m <= 4 * block_m && k >= 2048; }

// A's rows of every tile. In a cluster each CTA along n loads a part and multicasts it.
template <class Gemm>
DG_DEVICE void load_tokens(const Gemm& gemm, typename Gemm::Scheduler tile) {
  ProducerCursor cursor;
  const auto order = gemm.order();
  const u32 part = gemm.tokens_part();
  const bool late = starts_next_late(gemm.m(), gemm.k(), Gemm::kBlockM);
  for (; tile.valid(); tile.advance()) {
    const u32 loaded = gemm.tokens_loaded(tile.row);
    with_map<Gemm::kTokensBox, Gemm::kClusters>(part, loaded, gemm.arg.map_a, gemm.arg.map_a_last, [&](const TensorMap* map) {
      wait_for_previous_kernel();
      if (!late) allow_next_kernel();
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
  if (late) allow_next_kernel();
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
