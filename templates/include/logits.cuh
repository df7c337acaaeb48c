// Indexer logits of sparse attention: logit(i, j) = scale(j) * sum over heads h of relu(q(i, h) . k(j)) * weight(i, h).
//
// A product has 64 keys as its M, and kTokens queries with kHeads heads each as its N. Sums over heads are made by the tensor cores
// too: scores are clipped and rounded to bf16, and multiplied by weights. The accumulators of wgmma already have the layout of
// that second product's operand. A weight is the sum of two bf16 numbers, high and low, which have a column each.
//
// The producer publishes visits: a block of queries, and a run of keys for them. A consumer takes every kConsumers-th unit of 64 keys.
#pragma once
#include "pipeline.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

enum : u32 { kUnitKeys = 64, kScratchBytes = 128 };

// The descriptor of K-major rows of kRowBytes, which are also the width of the swizzle, in atoms of 8 rows.
template <u32 kRowBytes>
DG_DEVICE u64 row_descriptor(u32 address) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr u64 kStrideOffset = kRowBytes * 8 / 16;
  return kSwizzle << 62 | kStrideOffset << 32 | 1u << 16 | ((address & 0x3FFFF) >> 4);
}

template <u32 kCount, u32 kDone = 0, class Body>
DG_DEVICE void for_each(const Body& body) {
  if constexpr (kDone < kCount) {
    body(Index<kDone>());
    for_each<kCount, kDone + 1>(body);
  }
}

// sum += a * b: 16 keys by 16 heads times 16 heads by 8 columns.
DG_DEVICE void multiply_16x8(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A block of queries' weights in shared memory, as operands of the second product: of each query the high parts and the low parts, as
// pairs of bf16. Head 8 * g + 2 * t is the first of pair g of lane t of four, and a lane's pairs are neighbours.
template <class C>
using WeightPairs = u32[C::kTokens][2][4][C::kHeads / 8];

// How the producer brings weights to shared memory.
template <class C>
struct LogitWeights {
  enum : u32 { kHeadPairs = C::kHeads / 2, kPairs = C::kTokens * kHeadPairs, kEach = ceil_div(kPairs, 32) };

  float loaded[kEach][2];

  // `row` is the first query's row of weights. Rows from `rows` on count as zeros.
  DG_DEVICE void load(const float* weights, i64 stride, u32 row, u32 rows, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 pair = 32 * i + lane, own = row + pair / kHeadPairs;
      const bool exists = pair < kPairs && own < rows;
      const float* from = weights + own * stride + pair % kHeadPairs * 2;
      loaded[i][0] = exists ? from[0] : 0.0f;
      loaded[i][1] = exists ? from[1] : 0.0f;
    }
  }
  DG_DEVICE void store(WeightPairs<C>& to, u32 lane) const {
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 pair = 32 * i + lane, head_pair = pair % kHeadPairs;
      if (pair < kPairs) {
        u32(&parts)[2][4][C::kHeads / 8] = to[pair / kHeadPairs];
        split(loaded[i], parts[0][head_pair % 4][head_pair / 4], parts[1][head_pair % 4][head_pair / 4]);
      }
    }
  }

  // The high part is cut off, not rounded, so that it stays finite.
  static DG_DEVICE void split(const float (&weights)[2], u32& high, u32& low) {
    asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(weights[1]), "f"(weights[0]));
    // The rest of an infinity or a NaN counts as 0: the high part has it already.
    const float rest0 = weights[0] - __uint_as_float(high << 16), rest1 = weights[1] - __uint_as_float(high & 0xFFFF0000);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(rest1 == rest1 ? rest1 : 0.0f), "f"(rest0 == rest0 ? rest0 : 0.0f));
  }
};

// A block of queries and a run of keys for it, in shared memory.
template <class C>
struct LogitVisit {
  u32 units;      // of 64 keys; 0: there is no more work
  u32 first_key;  // of the run
  u32 row;        // of the result, for the first query
  u32 rows;       // how many of the queries exist
  u32 start[C::kTokens], end[C::kTokens];  // keys that each query attends
  alignas(16) WeightPairs<C> weights;
};

