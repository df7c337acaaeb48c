// Logits of queries over one matrix of keys, of which each query attends a range. See logits.cuh.
#pragma once
#include "logits.cuh"

enum : u32 { kFillColumns = 8192, kTileCost = 2, kBlockCost = 1 };

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
  bool begun;  // whether the first block's queries are being loaded
};

template <class C, class Mma, class Arguments>
struct PrefillLogits {
  using Places = LogitPlaces<C>;
  using Run = KeyRun<C>;
  using Weights = LogitWeights<C>;
  enum : u32 { kThreads = 128 * (C::kConsumers + 1), kWarps = kThreads / 32, kTileKeys = Run::kTileKeys };

  const Arguments& arg;
  Places places;

  DG_DEVICE PrefillLogits(const Arguments& arg, u8* shared) : arg(arg), places(shared) {}

  DG_DEVICE u32 blocks() const { return ceil_div(arg.rows, C::kTokens); }

  // Whether each CTA does a block of queries, which has a tile at most. Then there is nothing to share out.
  DG_DEVICE bool is_short() const { return blocks() <= gridDim.x && arg.keys <= kTileKeys; }

  // A CTA costs as much as the others: a tile kTileCost, and a block of queries kBlockCost more. The first blocks of a prompt have a
  // tile each, and the last ones have many.
  static DG_DEVICE u32 cost(u32 tiles) { return tiles > 0 ? tiles * kTileCost + kBlockCost : 0; }

  // By all threads: sums up the costs of all blocks. `share` and `sums`, one number for each warp, are in shared memory. The thread
  // that finds the first block loads its queries.
  DG_DEVICE void find_share(LogitShare& share, u32* sums) const {
    const u32 thread = threadIdx.x, each = ceil_div(blocks(), kThreads), lane = thread % 32;
    const u32 from = min_of(blocks(), thread * each), to = min_of(blocks(), from + each);
    u32 own = 0, tiles = 0;
    for (u32 block = to; block > from;) {
      tiles = Run::of(arg, --block).tiles();
      own += cost(tiles);
    }
    u32 before = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFF, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) sums[thread / 32] = before;
    if (thread == 0) share = LogitShare{blocks(), 0, blocks(), 0, false};
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
        if (block > from) tiles = Run::of(arg, block).tiles();
        const u32 after = before + cost(tiles);
        // The tile of this block at which a CTA begins whose costs begin at `at`.
        const auto tile = [&](u32 at) { return at > before + kBlockCost ? (at - before - kBlockCost) / kTileCost : 0; };
        if (before <= begin && begin < after) {
          share.block = block, share.tile = tile(begin), share.begun = true;
          places.load_queries(0, arg.map_q, block * Places::kRows);
        }
        if (before <= end && end < after) share.last_block = block, share.last_tile = tile(end);
        before = after;
      }
    }
    __syncthreads();
  }

  DG_DEVICE void produce(const LogitShare& share, u32 lane) const {
    LogitProducer<C> producer(places, lane, share.begun);
    Weights weights;
    KeyRange range;  // of a lane's query
    const auto load_block = [&](u32 block) {
      range = KeyRange::of(arg, lane < C::kTokens ? block * C::kTokens + lane : arg.rows);
      weights.load(arg.weights, arg.weights_stride, block * C::kTokens, arg.rows, lane);
    };
    u32 block = share.block, tile = share.tile;
    load_block(block);
    bool cold = true;
    while (block < share.last_block || (block == share.last_block && tile < share.last_tile)) {
      const Run run = Run::of(range);
      const u32 tiles = (block == share.last_block ? share.last_tile : run.tiles()) - tile;
      const u32 units = C::kConsumers * tiles, first = run.first + tile * kTileKeys;
      u32 done = 0;
      const auto load = [&](u32 end) {
        for (; done < end; ++done) {
          const u32 stage = producer.next_stage();
          if (lane == 0) tma_load(places.keys(stage), arg.map_k, places.barriers.full(stage), 0, first + done * kUnitKeys);
        }
      };
      if (units > 0) {
        producer.begin(arg.map_q, block * Places::kRows);
        // The first keys do not wait for weights.
        if (cold) load(C::kConsumers);
        cold = false;
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
      load_block(block);  // long before it is needed
      load(units);
    }
    producer.end();
  }

  // Writes minus infinity to the columns before and after the runs of keys, which consumers do not write.
  DG_DEVICE void fill(u32 thread, u32 threads) const {
    constexpr u32 kSize = C::kBf16 ? 2 : 4, kEach = 16 / kSize, kWord = C::kBf16 ? 0xFF80FF80 : 0xFF800000;
    const u32 parts = ceil_div(arg.filled, kFillColumns);
    const u64 all = static_cast<u64>(arg.rows) * parts;
    for (u64 index = blockIdx.x; index < all; index += gridDim.x) {
      const u32 row = static_cast<u32>(index / parts), begin = static_cast<u32>(index % parts) * kFillColumns;
      const u32 end = min_of(arg.filled, begin + kFillColumns);
      const Run run = Run::of(arg, row / C::kTokens);
      const u32 tiles = run.tiles(), first = tiles > 0 ? run.first : arg.filled;
      const u32 last = first + tiles * kTileKeys;
      u8* at = arg.out + row * arg.out_stride * kSize;
#pragma unroll
      for (u32 side = 0; side < 2; ++side) {
        const u32 from = side ? max_of(begin, last) : begin, to = side ? end : min_of(end, first);
        const u32 whole = max_of(from, to / kEach * kEach);  // `from` is a multiple of kEach
#pragma unroll 4
        for (u32 column = from + thread * kEach; column < whole; column += threads * kEach) {
          store_16(at + static_cast<u64>(column) * kSize, Bytes16{{kWord, kWord, kWord, kWord}});
        }
        if (whole + thread < to) {
          if constexpr (C::kBf16) {
            reinterpret_cast<u16*>(at)[whole + thread] = static_cast<u16>(kWord);
          } else {
            reinterpret_cast<u32*>(at)[whole + thread] = kWord;
          }
        }
      }
    }
  }

  DG_DEVICE void run() const {
    auto& share = *reinterpret_cast<LogitShare*>(places.shared + Places::kOffsetScratch);
    u32* sums = reinterpret_cast<u32*>(&share + 1);
    static_assert(sizeof(LogitShare) + kWarps * 4 <= kScratchBytes);
    const u32 warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (warp == 0) places.init(lane);
    if (threadIdx.x == 0) {
      tma_prefetch_map(arg.map_q);
      tma_prefetch_map(arg.map_k);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    if (is_short()) {
      // Queries and ranges are loaded at once.
      if (threadIdx.x == 0) {
        const bool exists = blockIdx.x < blocks();
        share = exists ? LogitShare{blockIdx.x, 0, blockIdx.x + 1, 0, true} : LogitShare{blocks(), 0, blocks(), 0, false};
        if (exists) places.load_queries(0, arg.map_q, blockIdx.x * Places::kRows);
      }
      __syncthreads();
    } else {
      find_share(share, sums);
    }
    if (warp >= 4 * C::kConsumers) {
      registers_shrink<C::kProducerRegisters>();
      if (warp == 4 * C::kConsumers) {
        produce(share, lane);
      } else {
        fill(threadIdx.x - 128 * C::kConsumers - 32, 96);
      }
    } else {
      registers_grow<C::kConsumerRegisters>();
      LogitConsumer<C, Mma, Arguments>{arg, places, warp / 4, threadIdx.x % 128}.run();
    }
  }
};
