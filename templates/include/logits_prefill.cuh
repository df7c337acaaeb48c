// Logits of queries over one matrix of keys, of which each query attends a range. See logits.cuh.
#pragma once
#include "logits.cuh"

enum : u32 { kFillColumns = 8192 };

// The ranges of a block of queries. Queries that attend nothing have start = end = 0.
template <class C>
struct KeyRanges {
  enum : u32 { kTileKeys = C::kConsumers * kUnitKeys };
  u32 start[C::kTokens], end[C::kTokens];

  template <class Arguments>
  DG_DEVICE void load(const Arguments& arg, u32 block) {
#pragma unroll
    for (u32 i = 0; i < C::kTokens; ++i) {
      const u32 row = block * C::kTokens + i;
      const int first = row < arg.rows ? arg.starts[row] : 0, last = row < arg.rows ? arg.ends[row] : 0;
      start[i] = first > 0 ? first : 0;
      end[i] = last > 0 ? min_of(last, arg.keys) : 0;
      if (start[i] >= end[i]) start[i] = end[i] = 0;
    }
  }
  // The first key of the block's run: a multiple of 32, so that rows are written from where 128 bytes begin.
  DG_DEVICE u32 first() const {
    u32 found = 0xFFFFFFFF;
#pragma unroll
    for (u32 i = 0; i < C::kTokens; ++i) {
      if (end[i] > 0) found = min_of(found, start[i]);
    }
    return found & ~31u;
  }
  DG_DEVICE u32 tiles() const {
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < C::kTokens; ++i) found = max_of(found, end[i]);
    return found > 0 ? ceil_div(found - first(), kTileKeys) : 0;
  }
};

// Each CTA does as many tiles as the others, of a unit for each consumer, one after the other in the order of queries.
struct LogitShare {
  u32 block, skipped, tiles;  // the first block of queries, its tiles that others do, and the tiles of this CTA
};

template <class C, class Mma, class Arguments>
struct PrefillLogits {
  using Places = LogitPlaces<C>;
  using Ranges = KeyRanges<C>;
  using Weights = LogitWeights<C>;
  enum : u32 { kThreads = 128 * (C::kConsumers + 1), kWarps = kThreads / 32, kTileKeys = Ranges::kTileKeys };

  const Arguments& arg;
  Places places;

  DG_DEVICE PrefillLogits(const Arguments& arg, u8* shared) : arg(arg), places(shared) {}

  DG_DEVICE u32 blocks() const { return ceil_div(arg.rows, C::kTokens); }