// Shared memory, and what all roles know of it.
template <class C>
struct LogitPlaces {
  enum : u32 { kRows = C::kHeads * C::kTokens, kQueryBytes = kRows * C::kDim, kStageBytes = kUnitKeys * C::kDim };
  enum : u32 { kScaleBytes = C::kPaged ? kUnitKeys * 4 : 0 };  // of a stage
  // A staging buffer has rows of 64 keys, 8 floats apart, so that the lanes of a warp write to different banks.
  enum : u32 { kStagingRow = kUnitKeys + 8, kStagingBytes = C::kTokens * kStagingRow * 4 };
  enum : u32 { kOffsetKeys = 2 * kQueryBytes, kOffsetScales = kOffsetKeys + C::kStages * kStageBytes };
  enum : u32 { kOffsetStaging = kOffsetScales + C::kStages * kScaleBytes };
  enum : u32 { kOffsetVisits = kOffsetStaging + 2 * C::kConsumers * kStagingBytes };
  enum : u32 { kOffsetBarriers = kOffsetVisits + 2 * sizeof(LogitVisit<C>) };
  using Barriers = PipelineBarriers<C::kStages, 4, 1>;  // each stage is read by one consumer
  enum : u32 { kOffsetScratch = kOffsetBarriers + Barriers::kBytes + 4 * 8, kBytes = kOffsetScratch + kScratchBytes };
  static_assert(kBytes == C::kSharedBytes && kQueryBytes % 1024 == 0 && sizeof(LogitVisit<C>) % 16 == 0);
  static_assert(C::kStages % C::kConsumers == 0 && C::kStages >= 3 * C::kConsumers);

  u8* shared;
  u32 base;
  Barriers barriers;

  DG_DEVICE explicit LogitPlaces(u8* shared) : shared(shared), base(shared_address(shared)) {
    barriers.base = base + kOffsetBarriers;
  }
  DG_DEVICE u32 queries(u32 slot) const { return base + slot * kQueryBytes; }
  DG_DEVICE u32 keys(u32 stage) const { return base + kOffsetKeys + stage * kStageBytes; }
  DG_DEVICE u32 scales(u32 stage) const { return base + kOffsetScales + stage * kScaleBytes; }
  DG_DEVICE LogitVisit<C>& visit(u32 slot) const {
    return reinterpret_cast<LogitVisit<C>*>(shared + kOffsetVisits)[slot];
  }
  // Completes when a visit and its queries are in shared memory: lane 0 arrives for the queries, and each lane for the visit; and when
  // all consumers have done with them.
  DG_DEVICE u32 visit_full(u32 slot) const { return base + kOffsetBarriers + Barriers::kBytes + slot * 8; }
  DG_DEVICE u32 visit_empty(u32 slot) const { return visit_full(slot) + 16; }

  // By one warp, since nothing is loaded before.
  DG_DEVICE void init(u32 lane) const {
    if (lane < C::kStages) {
      barrier_init(barriers.full(lane), 1);
      barrier_init(barriers.empty(lane), 4);
    }
    if (lane < 2) {
      barrier_init(visit_full(lane), 1 + 32);
      barrier_init(visit_empty(lane), 4 * C::kConsumers);
    }
    barrier_init_fence();
  }

  // By the warp that called `init`, before anything is loaded: publishes a visit in slot 0 of a unit for each consumer, in the first
  // stages. No query attends a key of it and no row exists, so nothing is written, whatever is in shared memory. Consumers fetch the
  // main loop's instructions from HBM once in a kernel; so they do while the first real keys are on their way.
  DG_DEVICE void warm_up(u32 lane) const {
    __syncwarp();
    LogitVisit<C>& empty = visit(0);
    if (lane < C::kTokens) empty.start[lane] = empty.end[lane] = 0;
    if (lane == 0) {
      empty.units = C::kConsumers;
      empty.first_key = empty.row = empty.rows = 0;
      barrier_arrive(visit_full(0));  // for the queries
    }
    barrier_arrive(visit_full(0));
    if (lane < C::kConsumers) barrier_arrive(barriers.full(lane));
  }

