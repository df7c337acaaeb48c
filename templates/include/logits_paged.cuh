// Logits of a few tokens of each request over the pages of its keys. See logits.cuh.
//
// The schedule cuts the requests' keys into splits of 256, in order, and says at which split each CTA begins.
#pragma once
#include "logits.cuh"

enum : u32 { kSplitKeys = 256 };

template <class C, class Mma, class Arguments>
struct PagedLogits {
  using Places = LogitPlaces<C>;
  using Weights = LogitWeights<C>;

  const Arguments& arg;
  Places places;

  DG_DEVICE PagedLogits(const Arguments& arg, u8* shared) : arg(arg), places(shared) {}

  // The keys of a request's token that can be read: as many as the block table has room for.
  DG_DEVICE u32 length(u32 request, u32 token) const {
    if (request >= arg.batch || token >= arg.next_n) return 0;
    const int found = arg.lengths[request * static_cast<i64>(arg.lengths_stride) + token * arg.lengths_step];
    return found > 0 ? min_of(found, arg.table_width * arg.page_keys) : 0;
  }

  DG_DEVICE u32 page(u32 request, u32 index) const {
    // Outside of the table no page is meant. TMA reads zeros there.
    return index < arg.table_width ? arg.table[request * arg.table_stride + index] : 0xFFFFFFFF;
  }

  // Copies of a request's keys and scales in units of 64 keys, each of one or more pages.
  struct Units {
    u32 request, first_page, pages, done;  // `pages`: all that are copied
    u32 next, entries;                     // entries of the block table, one for each lane: of 32 pages, and of those before
  };

  // Starts copies until `pages` of the request are done.
  DG_DEVICE void load(LogitProducer<C>& producer, Units& units, u32 pages, u32 lane) const {
    const u32 each = kUnitKeys / arg.page_keys;
    while (units.done < pages) {
      // Entries are loaded 32 at a time, and long before they are needed.
      if (units.done % 32 == 0) {
        units.entries = units.next;
        if (units.done + 32 < units.pages) units.next = page(units.request, units.first_page + units.done + 32 + lane);
      }
      const u32 end = min_of(pages, units.done / 32 * 32 + 32);
      for (; units.done < end; units.done += each) {
        const u32 stage = producer.next_stage(), full = places.barriers.full(stage);
        for (u32 i = 0; i < each; ++i) {
          const u32 block = __shfl_sync(0xFFFFFFFF, units.entries, units.done % 32 + i);
          if (lane == 0) {
            // Pages are read once: they would evict what other kernels need again (2% faster on an H100).
            tma_load_3d(places.keys(stage) + i * arg.page_keys * C::kDim, arg.map_k, full, 0, 0, block, evict_first());
            tma_load(places.scales(stage) + i * arg.page_keys * 4, arg.map_s, full, 0, block, evict_first());
          }
        }
      }
    }
  }

  DG_DEVICE void produce(u32 lane) const {
    LogitProducer<C> producer(places, lane);
    const u32* bounds = arg.schedule + 2 * blockIdx.x;
    u32 request = bounds[0], split = bounds[1];
    const u32 last_request = bounds[2], last_split = bounds[3], last_token = arg.next_n - 1;
    const u32 groups = ceil_div(arg.next_n, C::kTokens);
    bool cold = true;
    u32 keys = length(request, last_token);
    u32 entry = request < arg.batch ? page(request, split * (kSplitKeys / arg.page_keys) + lane) : 0;
    while (request < arg.batch && (request < last_request || (request == last_request && split < last_split))) {
      const u32 first = split * kSplitKeys;
      const u32 end = request == last_request ? min_of(keys, last_split * kSplitKeys) : keys;
      const u32 now = request, entry_now = entry;
      ++request;
      split = 0;
      keys = length(request, last_token);
      if (request < arg.batch) entry = page(request, lane);
      if (first >= end) continue;
      const u32 units = ceil_div(end - first, kUnitKeys), each = kUnitKeys / arg.page_keys;
      for (u32 group = 0; group < groups; ++group) {
        const u32 row = now * arg.next_n, token = group * C::kTokens;
        Weights weights;
        weights.load(arg.weights, arg.weights_stride, row + token, row + arg.next_n, lane);
        Units copies{now, first / arg.page_keys, units * each, 0, entry_now, 0};
        // The first pages do not wait for weights; more of them would keep the queries waiting.
        if (cold) load(producer, copies, min_of(units, 2) * each, lane);
        cold = false;
        producer.visit(arg.map_q, (row + token) * C::kHeads, false, [&](LogitVisit<C>& visit) {
          weights.store(visit.weights, lane);
          if (lane < C::kTokens) {
            visit.start[lane] = 0;
            visit.end[lane] = min_of(length(now, token + lane), arg.columns);
          }
          if (lane == 0) {
            visit.units = units;
            visit.first_key = first;
            visit.row = row + token;
            visit.rows = min_of(C::kTokens, arg.next_n - token);
            visit.shifts = 0;
          }
        });
        load(producer, copies, units * each, lane);
      }
    }
    producer.visit(arg.map_q, 0, true, [&](LogitVisit<C>& visit) {
      if (lane == 0) visit.units = 0;
    });
  }

  DG_DEVICE void run() const {
    const u32 warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
      tma_prefetch_map(arg.map_q);
      tma_prefetch_map(arg.map_k);
      tma_prefetch_map(arg.map_s);
      places.init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (warp >= 4 * C::kConsumers) {
      registers_shrink<C::kProducerRegisters>();
      if (warp == 4 * C::kConsumers) produce(threadIdx.x % 32);
    } else {
      registers_grow<C::kConsumerRegisters>();
      LogitConsumer<C, Mma, Arguments>{arg, places, warp / 4, threadIdx.x % 128}.run();
    }
  }
};
