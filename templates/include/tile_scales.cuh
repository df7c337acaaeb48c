// Scales of the FP8 kernels with any scaling in shared memory, and those of whole rows in global memory.
#pragma once
#include "barrier.cuh"
#include "pipeline.cuh"
#include "scaling.cuh"
#include "tma.cuh"

// The loader of scales: A's rows of a tile, and with 1D1D B's too. Rows past the edge arrive as zeros.
template <class Layout>
struct TileScales {
  enum : bool { kColumns = Layout::kScaling == k1D1D, kLoads = Layout::kScaling != kRowwise };
  enum : u32 { kStageBytes = kLoads ? (Layout::kBlockM + (kColumns ? +Layout::kBlockN : 0)) * 4 : 0 };

  template <class Kernel>
  static DG_DEVICE void load(const Kernel& kernel, typename Kernel::Scheduler tile) {
    if constexpr (kLoads) {
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
