// The 16-bit GEMM with operands swapped: weights (B) are the M of wgmma and tokens (A) its N. With few tokens no shared memory and
// no products are wasted. K can be split over the consumers of a CTA and over the CTAs of a cluster, which add their sums through
// distributed shared memory.
#pragma once
#include "gemm_kernel.cuh"
#include "b16_mainloop.cuh"
#include "swapped_output.cuh"

template <class Constants, class MmaType>
struct B16SwappedLayout {
  enum : u32 { kGrouping = kUngrouped };
  enum : bool { kMapsOfGroups = false };
  using Tile = Constants;
  using Mma = MmaType;
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = 64, kBlockK = 64, kStages = Tile::kStages, kConsumers = Tile::kConsumers };
  enum : u32 { kClusterM = 1, kClusterN = 1, kClusterK = Tile::kClusterK, kConsumersK = kConsumers };
  static_assert(kBlockM % 8 == 0 && kBlockM <= 64 && Mma::kN == kBlockM);

  using A = OperandTile<kBlockM, false, 1, false>;
  using B = OperandTile<kBlockN, Tile::kMnMajorB, 1, false>;
  using Scheduler = TileScheduler<kBlockM, kBlockN, 1, 1, kClusterK>;
  using Order = BlockOrder<kClusterK, kConsumers>;
  using Barriers = PipelineBarriers<kStages, 4, 1>;
  using Scales = NoScales;
  using Exchange = SplitKExchange<kBlockM, 1, kClusterK, kConsumers, kConsumers>;
  using Out = Output<Tile::kElement>;
  enum : bool { kStaged = Tile::kTmaStore && Tile::kElement != kF32 };  // whether tiles are staged, to be copied in 16-byte pieces
  using Store = TransposedStore<kBlockM, Exchange::kOwned, Output<Tile::kElement == kF32 ? kBf16 : Tile::kElement>>;

  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries.
  enum : u32 { kOffsetB = 0, kOffsetA = kStages * B::kBytes };
  enum : u32 { kOffsetStaging = kOffsetA + kStages * A::kBytes };
  enum : u32 { kOffsetSlots = kOffsetStaging + (kStaged ? kConsumers * Store::kBytes : 0) };
  enum : u32 { kOffsetBarriers = kOffsetSlots + Exchange::kBytes };
  enum : u32 { kSharedBytes = kOffsetBarriers + Barriers::kBytes + (kClusterK * kConsumers > 1 ? Exchange::kBarrierBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");
};

template <class Constants, class MmaType, class Arguments>
struct B16Swapped {
  using Layout = B16SwappedLayout<Constants, MmaType>;
  using Tile = Constants;
  using Mma = MmaType;
  using Kernel = GemmKernel<Layout, Arguments>;
  using Scheduler = typename Layout::Scheduler;
  using Exchange = typename Layout::Exchange;
  using Store = typename Layout::Store;
  using Ending = SwappedOutput<Layout>;
  enum : u32 { kConsumers = Layout::kConsumers, kSplits = Layout::kClusterK * kConsumers, kBlockM = Layout::kBlockM };
  struct Shape {
    enum : u32 { kStages = Layout::kStages, kStep = kConsumers, kSlices = 1 };
    enum : bool { kClears = false };
    enum : u32 { kBytesLeft = Layout::B::kBytes, kBytesRight = Layout::A::kBytes };
  };
  using Mainloop = B16Mainloop<Shape, Mma, typename Layout::Barriers>;
  using Sums = typename Mainloop::Sums;

  Kernel kernel;

  DG_DEVICE B16Swapped(const Arguments& arg, u32 shared) : kernel(arg, shared) {}

  DG_DEVICE void run() {
    kernel.run([&] { consume(); }, [](const Scheduler&) {});
  }

 private:
  // A consumer warpgroup: one split of K of every tile.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 split = kernel.rank_k() * kConsumers + consumer;
    const u32 blocks = uniform(kernel.order(consumer).mine());
    const u32 staging = kernel.shared + Layout::kOffsetStaging + consumer * Store::kBytes;
    float sum[1][kBlockM / 2];
    Mainloop mainloop(kernel.barriers, uniform(Layout::B::descriptor(kernel.shared + Layout::kOffsetB)),
                      uniform(Layout::A::descriptor(kernel.shared + Layout::kOffsetA)), lane);
    mainloop.at.stage = consumer;
    wait_for_previous_kernel();  // before D is overwritten
    for (Scheduler tile(kernel.arg.raster); tile.valid();) {
      const u32 row = tile.row, column = tile.column;
      mainloop.start(sum);
      mainloop.template resume<0>(sum, blocks, Index<0>());
      tile.advance();
      const u32 active = ceil_div(min_of(kBlockM, kernel.m() - row), 8);
      if constexpr (kSplits > 1) kernel.exchange.exchange(sum, 0, consumer, split, thread, tile.valid());
      const auto wanted = [&](u32 chunk) {
        return (kSplits == 1 || chunk / Exchange::kOwned == split) && chunk < active;
      };
      Ending::store(kernel, sum, row, column, staging, split, warp, lane, wanted);
    }
  }
};
