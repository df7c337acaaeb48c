// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors, operands swapped: the weights' rows are the
// tensor cores' M, tokens their N, so that few tokens waste neither shared memory nor products. K can be split over
// consumers of a CTA and over CTAs of a cluster, which exchange their sums through distributed shared memory.
#pragma once
#include "barrier.cuh"
#include "epilogue.cuh"
#include "fp8_gemm_arguments.cuh"
#include "fp8_mainloop.cuh"
#include "pipeline.cuh"
#include "reduction.cuh"
#include "scheduler.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

template <class Tile, class Mma>
struct Fp8Swapped {
  static constexpr u32 kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 128;
  static constexpr u32 kStages = Tile::kStages, kConsumers = Tile::kConsumers;
  static constexpr u32 kClusterK = Tile::kClusterK, kConsumersK = Tile::kConsumersK;
  // Shares of K that a tile is split into: over the CTAs of a cluster, and there over consumers.
  static constexpr u32 kShares = kClusterK * kConsumersK;
  static constexpr bool kTmaStore = Tile::kTmaStore;

  // Consumers of a CTA that share K are a group; groups share the tile's rows, in m64 slices.
  static constexpr u32 kGroups = kConsumers / kConsumersK, kSlices = kBlockN / (64 * kGroups);
  static_assert(kSlices * 64 * kGroups == kBlockN && kGroups * kConsumersK == kConsumers);
  static_assert(kSlices == 1 || kSlices == 2, "rows of one consumer must share a scale");

  // Shared memory, in this order; everything that is swizzled starts on a 1024-byte boundary.
  static constexpr u32 kBytesWeights = kBlockN * kBlockK, kBytesTokens = kBlockM * kBlockK;
  static constexpr u32 kBytesScale = ceil_div(kBlockM * 4, 128) * 128;  // TMA writes to 128-byte boundaries

  struct Shape {
    static constexpr u32 kStages = Tile::kStages, kStep = kConsumersK, kPartials = Tile::kPartials;
    static constexpr u32 kRows = kBlockN, kColumns = kBlockM, kSlices = Fp8Swapped::kSlices;
  };
  using Scheduler = TileScheduler<kBlockM, kBlockN, 1, 1, kClusterK>;
  using Barriers = PipelineBarriers<kStages, kGroups * 4, 1>;
  using Exchange = ShareExchange<kBlockM, kSlices, kClusterK, kConsumersK, kConsumers>;
  using Scaling = ColumnTokens<kBlockM, Tile::kScalesHeld, kBytesScale>;
  using Mainloop = Fp8Mainloop<Shape, Mma, Barriers, Scaling>;
  using Store = TransposedTmaStore<kBlockM, kSlices, Exchange::kOwned, Tile::kBoxChunks>;
  using Cursor = PipelineCursor<kStages>;

  static constexpr u32 kOffsetTokens = kStages * kBytesWeights;
  static constexpr u32 kOffsetStaging = kOffsetTokens + kStages * kBytesTokens;
  static constexpr u32 kOffsetSlots = kOffsetStaging + (kTmaStore ? kConsumers * Store::kBytes : 0);
  static constexpr u32 kOffsetScale = kOffsetSlots + Exchange::kBytes;
  static constexpr u32 kOffsetBarriers = kOffsetScale + kStages * kBytesScale;
  static constexpr u32 kSharedBytes = kOffsetBarriers + Barriers::kBytes + (kShares > 1 ? Exchange::kBarrierBytes : 0);
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  const Fp8GemmArguments& arg;
  u32 shared;
  Barriers barriers;
  Exchange exchange;

