// The tile scheduler: which output tiles a cluster computes, and in which order.
#pragma once
#include "barrier.cuh"
#include "raster.cuh"

// Static schedule over cluster tiles of cluster_m x cluster_n CTA tiles. A cluster tile may reach past the edge. What lies outside
// is neither loaded (see edge_boxes.cuh) nor stored, but all CTAs of the cluster go through the same stages.
// With kBatched they are the tiles of several products, and `group` is the tile's product.
template <u32 kBlockM, u32 kBlockN, u32 kClusterM, u32 kClusterN, u32 kClusterK, bool kBatched = false>
struct TileScheduler {
  using Tiles = Choice<kBatched, BatchRaster, Raster>;
  const Tiles* raster;
  u32 count, stride, index;
  u32 row, column;  // of this CTA's current tile: its first element, or with a block size of 1 its place among tiles
  u32 group;

  TileScheduler() = default;

  DG_DEVICE TileScheduler(const Tiles* raster) : TileScheduler(raster, Index<0>()) {
    if (valid()) locate();
  }

  // The first tile for loaders, computed right here even if it does not exist. Without the asm statements the compiler would
  // delay the arithmetic to its first use and reload the stride from constant memory for each tile. Consumers do not use
  // this, as they have no registers to spare.
  static DG_DEVICE TileScheduler early(const Tiles* raster) {
    TileScheduler tile(raster, Index<0>());
    tile.stride = opaque(tile.stride);
    tile.locate();
    asm volatile("" ::"r"(tile.row), "r"(tile.column), "r"(tile.count), "r"(tile.index));
    return tile;
  }

  DG_DEVICE bool valid() const { return index < count; }
  // Tiles in one row of tiles, including those past the edge.
  DG_DEVICE u32 columns() const { return raster->columns * kClusterN; }

  DG_DEVICE void advance() {
    index += stride;
    if (valid()) locate();
  }

 private:
  // Row and column are not set yet.
  DG_DEVICE TileScheduler(const Tiles* raster, Index<0>)
      : raster(raster), count(tiles_of(raster)),
        stride(gridDim.x / (kClusterM * kClusterN * kClusterK)),
        index(blockIdx.x / (kClusterM * kClusterN * kClusterK)) {}

  static DG_DEVICE u32 tiles_of(const Raster* raster) { return raster->rows * raster->columns; }
  static DG_DEVICE u32 tiles_of(const BatchRaster* raster) { return raster->count; }

  DG_DEVICE void locate() {
    if constexpr (kBatched) {
      group = raster->part.quotient(index);
      raster->tiles.locate(index - group * raster->part.value, row, column);
    } else {
      raster->locate(index, row, column);
    }
    const u32 rank = kClusterM * kClusterN == 1 ? 0 : cluster_rank();
    row = (row * kClusterM + rank % kClusterM) * kBlockM;
    column = (column * kClusterN + rank / kClusterM) * kBlockN;
  }
};
