// Tensor memory accelerator: tiles between global and shared memory through tensor maps.
#pragma once
#include "types.cuh"

DG_DEVICE void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <u32 kMaps>
DG_DEVICE void tma_prefetch_map(const TensorMap* const (&maps)[kMaps]) {
#pragma unroll
  for (u32 i = 0; i < kMaps; ++i) tma_prefetch_map(maps[i]);
}

// Makes a tensor map in global memory, which an earlier kernel wrote, known to this thread's loads.
DG_DEVICE void tma_acquire_map(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// Loads the box at (x, y), innermost first, into this CTA; elements outside the tensor arrive as zeros and are counted.
DG_DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// The L2 policy evict-first, for operands that are not needed again soon. Other loads have no policy: decode was 10% slower with a
// "normal" hint on tokens (H200, together with other changes).
//
// The number is what createpolicy returns for L2::evict_first with a fraction of 1 (CUTLASS: `TMA::CacheHintSm90`). As a constant
// it takes no registers, of which producers have few.
DG_DEVICE constexpr u64 evict_first() { return 0x12F0000000000000ull; }

DG_DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy) : "memory");
}

// Bits of a launch's `evict_first`: the operands that have this policy. kEvictStartB: B of each CTA's first tile.
enum EvictFirst : u32 { kEvictB = 1, kEvictD = 2, kEvictStartB = 4 };

// Prefetches a box into L2. This is safe while another kernel still writes it: all writes of a GPU go through L2.
DG_DEVICE void tma_prefetch(const TensorMap* map, u32 x, u32 y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// Loads a box to the same offset of every CTA in `mask`. In each CTA the bytes complete on its own barrier at that offset.
DG_DEVICE void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask) : "memory");
}

DG_DEVICE void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u16 mask, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask), "l"(policy) : "memory");
}

DG_DEVICE void tma_store(const TensorMap* map, u32 source, u32 x, u32 y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(source), "r"(x), "r"(y) : "memory");
}

DG_DEVICE void tma_store(const TensorMap* map, u32 source, u32 x, u32 y, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;"
               ::"l"(map), "r"(source), "r"(x), "r"(y), "l"(policy) : "memory");
}

// Calls `use` with the policy evict-first or without a policy, in two copies of its code. A selected policy would be an operand of
// every load.
template <class Use>
DG_DEVICE void with_policy(bool evicts_first, const Use& use) {
  if (evicts_first) {
    use(evict_first());
  } else {
    use();
  }
}

// A policy that each load and store chooses by a branch. That takes longer, but there is one copy of the code around it.
struct LatePolicy {
  bool evicts_first;
};

// For code that seldom runs.
struct Rarely {};
template <class Use>
DG_DEVICE void with_policy(bool evicts_first, const Use& use, Rarely) {
  use(LatePolicy{evicts_first});
}

DG_DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, LatePolicy late) {
  with_policy(late.evicts_first, [&](auto... policy) { tma_load(destination, map, barrier, x, y, policy...); });
}
DG_DEVICE void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u16 mask, LatePolicy late) {
  with_policy(late.evicts_first, [&](auto... policy) { tma_load_multicast(destination, map, barrier, x, y, mask, policy...); });
}
DG_DEVICE void tma_store(const TensorMap* map, u32 source, u32 x, u32 y, LatePolicy late) {
  with_policy(late.evicts_first, [&](auto... policy) { tma_store(map, source, x, y, policy...); });
}

// The same from the z-th matrix of a tensor with three dimensions. Elements outside of that matrix arrive as zeros.
DG_DEVICE void tma_load_3d(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

DG_DEVICE void tma_load_3d(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u32 z, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy) : "memory");
}

DG_DEVICE void tma_load_multicast_3d(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u32 z, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask) : "memory");
}

DG_DEVICE void tma_load_multicast_3d(u32 destination, const TensorMap* map, u32 barrier, u32 x, u32 y, u32 z, u16 mask, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
      ::"r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask), "l"(policy) : "memory");
}

DG_DEVICE void tma_prefetch_3d(const TensorMap* map, u32 x, u32 y, u32 z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}

// Adds a box of float32 to what is in global memory. Every element has one addition, so that the result repeats bitwise.
// Subnormal sums become zero (PTX, cp.reduce.async.bulk.tensor).
DG_DEVICE void tma_add(const TensorMap* map, u32 source, u32 x, u32 y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(source), "r"(x), "r"(y) : "memory");
}

// The same into the z-th matrix of a tensor with three dimensions. Boxes are clipped at the edges of that matrix.
DG_DEVICE void tma_store_3d(const TensorMap* map, u32 source, u32 x, u32 y, u32 z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(map), "r"(source), "r"(x), "r"(y), "r"(z) : "memory");
}

DG_DEVICE void tma_add_3d(const TensorMap* map, u32 source, u32 x, u32 y, u32 z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(map), "r"(source), "r"(x), "r"(y), "r"(z) : "memory");
}

DG_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but `kPending` groups of this thread's stores have been read out of shared memory (not until they are
// visible in global memory).
template <u32 kPending = 0>
DG_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary shared-memory writes before later TMA reads of them. It covers this thread's writes, and those of threads that
// have met it at a barrier since. The fence has to lie between write and read, in the CTA of the read (Lustig et al., Mixed-Proxy
// Extensions for the NVIDIA PTX Memory Consistency Model, ISCA 2022, section 5.4). A fence takes about 300 cycles on an H200, so
// only the thread that stores executes it, not every thread that has written.
DG_DEVICE void fence_shared_to_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