  // By all threads: counts the tiles of all blocks. `share` and `sums`, one number for each warp, are in shared memory.
  DG_DEVICE void find_share(LogitShare& share, u32* sums) const {
    const u32 thread = threadIdx.x, each = ceil_div(blocks(), kThreads), lane = thread % 32;
    const u32 from = min_of(blocks(), thread * each), to = min_of(blocks(), from + each);
    u32 own = 0;
    for (u32 block = from; block < to; ++block) {
      Ranges ranges;
      ranges.load(arg, block);
      own += ranges.tiles();
    }
    u32 before = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFF, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) sums[thread / 32] = before;
    if (thread == 0) share = LogitShare{0, 0, 0};
    __syncthreads();
    u32 total = 0;
#pragma unroll
    for (u32 warp = 0; warp < kWarps; ++warp) {
      if (warp == thread / 32) before += total;
      total += sums[warp];
    }
    before -= own;
    const u32 begin = static_cast<u64>(total) * blockIdx.x / gridDim.x;
    const u32 end = static_cast<u64>(total) * (blockIdx.x + 1) / gridDim.x;
    if (begin < end && before <= begin && begin < before + own) {
      for (u32 block = from; block < to; ++block) {
        Ranges ranges;
        ranges.load(arg, block);
        const u32 tiles = ranges.tiles();
        if (begin < before + tiles) {
          share = LogitShare{block, begin - before, end - begin};
          break;
        }
        before += tiles;
      }
    }
    __syncthreads();
  }

  DG_DEVICE void produce(const LogitShare& share, u32 lane) const {
    LogitProducer<C> producer(places, lane);
    Ranges ranges;
    Weights weights;
    u32 block = share.block, skipped = share.skipped, left = share.tiles;
    ranges.load(arg, block);
    weights.load(arg.weights, arg.weights_stride, block * C::kTokens, arg.rows, lane);
    bool cold = true;
    while (left > 0) {
      const u32 tiles = min_of(left, ranges.tiles() - skipped), first = ranges.first() + skipped * kTileKeys;
      const u32 units = C::kConsumers * tiles;
      u32 done = 0;
      const auto load = [&](u32 end) {
        for (; done < end; ++done) {
          const u32 stage = producer.next_stage();
          if (lane == 0) tma_load(places.keys(stage), arg.map_k, places.barriers.full(stage), 0, first + done * kUnitKeys);
        }
      };
      // The first keys do not wait for weights; more of them would keep the queries waiting.
      if (cold) load(min_of(units, 2));
      if (tiles > 0) {
        cold = false;
        producer.visit(arg.map_q, block * Places::kRows, false, [&](LogitVisit<C>& visit) {
          weights.store(visit.weights, lane);
          if (lane == 0) {
            visit.units = units;
            visit.first_key = first;
            visit.row = block * C::kTokens;
            visit.rows = min_of(C::kTokens, arg.rows - block * C::kTokens);
            visit.shifts = arg.compressed;
#pragma unroll
            for (u32 i = 0; i < C::kTokens; ++i) {
              visit.start[i] = ranges.start[i];
              const u32 room = arg.compressed ? ranges.start[i] + arg.columns : arg.columns;
              visit.end[i] = max_of(ranges.start[i], min_of(ranges.end[i], room));
            }
          }
        });
      }
      left -= tiles;
      skipped = 0;
      ++block;
      // The next block's, long before they are needed.
      ranges.load(arg, block);
      weights.load(arg.weights, arg.weights_stride, block * C::kTokens, arg.rows, lane);
      load(units);
    }
    producer.visit(arg.map_q, 0, true, [&](LogitVisit<C>& visit) {
      if (lane == 0) visit.units = 0;
    });
  }

  // Writes minus infinity to the columns before and after the runs of keys, which consumers do not write.
  DG_DEVICE void fill(u32 thread, u32 threads) const {
    constexpr u32 kSize = C::kBf16 ? 2 : 4, kEach = 16 / kSize, kWord = C::kBf16 ? 0xFF80FF80 : 0xFF800000;
    const u32 parts = ceil_div(arg.filled, kFillColumns);
    const u64 all = static_cast<u64>(arg.rows) * parts;
    for (u64 index = blockIdx.x; index < all; index += gridDim.x) {
      const u32 row = static_cast<u32>(index / parts), begin = static_cast<u32>(index % parts) * kFillColumns;
      const u32 end = min_of(arg.filled, begin + kFillColumns);
      Ranges ranges;
      ranges.load(arg, row / C::kTokens);
      const u32 tiles = ranges.tiles(), first = tiles > 0 ? ranges.first() : arg.filled;
      const u32 last = first + tiles * kTileKeys;
      u8* at = arg.out + row * arg.out_stride * kSize;
#pragma unroll
      for (u32 side = 0; side < 2; ++side) {
        const u32 from = side ? max_of(begin, last) : begin, to = side ? end : min_of(end, first);
        for (u32 column = from + thread * kEach; column < to; column += threads * kEach) {
          if (column + kEach <= to) {
            store_16(at + static_cast<u64>(column) * kSize, Bytes16{{kWord, kWord, kWord, kWord}});
          } else {
            for (u32 i = column; i < to; ++i) {
              if constexpr (C::kBf16) {
                reinterpret_cast<u16*>(at)[i] = static_cast<u16>(kWord);
              } else {
                reinterpret_cast<u32*>(at)[i] = kWord;
              }
            }
          }
        }
      }
    }
  }

  DG_DEVICE void run() const {
    auto& share = *reinterpret_cast<LogitShare*>(places.shared + Places::kOffsetScratch);
    u32* sums = reinterpret_cast<u32*>(&share + 1);
    static_assert(sizeof(LogitShare) + kWarps * 4 <= kScratchBytes);
    const u32 warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
      tma_prefetch_map(arg.map_q);
      tma_prefetch_map(arg.map_k);
      places.init();
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    find_share(share, sums);
    if (warp >= 4 * C::kConsumers) {
      registers_shrink<C::kProducerRegisters>();
      const u32 thread = threadIdx.x - 128 * C::kConsumers;
      if (warp == 4 * C::kConsumers) {
        produce(share, thread);
      } else {
        fill(thread - 32, 96);
      }
    } else {
      registers_grow<C::kConsumerRegisters>();
      LogitConsumer<C, Mma, Arguments>{arg, places, warp / 4, threadIdx.x % 128}.run();
    }
  }
};
