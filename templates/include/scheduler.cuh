// Which output tiles a cluster computes, in which order.
#pragma once
#include "barrier.cuh"
#include "raster.cuh"

// Static persistent schedule over cluster tiles (cluster_m x cluster_n CTA tiles each). A cluster tile may hang over the
// edge: its loads read zeros and its stores are clipped, so that all CTAs of a cluster always do the same steps.
template <u32 kBlockM, u32 kBlockN, u32 kClusterM, u32 kClusterN, u32 kClusterK>
struct TileScheduler {
  enum : bool { kStreams = false };

  const Raster* raster;
  u32 count, stride, index;
  u32 row, column;  // first element of this CTA's current tile

  DG_DEVICE TileScheduler(const Raster* raster) : raster(raster) {
    count = raster->rows * raster->columns;
    stride = opaque(gridDim.x / (kClusterM * kClusterN * kClusterK));  // read from memory at each use, else
    index = blockIdx.x / (kClusterM * kClusterN * kClusterK);
    if (valid()) locate();
  }

  DG_DEVICE bool valid() const { return index < count; }
  // Keeps the compiler from working it out where it is used first.
  DG_DEVICE void settle() const { asm volatile("" ::"r"(row), "r"(column), "r"(count), "r"(index)); }
  static DG_DEVICE u32 gathered() { return 0; }

  DG_DEVICE void advance() {
    index += stride;
    if (valid()) locate();
  }

 private:
  DG_DEVICE void locate() {
    raster->locate(index, row, column);
    const u32 rank = kClusterM * kClusterN == 1 ? 0 : cluster_rank();
    row = (row * kClusterM + rank % kClusterM) * kBlockM;
    column = (column * kClusterN + rank / kClusterM) * kBlockN;
  }
};
