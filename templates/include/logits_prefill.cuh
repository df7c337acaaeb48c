// Logits of queries over one matrix of keys, of which each query attends a range. See logits.cuh.
#pragma once
#include "bulk.cuh"
#include "logits.cuh"

// kShortTiles: tiles of a CTA up to which nothing is shared out. Then tiles that no query attends are multiplied, too, but no load waits
// for ranges, which come from HBM, and their sums.
enum : u32 { kFillColumns = 8192, kTileCost = 2, kBlockCost = 1, kShortTiles = 2 };

// Keys that a query attends: from `start` on, before `end`, which are both 0 if there are none.
struct KeyRange {
  u32 start, end;

  template <class Arguments>
  static DG_DEVICE KeyRange of(const Arguments& arg, u32 row) {
    const int first = row < arg.rows ? arg.starts[row] : 0, last = row < arg.rows ? arg.ends[row] : 0;
    const u32 start = first > 0 ? first : 0, end = last > 0 ? min_of(last, arg.keys) : 0;
    return start < end ? KeyRange{start, end} : KeyRange{0, 0};
  }
};

// The run of keys of a block of queries: those that any of them attends.
template <class C>
struct KeyRun {
  enum : u32 { kTileKeys = C::kConsumers * kUnitKeys };
  u32 first, last;

  // `first` becomes a multiple of 32, so that rows are written from where 128 bytes begin.
  DG_DEVICE KeyRun(u32 first, u32 last) : first(first & ~31u), last(last) {}

  // By one thread.
  template <class Arguments>
  static DG_DEVICE KeyRun of(const Arguments& arg, u32 block) {
    u32 first = 0xFFFFFFFF, last = 0;
#pragma unroll
    for (u32 i = 0; i < C::kTokens; ++i) {
      const KeyRange range = KeyRange::of(arg, block * C::kTokens + i);
      if (range.end > 0) first = min_of(first, range.start);
      last = max_of(last, range.end);
    }
    return KeyRun(first, last);
  }
  // By a warp whose lanes have the queries' ranges, or empty ones.
  static DG_DEVICE KeyRun of(const KeyRange& range) {
    return KeyRun(__reduce_min_sync(0xFFFFFFFF, range.end > 0 ? range.start : 0xFFFFFFFF), __reduce_max_sync(0xFFFFFFFF, range.end));
  }
  // Tiles of a unit for each consumer.
  DG_DEVICE u32 tiles() const { return last > 0 ? ceil_div(last - first, kTileKeys) : 0; }
};

// The work of a CTA: from a tile of a block of queries on, to before another one, in the order of queries.
struct LogitShare {
  u32 block, tile, last_block, last_tile;
  bool begun;  // whether there is any, and the first block's queries and the first keys are being loaded
  bool plain;  // tiles are counted from key 0, whatever the ranges are
  volatile u32 passed;  // blocks that the producer has passed, if columns are filled: see `fill`
};

template <class C, class Mma, class Arguments>
struct PrefillLogits {
  using Places = LogitPlaces<C>;
  using Run = KeyRun<C>;
  using Weights = LogitWeights<C>;
  enum : u32 { kThreads = 128 * (C::kConsumers + 1), kWarps = kThreads / 32, kTileKeys = Run::kTileKeys };
  enum : u32 { kSize = C::kBf16 ? 2 : 4, kEach = 16 / kSize, kWord = C::kBf16 ? 0xFF80FF80 : 0xFF800000 };

  const Arguments& arg;
  Places places;

  DG_DEVICE PrefillLogits(const Arguments& arg, u8* shared) : arg(arg), places(shared) {}

  DG_DEVICE u32 blocks() const { return ceil_div(arg.rows, C::kTokens); }

  // The share of a CTA where each has at most kShortTiles tiles of one block of queries. Then nothing is shared out, and no load waits
  // for ranges. `plain` is false where there are too many.
  DG_DEVICE LogitShare plain_share() const {
    const u32 count = blocks(), tiles = ceil_div(arg.keys, kTileKeys);
    LogitShare share{count, 0, count, 0, false, false, 0};
    if (count > gridDim.x) return share;
    const u32 parts = gridDim.x / count, each = ceil_div(tiles, parts);  // parts of a block
    if (each > kShortTiles) return share;
    share.plain = true;
    const u32 block = blockIdx.x / parts, tile = (blockIdx.x - block * parts) * each;
    if (block < count && tile < tiles) share = LogitShare{block, tile, block, min_of(tiles, tile + each), true, true, 0};
    return share;
  }

  // By one thread: loads the first block's queries, and a tile from `key` on, to where `produce` goes on.
  DG_DEVICE void load_first(u32 block, u32 key) const {
    places.load_queries(1, arg.map_q, block * Places::kRows);
#pragma unroll
    for (u32 unit = 0; unit < C::kConsumers; ++unit) {
      const u32 stage = C::kConsumers + unit, full = places.barriers.full(stage);
      barrier_arrive_expect(full, Places::kStageBytes);
      tma_load(places.keys(stage), arg.map_k, full, 0, key + unit * kUnitKeys);
    }
  }