  DG_DEVICE Fp8Swapped(const Fp8GemmArguments& arg, u32 shared) : arg(arg), shared(shared) {
    barriers.base = shared + kOffsetBarriers;
    exchange.slots = shared + kOffsetSlots;
    exchange.barriers = shared + kOffsetBarriers + Barriers::kBytes;
  }

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }
  DG_DEVICE u32 blocks() const { return ceil_div(k(), kBlockK); }
  DG_DEVICE u32 rank_k() const { return kClusterK > 1 ? cluster_rank() : 0; }
  // The first of a CTA's blocks of K, and the end of the one's before it. CTAs differ by one block at most.
  DG_DEVICE u32 first_block(u32 rank) const { return blocks() * rank / kClusterK; }

  // The producer's walk over the blocks of K of all its tiles.
  struct Walk {
    Scheduler tile;
    u32 begin, end, block;

    DG_DEVICE bool valid() const { return begin < end && tile.valid(); }
    DG_DEVICE void advance() {
      if (++block == end) {
        tile.advance();
        block = begin;
      }
    }
  };

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32;
    const bool producer = warp == kConsumers * 4 && elect_one();
    u32 early = 0;
    if (producer) {
      tma_prefetch_map(arg.map_b);
      tma_prefetch_map(arg.map_a);
      tma_prefetch_map(arg.map_scale_a);
      if constexpr (kTmaStore) tma_prefetch_map(arg.map_d);
      barriers.init();
      if constexpr (kShares > 1) exchange.init(rank_k());
      barrier_init_fence();
      // Nobody waits for these barriers yet, so that weights that are constant can be on their way at once.
      if (arg.constant_b) early = fetch_early();
    }
    __syncwarp();
    if constexpr (kClusterK > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }

    if (threadIdx.x >= kConsumers * 128) {
      if constexpr (Tile::kProducerRegisters > 0) registers_shrink<Tile::kProducerRegisters>();
      if (producer) produce(early);
      __syncwarp();
    } else {
      if constexpr (Tile::kConsumerRegisters > 0) registers_grow<Tile::kConsumerRegisters>();
      consume();
    }
    // No CTA may leave while another of its cluster can still reach into its shared memory.
    if constexpr (kClusterK > 1) cluster_sync();
  }

  DG_DEVICE Walk walk() const {
    // Consumers that take blocks in turn all take as many: what is missing is loaded from past the end of K, as zeros.
    const u32 begin = first_block(rank_k()), end = first_block(rank_k() + 1);
    return Walk{Scheduler(m(), n(), arg.band), begin, begin + ceil_div(end - begin, kConsumersK) * kConsumersK, begin};
  }

  // Where block `block` of this CTA's share lies: a share that was rounded up ends past the end of K, not in the next.
  DG_DEVICE u32 place(u32 block) const {
    return kConsumersK == 1 || block < first_block(rank_k() + 1) ? block : blocks();
  }

  DG_DEVICE void load_weights(const Walk& at, u32 stage, u64 policy) {
    const u32 full = barriers.full(stage);
    barrier_arrive_expect(full, kBytesWeights + arg.box_rows * (kBlockK + 4));
    tma_load(shared + stage * kBytesWeights, arg.map_b, full, place(at.block) * kBlockK, at.tile.column, policy);
  }

  // Weights for a round of all stages, before the previous kernel's end: only what that kernel does not write.
  DG_DEVICE u32 fetch_early() {
    const u64 policy = cache_policy(arg.b_read_once);
    u32 stage = 0;
    for (Walk at = walk(); stage < kStages && at.valid(); at.advance()) load_weights(at, stage++, policy);
    return stage;
  }

  // One thread: loads the stages of every tile in order.
  DG_DEVICE void produce(u32 early) {
    const u64 policy = cache_policy(arg.b_read_once);
    wait_for_previous_kernel();
    allow_next_kernel();
    Cursor cursor;
    u32 loaded = 0;
    for (Walk at = walk(); at.valid(); at.advance(), cursor.advance()) {
      const u32 stage = cursor.stage, full = barriers.full(stage);
      if (loaded < early) {
        ++loaded;
      } else {
        barrier_wait(barriers.empty(stage), cursor.parity ^ 1);
        load_weights(at, stage, policy);
      }
      tma_load(shared + kOffsetTokens + stage * kBytesTokens, arg.map_a, full, place(at.block) * kBlockK, at.tile.row);
      tma_load(shared + kOffsetScale + stage * kBytesScale, arg.map_scale_a, full, at.tile.row, place(at.block));
    }
  }

  // One warpgroup: rows [64 * kSlices * its group, + 64 * kSlices) of every tile's weights, and a share of K.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 group = consumer / kConsumersK, turn = consumer % kConsumersK;
    const u32 first_row = group * 64 * kSlices, share = rank_k() * kConsumersK + turn;
    const u32 staging = shared + kOffsetStaging + consumer * Store::kBytes;
    // Blocks of K of this CTA. This consumer takes every kConsumersK-th from its turn on, those past the end included.
    const u32 begin = first_block(rank_k()), count = first_block(rank_k() + 1) - begin;
    const u32 mine = ceil_div(count, kConsumersK), real = (count + kConsumersK - 1 - turn) / kConsumersK;
    float sum[kSlices][kBlockM / 2];

    const BlockScales<1> weights(arg.scale_b + (begin + turn) * arg.scale_b_stride_k, arg.scale_b_stride_n,
                                 arg.scale_b_stride_k * kConsumersK, ceil_div(n(), 128), real, lane);
    Mainloop mainloop(barriers, Scaling(weights, shared + kOffsetScale + lane % 4 * 8),
                      uniform(descriptor_low(shared + first_row * kBlockK)),
                      uniform(descriptor_low(shared + kOffsetTokens)), lane);
    Scheduler tile(m(), n(), arg.band);
    mainloop.at.stage = turn;
    if (!arg.constant_b) wait_for_previous_kernel();
    if (tile.valid()) mainloop.scaling.fetch(tile.column + first_row);
    if (arg.constant_b) wait_for_previous_kernel();  // before D is overwritten
    while (tile.valid()) {
#pragma unroll
      for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (u32 i = 0; i < kBlockM / 2; ++i) sum[slice][i] = 0.0f;
      mainloop.multiply(sum, mine, 0);

      const u32 row = tile.row, column = tile.column + first_row;
      tile.advance();
      if (tile.valid()) mainloop.scaling.fetch(tile.column + first_row);
      const u32 active = ceil_div(min_of(kBlockM, m() - row), 8);
      if constexpr (kShares > 1) exchange.exchange(sum, group, consumer, share, thread);
      const auto wanted = [&](u32 chunk) {
        return (kShares == 1 || chunk / Exchange::kOwned == share) && chunk < active;
      };
      if constexpr (kTmaStore) {
        // The staging area is free once the stores of the tile before have been read out of it.
        if (thread == 0) tma_store_wait_read();
        named_barrier_sync(1 + consumer, 128);
        Store::stage(staging, sum, warp, lane, wanted);
        fence_shared_to_tma();
        named_barrier_sync(1 + consumer, 128);
        const u32 token = row + (kShares == 1 ? 0 : share * Exchange::kOwned * 8);
        if (thread == 0) Store::store(arg.map_d, staging, token, column, min_of(m(), row + kBlockM), n());
      } else {
        store_direct_transposed<kBlockM, kSlices>(arg.d, arg.d_stride, sum, row, column, m(), n(), warp, lane, wanted);
      }
    }
    if constexpr (kTmaStore) {
      if (thread == 0) tma_store_wait_read();
    }
  }
};
