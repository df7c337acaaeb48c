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

// The high or the low part of two weights, as a pair of bf16. The high part is cut off, not rounded, so that it stays finite.
DG_DEVICE u32 part_of_pair(float first, float second, bool low) {
  u32 high;
  asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(second), "f"(first));
  if (!low) return high;
  // The rest of an infinity or a NaN counts as 0: the high part has it already.
  const float rest0 = first - __uint_as_float(high << 16), rest1 = second - __uint_as_float(high & 0xFFFF0000);
  u32 rest;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rest) : "f"(rest1 == rest1 ? rest1 : 0.0f), "f"(rest0 == rest0 ? rest0 : 0.0f));
  return rest;
}

// Weights of a block of queries: how the producer brings them to shared memory.
template <class C>
struct LogitWeights {
  enum : u32 { kAll = C::kTokens * C::kHeads, kEach = kAll / 32 };
  static_assert(kAll % 32 == 0);

  float loaded[kEach];

  // `row` is the first query's row of weights. Rows from `rows` on count as zeros.
  DG_DEVICE void load(const float* weights, i64 stride, u32 row, u32 rows, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 own = row + (32 * i) / C::kHeads;
      loaded[i] = own < rows ? weights[own * stride + 32 * i % C::kHeads + lane] : 0.0f;
    }
  }
  DG_DEVICE void store(float (&to)[C::kTokens][C::kHeads], u32 lane) const {
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) to[32 * i / C::kHeads][32 * i % C::kHeads + lane] = loaded[i];
  }
};

// A block of queries and a run of keys for it, in shared memory.
template <class C>
struct LogitVisit {
  u32 units;      // of 64 keys; 0: there is no more work
  u32 first_key;  // of the run
  u32 row;        // of the result, for the first query
  u32 rows;       // how many of the queries exist
  u32 shifts;     // whether a query's columns begin at its `start`
  u32 start[C::kTokens], end[C::kTokens];  // keys that each query attends
  alignas(16) float weights[C::kTokens][C::kHeads];
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
  static_assert(C::kStages % C::kConsumers == 0);

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
  // Completes when a visit and its queries are in shared memory, and when all consumers have done with them.
  DG_DEVICE u32 visit_full(u32 slot) const { return base + kOffsetBarriers + Barriers::kBytes + slot * 8; }
  DG_DEVICE u32 visit_empty(u32 slot) const { return visit_full(slot) + 16; }

  DG_DEVICE void init() const {
    barriers.init();
    for (u32 slot = 0; slot < 2; ++slot) {
      barrier_init(visit_full(slot), 32);
      barrier_init(visit_empty(slot), 4 * C::kConsumers);
    }
    barrier_init_fence();
  }
};

// The producer warp's side of visits and stages. All its lanes call these together.
template <class C>
struct LogitProducer {
  using Places = LogitPlaces<C>;
  const Places& places;
  u32 lane;
  u32 slot = 0, round = 0;  // of visits
  PipelineCursor<C::kStages> cursor;

  DG_DEVICE LogitProducer(const Places& places, u32 lane) : places(places), lane(lane) { cursor.parity = 1; }

  // Waits for room, then calls `fill(visit)`, and publishes it with the queries from `row_of_queries` on.
  template <class Fill>
  DG_DEVICE void visit(const TensorMap* map_q, u32 row_of_queries, bool last, const Fill& fill) {
    barrier_wait(places.visit_empty(slot), round ^ 1);
    fill(places.visit(slot));
    const u32 full = places.visit_full(slot);
    if (lane == 0 && !last) {
      barrier_arrive_expect(full, Places::kQueryBytes);
      tma_load(places.queries(slot), map_q, full, 0, row_of_queries);
    } else {
      barrier_arrive(full);
    }
    round ^= slot;
    slot ^= 1;
  }

  // Waits for the next stage to be empty, and announces that its bytes come.
  DG_DEVICE u32 next_stage() {
    const u32 stage = cursor.stage;
    barrier_wait(places.barriers.empty(stage), cursor.parity);
    if (lane == 0) barrier_arrive_expect(places.barriers.full(stage), Places::kStageBytes + Places::kScaleBytes);
    cursor.advance();
    return stage;
  }
};

template <class C, class Mma, class Arguments>
struct LogitConsumer {
  using Places = LogitPlaces<C>;
  // Sets of up to four queries, and chunks of 16 heads. Each query has one operand of weights for each chunk.
  enum : u32 { kSets = ceil_div(C::kTokens, 4), kChunks = C::kHeads / 16 };
  enum : u32 { kWords = kSets * kChunks * 2, kPairs = C::kTokens * kChunks * 4 };
  enum : u32 { kOutputs = ceil_div(C::kTokens * kUnitKeys, 128) };  // of a thread in one unit
  static_assert(Mma::kN == Places::kRows && C::kHeads % 16 == 0);

  const Arguments& arg;
  const Places& places;
  u32 consumer, thread;

  DG_DEVICE u32 lane() const { return thread % 32; }

