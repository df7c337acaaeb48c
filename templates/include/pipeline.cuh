// The ring of shared-memory stages between producers and consumers.
#pragma once
#include "barrier.cuh"

// A consumer's position in the ring: the stage, and the parity of the current round. A wait distinguishes a phase only from
// the previous one, so a reader must wait for every round of its stages.
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

// A producer's position in the ring. It waits for the consumers' release in the round before.
struct ProducerCursor {
  u32 stage = 0, round = 0;
};

// Loads of constant weights before the previous kernel has ended: how many stages, and a pause (`pace`, in cycles) after each load
// of the ring's first round. TMA works in order, so tokens, which the previous kernel writes, queue behind these weights: at full
// speed they delayed the tokens of 7168 x 2048 by half a microsecond of 5 (H200). The pause allows 128 bytes a cycle, several
// times an SM's part of the HBM bandwidth. There is none where a stage has more bytes of tokens than of weights: there
// 96 x 2112 x 7168 took 5% longer with it.
template <u32 kBytesWeights, u32 kBytesTokens>
struct EarlyLoads {
  enum : u32 { kPace = kBytesWeights >= kBytesTokens ? kBytesWeights / 128 : 0 };
  u32 stages, pace;

  DG_DEVICE explicit EarlyLoads(u32 stages) : stages(stages), pace(stages > 0 ? +kPace : 0) {}
};
struct NoEarlyLoads {
  enum : u32 { kPace = 0, stages = 0, pace = 0 };
};

// How many stages of `bytes` of weights are prefetched into L2 in the prologue. There is time for three where the CTA waits for
// its cluster, or where the first loads do not wait for the previous kernel: graphs of 1 and 16 tokens by 576 x 7168 and 4096 x
// 7168 were 3 to 5% faster (H200). Elsewhere more than one delays the loads: single calls with K up to 512 took 2 to 5% longer.
DG_DEVICE constexpr u32 prefetched(u32 bytes, bool has_time) { return has_time ? min_of(3u, 65536 / bytes) : 1; }

// When the next kernel of the stream may start: as soon as this one reads its operands, so that constant weights are loaded early. But
// where a few rows of tiles read the same B and K is long, not before this CTA's last loads are issued: in graphs of 96 to 128 tokens an
// early start took up to 15% longer (unpromised, BF16 128 x 10240 x 5120: 46.1 and 39.5 us; FP8 128 x 5120 x 13824: 30.6 and 27.7; H100).
// With one row of tiles or short K, a late start took up to 15% longer with constant weights (FP8 86 x 6144 x 1024).
DG_DEVICE bool starts_next_late(u32 m, u32 k, u32 block_m) { return m > block_m && m <= 4 * block_m && k >= 2048; }

// full[i] completes when the bytes of stage i have arrived. empty[i] completes when all consumer warps that read stage i have
// released it, including those of CTAs that receive this CTA's multicasts.
// In clusters full[i] also waits for kLoaders threads: those that load an operand, and the one that sets the number of bytes. A loader
// may have no box of a tile that reaches past the edge. If the ring went on without it and it fell behind by a round, its waits could
// not see that, and it would hang.
template <u32 kStages, u32 kConsumerWarps, u32 kClusterSize, u32 kLoaders = 2>
struct PipelineBarriers {
  enum : u32 { kBytes = 2 * kStages * 8 };
  u32 base;

  DG_DEVICE u32 full(u32 stage) const { return base + stage * 8; }
  DG_DEVICE u32 empty(u32 stage) const { return base + (kStages + stage) * 8; }

  DG_DEVICE void init() const {
    for (u32 stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), kClusterSize > 1 ? kLoaders : 1);
      barrier_init(empty(stage), kConsumerWarps * kClusterSize);
    }
  }

  // Called for each stage by loaders that do not set the number of bytes.
  DG_DEVICE void take_part(u32 stage) const {
    if constexpr (kClusterSize > 1) barrier_arrive(full(stage));
  }

  // Fills the next `count` stages: waits until each is empty, then calls `fill(step, stage)`. Keep loop invariants out of `fill`:
  // a block of a narrow tile takes few cycles more than one pass of this loop. In the ring's first round no wait is needed; after
  // `early` stages the previous kernel is awaited.
  template <class Fill, class Early = NoEarlyLoads>
  DG_DEVICE void fill(ProducerCursor& cursor, u32 count, const Fill& fill, const Early& early = Early()) const {
    // Rings with few stages are loaded early as a whole, if at all: their tiles are wide, and their producers have few registers.
    constexpr bool kEarly = kStages >= 4;
    // Many stages are filled fastest by a loop without waits: graphs of 1 to 22 tokens with split K lost 1 to 5% without it
    // (H100). With fewer stages this is one more loop to compile.
    constexpr bool kRamp = kStages >= 8;
    for (u32 step = 0; step < count;) {
      const bool first = cursor.round == 0;
      const bool some = kEarly && first && cursor.stage < early.stages && early.stages < kStages;
      const u32 stop = min_of(count, step + (some ? early.stages : +kStages) - cursor.stage);
      const u32 parity = (cursor.round & 1) ^ 1;
      if (kRamp && first) {
#pragma unroll 1
        for (; step < stop; ++step, ++cursor.stage) {
          fill(step, cursor.stage);
          if (Early::kPace > 0 && early.pace > 0) pass_cycles(early.pace);
        }
      } else {
#pragma unroll 1
        for (; step < stop; ++step, ++cursor.stage) {
          barrier_wait(empty(cursor.stage), parity);
          fill(step, cursor.stage);
          if constexpr (kEarly && !kRamp && Early::kPace > 0) pass_cycles(first ? early.pace : 0);
        }
      }
      if (some) wait_for_previous_kernel();
      if (cursor.stage == kStages) {
        cursor.stage = 0;
        ++cursor.round;
      }
    }
  }

  // Waits after the last tile until all stages are empty. A CTA must not exit while others of its cluster still arrive at its
  // barriers. A cluster barrier instead would need a fence and take longer.
  DG_DEVICE void drain(const ProducerCursor& cursor) const {
    for (u32 stage = 0; stage < kStages; ++stage) {
      const u32 rounds = cursor.round + (stage < cursor.stage ? 1 : 0);
      if (rounds > 0) barrier_wait(empty(stage), (rounds & 1) ^ 1);
    }
  }

  // Called by a whole consumer warp: one arrival at every CTA of the cluster.
  DG_DEVICE void release(u32 stage, u32 lane) const { release_at(full(stage), lane); }
  // The same for the stage whose full barrier has this address.
  DG_DEVICE void release_at(u32 address, u32 lane) const {
    const u32 barrier = address + kStages * 8;
    if constexpr (kClusterSize == 1) {
      if (lane == 0) barrier_arrive(barrier);
    } else {
      if (lane < kClusterSize) barrier_arrive_remote(barrier, lane);
    }
  }
};
