// Staging areas: the shared memory from which a tile's bf16 values are stored.
#pragma once
#include "barrier.cuh"

// Each consumer has one area. In persistent CTAs areas lie after the ring, because the ring is loading the next tile. A CTA with
// one tile places them in stages that are not filled again, in the part of A or of B. That leaves room for one or two more
// stages: 512 x 7168 x 16384 with 128x224 tiles went from 90.4 to 86.9 us on an H200, whose L2 takes 1400 to 1800 cycles under
// load.
template <u32 kStages, u32 kConsumers, u32 kBytesA, u32 kBytesB, u32 kAreaBytes, bool kPersistent>
struct StagingAreas {
  enum : u32 { kOffsetB = kStages * kBytesA, kOffsetOwn = kOffsetB + kStages * kBytesB };
  enum : u32 { kOwnBytes = kPersistent ? kConsumers * kAreaBytes : 0 };
  // Areas that fit into a stage (from the beginning of A's part, and one in B's), and stages that all areas need.
  enum : bool { kInB = kBytesB >= kAreaBytes };
  enum : u32 { kInStage = kBytesA / kAreaBytes + kInB };
  enum : u32 { kStagesLent = kPersistent ? 0 : ceil_div(kConsumers, max_of(kInStage, 1u)) };
  static_assert(kPersistent || (kInStage > 0 && kStagesLent <= kStages));  // no two consumers may get the same area

  // Offset of a consumer's area in shared memory; `next_stage` is the stage that would be filled next.
  static DG_DEVICE u32 offset(u32 consumer, u32 next_stage) {
    if constexpr (kPersistent) {
      return kOffsetOwn + consumer * kAreaBytes;
    } else {
      const u32 stage = (next_stage + consumer / kInStage) % kStages, place = consumer % kInStage;
      if (kInB && place + 1 == kInStage) return kOffsetB + stage * kBytesB;
      return stage * kBytesA + place * kAreaBytes;
    }
  }

  // A consumer and the store warp synchronise when the area is free, and when one of its `kParts` parts is full. These are named
  // barriers: with mbarriers, whose wait is a loop, ptxas loses track of wgmma in flight and serialises it. In a CTA with one tile
  // a loader reports the areas free, once it has waited for all rounds of those stages.
  static DG_DEVICE void free_all() {
    for (u32 consumer = 0; consumer < kConsumers; ++consumer) named_barrier_arrive(kAreaFreeBarrier + consumer, kThreads);
  }
  static DG_DEVICE void wait_until_free(u32 consumer) { named_barrier_sync(kAreaFreeBarrier + consumer, kThreads); }
  template <u32 kParts>
  static DG_DEVICE void fill(u32 consumer, u32 part) {
    named_barrier_arrive(kAreaFullBarrier + consumer * kParts + part, kThreads);
  }
  template <u32 kParts>
  static DG_DEVICE void wait_until_full(u32 consumer, u32 part) {
    named_barrier_sync(kAreaFullBarrier + consumer * kParts + part, kThreads);
  }

 private:
  enum : u32 { kThreads = 128 + 32 };
};
