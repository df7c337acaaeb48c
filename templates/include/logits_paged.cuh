// Logits of a few tokens of each request over the pages of its keys. See logits.cuh.
//
// The schedule cuts the requests' keys into splits of 256, in order, and says at which split each CTA begins.
#pragma once
#include "logits.cuh"

// kColdUnits: units of each consumer that are loaded before the first visit is published. A consumer releases none of them earlier, so
// with more than its stages the producer would wait for ever; with many a short request's visit comes late.
enum : u32 { kSplitKeys = 256, kColdUnits = 2 };

template <class C, class Mma, class Arguments>
struct PagedLogits {
  using Places = LogitPlaces<C>;
  using Weights = LogitWeights<C>;

  static_assert(C::kConsumers <= 4);  // each has a producer warp
  static_assert(kColdUnits * C::kConsumers <= C::kStages);

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

  // Producer warp `warp` loads the units of consumer `warp`, each of one or more pages. One warp alone takes 500 cycles a unit, as
  // long as HBM does, and keys in L2 would wait for it. Warp 0 publishes visits, too.
  DG_DEVICE void produce(u32 warp, u32 lane) const {
    LogitProducer<C> producer(places, lane, false, 0, warp);
    const u32* bounds = arg.schedule + 2 * blockIdx.x;
    u32 request = bounds[0], split = bounds[1];
    const u32 last_request = bounds[2], last_split = bounds[3], last_token = arg.next_n - 1;
    const u32 groups = ceil_div(arg.next_n, C::kTokens);
    const u32 halves = arg.page_keys < kUnitKeys ? 1 : 0, each = 1 << halves, batch = 32 >> halves;  // a unit has one page or two
    // A lane's entry of the block table: of a page of the `batch` units that this warp loads from `unit` of a split on.
    const auto entry_of = [&](u32 request, u32 split, u32 unit) {
      return page(request, ((split * (kSplitKeys / kUnitKeys) + unit + (lane >> halves) * C::kConsumers) << halves) + (lane & halves));
    };
    Weights weights;
    const auto load_weights = [&](u32 request, u32 token) {
      const u32 rows = min_of(request + 1, arg.batch) * arg.next_n;
      if (warp == 0) weights.load(arg.weights, arg.weights_stride, request * arg.next_n + token, rows, lane);
    };
    u32 unit = warp;  // the next one of this warp, from the visit's first
    u32 keys = length(request, last_token), next = request < arg.batch ? entry_of(request, split, unit) : 0;
    load_weights(request, 0);
    bool cold = true;
    while (request < arg.batch && (request < last_request || (request == last_request && split < last_split))) {
      const u32 now = request, now_split = split, first = split * kSplitKeys;
      const u32 end = request == last_request ? min_of(keys, last_split * kSplitKeys) : keys;
      const u32 units = first < end ? ceil_div(end - first, kUnitKeys) : 0;
      u32 entries = next;
      // The next request's, long before they are needed.
      ++request;
      split = 0;
      keys = length(request, last_token);
      if (request < arg.batch) next = entry_of(request, 0, (unit + C::kConsumers - units * groups % C::kConsumers) % C::kConsumers);
      if (units == 0) load_weights(request, 0);
      for (u32 group = 0; group < groups && units > 0; ++group) {
        const u32 row = now * arg.next_n, token = group * C::kTokens;
        if (group > 0) entries = entry_of(now, now_split, unit);
        u32 done = 0, later = 0;
        const auto load = [&](u32 end) {
          for (; unit < end; unit += C::kConsumers, ++done) {
            if (done == batch) {
              entries = later;
              done = 0;
            }
            if (done == 0 && unit + batch * C::kConsumers < units) later = entry_of(now, now_split, unit + batch * C::kConsumers);
            const u32 stage = producer.next_stage(), full = places.barriers.full(stage);
#pragma unroll 1
            for (u32 i = 0; i < each; ++i) {
              const u32 block = __shfl_sync(0xFFFFFFFF, entries, (done << halves) + i);
              if (lane == 0) {
                // Pages are read once: they would evict what other kernels need again (2% faster on an H100).
                tma_load_3d(places.keys(stage) + i * arg.page_keys * C::kDim, arg.map_k, full, 0, 0, block, evict_first());
                tma_load(places.scales(stage) + i * arg.page_keys * 4, arg.map_s, full, 0, block, evict_first());
              }
            }
          }
        };
        if (warp == 0) producer.begin(arg.map_q, (row + token) * C::kHeads);
        // The first pages do not wait for weights.
        if (cold) load(min_of(units, kColdUnits * C::kConsumers));
        cold = false;
        if (warp == 0) {
          producer.publish([&](LogitVisit<C>& visit) {
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
            }
          });
        }
        const bool last = group + 1 == groups;
        load_weights(last ? request : now, last ? 0 : token + C::kTokens);
        load(units);
        unit -= units;
      }
    }
    if (warp == 0) producer.end();
  }

  DG_DEVICE void run() const {
    const u32 warp = uniform(threadIdx.x / 32);
    if (warp == 0) places.init(threadIdx.x % 32);
    if (threadIdx.x == 0) {
      tma_prefetch_map(arg.map_q);
      tma_prefetch_map(arg.map_k);
      tma_prefetch_map(arg.map_s);
    }
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (warp >= 4 * C::kConsumers) {
      registers_shrink<C::kProducerRegisters>();
      if (warp < 5 * C::kConsumers) produce(warp - 4 * C::kConsumers, threadIdx.x % 32);
    } else {
      registers_grow<C::kConsumerRegisters>();
      LogitConsumer<C, Mma, Arguments>{arg, places, warp / 4, threadIdx.x % 128}.run();
    }
  }
};
