// The ring of shared-memory stages between one producer and the consumer warpgroups.
#pragma once
#include "barrier.cuh"

// A position in the ring: which stage, and the parity of its current round. Each stage always has the same reader: a wait
// tells a phase from the one before it, not from the one before that, so no round of a stage may go unwaited.
template <u32 kStages>
struct PipelineCursor {
  u32 stage = 0, parity = 0;

  template <u32 kSteps = 1>
  DG_DEVICE void advance() {
    static_assert(kStages % kSteps == 0);
    stage += kSteps;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

// full[i] completes when the bytes of stage i have landed; empty[i] when every consumer warp that reads stage i, or
// whose CTA receives what this CTA multicasts into stage i, has let go of it.
template <u32 kStages, u32 kConsumerWarps, u32 kClusterSize>
struct PipelineBarriers {
  enum : u32 { kBytes = 2 * kStages * 8 };
  u32 base;

  DG_DEVICE u32 full(u32 stage) const { return base + stage * 8; }
  DG_DEVICE u32 empty(u32 stage) const { return base + (kStages + stage) * 8; }

  DG_DEVICE void init() const {
    for (u32 stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), kConsumerWarps * kClusterSize);
    }
  }

  // A producer's way through the next `count` stages: waits until each is empty, then calls `fill(step, stage)`. What does
  // not change from stage to stage belongs outside: narrow tiles take few cycles more than a round of this.
  template <class Cursor, class Fill>
  DG_DEVICE void fill(Cursor& cursor, u32 count, const Fill& fill) const {
#pragma unroll 1
    for (u32 step = 0; step < count; ++step, cursor.advance()) {
      barrier_wait(empty(cursor.stage), cursor.parity ^ 1);
      fill(step, cursor.stage);
    }
  }

  // Called by a whole consumer warp: one arrival at every CTA of the cluster.
  DG_DEVICE void release(u32 stage, u32 lane) const {
    if constexpr (kClusterSize == 1) {
      if (lane == 0) barrier_arrive(empty(stage));
    } else {
      if (lane < kClusterSize) barrier_arrive_remote(empty(stage), lane);
    }
  }
};