  // By one thread: loads a visit's queries, from `row` on.
  DG_DEVICE void load_queries(u32 slot, const TensorMap* map_q, u32 row) const {
    barrier_arrive_expect(visit_full(slot), kQueryBytes);
    tma_load(queries(slot), map_q, visit_full(slot), 0, row);
  }
};

// A producer warp's side of visits and stages. All its lanes call these together. Pages are loaded by a warp for each consumer, which
// fills that one's stages; other keys by one warp.
template <class C>
struct LogitProducer {
  using Places = LogitPlaces<C>;
  const Places& places;
  u32 lane;
  bool begun;               // whether the first visit's queries are being loaded already
  u32 slot, round = 0;  // of visits
  PipelineCursor<C::kStages> cursor;

  // The first slot and stage come after those of `warm_up`, if there is one, and of keys that are being loaded already.
  DG_DEVICE LogitProducer(const Places& places, u32 lane, bool begun, u32 first_slot, u32 first_stage)
      : places(places), lane(lane), begun(begun), slot(first_slot), cursor{first_stage, 1} {}

  // Waits for room for a visit, and loads its queries, from `row` on. `publish` comes next.
  DG_DEVICE void begin(const TensorMap* map_q, u32 row) {
    barrier_wait(places.visit_empty(slot), round ^ 1);
    if (lane == 0 && !begun) places.load_queries(slot, map_q, row);
    begun = false;
  }

  // Calls `fill(visit)`, and publishes the visit.
  template <class Fill>
  DG_DEVICE void publish(const Fill& fill) {
    fill(places.visit(slot));
    barrier_arrive(places.visit_full(slot));
    round ^= slot;
    slot ^= 1;
  }

  // Publishes that there is no more work.
  DG_DEVICE void end() {
    barrier_wait(places.visit_empty(slot), round ^ 1);
    if (lane == 0 && !begun) barrier_arrive(places.visit_full(slot));
    publish([&](LogitVisit<C>& visit) {
      if (lane == 0) visit.units = 0;
    });
  }

  // Waits for the next stage to be empty, and announces that its bytes come.
  DG_DEVICE u32 next_stage() {
    const u32 stage = cursor.stage;
    barrier_wait(places.barriers.empty(stage), cursor.parity);
    if (lane == 0) barrier_arrive_expect(places.barriers.full(stage), Places::kStageBytes + Places::kScaleBytes);
    cursor.template advance<C::kPaged ? C::kConsumers : 1>();
    return stage;
  }
};

template <class C, class Mma, class Arguments>
struct LogitConsumer {
  using Places = LogitPlaces<C>;
  // Sets of up to four queries, and chunks of 16 heads. Each query has one operand of weights for each chunk.
  enum : u32 { kSets = ceil_div(C::kTokens, 4), kChunks = C::kHeads / 16 };
  enum : u32 { kWords = kSets * kChunks * 2, kPairs = C::kTokens * kChunks * 4 };
  enum : u32 { kOutputs = ceil_div(C::kTokens * kUnitKeys, 128), kSize = C::kBf16 ? 2 : 4 };  // of a thread in one unit; bytes of one
  static_assert(Mma::kN == Places::kRows && C::kHeads % 16 == 0);

  const Arguments& arg;
  const Places& places;
  u32 consumer, thread;

  DG_DEVICE u32 lane() const { return thread % 32; }

  // Queries of a set.
  static DG_DEVICE constexpr u32 queries(u32 set) { return min_of(4u, C::kTokens - 4 * set); }

