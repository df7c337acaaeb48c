// Which output tiles a cluster computes, in which order.
#pragma once
#include "barrier.cuh"

// Static persistent schedule over cluster tiles (cluster_m x cluster_n CTA tiles each). Tiles are walked in bands of
// `band` cluster tiles along n, m inside a band, so that the clusters running at one time read few distinct rows of A
// and of B and find them in L2. A cluster tile may hang over the edge: its loads read zeros and its stores are clipped,
// so that all CTAs of a cluster always do the same steps.
template <u32 kBlockM, u32 kBlockN, u32 kClusterM, u32 kClusterN, u32 kClusterK>
struct TileScheduler {
  enum : bool { kStreams = false };

  u32 tiles_m, tiles_n, band, count, stride, index;
  u32 row, column;  // first element of this CTA's current tile

  DG_DEVICE TileScheduler(u32 m, u32 n, u32 band) : band(band) {
    tiles_m = ceil_div(m, kBlockM * kClusterM);
    tiles_n = ceil_div(n, kBlockN * kClusterN);
    count = tiles_m * tiles_n;
    stride = gridDim.x / (kClusterM * kClusterN * kClusterK);
    index = blockIdx.x / (kClusterM * kClusterN * kClusterK);
    if (valid()) locate();
  }

  DG_DEVICE bool valid() const { return index < count; }
  static DG_DEVICE u32 gathered() { return 0; }

  DG_DEVICE void advance() {
    index += stride;
    if (valid()) locate();
  }

 private:
  DG_DEVICE void locate() {
    const u32 per_band = band * tiles_m;
    const u32 first = index / per_band * band;
    const u32 width = min_of(band, tiles_n - first);
    const u32 inside = index % per_band;
    const u32 rank = kClusterM * kClusterN == 1 ? 0 : cluster_rank();
    row = (inside / width * kClusterM + rank % kClusterM) * kBlockM;
    column = ((first + inside % width) * kClusterN + rank / kClusterM) * kBlockN;
  }
};
