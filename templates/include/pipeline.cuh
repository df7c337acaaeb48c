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

// A producer's, which waits for what consumers did in the round before.
struct ProducerCursor {
  u32 stage = 0, round = 0;
};

// What a producer of weights loads before the previous kernel has ended: so many stages, with cycles that go by behind each load
// of the ring's first round. What that kernel wrote is loaded behind them, and TMA works in order: as fast as they can be asked
// for, constant weights kept the tokens of 7168 x 2048 for half a microsecond of 5 on an H200. 128 bytes a cycle are several
// times an SM's part of what HBM gives. Not where tokens are more bytes than weights: they are then what is waited for, and
// 96 x 2112 x 7168 took 5% longer.
struct EarlyLoads {
  u32 stages, pace;

  DG_DEVICE EarlyLoads() : stages(0), pace(0) {}
  DG_DEVICE EarlyLoads(u32 stages, u32 bytes_weights, u32 bytes_tokens)
      : stages(stages), pace(stages > 0 && bytes_weights >= bytes_tokens ? bytes_weights / 128 : 0) {}
};

// How many loads of `bytes` of weights are asked into L2 while a CTA sets itself up. Where it waits for its cluster, or where
// loads of the first will not wait for the previous kernel, there is time for three: graphs of 1 and 16 tokens by 576 x 7168
// and 4096 x 7168 were 3 to 5% faster (H200). Elsewhere more than one keep TMA from loads longer than they save: single calls
// with K up to 512 took 2 to 5% longer.
DG_DEVICE constexpr u32 prefetched(u32 bytes, bool has_time) { return has_time ? min_of(3u, 65536 / bytes) : 1; }

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
  // not change from stage to stage belongs outside: narrow tiles take few cycles more than a turn of this loop. In the first
  // round of a ring of four or more stages nothing is waited for but, behind `early` stages, the previous kernel.
  template <class Fill>
  DG_DEVICE void fill(ProducerCursor& cursor, u32 count, const Fill& fill, const EarlyLoads& early = EarlyLoads()) const {
    // Producers of wide tiles, which have few stages, have time and few registers.
    constexpr bool kOneByOne = kStages < 4;
    for (u32 step = 0; step < count;) {
      const u32 parity = (cursor.round & 1) ^ 1;
      if constexpr (kOneByOne) {
        barrier_wait(empty(cursor.stage), parity);
        fill(step++, cursor.stage++);
      } else {
        const bool some = cursor.round == 0 && cursor.stage < early.stages && early.stages < kStages;
        const u32 stop = min_of(count, step + (some ? early.stages : +kStages) - cursor.stage);
        if (cursor.round == 0) {
#pragma unroll 1
          for (; step < stop; ++step, ++cursor.stage) {
            fill(step, cursor.stage);
            if (early.pace > 0) pass_cycles(early.pace);
          }
          if (some) wait_for_previous_kernel();
        } else {
#pragma unroll 1
          for (; step < stop; ++step, ++cursor.stage) {
            barrier_wait(empty(cursor.stage), parity);
            fill(step, cursor.stage);
          }
        }
      }
      if (cursor.stage == kStages) {
        cursor.stage = 0;
        ++cursor.round;
      }
    }
  }

  // Waits, behind the last stage, until all are empty again. No CTA may leave while others of its cluster still have to arrive
  // at its barriers; to meet them once more would take a fence, and longer.
  DG_DEVICE void drain(const ProducerCursor& cursor) const {
    for (u32 stage = 0; stage < kStages; ++stage) {
      const u32 rounds = cursor.round + (stage < cursor.stage ? 1 : 0);
      if (rounds > 0) barrier_wait(empty(stage), (rounds & 1) ^ 1);
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
