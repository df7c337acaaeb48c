// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors: 1 x 128 for A and 128 x 128 for B, or one for each row
// of A and of B.
// Warp-specialised: a producer warpgroup fills a ring of stages by TMA. Each consumer warpgroup multiplies its own rows of the
// tile, promotes them, and stages them for the store. In persistent CTAs the producers load the next tile meanwhile.
//
// Constants supplies the block sizes, Mma the wgmma and Arguments the parameters of this kernel (see kernels/sm90_fp8_gemm.cu.jinja).
#pragma once
#include "finish.cuh"
#include "fp8_mainloop.cuh"
#include "gemm_kernel.cuh"
#include "next_tile_hint.cuh"
#include "scaling.cuh"
#include "tile_scales.cuh"
#include "tile_store.cuh"

template <class Constants, class MmaType>
struct Fp8GemmLayout {
  using Tile = Constants;
  using Mma = MmaType;
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 128 };
  enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers, kConsumersK = 1 };
  enum : u32 { kClusterM = Tile::kClusterM, kClusterN = Tile::kClusterN, kClusterK = Tile::kClusterK };
  enum : u32 { kGrouping = kUngrouped, kScaling = Tile::kScaling };
  enum : bool { kClusters = kClusterM * kClusterN * kClusterK > 1, kMapsOfGroups = false };
  // Not persistent: one CTA per tile.
  enum : bool { kTmaStore = Tile::kTmaStore, kPersistent = Tile::kPersistent };
  static_assert(kPersistent || !kClusters);
  // One consumer's rows of a tile, in m64 slices, and the columns that it stores: all, or with split K those that its split owns.
  enum : u32 { kSlices = kBlockM / (64 * kConsumers), kColumns = kBlockN / kClusterK };
  static_assert(kSlices * 64 * kConsumers == kBlockM && kBlockN % (16 * kClusterK) == 0);

  using Columns = TileColumns<kBlockN>;
  using A = OperandTile<kBlockM, false, kClusterN, kClusters, 1>;
  using B = SegmentedTile<Columns, kClusterM, kClusters>;
  using Scheduler = TileScheduler<kBlockM, 1, kClusterM, kClusterN, kClusterK>;  // tile.column counts tiles (see columns.cuh)
  using Order = BlockOrder<kClusterK, 1>;
  using Barriers = PipelineBarriers<kStages, kConsumers * 4, kClusterM * kClusterN, 3>;
  using Exchange = SplitKExchange<kBlockN, kSlices, kClusterK, 1, kConsumers>;
  using Scales = EdgeScales<Fp8GemmLayout>;
  using Store = TmaStore<kColumns, kSlices>;
  using Areas = StagingAreas<kStages, kConsumers, A::kBytes, B::kBytes, Store::kBytes, kPersistent>;
  enum : u32 { kStagesLent = kTmaStore ? +Areas::kStagesLent : 0 };
  // Whether the store warp stores tiles while consumers go on. With one tile per CTA consumers store themselves, which is faster.
  enum : bool { kStoreWarp = kTmaStore && kPersistent };
  // Whether the store warp publishes the next tile. With one consumer some tiles would spill.
  enum : bool { kHints = kStoreWarp && kConsumers == 2 };

  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries, and scales on the 128-byte boundaries of TMA.
  enum : u32 { kRowBytes = ceil_div(kBlockM * 4, 128) * 128 };
  enum : u32 { kOffsetA = 0, kOffsetB = kStages * A::kBytes };
  enum : u32 { kOffsetRows = Areas::kOffsetOwn + (kTmaStore ? +Areas::kOwnBytes : 0) };
  enum : u32 { kOffsetSlots = kOffsetRows + kStages * kRowBytes, kOffsetBarriers = kOffsetSlots + Exchange::kBytes };
  enum : u32 { kOffsetHint = kOffsetBarriers + Barriers::kBytes + (kClusterK > 1 ? Exchange::kBarrierBytes : 0) };
  enum : u32 { kSharedBytes = kOffsetHint + (kHints ? +NextTileHint::kBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");
};

template <class Constants, class MmaType, class Arguments>
struct Fp8Gemm {
  using Layout = Fp8GemmLayout<Constants, MmaType>;
  using Tile = Constants;
  using Mma = MmaType;
  using Kernel = GemmKernel<Layout, Arguments>;
  using Scheduler = typename Layout::Scheduler;
  using Columns = typename Layout::Columns;
  using Store = typename Layout::Store;
  using Areas = typename Layout::Areas;
  using Order = typename Layout::Order;
  using Final = Epilogue<Output<kBf16>>;
  enum : u32 { kBlockM = Layout::kBlockM, kBlockN = Layout::kBlockN, kBlockK = 128, kConsumers = Layout::kConsumers };
  enum : u32 { kClusterK = Layout::kClusterK, kSlices = Layout::kSlices, kColumns = Layout::kColumns };
  enum : bool { kTmaStore = Layout::kTmaStore, kPersistent = Layout::kPersistent, kHints = Layout::kHints };
  static_assert(Tile::kTurns == 1 || (Tile::kTurns == kConsumers && kClusterK == 1),
                "consumers that take turns must issue the same number of products");

  // Whether there is one scale for each row of A and of B. Then promotion multiplies by A's scales, and the epilogue by B's. These
  // kernels do not split K, and store by TMA or copies.
  enum : bool { kRowScales = Layout::kScaling == kRowwise };
  static_assert(!kRowScales || (kClusterK == 1 && kTmaStore));
  enum : bool { kNeedsRow = kRowScales || Final::kNeedsRow };  // whether consumers must know the row of the next tile
  // Whether the next tile's first product is issued before this tile's sums are stored. Not with split K, where a split may have no
  // block.
  enum : bool { kStartsEarly = kClusterK == 1 };
  // Whether the units of a tile are staged one by one, each while a product runs.
  enum : bool { kStagesEarly = kStartsEarly && kTmaStore };
  // Whether a tile's first scales of B are loaded before the last block of the previous tile. Beside 192 accumulators there are no
  // registers for several rows of scales, except with one consumer: ptxas would place sums and partial sums in one bank.
  enum : u32 { kAccumulators = kSlices * kBlockN / (Tile::kInTurn > 1 ? 1 : 2) + Tile::kPartials * Mma::kN / 2 };
  enum : bool { kScalesEarly = Columns::kScales == 1 || kConsumers == 1 || kAccumulators < 192 };
  struct Shape {
    enum : u32 { kStages = Layout::kStages, kConsumers = Layout::kConsumers, kPartials = Tile::kPartials };
    enum : u32 { kStep = 1, kTurns = Tile::kTurns, kInTurn = Tile::kInTurn };
    enum : u32 { kRows = kBlockM, kColumns = kBlockN, kSlices = Layout::kSlices };
    enum : bool { kPeeks = Tile::kPartials == 2 && kBlockM * kBlockN < 128 * 128 };
    enum : bool { kFresh = Tile::kPartials == 1 && kConsumers > 1 };
  };
  // No kSpreads for tiles of 16 columns: they never waited for the first scale, and shuffles between their few FFMA cost time.
  using Weights = BlockScales<Columns::kScales, Order, (kBlockN > 16)>;
  using Scaling = Choice<kRowScales, RowScales<kSlices>, RowTokens<Weights, Columns, kSlices, Layout::kRowBytes>>;
  using LateScales = ColumnScales<Mma::kN>;  // B's scales of rows for one unit
  using Mainloop = Fp8Mainloop<Shape, Mma, typename Layout::Barriers, Scaling>;
  using Sums = typename Mainloop::Sums;

  Kernel kernel;

  DG_DEVICE Fp8Gemm(const Arguments& arg, u32 shared) : kernel(arg, shared) {}

  DG_DEVICE void run() {
    kernel.run([&] { consume(kernel.tiles()); }, [&](const Scheduler& tile) {
      if constexpr (Layout::kStoreWarp) store_tiles(*this, tile);
    });
  }

  static DG_DEVICE Columns columns_of(const Scheduler& tile) { return {tile.column, tile.columns()}; }
  DG_DEVICE u16* d() const { return reinterpret_cast<u16*>(kernel.arg.d); }
  DG_DEVICE NextTileHint hint() const { return NextTileHint(kernel.shared + Layout::kOffsetHint); }

  // A tile is stored in parts, one for each unit, if units are whole boxes and there are enough named barriers.
  enum : bool { kWholeBoxes = Mainloop::kParts == 1 || Mma::kN % Store::kBoxColumns == 0 };
  enum : u32 { kStoreParts = kStagesEarly && kWholeBoxes && kConsumers * Mainloop::kUnits <= 4 ? Mainloop::kUnits : 1 };

  // A consumer warpgroup: rows [64 * kSlices * consumer, + 64 * kSlices) of every tile.
  DG_DEVICE void consume(Scheduler tile) {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 first_row = consumer * 64 * kSlices, split = kernel.rank_k();
    float sum[kSlices][kBlockN / 2];

    const auto part = [&] {
      typename Weights::Part found{{}, kernel.order()};
#pragma unroll
      for (u32 scale = 0; scale < Columns::kScales; ++scale) found.row[scale] = columns_of(tile).scale_row(scale);
      return found;
    };
    const auto scaling = [&] {
      const u32 row = first_row + warp * 16 + lane / 4;
      if constexpr (kRowScales) {
        return Scaling(kernel.arg.scale_a, kernel.arg.scale_a_stride, kernel.m());
      } else {
        const auto& arg = kernel.arg;
        const Weights weights(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(kernel.n(), 128), lane, part());
        return Scaling(weights, kernel.shared + Layout::kOffsetRows + row * 4);
      }
    };
    Mainloop mainloop(kernel.barriers, scaling(), uniform(descriptor_low(kernel.shared + first_row * kBlockK)),
                      uniform(descriptor_low(kernel.shared + Layout::kOffsetB)), consumer, lane);
    LateScales late;
    const auto fetch_rows = [&] {
      if constexpr (kRowScales) mainloop.scaling.fetch(tile.row + first_row + warp * 16 + lane / 4);
    };
    const auto go_on = [&] {
      if constexpr (!kRowScales) mainloop.scaling.weights.go_on(part());
    };
    if (kernel.arg.early_stages == 0) wait_for_previous_kernel();
    if constexpr (!kRowScales) {
      if (tile.valid()) mainloop.scaling.weights.open();
    }
    if (kernel.arg.early_stages > 0) wait_for_previous_kernel();  // before D is overwritten
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
      const u32 mine = uniform(kernel.order().mine());
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
      if constexpr (kClusterK > 1) kernel.exchange.exchange(sum, consumer, consumer, split, thread, goes_on);
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
    if (columns.at(first) >= kernel.n()) return;
    if constexpr (Final::kScales) Final::template scale<kCount>(kernel, sum, own, kernel.m());
    if constexpr (Final::kFinishes)
      Final::template finish<kCount, kTmaStore, kRun>(kernel, sum, own, kernel.m(), Index<0>(), lane,
                                                       [&](u32 i) { return columns.at(first + i); });
  }

  // Stores all that a consumer has to store of a tile; `stage` does the same for one unit.
  DG_DEVICE void store(const Sums& sum, u32 row, const Columns& columns, u32 consumer, u32 split, u32 thread) const {
    const u32 warp = thread / 32, lane = thread % 32;
    if constexpr (!kTmaStore) {
      store_direct<kBlockN, kSlices, kClusterK>(d(), kernel.arg.d_stride, sum, row, columns, kernel.m(), kernel.n(), warp, lane, split);
    } else {
      const u32 area = kernel.shared + Areas::offset(consumer, 0);
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
      late.load(kernel.arg.scale_b, kernel.arg.scale_b_stride, kernel.n(), [&](u32 column) { return columns.at(kColumn + column + lane); });
    }
  }

  template <u32 kUnit>
  DG_DEVICE void stage(Sums& sum, const Scheduler& tile, u32 consumer, u32 thread, u32 next_stage, LateScales& late) const {
    constexpr u32 kSlice = kUnit / Mainloop::kParts, kColumn = kUnit % Mainloop::kParts * Mma::kN;
    const u32 area = kernel.shared + Areas::offset(consumer, next_stage);
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
          area, d(), kernel.arg.d_stride, tile.row + consumer * 64 * kSlices, columns_of(tile), kernel.m(), kernel.n(), thread / 32,
          thread % 32);
    }
  }
};
