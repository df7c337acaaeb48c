// The split-K exchange. Each consumer of one CTA, or of a cluster of CTAs along K, has the sums over its part of a tile's K. The
// exchange adds them in the order of the splits, so that results repeat bitwise, and do not depend on the tile.
#pragma once
#include "barrier.cuh"

// A split is one part of K. Each split owns some chunks of eight accumulator columns and receives the sums of the other splits
// for these. Its consumer has a slot of shared memory for each other split, which writes the slot and then arrives at the
// consumer's full barrier. Slots have the layout of accumulators, so that there are no bank conflicts.
template <u32 kColumns, u32 kSlices, u32 kClusterK, u32 kConsumersK, u32 kConsumers>
struct SplitKExchange {
  enum : u32 { kSplits = kClusterK * kConsumersK, kChunks = kColumns / 8 };
  enum : u32 { kOwned = ceil_div(kChunks, kSplits), kOwners = ceil_div(kChunks, kOwned) };
  // Within one CTA each warp uses ordinary stores and then arrives. Between CTAs asynchronous stores complete on the barrier by
  // themselves; outside of a cluster launch they are an illegal instruction.
  enum : bool { kLocal = kClusterK == 1 };
  enum : u32 { kPieceBytes = 128 * 16 };  // a chunk of one slice: four elements a thread
  enum : u32 { kSlotBytes = kOwned * kSlices * kPieceBytes };
  enum : u32 { kConsumerBytes = (kSplits - 1) * kSlotBytes };
  enum : u32 { kBytes = kConsumers * kConsumerBytes };
  enum : u32 { kBarrierBytes = kConsumers * 2 * 8 };

  u32 slots, barriers;  // at the same addresses in every CTA of the cluster
  u32 parity = 0;

  DG_DEVICE u32 full(u32 consumer) const { return barriers + consumer * 16; }
  DG_DEVICE u32 empty(u32 consumer) const { return barriers + consumer * 16 + 8; }

  // How many other splits `split` sends to.
  static DG_DEVICE u32 receivers(u32 split) { return kOwners - (split < kOwners ? 1 : 0); }

  DG_DEVICE void init(u32 rank) const {
    for (u32 consumer = 0; consumer < kConsumers; ++consumer) {
      const u32 to = receivers(rank * kConsumersK + consumer % kConsumersK);
      barrier_init(full(consumer), kLocal ? (kSplits - 1) * 4 : 1);
      barrier_init(empty(consumer), to > 0 ? to : 1);
    }
  }

  // Sends this split's sums of the chunks that other splits own, and adds the sums that those sent of its own chunks. `group` is
  // the group of consumers that multiply the same rows, `consumer` the number of this one in its CTA. Whole tiles are exchanged,
  // also past the tensor's end: an owner frees a slot only after it was filled, so that no arrival comes a round early. After the
  // last tile (`more` is false in all CTAs) slots are not freed: nobody waits for them, a CTA might have exited by then, and
  // between CTAs the arrival costs a membar.gpu.
  DG_DEVICE void exchange(float (&sum)[kSlices][kColumns / 2], u32 group, u32 consumer, u32 split, u32 thread, bool more) {
    const u32 first = split * kOwned, owned = split < kOwners ? min_of(kOwned, kChunks - first) : 0;
    if (!kLocal && thread == 0 && owned > 0)
      barrier_arrive_expect(full(consumer), (kSplits - 1) * owned * kSlices * kPieceBytes);
    // The slots that took this split's sums of the previous tile are free.
    if (receivers(split) > 0) barrier_wait<true>(empty(consumer), parity ^ 1);
#pragma unroll
    for (u32 to = 0; to < kOwners; ++to) {
      if (to != split) {
        const u32 receiver = group * kConsumersK + to % kConsumersK;
        const u32 slot = slots + receiver * kConsumerBytes + (split < to ? split : split - 1) * kSlotBytes + thread * 16;
        const u32 there = kLocal ? slot : remote_address(slot, to / kConsumersK);
        const u32 barrier = kLocal ? full(receiver) : remote_address(full(receiver), to / kConsumersK);
#pragma unroll
        for (u32 chunk = to * kOwned; chunk < min_of((to + 1) * kOwned, kChunks); ++chunk) {
#pragma unroll
          for (u32 slice = 0; slice < kSlices; ++slice)
            store(there + (chunk % kOwned * kSlices + slice) * kPieceBytes, &sum[slice][chunk * 4], barrier);
        }
        if constexpr (kLocal) {
          __syncwarp();
          if (thread % 32 == 0) barrier_arrive(barrier);
        }
      }
    }
    if (owned > 0) {
      barrier_wait<true>(full(consumer), parity);
      const u32 mine = slots + consumer * kConsumerBytes + thread * 16;
#pragma unroll
      for (u32 chunk = 0; chunk < kChunks; ++chunk) {
        if (chunk / kOwned == split) {
#pragma unroll
          for (u32 slice = 0; slice < kSlices; ++slice) {
            add_in_order(chunk / kOwned, mine + (chunk % kOwned * kSlices + slice) * kPieceBytes, &sum[slice][chunk * 4]);
          }
        }
      }
      if (more) {
        named_barrier_sync(kConsumerBarrier + consumer, 128);
        if (thread < kSplits && thread != split) {
          const u32 sender = empty(group * kConsumersK + thread % kConsumersK);
          if constexpr (kLocal) {
            barrier_arrive(sender);
          } else {
            barrier_arrive_release(remote_address(sender, thread / kConsumersK));
          }
        }
      }
    }
    parity ^= 1;
  }

 private:
  // Adds the pieces of all splits in their order, whichever owns them: `owner`, which is known at compile time. It has its own piece in
  // `sum`, and those of the others in slots. If it is the second one, its piece may come first.
  static DG_DEVICE void add_in_order(u32 owner, u32 slots, float* sum) {
    const bool late = owner > 1;
    const float own[4] = {sum[0], sum[1], sum[2], sum[3]};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sum[i] = late ? -0.0f : own[i];  // adding -0 changes nothing
#pragma unroll
    for (u32 split = 0; split < kSplits; ++split) {
      if (split != owner) {
        add_shared(slots + (split < owner ? split : split - 1) * kSlotBytes, sum);
      } else if (late) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum[i] += own[i];
      }
    }
  }

  static DG_DEVICE void store(u32 address, const float* v, u32 barrier) {
    if constexpr (kLocal) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                   ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
    } else {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
          ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
    }
  }
};
