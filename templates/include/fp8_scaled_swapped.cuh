// The FP8 products with operands swapped, for few tokens: weights (B) are the M of wgmma and tokens (A) its N. No shared memory and no
// products are wasted. With 1D2D scales or scales of whole rows; K can be split over the consumers of a CTA and over the CTAs of a
// cluster, which add their sums through distributed shared memory. With 1D2D it may be a batch of products.
//
// With kEdges the scales of A have edge boxes, and constant scales of B are loaded before the previous kernel has ended.
#pragma once
#include "fp8_mainloop.cuh"
#include "gemm_kernel.cuh"
#include "scaling.cuh"
#include "swapped_output.cuh"
#include "tile_scales.cuh"

template <class Constants, class MmaType, bool kEdges>
struct Fp8ScaledSwappedLayout {
  using Tile = Constants;
  enum : u32 { kGrouping = Tile::kGrouping };
  enum : bool { kMapsOfGroups = false };
  using Mma = MmaType;
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = 64, kBlockK = 128, kStages = Tile::kStages, kConsumers = Tile::kConsumers };
  enum : u32 { kClusterM = 1, kClusterN = 1, kClusterK = Tile::kClusterK, kConsumersK = kConsumers };
  enum : u32 { kScaling = Tile::kScaling };
  static_assert(kBlockM % 8 == 0 && kBlockM <= 64 && Mma::kN == kBlockM && kScaling != k1D1D);
  enum : bool { kClusters = false };  // no CTAs that share loads
  enum : u32 { kStagesLent = 0 };

  using A = OperandTile<kBlockM, false, 1, false, 1>;
  using B = OperandTile<kBlockN, false, 1, false, 1>;
  using Scheduler = TileScheduler<kBlockM, kBlockN, 1, 1, kClusterK, kGrouping == kBatched>;
  using Order = BlockOrder<kClusterK, kConsumers>;
  using Barriers = PipelineBarriers<kStages, 4, 1>;
  using Exchange = SplitKExchange<kBlockM, 1, kClusterK, kConsumers, kConsumers>;
  using Scales = Choice<kEdges, EdgeScales<Fp8ScaledSwappedLayout>, TileScales<Fp8ScaledSwappedLayout>>;
  using Out = Output<Tile::kElement>;
  enum : bool { kStaged = Tile::kTmaStore && Tile::kElement != kF32 };
  using Store = TransposedStore<kBlockM, Exchange::kOwned, Output<Tile::kElement == kF32 ? kBf16 : Tile::kElement>>;

  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries, scales on TMA's of 128.
  enum : u32 { kRowBytes = kScaling == kRowwise ? 0 : ceil_div(kBlockM * 4, 128) * 128, kColumnBytes = 0 };
  enum : u32 { kOffsetB = 0, kOffsetA = kStages * B::kBytes };
  enum : u32 { kOffsetStaging = kOffsetA + kStages * A::kBytes };
  enum : u32 { kOffsetSlots = kOffsetStaging + (kStaged ? kConsumers * Store::kBytes : 0) };
  enum : u32 { kOffsetRows = kOffsetSlots + Exchange::kBytes, kOffsetColumns = kOffsetRows + kStages * kRowBytes };
  enum : u32 { kOffsetBarriers = kOffsetColumns };
  enum : u32 { kSharedBytes = kOffsetBarriers + Barriers::kBytes + (kClusterK * kConsumers > 1 ? Exchange::kBarrierBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");
};

template <class Constants, class MmaType, class Arguments, bool kEdges = false>
struct Fp8ScaledSwapped {
  using Layout = Fp8ScaledSwappedLayout<Constants, MmaType, kEdges>;
  using Tile = Constants;
  using Mma = MmaType;
  using Kernel = GemmKernel<Layout, Arguments>;
  using Scheduler = typename Layout::Scheduler;
  using Exchange = typename Layout::Exchange;
  using Ending = SwappedOutput<Layout>;
  enum : u32 { kConsumers = Layout::kConsumers, kSplits = Layout::kClusterK * kConsumers, kBlockM = Layout::kBlockM };
  enum : u32 { kScaling = Layout::kScaling };
  struct Shape {
    enum : u32 { kStages = Layout::kStages, kConsumers = Layout::kConsumers, kPartials = 2 };
    enum : u32 { kStep = kConsumers, kTurns = 1, kInTurn = 1, kRows = 64, kColumns = kBlockM, kSlices = 1 };
    enum : bool { kFresh = false, kPeeks = false };
  };
  using Weights = BlockScales<1, typename Layout::Order>;

  template <u32 kKind, class = void>
  struct ScalingOf {
    using Type = TokenScales<kBlockM>;
  };
  template <class T>
  struct ScalingOf<k1D2D, T> {
    using Type = ColumnTokens<Weights, kBlockM>;
    static_assert(Type::kStageBytes == Layout::kRowBytes);
  };
  using Scaling = typename ScalingOf<kScaling>::Type;
  using Mainloop = Fp8Mainloop<Shape, Mma, typename Layout::Barriers, Scaling>;
  using Sums = typename Mainloop::Sums;

  Kernel kernel;

  DG_DEVICE Fp8ScaledSwapped(const Arguments& arg, u32 shared) : kernel(arg, shared) {}

  DG_DEVICE void run() {
    kernel.run([&] { consume(); }, [](const Scheduler&) {});
  }

 private:
  DG_DEVICE typename Weights::Part part(const Scheduler& tile, u32 turn) const {
    return {{tile.column / 128}, kernel.order(turn)};
  }

  DG_DEVICE Scaling scaling(const Scheduler& tile, u32 turn, u32 lane) const {
    if constexpr (kScaling == k1D2D) {
      const auto& arg = kernel.arg;
      return Scaling(Weights(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(kernel.n(), 128), lane,
                             part(tile, turn)), kernel.shared + Layout::kOffsetRows + lane % 4 * 8);
    } else {
      return Scaling(kernel.arg.scale_a, kernel.arg.scale_a_stride, kernel.m());
    }
  }

  // Starts loading the scales that promotion needs from a tile's first block on and that no stage brings.
  DG_DEVICE void fetch(Scaling& scaling, const Scheduler& tile, u32 turn, u32 lane) const {
    if (!tile.valid()) return;
    if constexpr (kScaling == k1D2D) {
      if constexpr (Kernel::kBatched) scaling.weights.base = kernel.arg.scale_b + tile.group * kernel.arg.scale_b_stride_g;
      scaling.weights.go_on(part(tile, turn));
    } else {
      scaling.fetch(tile.row + lane % 4 * 2);
    }
  }

  // A consumer warpgroup: one split of K of every tile.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 split = kernel.rank_k() * kConsumers + consumer;
    // With edges the number of blocks is computed for each tile: with one that was kept, loops over blocks of 8 tokens computed where a
    // page ends in every block.
    const auto blocks = [&] { return uniform(kernel.order(consumer).mine()); };
    const u32 kept = kEdges ? 0 : blocks();
    const u32 staging = kernel.shared + Layout::kOffsetStaging + consumer * Layout::Store::kBytes;
    float sum[1][kBlockM / 2];
    Scheduler tile(kernel.arg.raster);
    Mainloop mainloop(kernel.barriers, scaling(tile, consumer, lane), uniform(descriptor_low(kernel.shared + Layout::kOffsetB)),
                      uniform(descriptor_low(kernel.shared + Layout::kOffsetA)), consumer, lane);
    mainloop.at.stage = consumer;
    const bool early = kEdges && kernel.arg.early_stages > 0;
    if (!early) wait_for_previous_kernel();  // before scales and C are read, and D is overwritten
    fetch(mainloop.scaling, tile, consumer, lane);
    if (early) wait_for_previous_kernel();
    while (tile.valid()) {
      mainloop.multiply(sum, kEdges ? blocks() : kept, [] {});
      const u32 row = tile.row, column = tile.column;
      u32 matrix = 0;
      if constexpr (Kernel::kBatched) matrix = tile.group;
      tile.advance();
      fetch(mainloop.scaling, tile, consumer, lane);
      const u32 active = ceil_div(min_of(kBlockM, kernel.m() - row), 8);
      if constexpr (kSplits > 1) kernel.exchange.exchange(sum, 0, consumer, split, thread, tile.valid());
      const auto wanted = [&](u32 chunk) {
        return (kSplits == 1 || chunk / Exchange::kOwned == split) && chunk < active;
      };
      if constexpr (kScaling == kRowwise) scale(sum, column + warp * 16 + lane / 4, wanted);
      Ending::store(kernel, sum, row, column, staging, split, warp, lane, wanted, matrix);
    }
  }

  // Multiplies by the scales of weights; a thread has two of them.
  template <class Wanted>
  DG_DEVICE void scale(Sums& sum, u32 weight, const Wanted& wanted) const {
    const auto& arg = kernel.arg;
    const float low = scale_of(arg.scale_b, arg.scale_b_stride, weight, kernel.n());
    const float high = scale_of(arg.scale_b, arg.scale_b_stride, weight + 8, kernel.n());
#pragma unroll
    for (u32 i = 0; i < kBlockM / 2; ++i)
      if (wanted(i / 4)) sum[0][i] *= i & 2 ? high : low;
  }
};
