// Which output tiles a cluster computes, in which order.
#pragma once
#include "barrier.cuh"
#include "raster.cuh"

// Static persistent schedule over cluster tiles (cluster_m x cluster_n CTA tiles each). A cluster tile may hang over the
// edge: what lies outside is not loaded (see edge_boxes.cuh) and not stored, and all CTAs of a cluster go through the same stages.
template <u32 kBlockM, u32 kBlockN, u32 kClusterM, u32 kClusterN, u32 kClusterK>
struct TileScheduler {
  const Raster* raster;
  u32 count, stride, index;
  u32 row, column;  // of this CTA's current tile: its first element, or with a block size of 1 its place among tiles

  TileScheduler() = default;

  DG_DEVICE TileScheduler(const Raster* raster) : TileScheduler(raster, Index<0>()) {
    if (valid()) locate();
  }

  // The same in less time, whether there is such a tile or not, and at once: the compiler would do it where it is used, and
  // read what it goes on by from memory each time. Consumers have no register for that.
  static DG_DEVICE TileScheduler early(const Raster* raster) {
    TileScheduler tile(raster, Index<0>());
    tile.stride = opaque(tile.stride);
    tile.locate();
    asm volatile("" ::"r"(tile.row), "r"(tile.column), "r"(tile.count), "r"(tile.index));
    return tile;
  }

  DG_DEVICE bool valid() const { return index < count; }
  // Tiles in a row of them, those past the edge counted.
  DG_DEVICE u32 columns() const { return raster->columns * kClusterN; }

  DG_DEVICE void advance() {
    index += stride;
    if (valid()) locate();
  }

 private:
  // Not located yet.
  DG_DEVICE TileScheduler(const Raster* raster, Index<0>)
      : raster(raster), count(raster->rows * raster->columns),
        stride(gridDim.x / (kClusterM * kClusterN * kClusterK)),
        index(blockIdx.x / (kClusterM * kClusterN * kClusterK)) {}

  DG_DEVICE void locate() {
    raster->locate(index, row, column);
    const u32 rank = kClusterM * kClusterN == 1 ? 0 : cluster_rank();
    row = (row * kClusterM + rank % kClusterM) * kBlockM;
    column = (column * kClusterN + rank / kClusterM) * kBlockN;
  }
};