  // Queries of a set.
  static DG_DEVICE constexpr u32 queries(u32 set) { return min_of(4u, C::kTokens - 4 * set); }

  // The second product's operand of weights. Lane 4 g + t has column g, which is the high (g even) or the low part of the weights of
  // the set's query g / 2, or of another one if there is no such query.
  static DG_DEVICE void load_weights(u32 (&words)[kWords], const float (&from)[C::kTokens][C::kHeads], u32 lane) {
    const bool low = lane / 4 % 2 != 0;
    for_each<kWords>([&](auto word) {
      constexpr u32 kSet = decltype(word)::kValue / (2 * kChunks), kGroup = decltype(word)::kValue % (2 * kChunks);
      const float* pair = from[4 * kSet + lane / 8 % queries(kSet)] + 8 * kGroup + 2 * (lane % 4);
      words[decltype(word)::kValue] = part_of_pair(pair[0], pair[1], low);
    });
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

  // The rows of the result that this thread writes in a visit.
  struct Row {
    u8* at;             // of key 0
    u32 start, length;  // keys that the query attends
    bool exists;
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
      return key < arg.keys ? arg.scales[key] : 0.0f;
    }
  }

  DG_DEVICE void run() const {
    const ProductTurns<C::kTurns ? C::kConsumers : 1> turns(consumer);
    const float minus_infinity = __uint_as_float(0xFF800000);
    u32 filled = 0;  // columns up to this one are minus infinity where a key is not attended
    if constexpr (!C::kPaged) filled = arg.filled;
    PipelineCursor<C::kStages> cursor;
    cursor.stage = consumer;
    u32 slot = 0, round = 0, unit = consumer, buffer = 0;
    const u32 staging = places.base + Places::kOffsetStaging + consumer * 2 * Places::kStagingBytes;
    Mma::declare();
    turns.begin();
    while (true) {
      barrier_wait(places.visit_full(slot), round);
      const LogitVisit<C>& visit = places.visit(slot);
      const u32 units = uniform(visit.units), first_key = visit.first_key;
      if (units == 0) break;
      u32 words[kWords];
      load_weights(words, visit.weights, lane());
      Row rows[kOutputs];
#pragma unroll
      for (u32 i = 0; i < kOutputs; ++i) {
        const u32 token = (i * 128 + thread) / kUnitKeys;
        const bool real = token < C::kTokens;
        const u32 start = real ? visit.start[token] : 0;
        const i64 shift = visit.shifts ? start : 0;
        rows[i].start = start;
        rows[i].length = (real ? visit.end[token] : 0) - start;
        rows[i].exists = token < visit.rows;
        rows[i].at = arg.out + ((visit.row + token) * arg.out_stride - shift) * (C::kBf16 ? 2 : 4);
      }
      const u64 b = row_descriptor<C::kDim>(places.queries(slot));
      u32 key = first_key + unit * kUnitKeys + thread % kUnitKeys;
      const auto write = [&](const float (&logit)[kSets][2], u32 key, float scale) {
        const u32 to = staging + buffer * Places::kStagingBytes;
        buffer ^= 1;
        stage_logits(logit, to);
        // Two buffers: a thread that writes this one again has met all others at the barrier of the unit between.
        named_barrier_sync(kConsumerBarrier + consumer, 128);
#pragma unroll
        for (u32 i = 0; i < kOutputs; ++i) {
          const u32 token = (i * 128 + thread) / kUnitKeys;
          if (token < C::kTokens) {
            const bool attended = key - rows[i].start < rows[i].length;
            const float sum = load_shared(to + (token * Places::kStagingRow + thread % kUnitKeys) * 4);
            if (attended || (rows[i].exists && key < filled)) put(rows[i].at, key, attended ? sum * scale : minus_infinity);
          }
        }
      };
      u32 pairs[kPairs] = {};
      float logit[kSets][2], last_scale = 0.0f;
      for (bool first = true; unit < units; unit += C::kConsumers, first = false) {
        float scale = 0.0f;
        if constexpr (!C::kPaged) scale = scale_of(key, cursor.stage);
        barrier_wait(places.barriers.full(cursor.stage), cursor.parity);
        if constexpr (C::kPaged) scale = scale_of(key, cursor.stage);
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
        if constexpr (C::kTurns) {
          if (!first) write(logit, key - C::kConsumers * kUnitKeys, last_scale);
        }
        wgmma_wait<0>();
        turns.pass();
        places.barriers.release(cursor.stage, lane());
        cursor.template advance<C::kConsumers>();
        clip(pairs);
        if constexpr (!C::kTurns) {
          sum_heads(pairs, words, lane(), logit);
          write(logit, key, scale);
        }
        last_scale = scale;
        key += C::kConsumers * kUnitKeys;
      }
      if constexpr (C::kTurns) {
        sum_heads(pairs, words, lane(), logit);
        write(logit, key - C::kConsumers * kUnitKeys, last_scale);
      }
      unit -= units;
      __syncwarp();
      if (lane() == 0) barrier_arrive(places.visit_empty(slot));
      round ^= slot;
      slot ^= 1;
    }
    turns.end();
  }
};
