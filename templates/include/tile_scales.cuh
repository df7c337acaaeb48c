// The loaders of the FP8 kernels' scales into shared memory.
#pragma once
#include "barrier.cuh"
#include "edge_boxes.cuh"
#include "pipeline.cuh"
#include "scaling.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// Loaders are called by a whole warp.

// The loader of scales: A's rows of a tile, and with 1D1D B's too. Rows past the edge arrive as zeros.
template <class Layout>
struct TileScales {
  enum : bool { kColumns = Layout::kScaling == k1D1D, kLoads = Layout::kScaling != kRowwise };
  enum : bool { kExpects = false, kPrefetches = false };  // see NoScales
  enum : u32 { kStageBytes = kLoads ? (Layout::kBlockM + (kColumns ? +Layout::kBlockN : 0)) * 4 : 0 };

  template <class Kernel>
  static DG_DEVICE void load(const Kernel& kernel, typename Kernel::Scheduler tile) {
    if constexpr (kLoads) {
      if (!elect_one()) return;
      ProducerCursor cursor;
      const auto order = kernel.order();
      const auto& barriers = kernel.barriers;
      wait_for_previous_kernel();
      for (; tile.valid(); tile.advance()) {
        barriers.fill(cursor, kernel.steps(tile, order), [&](u32 step, u32 stage) {
          u32 row = tile.row, block = order.step_block(step);
          if constexpr (Layout::kMapsOfGroups) block = tile.depth > 0 ? tile.first_k + step : +Kernel::kNowhere;
          if constexpr (Layout::kGrouping == kMasked) {  // each group's scales are a matrix of their own, below the one before
            row -= tile.group * kernel.m();
            block += tile.group * order.blocks;
          }
          const u32 rows = kernel.shared + Layout::kOffsetRows + stage * Layout::kRowBytes;
          if constexpr (Kernel::kBatched) {
            tma_load_3d(rows, kernel.arg.map_scale_a, barriers.full(stage), row, block, tile.group);
          } else {
            tma_load(rows, kernel.arg.map_scale_a, barriers.full(stage), row, block);
          }
          if constexpr (kColumns) {
            const u32 slot = stage + (cursor.round & 1) * Layout::kStages;
            tma_load(kernel.shared + Layout::kOffsetColumns + slot * Layout::kColumnBytes, kernel.arg.map_scale_b,
                     barriers.full(stage), tile.column, block);
          }
        });
      }
    }
  }
};

// The loader of A's scales with edge boxes. It has the least to do, so it also sets the number of bytes that each full barrier expects
// of all loaders. Where tiles are staged in kStagesLent stages of the ring, it waits until those are empty, and tells consumers.
template <class Layout>
struct EdgeScales {
  enum : bool { kLoads = true, kExpects = true, kPrefetches = Layout::kScaling == k1D2D };

  template <class Kernel>
  static DG_DEVICE void load(const Kernel& kernel, typename Kernel::Scheduler tile) {
    if (elect_one()) load_all(kernel, tile);
    if constexpr (Layout::kStagesLent > 0) {
      __syncwarp();
      Layout::Areas::free_all();
    }
  }

 private:
  template <class Kernel>
  static DG_DEVICE void load_all(const Kernel& kernel, typename Kernel::Scheduler tile) {
    ProducerCursor cursor;
    const auto order = kernel.order();
    const auto& arg = kernel.arg;
    const auto& barriers = kernel.barriers;
    for (; tile.valid(); tile.advance()) {
      const u32 rows = rows_loaded<Layout::kBlockM, Layout::kClusters>(tile.row, kernel.m(), arg.last_rows);
      const u32 bytes = Layout::B::bytes(kernel.b(tile), kernel.weights_row(tile)) + rows * (Layout::kBlockK + (kPrefetches ? 4 : 0));
      if constexpr (!kPrefetches) {
        barriers.fill(cursor, order.length, [&](u32, u32 stage) { barrier_arrive_expect(barriers.full(stage), bytes); });
      } else {
        with_map<Layout::kBlockM, Layout::kClusters>(0, rows, arg.map_scale_a, arg.map_scale_a_last, [&](const TensorMap* map) {
          wait_for_previous_kernel();
          barriers.fill(cursor, order.length, [&](u32 step, u32 stage) {
            barrier_arrive_expect(barriers.full(stage), bytes);
            const u32 to = kernel.shared + Layout::kOffsetRows + stage * Layout::kRowBytes;
            if (map) tma_load(to, map, barriers.full(stage), tile.row, order.step_block(step));
          });
        });
      }
    }
    if constexpr (Layout::kStagesLent > 0) barriers.fill(cursor, Layout::kStagesLent, [](u32, u32) {});
  }
};