  // The second product's operand of weights. Lane 4 g + t has column g, which is the high (g even) or the low part of the weights of
  // the set's query g / 2, or of another one if there is no such query.
  static DG_DEVICE void load_weights(u32 (&words)[kWords], const WeightPairs<C>& from, u32 lane) {
#pragma unroll
    for (u32 set = 0; set < kSets; ++set) {
      const u32 at = shared_address(from[4 * set + lane / 8 % queries(set)][lane / 4 % 2][lane % 4]);
#pragma unroll
      for (u32 word = 0; word < 2 * kChunks; word += 4) {
        const Bytes16 four = load_shared_16(at + word * 4);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) words[set * 2 * kChunks + word + i] = four.words[i];
      }
    }
  }

  // Scores of the unit that was multiplied, as pairs of bf16.
  static DG_DEVICE void clip(u32 (&pairs)[kPairs]) {
    for_each<kPairs>([&](auto pair) { pairs[decltype(pair)::kValue] = Mma::template clipped<decltype(pair)::kValue>(); });
  }

  // Sums over heads, without scales, of this thread's two keys and its lane's own query of each set.
  static DG_DEVICE void sum_heads(const u32 (&pairs)[kPairs], const u32 (&words)[kWords], u32 lane, float (&logit)[kSets][2]) {
#pragma unroll
    for (u32 set = 0; set < kSets; ++set) {
      float sum[4][4] = {};
#pragma unroll
      for (u32 chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (u32 query = 0; query < queries(set); ++query) {
          const u32 word = (set * kChunks + chunk) * 2;
          multiply_16x8(sum[query], pairs + ((4 * set + query) * kChunks + chunk) * 4, words[word], words[word + 1]);
        }
      }
#pragma unroll
      for (u32 query = 0; query < queries(set); ++query) {
        if (query == 0 || lane % 4 == query) {
          logit[set][0] = sum[query][0] + sum[query][1];
          logit[set][1] = sum[query][2] + sum[query][3];
        }
      }
    }
  }

  DG_DEVICE void stage_logits(const float (&logit)[kSets][2], u32 to) const {
    const u32 own = lane() % 4, key = thread / 32 * 16 + lane() / 4;
#pragma unroll
    for (u32 set = 0; set < kSets; ++set) {
      if (own < queries(set)) {
        const u32 at = to + ((4 * set + own) * Places::kStagingRow + key) * 4;
        asm volatile("st.shared.f32 [%0], %1;\n st.shared.f32 [%0+32], %2;" ::"r"(at), "f"(logit[set][0]), "f"(logit[set][1]) : "memory");
      }
    }
  }

  // The rows of the result that this thread writes in a visit: every second one.
  struct Rows {
    u8* at[kOutputs];                       // of key 0
    u32 start[kOutputs], length[kOutputs];  // keys that each query attends
    u32 exist;                              // how many of the visit's rows exist

    DG_DEVICE void load(const LogitVisit<C>& visit, const Arguments& arg, u32 thread) {
      exist = visit.rows;
#pragma unroll
      for (u32 i = 0; i < kOutputs; ++i) {
        const u32 token = (i * 128 + thread) / kUnitKeys;
        const bool real = token < C::kTokens;
        start[i] = real ? visit.start[token] : 0;
        length[i] = (real ? visit.end[token] : 0) - start[i];
        i64 shift = 0;
        if constexpr (!C::kPaged) shift = arg.compressed ? start[i] : 0;
        at[i] = arg.out + ((visit.row + token) * arg.out_stride - shift) * kSize;
      }
    }
  };

  static DG_DEVICE void put(u8* at, i64 index, float value) {
    if constexpr (C::kBf16) {
      u16 rounded;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
      reinterpret_cast<u16*>(at)[index] = rounded;
    } else {
      reinterpret_cast<float*>(at)[index] = value;
    }
  }

  DG_DEVICE float scale_of(u32 key, u32 stage) const {
    if constexpr (C::kPaged) {
      return load_shared(places.scales(stage) + thread % kUnitKeys * 4);
    } else {
      return arg.scales[min_of(key, arg.keys - 1)];
    }
  }

  DG_DEVICE void run() const {
    const ProductTurns<C::kTurns ? C::kConsumers : 1> turns(consumer);
    const float minus_infinity = __uint_as_float(0xFF800000);
    u32 filled = 0;  // columns up to this one are minus infinity where a key is not attended
    if constexpr (!C::kPaged) filled = arg.filled;
    PipelineCursor<C::kStages> cursor;
    cursor.stage = consumer;
    u32 slot = 0, round = 0, unit = consumer;
    // Of the unit that was multiplied last. Before the first one no logit is written, since no query attends a key.
    u32 pairs[kPairs] = {}, words[kWords] = {}, key = 0, buffer = 0;
    float logit[kSets][2], scale = 0.0f;
    Rows rows{};
    const u32 staging = places.base + Places::kOffsetStaging + consumer * 2 * Places::kStagingBytes;
    const auto write = [&] {
      const u32 to = staging + buffer * Places::kStagingBytes;
      buffer ^= 1;
      stage_logits(logit, to);
      // Two buffers: a thread that writes this one again has met all others at the barrier of the unit between.
      named_barrier_sync(kConsumerBarrier + consumer, 128);
#pragma unroll
      for (u32 i = 0; i < kOutputs; ++i) {
        const u32 token = (i * 128 + thread) / kUnitKeys;
        if (token < C::kTokens) {
          const bool attended = key - rows.start[i] < rows.length[i];
          const float sum = load_shared(to + (token * Places::kStagingRow + thread % kUnitKeys) * 4);
          if (attended || (token < rows.exist && key < filled)) put(rows.at[i], key, attended ? sum * scale : minus_infinity);
        }
      }
    };
    Mma::declare();
    turns.begin();
    while (true) {
      barrier_wait(places.visit_full(slot), round);
      const LogitVisit<C>& visit = places.visit(slot);
      const u32 units = uniform(visit.units);
      if (units == 0) break;
      const u64 b = row_descriptor<C::kDim>(places.queries(slot));
      for (bool first = true; unit < units; unit += C::kConsumers, first = false) {
        barrier_wait(places.barriers.full(cursor.stage), cursor.parity);
        const u64 a = row_descriptor<C::kDim>(places.keys(cursor.stage));
        if constexpr (C::kTurns) {
          // The tensor cores are slow where sums over heads interleave with another consumer's products. So a turn is both: the sums
          // of the unit before, and the product of the next one. Logits are written while that product runs.
          turns.wait();
          sum_heads(pairs, words, lane(), logit);
        }
        wgmma_fence();
        Mma::multiply(a, b);
        wgmma_commit();
        if constexpr (C::kTurns) write();
        if (first) {
          load_weights(words, visit.weights, lane());
          rows.load(visit, arg, thread);
          key = visit.first_key + unit * kUnitKeys + thread % kUnitKeys;
        } else {
          key += C::kConsumers * kUnitKeys;
        }
        if constexpr (C::kPaged) scale = scale_of(key, cursor.stage);
        wgmma_wait<0>();
        turns.pass();
        if constexpr (!C::kPaged) scale = scale_of(key, cursor.stage);  // long before it is needed, but the turn comes first
        places.barriers.release(cursor.stage, lane());
        cursor.template advance<C::kConsumers>();
        clip(pairs);
        if constexpr (!C::kTurns) {
          sum_heads(pairs, words, lane(), logit);
          write();
        }
      }
      unit -= units;
      __syncwarp();
      if (lane() == 0) barrier_arrive(places.visit_empty(slot));
      round ^= slot;
      slot ^= 1;
    }
    if constexpr (C::kTurns) {
      sum_heads(pairs, words, lane(), logit);
      write();
    }
    turns.end();
  }
};
