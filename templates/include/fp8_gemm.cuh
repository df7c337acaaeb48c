// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors: 1 x 128 for A and 128 x 128 for B, or one for each row
// of A and of B.
// Warp-specialised: a producer warpgroup fills a ring of stages by TMA. Each consumer warpgroup multiplies its own rows of the
// tile, promotes them, and stages them for the store. In persistent CTAs the producers load the next tile meanwhile.
//
// Tile supplies the block sizes, Mma the wgmma and Arguments the parameters of this kernel (see kernels/sm90_fp8_gemm.cu.jinja).
#pragma once
#include "barrier.cuh"
#include "edge_boxes.cuh"
#include "epilogue.cuh"
#include "finish.cuh"
#include "fp8_mainloop.cuh"
#include "loaders.cuh"
#include "next_tile_hint.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "prologue.cuh"
#include "scaling.cuh"
#include "scheduler.cuh"
#include "split_k_exchange.cuh"
#include "staging.cuh"
#include "store_warp.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

template <class Tile, class Mma, class Arguments>
struct Fp8Gemm {
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 128 };
  enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers };
  enum : u32 { kClusterM = Tile::kClusterM, kClusterN = Tile::kClusterN };
  enum : u32 { kClusterK = Tile::kClusterK };  // CTAs that split a tile's K
  enum : u32 { kClusterSize = kClusterM * kClusterN * kClusterK };
  static_assert(kClusterK == 1 || kClusterM * kClusterN == 1);
  enum : bool { kTmaStore = Tile::kTmaStore, kClusters = kClusterSize > 1 };
  enum : u16 { kAll = (1u << kClusterM * kClusterN) - 1 };  // multicast mask: the CTAs of the cluster

  // Whether there is one scale for each row of A and of B. Then promotion multiplies by A's scales, and the epilogue by B's. These
  // kernels do not split K, and store by TMA or copies.
  enum : bool { kRowScales = Tile::kScaling == kRowwise };
  static_assert(!kRowScales || (kClusterK == 1 && kTmaStore));

  // One consumer's rows of a tile, in m64 slices.
  enum : u32 { kSlices = kBlockM / (64 * kConsumers) };
  static_assert(kSlices * 64 * kConsumers == kBlockM);
  static_assert(kBlockN % (16 * kClusterK) == 0);
  static_assert(Tile::kTurns == 1 || (Tile::kTurns == kConsumers && kClusterK == 1),
                "consumers that take turns must issue the same number of products");
  using Columns = TileColumns<kBlockN>;

  // The columns that a consumer stores of its rows: all, or with split K those that its split owns.
  enum : u32 { kColumns = kBlockN / kClusterK };
  using Store = TmaStore<kColumns, kSlices>;
  using Final = Epilogue<Output<kBf16>>;
  enum : bool { kNeedsRow = kRowScales || Final::kNeedsRow };  // whether consumers must know the row of the next tile
  // Whether the next tile's first product is issued before this tile's sums are stored. Not with split K, where a split may have no
  // block.
  enum : bool { kStartsEarly = kClusterK == 1 };
  // Whether the units of a tile are staged one by one, each while a product runs.
  enum : bool { kStagesEarly = kStartsEarly && kTmaStore };
  // Whether a tile's first scales of B are loaded before the last block of the previous tile. Beside 192 accumulators there are no
  // registers for several rows of scales, except with one consumer: ptxas would place sums and partial sums in one bank.
  enum : u32 { kAccumulators = kSlices * kBlockN / 2 + Tile::kPartials * Mma::kN / 2 };
  enum : bool { kScalesEarly = Columns::kScales == 1 || kConsumers == 1 || kAccumulators < 192 };
  // Not persistent: one CTA per tile.
  enum : bool { kPersistent = Tile::kPersistent };
  static_assert(kPersistent || !kClusters);
  // Whether the store warp stores tiles while consumers go on. With one tile per CTA consumers store themselves, which is faster.
  enum : bool { kStoreWarp = kTmaStore && kPersistent };
  // Whether the store warp publishes the next tile. With one consumer some tiles would spill.
  enum : bool { kHints = kStoreWarp && kConsumers == 2 };
  using Scheduler = TileScheduler<kBlockM, 1, kClusterM, kClusterN, kClusterK>;  // tile.column counts tiles (see columns.cuh)
  using Barriers = PipelineBarriers<kStages, kConsumers * 4, kClusterM * kClusterN, 3>;
  using Exchange = SplitKExchange<kBlockN, kSlices, kClusterK, 1, kConsumers>;
  using Cursor = ProducerCursor;
  struct Shape {
    enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers, kPartials = Tile::kPartials };
    enum : u32 { kStep = 1, kTurns = Tile::kTurns };
    enum : u32 { kRows = kBlockM, kColumns = kBlockN, kSlices = Fp8Gemm::kSlices };
    enum : bool { kPeeks = Tile::kPartials == 2 && kBlockM * kBlockN < 128 * 128 };
    enum : bool { kFresh = Tile::kPartials == 1 && kConsumers > 1 };
  };
  using Order = BlockOrder<kClusterK, 1>;
  // No kSpreads for tiles of 16 columns: they never waited for the first scale, and shuffles between their few FFMA cost time.
  using Weights = BlockScales<Columns::kScales, Order, (kBlockN > 16)>;
  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries.
  enum : u32 { kBytesA = kBlockM * kBlockK, kBytesB = kBlockN * kBlockK };
  enum : u32 { kBytesScale = ceil_div(kBlockM * 4, 128) * 128 };  // TMA writes to 128-byte boundaries
  enum : u32 { kOffsetA = 0, kOffsetB = kStages * kBytesA };
  template <bool kRowwiseScales, class = void>
  struct ScalingOf {
    using Type = RowTokens<Weights, Columns, kSlices, kBytesScale>;
  };
  template <class T>
  struct ScalingOf<true, T> {
    using Type = RowScales<kSlices>;
  };
  using Scaling = typename ScalingOf<kRowScales>::Type;
  using LateScales = ColumnScales<Mma::kN>;  // B's scales of rows for one unit
  using Mainloop = Fp8Mainloop<Shape, Mma, Barriers, Scaling>;
  using Sums = typename Mainloop::Sums;
  using Areas = StagingAreas<kStages, kConsumers, kBytesA, kBytesB, Store::kBytes, kPersistent>;
  enum : u32 { kOffsetScale = Areas::kOffsetOwn + (kTmaStore ? +Areas::kOwnBytes : 0) };
  enum : u32 { kOffsetSlots = kOffsetScale + kStages * kBytesScale, kOffsetBarriers = kOffsetSlots + Exchange::kBytes };
  enum : u32 { kOffsetHint = kOffsetBarriers + Barriers::kBytes + (kClusterK > 1 ? Exchange::kBarrierBytes : 0) };
  enum : u32 { kSharedBytes = kOffsetHint + (kHints ? +NextTileHint::kBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  const Arguments& arg;
  u32 shared;
  Barriers barriers;
  Exchange exchange;

  DG_DEVICE Fp8Gemm(const Arguments& arg, u32 shared) : arg(arg), shared(shared) {
    barriers.base = shared + kOffsetBarriers;
    exchange.slots = shared + kOffsetSlots;
    exchange.barriers = shared + kOffsetBarriers + Barriers::kBytes;
  }

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }
  DG_DEVICE u32 blocks() const { return ceil_div(k(), kBlockK); }
  DG_DEVICE u32 rank_k() const { return kClusterK > 1 ? cluster_rank() : 0; }
  DG_DEVICE NextTileHint hint() const { return NextTileHint(shared + kOffsetHint); }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32;
    if (threadIdx.x >= kConsumers * 128) {
      Scheduler first;  // the first tile
      if (warp == kConsumers * 4 + 3) {
        init_barriers<(kClusterK > 1)>(barriers, exchange, rank_k());
      } else {
        first = Scheduler::early(arg.raster);
        if (warp == kConsumers * 4) prefetch_weights(first);
      }
      prologue_sync<kClusterSize>();
      if constexpr (Tile::kProducerRegisters > 0) registers_shrink<Tile::kProducerRegisters>();
      if (warp == kConsumers * 4 && elect_one()) produce_weights(first);
      if (warp == kConsumers * 4 + 1 && elect_one()) load_tokens(*this, first);
      if (warp == kConsumers * 4 + 2 && elect_one()) produce_scales(first);
      if (kStoreWarp && warp == kConsumers * 4 + 3) store_tiles(*this, Scheduler(arg.raster));
      __syncwarp();
      if (kTmaStore && !kPersistent && warp == kConsumers * 4 + 2) Areas::free_all();
    } else {
      if (threadIdx.x == 0) prefetch_maps<Columns::kSegments, !kRowScales>(arg, kBlockM, kBlockN);
      prologue_sync<kClusterSize>();
      if constexpr (Tile::kConsumerRegisters > 0) registers_grow<Tile::kConsumerRegisters>();
      consume(Scheduler(arg.raster));
    }
  }

  // Prefetches this CTA's first blocks of B into L2. Unlike their loads, this need not wait for the previous kernel.
  DG_DEVICE void prefetch_weights(const Scheduler& first) const {
    const Order order(blocks(), rank_k(), 0);
    if (arg.early_stages < kStages && first.valid() && elect_one()) {
      const u32 count = min_of(order.length, prefetched(kBytesB, kClusterK > 1 || arg.early_stages > 0));
      with_weights(columns_of(first), [&](const auto& each_box, auto) {
#pragma unroll 1
        for (u32 step = 0; step < count; ++step)
          each_box([&](const TensorMap* map, u32, u32 row) { tma_prefetch(map, order.step_block(step) * kBlockK, row); });
      });
    }
    __syncwarp();
  }

  static DG_DEVICE Columns columns_of(const Scheduler& tile) { return {tile.column, tile.columns()}; }

  // The boxes of B that this CTA loads for a tile (see edge_boxes.cuh). CTAs along m load and multicast a part each.
  template <class Use>
  DG_DEVICE void with_weights(const Columns& columns, const Use& use) const {
    with_boxes<kClusterM, kClusters>(columns, kClusterM > 1 ? cluster_rank() : 0, n(), arg.map_b, arg.map_b_last, use);
  }

  // The rows of A that this CTA loads of a tile: how many, the first, and how many of the tile exist.
  enum : u32 { kTokensBox = kBlockM / kClusterN };
  DG_DEVICE u32 tokens_part() const { return kClusterN > 1 ? cluster_rank() * kTokensBox : 0; }
  DG_DEVICE u32 tokens_loaded(u32 row) const { return rows_loaded<kBlockM, kClusters>(row, m(), arg.last_rows); }

  DG_DEVICE u32 weights_loaded(const Scheduler& tile) const { return columns_of(tile).existing(n()); }
  DG_DEVICE Order order() const { return Order(blocks(), rank_k(), 0); }

  // Three threads, each in its own warp, load B, A, and A's scales into the stages in order. One thread cannot issue loads as fast
  // as narrow tiles need them. Constant weights do not wait for the previous kernel.
  DG_DEVICE void produce_weights(Scheduler tile) {
    Cursor cursor;
    for (; tile.valid(); tile.advance()) {
      const Order order = this->order();
      const auto load = [&](const auto& each_box, auto... policy) {
        if (arg.early_stages == 0) wait_for_previous_kernel();
        barriers.fill(cursor, order.length, [&](u32 step, u32 stage) {
          barriers.take_part(stage);
          const u32 b = shared + kOffsetB + stage * kBytesB, x = order.step_block(step) * kBlockK;
          each_box([&](const TensorMap* map, u32 place, u32 row) {
            if constexpr (kClusterM > 1) {
              tma_load_multicast(b + place * kBlockK, map, barriers.full(stage), x, row, kAll, policy...);
            } else {
              tma_load(b + place * kBlockK, map, barriers.full(stage), x, row, policy...);
            }
          });
        }, EarlyLoads<kBytesB, kBytesA>(arg.early_stages));
      };
      const bool evicts_first = arg.evict_first & kEvictB;
      with_weights(columns_of(tile), [&](const auto& each_box, auto whole) {
        if constexpr (decltype(whole)::kValue) {
          with_policy(evicts_first, [&](auto... policy) { load(each_box, policy...); });
        } else {
          load(each_box, LatePolicy{evicts_first});
        }
      });
    }
    if constexpr (kClusterM * kClusterN > 1) barriers.drain(cursor);
  }

  DG_DEVICE void produce_scales(Scheduler tile) {
    ProducerCursor cursor;
    if constexpr (kRowScales) {
      cursor = expect_loads(*this, tile);
    } else {
      cursor = load_scales(*this, tile);
    }
    if constexpr (kTmaStore && !kPersistent) barriers.fill(cursor, Areas::kStagesLent, [](u32, u32) {});
  }

  // A tile is stored in parts, one for each unit, if units are whole boxes and there are enough named barriers.
  enum : bool { kWholeBoxes = Mainloop::kParts == 1 || Mma::kN % Store::kBoxColumns == 0 };
  enum : u32 { kStoreParts = kStagesEarly && kWholeBoxes && kConsumers * Mainloop::kUnits <= 4 ? Mainloop::kUnits : 1 };

  // A consumer warpgroup: rows [64 * kSlices * consumer, + 64 * kSlices) of every tile.
  DG_DEVICE void consume(Scheduler tile) {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 first_row = consumer * 64 * kSlices, split = rank_k();
    float sum[kSlices][kBlockN / 2];

    const auto part = [&] {
      typename Weights::Part found{{}, order()};
#pragma unroll
      for (u32 scale = 0; scale < Columns::kScales; ++scale) found.row[scale] = columns_of(tile).scale_row(scale);
      return found;
    };
    const auto scaling = [&] {
      const u32 row = first_row + warp * 16 + lane / 4;
      if constexpr (kRowScales) {
        return Scaling(arg.scale_a, arg.scale_a_stride, m());
      } else {
        const Weights weights(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(n(), 128), lane, part());
        return Scaling(weights, shared + kOffsetScale + row * 4);
      }
    };
    Mainloop mainloop(barriers, scaling(), uniform(descriptor_low(shared + first_row * kBlockK)),
                      uniform(descriptor_low(shared + kOffsetB)), consumer, lane);
    LateScales late;
    const auto fetch_rows = [&] {
      if constexpr (kRowScales) mainloop.scaling.fetch(tile.row + first_row + warp * 16 + lane / 4);
    };
    const auto go_on = [&] {
      if constexpr (!kRowScales) mainloop.scaling.weights.go_on(part());
    };
    if (arg.early_stages == 0) wait_for_previous_kernel();
    if constexpr (!kRowScales) {
      if (tile.valid()) mainloop.scaling.weights.open();
    }
    if (arg.early_stages > 0) wait_for_previous_kernel();  // before D is overwritten
    mainloop.turns.begin();
    NextTileHint next = hint();
    if constexpr (kHints) NextTileHint::wait_for_first(consumer);
    if constexpr (kStartsEarly) {
      if (tile.valid()) mainloop.start();
    }
    if (tile.valid()) fetch_rows();
    // A CTA's last tile has a copy of `finish` of its own. Where a path with a product in flight joins one without, ptxas inserts a
    // wait, and no product would run while the next tile begins. Direct stores have no registers for a second copy.
    for (bool more = tile.valid(); more;) {
      const Scheduler now = tile;
      const u32 mine = uniform(order().mine());
      load_late<0>(late, now, lane);
      const auto put = [&](auto unit) {
        if constexpr (kStagesEarly) stage<decltype(unit)::kValue>(sum, now, consumer, thread, mainloop.at.stage, late);
      };
      const auto look_ahead = [&] {
        if constexpr (kHints) next.template take<kNeedsRow>(tile);
        else if constexpr (kPersistent) tile.advance();
        if (kPersistent && kScalesEarly && (kHints || tile.valid())) go_on();
      };
      if constexpr (kStartsEarly) {
        mainloop.resume(sum, mine, look_ahead, put);
      } else {
        mainloop.multiply(sum, mine, look_ahead);
      }
      more = kPersistent && tile.valid();
      if (kTmaStore && !more) {
        finish(mainloop, sum, now, consumer, split, thread, false, late);
        break;
      }
      if (!kScalesEarly && more) go_on();
      if (kStartsEarly && more) mainloop.start();
      if (more) fetch_rows();
      finish(mainloop, sum, now, consumer, split, thread, kTmaStore || more, late);
    }
    // For ptxas: without this barrier it assumes that products are in flight after the loop, and serialises all of them.
    named_barrier_sync(kConsumerBarrier + consumer, 128);
    mainloop.turns.end();
  }

  // Exchanges and stores a tile's sums when they are final.
  DG_DEVICE void finish(Mainloop& mainloop, Sums& sum, const Scheduler& tile, u32 consumer, u32 split, u32 thread,
                        bool goes_on, LateScales& late) {
    if constexpr (kStagesEarly) {
      stage<Mainloop::kUnits - 1>(sum, tile, consumer, thread, mainloop.at.stage, late);
    } else {
      if constexpr (kClusterK > 1) exchange.exchange(sum, consumer, consumer, split, thread, goes_on);
      const u32 row = tile.row + consumer * 64 * kSlices;
      if constexpr (Final::kAny) {
#pragma unroll
        for (u32 owner = 0; owner < kClusterK; ++owner) {
          if (owner == split) {
#pragma unroll
            for (u32 slice = 0; slice < kSlices; ++slice)
              complete<kColumns>(&sum[slice][owner * kColumns / 2], row + slice * 64, owner * kColumns, columns_of(tile), thread);
          }
        }
      }
      store(sum, row, columns_of(tile), consumer, split, thread);
    }
  }

  // Segments of columns, and the parts that are finished at once, begin at multiples of it.
  enum : u32 { kRun = kBlockN % 32 == 0 && Mma::kN % 32 == 0 && kColumns % 32 == 0 ? 32 : 16 };
  // Applies the epilogue to final sums of kCount columns of the tile, from `first` on, and of 64 rows of D from `row` on. The branch
  // around it is for ptxas, which would otherwise move most of an activation above the product that has just been issued. The tensor
  // cores would wait for it, and sums would spill.
  template <u32 kCount>
  DG_DEVICE void complete(float* sum, u32 row, u32 first, const Columns& columns, u32 thread) const {
    const u32 lane = thread % 32, own = row + thread / 32 * 16 + lane / 4;
    if (columns.at(first) >= n()) return;
    if constexpr (Final::kScales) Final::template scale<kCount>(*this, sum, own, m());
    if constexpr (Final::kFinishes)
      Final::template finish<kCount, kTmaStore, kRun>(*this, sum, own, m(), Index<0>(), lane, [&](u32 i) { return columns.at(first + i); });
  }

  // Stores all that a consumer has to store of a tile; `stage` does the same for one unit.
  DG_DEVICE void store(const Sums& sum, u32 row, const Columns& columns, u32 consumer, u32 split, u32 thread) const {
    const u32 warp = thread / 32, lane = thread % 32;
    if constexpr (!kTmaStore) {
      store_direct<kBlockN, kSlices, kClusterK>(arg.d, arg.d_stride, sum, row, columns, m(), n(), warp, lane, split);
    } else {
      const u32 area = shared + Areas::offset(consumer, 0);
      Areas::wait_until_free(consumer);
#pragma unroll
      for (u32 owner = 0; owner < kClusterK; ++owner)
        if (owner == split) Store::stage_all(area, sum, owner * kColumns / 2, warp, lane);
      Areas::template fill<kStoreParts>(consumer, 0);
    }
  }

  // Starts loading B's scales of rows for a unit.
  template <u32 kUnit>
  DG_DEVICE void load_late(LateScales& late, const Scheduler& tile, u32 lane) const {
    if constexpr (kRowScales) {
      const Columns columns = columns_of(tile);
      constexpr u32 kColumn = kUnit % Mainloop::kParts * Mma::kN;
      late.load(arg.scale_b, arg.scale_b_stride, n(), [&](u32 column) { return columns.at(kColumn + column + lane); });
    }
  }

  template <u32 kUnit>
  DG_DEVICE void stage(Sums& sum, const Scheduler& tile, u32 consumer, u32 thread, u32 next_stage, LateScales& late) const {
    constexpr u32 kSlice = kUnit / Mainloop::kParts, kColumn = kUnit % Mainloop::kParts * Mma::kN;
    const u32 area = shared + Areas::offset(consumer, next_stage);
    if constexpr (kRowScales) {
      late.template apply<Mma::kN>(&sum[kSlice][kColumn / 2], 0, thread % 32);
      if constexpr (Mainloop::kParts > 1 && kUnit + 1 < Mainloop::kUnits) load_late<kUnit + 1>(late, tile, thread % 32);
    }
    if constexpr (Final::kAny)
      complete<Mma::kN>(&sum[kSlice][kColumn / 2], tile.row + (consumer * kSlices + kSlice) * 64, kColumn, columns_of(tile), thread);
    if constexpr (kUnit == 0) Areas::wait_until_free(consumer);
    Store::template stage<kSlice, kColumn, Mma::kN>(area, &sum[kSlice][kColumn / 2], thread / 32, thread % 32);
    if constexpr (kPersistent) {
      if constexpr (kStoreParts > 1 || kUnit + 1 == Mainloop::kUnits)
        Areas::template fill<kStoreParts>(consumer, kStoreParts > 1 ? kUnit : 0);
    } else if constexpr (kWholeBoxes || kUnit % Mainloop::kParts + 1 == Mainloop::kParts) {
      __syncwarp();
      Store::template copy<kSlice, kWholeBoxes ? kColumn : 0, kWholeBoxes ? +Mma::kN : +kBlockN>(
          area, arg.d, arg.d_stride, tile.row + consumer * 64 * kSlices, columns_of(tile), m(), n(), thread / 32, thread % 32);
    }
  }
};
