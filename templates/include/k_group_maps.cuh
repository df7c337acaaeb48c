// Tensor maps of the groups of a GEMM that is grouped along K, whose operands are one K-major matrix for each group.
#pragma once
#include "barrier.cuh"
#include "tma.cuh"

// One warp makes the map of one operand of one group: `from` with another address, length of a row, and stride. The matrices lie one
// after the other and have `rows` rows. Each map has a place of its own, so that none is rewritten while loads use it.
DG_DEVICE void make_group_map(const TensorMap* from, const u8* base, u32 rows, const int* sizes, u32 group, TensorMap* to) {
  __shared__ alignas(128) TensorMap map;
  const u32 lane = threadIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  u32 before = 0;
  for (u32 other = lane; other < group; other += 32) before += sizes[other] > 0 ? sizes[other] : 0;
  before = __reduce_add_sync(0xffffffffu, before);
  // A group without any K is never read inside its matrix. But a map needs a row.
  const u32 size = sizes[group] > 0 ? sizes[group] : 16;
  if (size % 16 != 0) __trap();  // rows would begin inside the 16 bytes that TMA reads
#if __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 5
  const u32 stride = size >> 4;  // before CUDA 12.5 the instruction takes the field as it is (CUTLASS, copy_sm90_desc.hpp)
#else
  const u32 stride = size;
#endif
  if (lane < 16) map.opaque[lane] = from->opaque[lane];
  __syncwarp();
  const u32 place = shared_address(&map);
  if (lane == 0) {
    const u64 address = reinterpret_cast<u64>(base) + static_cast<u64>(before) * rows;
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(place), "l"(address) : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" ::"r"(place), "r"(size) : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;"
                 ::"r"(place), "l"(static_cast<u64>(stride)) : "memory");
  }
  __syncwarp();
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
               ::"l"(to), "r"(place) : "memory");
}