  // A CTA costs as much as the others: a tile kTileCost, and a block of queries kBlockCost more. The first blocks of a prompt have a
  // tile each, and the last ones have many.
  static DG_DEVICE u32 cost(u32 tiles) { return tiles > 0 ? tiles * kTileCost + kBlockCost : 0; }

  // By all threads: sums up the costs of all blocks. `share` and `sums`, one number for each warp, are in shared memory. The thread
  // that finds the first block begins to load it.
  DG_DEVICE void find_share(LogitShare& share, u32* sums) const {
    const u32 thread = threadIdx.x, each = ceil_div(blocks(), kThreads), lane = thread % 32;
    const u32 from = min_of(blocks(), thread * each), to = min_of(blocks(), from + each);
    u32 own = 0;
    Run run(0, 0);
    for (u32 block = to; block > from;) {
      run = Run::of(arg, --block);
      own += cost(run.tiles());
    }
    u32 before = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFF, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) sums[thread / 32] = before;
    if (thread == 0) share = LogitShare{blocks(), 0, blocks(), 0, false, false, 0};
    __syncthreads();
    u32 total = 0;
#pragma unroll
    for (u32 warp = 0; warp < kWarps; ++warp) {
      if (warp == thread / 32) before += total;
      total += sums[warp];
    }
    before -= own;
    const u32 fair = total / gridDim.x, more = total - fair * gridDim.x;  // the first `more` CTAs have one more
    const u32 begin = fair * blockIdx.x + min_of(blockIdx.x, more), end = begin + fair + (blockIdx.x < more ? 1 : 0);
    if (begin < end && before <= end && begin < before + own) {
      for (u32 block = from; block < to; ++block) {
        if (block > from) run = Run::of(arg, block);
        const u32 after = before + cost(run.tiles());
        // The tile of this block at which a CTA begins whose costs begin at `at`.
        const auto tile = [&](u32 at) { return at > before + kBlockCost ? (at - before - kBlockCost) / kTileCost : 0; };
        if (before <= begin && begin < after) {
          share.block = block, share.tile = tile(begin);
          if (after <= end || tile(begin) < tile(end)) {
            share.begun = true;
            load_first(block, run.first + tile(begin) * kTileKeys);
          }
        }
        if (before <= end && end < after) share.last_block = block, share.last_tile = tile(end);
        before = after;
      }
    }
    __syncthreads();
  }

  DG_DEVICE void produce(LogitShare& share, u32 lane) const {
    LogitProducer<C> producer(places, lane, share.begun, 1, (share.begun ? 2 : 1) * C::kConsumers);
    Weights weights;
    KeyRange range;  // of a lane's query
    const auto load_block = [&](u32 block) {
      range = KeyRange::of(arg, lane < C::kTokens ? block * C::kTokens + lane : arg.rows);
      weights.load(arg.weights, arg.weights_stride, block * C::kTokens, arg.rows, lane);
    };
    u32 block = share.block, tile = share.tile;
    u32 done = C::kConsumers;  // units of the block whose keys are being loaded: the first ones by `load_first`
    load_block(block);
    while (block < share.last_block || (block == share.last_block && tile < share.last_tile)) {
      const Run run = share.plain ? Run(0, arg.keys) : Run::of(range);
      const u32 tiles = (block == share.last_block ? share.last_tile : run.tiles()) - tile;
      const u32 units = C::kConsumers * tiles, first = run.first + tile * kTileKeys;
      if (units > 0) {
        producer.begin(arg.map_q, block * Places::kRows);
        producer.publish([&](LogitVisit<C>& visit) {
          weights.store(visit.weights, lane);
          if (lane < C::kTokens) {
            visit.start[lane] = range.start;
            visit.end[lane] = max_of(range.start, min_of(range.end, arg.compressed ? range.start + arg.columns : arg.columns));
          }
          if (lane == 0) {
            visit.units = units;
            visit.first_key = first;
            visit.row = block * C::kTokens;
            visit.rows = min_of(C::kTokens, arg.rows - block * C::kTokens);
          }
        });
      }
      tile = 0;
      ++block;
      if (lane == 0 && arg.filled > 0) share.passed = block - share.block;
      load_block(block);  // long before it is needed
      for (; done < units; ++done) {
        const u32 stage = producer.next_stage();
        if (lane == 0) tma_load(places.keys(stage), arg.map_k, places.barriers.full(stage), 0, first + done * kUnitKeys);
      }
      done = 0;
    }
    if (lane == 0) share.passed = 0xFFFFFFFF;
    producer.end();
  }

  // By the threads that neither load nor multiply, of which this is number `thread`: brings the scales of the first block to L2. Consumers
  // read them behind a product, and in a CTA with few tiles they would wait for HBM.
  DG_DEVICE void prefetch_scales(const LogitShare& share, u32 thread) const {
    if (!share.begun) return;
    const Run run = share.plain ? Run(0, arg.keys) : Run::of(arg, share.block);
    const bool one = share.block == share.last_block;
    const u32 from = run.first + share.tile * kTileKeys, to = one ? run.first + share.last_tile * kTileKeys : run.last;
    const u32 key = from + thread * 32;
    if (key < min_of(to, arg.keys)) prefetch_line(arg.scales + key);
  }

  // Columns of a row, [from[0], to[0]) and [from[1], to[1]), that no consumer writes: those before and after the block's run of keys.
  struct Gaps {
    u8* at;  // of the row
    u32 from[2], to[2];

    DG_DEVICE Gaps shuffled(u32 lane) const {
      const auto other = [&](auto x) { return __shfl_sync(0xFFFFFFFF, x, lane); };
      u8* const row = reinterpret_cast<u8*>(other(reinterpret_cast<unsigned long long>(at)));
      return Gaps{row, {other(from[0]), other(from[1])}, {other(to[0]), other(to[1])}};
    }
  };
  DG_DEVICE Gaps gaps(u64 index, u32 parts) const {
    const u32 row = static_cast<u32>(index / parts), begin = static_cast<u32>(index % parts) * kFillColumns;
    if (row >= arg.rows) return Gaps{arg.out, {0, 0}, {0, 0}};
    const u32 end = min_of(arg.filled, begin + kFillColumns);
    const Run run = Run::of(arg, row / C::kTokens);
    const u32 tiles = run.tiles(), first = tiles > 0 ? run.first : arg.filled, last = first + tiles * kTileKeys;
    return Gaps{arg.out + row * arg.out_stride * kSize, {begin, max_of(begin, last)}, {min_of(end, first), end}};
  }

  // By a warp of `warps`: writes minus infinity. Its lanes find the gaps of 32 rows at a time, since ranges come from L2 or HBM: a row after
  // the other would wait for each. Rows are written in step with the producer's blocks: queries and keys come from HBM, too, and are late
  // while it takes as many writes as it can.
  DG_DEVICE void fill(const LogitShare& share, u32 warp, u32 warps, u32 lane) const {
    const u32 parts = ceil_div(arg.filled, kFillColumns), step = gridDim.x * warps;
    const u64 all = static_cast<u64>(arg.rows) * parts, begin = blockIdx.x + gridDim.x * warp;
    const u32 rows = static_cast<u32>((all + step - 1 - begin) / step), blocks = share.last_block - share.block + 1;
    u32 row = 0;
    for (u64 index = begin; index < all; index += 32 * step) {
      const Gaps own = gaps(index + lane * step, parts);
      for (u32 i = 0; i < 32 && index + i * step < all; ++i, ++row) {
        const u32 wanted = share.begun ? static_cast<u32>((static_cast<u64>(row) * blocks + rows - 1) / rows) : 0;
        const WaitBound bound;
        while (share.passed < wanted) {
          bound.check();
          asm volatile("nanosleep.u32 %0;" ::"r"(100u) : "memory");
        }
        const Gaps gaps = own.shuffled(i);
#pragma unroll
        for (u32 side = 0; side < 2; ++side) {
          const u32 from = gaps.from[side], to = gaps.to[side], whole = max_of(from, to / kEach * kEach);  // `from` is a multiple of kEach
#pragma unroll 4
          for (u32 column = from + lane * kEach; column < whole; column += 32 * kEach) {
            store_16(gaps.at + static_cast<u64>(column) * kSize, Bytes16{{kWord, kWord, kWord, kWord}});
          }
          if (whole + lane < to) {
            if constexpr (C::kBf16) {
              reinterpret_cast<u16*>(gaps.at)[whole + lane] = static_cast<u16>(kWord);
            } else {
              reinterpret_cast<u32*>(gaps.at)[whole + lane] = kWord;
            }
          }
        }
      }
    }
  }

  DG_DEVICE void run() const {
    auto& found = *reinterpret_cast<LogitShare*>(places.shared + Places::kOffsetScratch);
    u32* sums = reinterpret_cast<u32*>(&found + 1);
    static_assert(sizeof(LogitShare) + kWarps * 4 <= kScratchBytes);
    const u32 warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const bool produces = warp == 4 * C::kConsumers;
    if (produces) {
      if (lane == 0) {
        tma_prefetch_map(arg.map_q);
        tma_prefetch_map(arg.map_k);
      }
      places.init(lane);
      places.warm_up(lane);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    const LogitShare plain = plain_share();
    if (plain.plain) {
      if (produces && lane == 0) {
        found = plain;
        if (plain.begun) load_first(plain.block, plain.tile * kTileKeys);
      }
      __syncthreads();
    } else {
      find_share(found, sums);
    }
    if (warp >= 4 * C::kConsumers) {
      registers_shrink<C::kProducerRegisters>();
      if (produces) {
        produce(found, lane);
      } else {
        prefetch_scales(found, threadIdx.x - 128 * C::kConsumers - 32);
        if (!found.plain) fill(found, warp - 4 * C::kConsumers - 1, 3, lane);
      }
    } else {
      registers_grow<C::kConsumerRegisters>();
      LogitConsumer<C, Mma, Arguments>{arg, places, warp / 4, threadIdx.x % 128}.run();
    }
  }
};
