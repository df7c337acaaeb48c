// Adding up the shares of K that several consumers, in one CTA or in a cluster of CTAs along k, have of one tile: always
// in the same order, so that results repeat bitwise.
#pragma once
#include "barrier.cuh"

// Consumer 0 of CTA 0 is the leader, and owns a slot of shared memory for each other share. Elements lie as they do in
// accumulators, one column of 128 threads after the other, so that slots are written and read without conflicts.
template <u32 kElements, u32 kShares, u32 kClusterSize>
struct ShareReduction {
  static constexpr u32 kSlotBytes = kElements * 128 * 4;
  static constexpr u32 kBytes = (kShares - 1) * kSlotBytes;  // slots
  static constexpr u32 kBarrierBytes = 2 * 8;

  u32 slots, barrier;  // at the same addresses in every CTA of the cluster
  u32 parity = 0;

  DG_DEVICE u32 full() const { return barrier; }
  DG_DEVICE u32 empty() const { return barrier + 8; }

  // All threads of the other shares arrive at the leader's full barrier, the leader's at every CTA's empty one.
  DG_DEVICE void init() const {
    barrier_init(full(), (kShares - 1) * 128);
    barrier_init(empty(), 128);
  }

  // Hands share `share` >= 1 to the leader; `wanted[i]` says whether rows eight apart are inside the tensor.
  DG_DEVICE void send(const float* sum, u32 share, u32 thread, const bool (&wanted)[2]) {
    barrier_wait<true>(empty(), parity ^ 1);
    parity ^= 1;
    const u32 slot = remote_address(slots + (share - 1) * kSlotBytes + thread * 4, 0);
#pragma unroll
    for (u32 i = 0; i < kElements; ++i)
      if (wanted[i / 2 % 2]) store_remote(slot + i * 512, sum[i]);
    barrier_arrive_release(remote_address(full(), 0));
  }

  // The leader's own share becomes the sum of all, in their order.
  DG_DEVICE void receive(float* sum, u32 thread, const bool (&wanted)[2]) {
    barrier_wait<true>(full(), parity);
    parity ^= 1;
#pragma unroll
    for (u32 share = 1; share < kShares; ++share) {
      const u32 slot = slots + (share - 1) * kSlotBytes + thread * 4;
#pragma unroll
      for (u32 i = 0; i < kElements; ++i)
        if (wanted[i / 2 % 2]) sum[i] += load_shared(slot + i * 512);
    }
#pragma unroll
    for (u32 rank = 0; rank < kClusterSize; ++rank) barrier_arrive_release(remote_address(empty(), rank));
  }
};
