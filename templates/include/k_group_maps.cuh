// Tensor maps of the groups of a GEMM that is grouped along K, with a K-major matrix for each group.
#pragma once
#include "barrier.cuh"
#include "tma.cuh"

// One warp makes the map of one operand of one group: `from` with another address, length of a row, and stride. The matrices lie one
// after the other and have `rows` rows. But with `padded_k` all are parts of one matrix of `padded_k` columns, whose rows are
// `row_bytes` apart, and each part begins at a multiple of 128 columns. Each map has a place of its own, so that none is rewritten while loads use it.
DG_DEVICE void make_group_map(const TensorMap* from, const u8* base, u32 rows, u32 padded_k, u32 row_bytes, const int* sizes,
                              u32 group, TensorMap* to) {
  __shared__ alignas(128) TensorMap map;
  const u32 lane = threadIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto size_of = [&](u32 group) { return static_cast<u32>(sizes[group] > 0 ? sizes[group] : 0); };
  u32 before = 0;
  for (u32 other = lane; other < group; other += 32) before += padded_k > 0 ? ceil_div(size_of(other), 128) * 128 : size_of(other);
  before = __reduce_add_sync(0xffffffffu, before);
  u32 size = size_of(group);
  if (padded_k > 0) {
    size = before < padded_k ? min_of(size, padded_k - before) : 0;
  } else {
    if (size % 16 != 0) __trap();  // rows would begin inside the 16 bytes that TMA reads
    row_bytes = size;
  }
  if (size == 0) {  // nothing is read with this map, but a map must have a row
    size = row_bytes = 16;
    before = 0;
  }
#if __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 5
  const u32 stride = row_bytes >> 4;  // before CUDA 12.5 the instruction takes the field as it is (CUTLASS, copy_sm90_desc.hpp)
#else
  const u32 stride = row_bytes;
#endif
  if (lane < 16) map.opaque[lane] = from->opaque[lane];
  __syncwarp();
  const u32 place = shared_address(&map);
  if (lane == 0) {
    const u64 address = reinterpret_cast<u64>(base) + static_cast<u64>(before) * (padded_k > 0 ? 1 : rows);
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(place), "l"(address) : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" ::"r"(place), "r"(size) : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;"
                 ::"r"(place), "l"(static_cast<u64>(stride)) : "memory");
  }
  __syncwarp();
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
               ::"l"(to), "r"(place) : "memory");
}
