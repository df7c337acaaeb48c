// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors, with operands swapped: weights (B) are the M of wgmma
// and tokens (A) its N. With few tokens no shared memory and no products are wasted. K can be split over the consumers of a CTA
// and over the CTAs of a cluster, which add their sums through distributed shared memory.
//
// Tile supplies the block sizes, Mma the wgmma and Arguments the parameters of this kernel (see kernels/sm90_fp8_swapped.cu.jinja).
#pragma once
#include "barrier.cuh"
#include "edge_boxes.cuh"
#include "epilogue.cuh"
#include "finish.cuh"
#include "fp8_mainloop.cuh"
#include "loaders.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "prologue.cuh"
#include "scheduler.cuh"
#include "split_k_exchange.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

template <class Tile, class Mma, class Arguments>
struct Fp8Swapped {
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = 64, kBlockK = 128 };
  static_assert(kBlockM % 8 == 0 && kBlockM <= 64);
  enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers, kClusterK = Tile::kClusterK };
  // Splits of a tile's K: one for each consumer of each CTA of the cluster.
  enum : u32 { kSplits = kClusterK * kConsumers };
  enum : bool { kTmaStore = Tile::kTmaStore, kClusters = false };  // no CTAs that share loads
  enum : u32 { kClusterN = 1, kTokensBox = kBlockM };

  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries.
  enum : u32 { kBytesWeights = kBlockN * kBlockK, kBytesA = kBlockM * kBlockK };

  struct Shape {
    enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers, kPartials = 2 };
    enum : u32 { kStep = kConsumers, kTurns = 1 };
    enum : u32 { kRows = kBlockN, kColumns = kBlockM, kSlices = 1 };
    enum : bool { kFresh = false, kPeeks = false };
  };
  using Scheduler = TileScheduler<kBlockM, kBlockN, 1, 1, kClusterK>;
  using Barriers = PipelineBarriers<kStages, 4, 1>;
  using Exchange = SplitKExchange<kBlockM, 1, kClusterK, kConsumers, kConsumers>;

  using Order = BlockOrder<kClusterK, kConsumers>;
  using Weights = BlockScales<1, Order>;
  using Scaling = ColumnTokens<Weights, kBlockM>;
  enum : u32 { kBytesScale = Scaling::kStageBytes };
  using Mainloop = Fp8Mainloop<Shape, Mma, Barriers, Scaling>;
  using Store = TransposedStore<kBlockM, Exchange::kOwned>;
  using Final = Epilogue<Output<kBf16>>;
  using Cursor = ProducerCursor;

  enum : u32 { kOffsetA = kStages * kBytesWeights };
  enum : u32 { kOffsetStaging = kOffsetA + kStages * kBytesA };
  enum : u32 { kOffsetSlots = kOffsetStaging + (kTmaStore ? kConsumers * Store::kBytes : 0) };
  enum : u32 { kOffsetScale = kOffsetSlots + Exchange::kBytes };
  enum : u32 { kOffsetBarriers = kOffsetScale + kStages * kBytesScale };
  enum : u32 { kSharedBytes = kOffsetBarriers + Barriers::kBytes + (kSplits > 1 ? Exchange::kBarrierBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  const Arguments& arg;
  u32 shared;
  Barriers barriers;
  Exchange exchange;

  DG_DEVICE Fp8Swapped(const Arguments& arg, u32 shared) : arg(arg), shared(shared) {
    barriers.base = shared + kOffsetBarriers;
    exchange.slots = shared + kOffsetSlots;
    exchange.barriers = shared + kOffsetBarriers + Barriers::kBytes;
  }

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }
  DG_DEVICE u32 blocks() const { return ceil_div(k(), kBlockK); }
  DG_DEVICE u32 rank_k() const { return kClusterK > 1 ? cluster_rank() : 0; }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32;
    if (threadIdx.x >= kConsumers * 128) {
      Scheduler first;  // the first tile
      if (warp == kConsumers * 4 + 3) {
        init_barriers<(kSplits > 1)>(barriers, exchange, rank_k());
      } else {
        first = Scheduler::early(arg.raster);
        if (warp == kConsumers * 4) prefetch_weights(first);
      }
      prologue_sync<kClusterK>();
      if constexpr (Tile::kProducerRegisters > 0) registers_shrink<Tile::kProducerRegisters>();
      if (warp == kConsumers * 4 && elect_one()) produce_weights(first);
      if (warp == kConsumers * 4 + 1 && elect_one()) load_tokens(*this, first);
      if (warp == kConsumers * 4 + 2 && elect_one()) load_scales(*this, first);
      __syncwarp();
    } else {
      if (threadIdx.x == 0) prefetch_maps<1>(arg, kBlockM, kBlockN);
      prologue_sync<kClusterK>();
      if constexpr (Tile::kConsumerRegisters > 0) registers_grow<Tile::kConsumerRegisters>();
      consume();
    }
  }

  // Prefetches this CTA's first blocks of B into L2. Unlike their loads, this need not wait for the previous kernel.
  DG_DEVICE void prefetch_weights(const Scheduler& first) const {
    const Order order(blocks(), rank_k(), 0);
    if (arg.early_stages < kStages && first.valid() && elect_one()) {
      const u32 count = min_of(order.length, prefetched(kBytesWeights, kClusterK > 1 || arg.early_stages > 0));
      with_map<kBlockN, false>(0, weights_loaded(first), arg.map_b[0], arg.map_b_last, [&](const TensorMap* map) {
#pragma unroll 1
        for (u32 step = 0; step < count; ++step) tma_prefetch(map, order.step_block(step) * kBlockK, first.column);
      });
    }
    __syncwarp();
  }

  DG_DEVICE Order order() const { return Order(blocks(), rank_k(), 0); }

  // Rows of B and of A that are loaded for a tile.
  DG_DEVICE u32 tokens_part() const { return 0; }
  DG_DEVICE u32 weights_loaded(const Scheduler& tile) const { return rows_loaded<kBlockN, false>(tile.column, n(), arg.last_columns); }
  DG_DEVICE u32 tokens_loaded(u32 row) const { return rows_loaded<kBlockM, false>(row, m(), arg.last_rows); }

  // Three threads, each in its own warp, load weights, tokens, and the tokens' scales into the stages in order. One thread cannot
  // issue loads as fast as narrow tiles need them. Constant weights do not wait for the previous kernel.
  DG_DEVICE void produce_weights(Scheduler tile) {
    Cursor cursor;
    const Order order(blocks(), rank_k(), 0);
    for (; tile.valid(); tile.advance()) {
      const auto load_all = [&](const TensorMap* map, auto... policy) {
        if (arg.early_stages == 0) wait_for_previous_kernel();
        barriers.fill(cursor, order.length, [&](u32 step, u32 stage) {
          tma_load(shared + stage * kBytesWeights, map, barriers.full(stage), order.step_block(step) * kBlockK,
                   tile.column, policy...);
        }, EarlyLoads<kBytesWeights, kBytesA>(arg.early_stages));
      };
      with_map<kBlockN, false>(0, weights_loaded(tile), arg.map_b[0], arg.map_b_last, [&](const TensorMap* map) {
        with_policy(arg.evict_first & kEvictB, [&](auto... policy) { load_all(map, policy...); });
      });
    }
  }

  // A consumer warpgroup: one split of K of every tile.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 group = consumer / kConsumers, turn = consumer % kConsumers;
    const u32 first_row = group * 64, split = rank_k() * kConsumers + turn;
    const u32 staging = shared + kOffsetStaging + consumer * Store::kBytes;
    const Order order(blocks(), rank_k(), turn);
    float sum[1][kBlockM / 2];

    Scheduler tile(arg.raster);
    const auto part = [&](const Scheduler& of) { return typename Weights::Part{{(of.column + first_row) / 128}, order}; };
    const Weights weights(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(n(), 128), lane, part(tile));
    Mainloop mainloop(barriers, Scaling(weights, shared + kOffsetScale + lane % 4 * 8),
                      uniform(descriptor_low(shared + first_row * kBlockK)),
                      uniform(descriptor_low(shared + kOffsetA)), consumer, lane);
    mainloop.at.stage = turn;
    if (arg.early_stages == 0) wait_for_previous_kernel();
    if (tile.valid()) mainloop.scaling.weights.open();
    if (arg.early_stages > 0) wait_for_previous_kernel();  // before D is overwritten
    while (tile.valid()) {
      mainloop.multiply(sum, uniform(order.mine()), [] {});
      const u32 row = tile.row, column = tile.column + first_row;
      tile.advance();
      if (tile.valid()) mainloop.scaling.weights.go_on(part(tile));
      const u32 active = ceil_div(min_of(kBlockM, m() - row), 8);
      if constexpr (kSplits > 1) exchange.exchange(sum, group, consumer, split, thread, tile.valid());
      const auto wanted = [&](u32 chunk) {
        return (kSplits == 1 || chunk / Exchange::kOwned == split) && chunk < active;
      };
      if constexpr (Final::kScales) Final::template scale_swapped<kBlockM>(*this, sum[0], row, m(), lane, wanted);
      if constexpr (Final::kFinishes)
        Final::template finish_swapped<kBlockM>(*this, sum[0], row, column + warp * 16 + lane / 4, m(), lane, wanted);
      if constexpr (kTmaStore) {
        __syncwarp();  // the warp has copied the previous tile
        Store::stage(staging, sum, warp, lane, wanted);
        __syncwarp();
        const u32 token = row + (kSplits == 1 ? 0 : split * Exchange::kOwned * 8);
        Store::copy(staging, arg.d, arg.d_stride, token, column, min_of(m(), row + kBlockM), n(), warp, lane);
      } else {
        store_direct_transposed<kBlockM>(arg.d, arg.d_stride, sum, row, column, m(),
                                                  min_of(n(), column + kBlockN), warp, lane, wanted);
      }
    }
  }
};
