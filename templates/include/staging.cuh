// Where a tile's sums wait on their way out.
#pragma once
#include "barrier.cuh"

// A staging area for each consumer: of persistent CTAs in memory of their own, behind the ring, since the next tile is loaded
// meanwhile. A CTA with one tile has stages that nothing comes into any more, those that would have been filled next: there
// an area lies in a stage's part of A or of B, and what it would have taken is another stage or two for loads. With those an
// H200 waited less for L2, which takes 1400 to 1800 cycles under load: 512 x 7168 x 16384 with 128x224 tiles 90.4 -> 86.9 us.
template <u32 kStages, u32 kConsumers, u32 kBytesA, u32 kBytesB, u32 kAreaBytes, bool kPersistent>
struct StagingAreas {
  enum : u32 { kOffsetB = kStages * kBytesA, kOffsetOwn = kOffsetB + kStages * kBytesB };
  enum : u32 { kOwnBytes = kPersistent ? kConsumers * kAreaBytes : 0 };
  // Areas that a stage has room for, at the begin of A's part and in B's, and stages that all consumers need.
  enum : bool { kInB = kBytesB >= kAreaBytes };
  enum : u32 { kInStage = kBytesA / kAreaBytes + kInB };
  enum : u32 { kStagesLent = kPersistent ? 0 : ceil_div(kConsumers, max_of(kInStage, 1u)) };
  static_assert(kPersistent || (kInStage > 0 && kStagesLent <= kStages));  // else two consumers would have one area

  // From the begin of shared memory, where `next_stage` would have been filled next.
  static DG_DEVICE u32 offset(u32 consumer, u32 next_stage) {
    if constexpr (kPersistent) {
      return kOffsetOwn + consumer * kAreaBytes;
    } else {
      const u32 stage = (next_stage + consumer / kInStage) % kStages, place = consumer % kInStage;
      if (kInB && place + 1 == kInStage) return kOffsetB + stage * kBytesB;
      return stage * kBytesA + place * kAreaBytes;
    }
  }

  // A consumer and the warp that stores meet when its area is free, and when one of `kParts` parts is full: at named barriers,
  // since ptxas does not follow products in flight past a loop that waits for an mbarrier. That lent stages are free is for a
  // loader to say, which has waited for all their rounds.
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
