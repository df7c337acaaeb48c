// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors: 1 x 128 for A, 128 x 128 for B.
// Warp-specialised and persistent: a producer warpgroup fills a ring of stages by TMA; each consumer warpgroup multiplies
// its own rows of the tile, promotes, and stores through its own staging area while the producers already load the next
// tile.
//
// Tile supplies the block sizes and Mma the wgmma of this kernel (see kernels/sm90_fp8_gemm.cu.jinja).
#pragma once
#include "barrier.cuh"
#include "epilogue.cuh"
#include "fp8_gemm_arguments.cuh"
#include "fp8_mainloop.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "reduction.cuh"
#include "scheduler.cuh"
#include "stream.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

template <class Tile, class Mma>
struct Fp8Gemm {
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 128 };
  enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers };
  enum : u32 { kClusterM = Tile::kClusterM, kClusterN = Tile::kClusterN };
  enum : u32 { kClusterK = Tile::kClusterK, kConsumersK = Tile::kConsumersK };
  enum : u32 { kClusterSize = kClusterM * kClusterN * kClusterK };
  // Shares of K that a tile is split into: over the CTAs of a cluster, and there over consumers.
  enum : u32 { kShares = kClusterK * kConsumersK };
  static_assert(kClusterK == 1 || kClusterM * kClusterN == 1);
  enum : bool { kTmaStore = Tile::kTmaStore };

  // Consumers that share K are a group. One consumer's share of a tile, in m64 slices of rows.
  enum : u32 { kGroups = kConsumers / kConsumersK };
  enum : u32 { kSlices = kBlockM * kConsumersK / (64 * kConsumers) };
  static_assert(kSlices * 64 * kConsumers == kBlockM * kConsumersK);
  static_assert(kShares == 1 || kBlockM == 64);
  static_assert(Tile::kTurns == 1 || (Tile::kTurns == kConsumers && kShares == 1), "turns need as many units of each");
  // How many rows of B's scales a tile can touch.
  enum : u32 { kScaleRows = 128 % kBlockN == 0 ? 1 : 2 };

  using Store = TmaStore<kBlockN, kSlices>;
  // A config that deals out blocks of K needs neither clusters nor consumers that share K.
  enum : bool { kStreams = Tile::kStreams };
  static_assert(!kStreams || kClusterSize * kConsumersK == 1);
  using Workspace = StreamWorkspace<kStreams ? kBlockM : 64, kStreams ? kBlockN : 32, kSlices>;
  // Whether the tensor cores get the next tile's first product before this one's sums are stored. Not where a share of K
  // may be empty, nor where ptxas would serialise products: two sets of partial sums and pieces of any length.
  enum : bool { kStartsEarly = kShares == 1 && (!kStreams || Tile::kPartials == 1) };
  using Whole = TileScheduler<kBlockM, kBlockN, kClusterM, kClusterN, kClusterK>;
  using Scheduler = typename Either<kStreams, StreamScheduler<kBlockM, kBlockN, Workspace::kSteps>, Whole>::Type;
  using Barriers = PipelineBarriers<kStages, kConsumers / kConsumersK * 4, kClusterM * kClusterN>;
  using Reduction = ShareReduction<kBlockN / 2, kShares, kClusterSize>;
  using Cursor = PipelineCursor<kStages>;
  struct Shape {
    enum : u32 { kStages = Tile::kStages, kStageBlocks = 1, kStep = kConsumersK, kPartials = Tile::kPartials };
    enum : u32 { kRows = kBlockM, kColumns = kBlockN, kSlices = Fp8Gemm::kSlices };
    enum : u32 { kTurns = Tile::kTurns };
  };
  using Order = BlockOrder<1, kClusterK, kConsumersK>;
  using Weights = BlockScales<kScaleRows, Order>;
  using Scaling = RowTokens<Weights, kSlices, kScaleRows, kBlockN, Tile::kScaleGroup, kBlockM * 4>;
  using Mainloop = Fp8Mainloop<Shape, Mma, Barriers, Scaling>;

  // Shared memory, in this order; everything that is swizzled starts on a 1024-byte boundary.
  enum : u32 { kBytesA = kBlockM * kBlockK, kBytesB = kBlockN * kBlockK, kBytesScale = kBlockM * 4 };
  enum : u32 { kOffsetB = kStages * kBytesA };
  enum : u32 { kOffsetStaging = kOffsetB + kStages * kBytesB };
  enum : u32 { kOffsetScale = kOffsetStaging + (kTmaStore ? kGroups * Store::kBytes : 0) };
  enum : u32 { kOffsetSlots = kOffsetScale + kStages * kBytesScale };
  enum : u32 { kOffsetBarriers = kOffsetSlots + Reduction::kBytes };
  enum : u32 { kSharedBytes = kOffsetBarriers + Barriers::kBytes + (kShares > 1 ? Reduction::kBarrierBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  const Fp8GemmArguments& arg;
  const StreamArguments& stream;
  u32 shared;
  Barriers barriers;
  Reduction reduction;

  DG_DEVICE Fp8Gemm(const Fp8GemmArguments& arg, const StreamArguments& stream, u32 shared)
      : arg(arg), stream(stream), shared(shared) {
    barriers.base = shared + kOffsetBarriers;
    reduction.slots = shared + kOffsetSlots;
    reduction.barrier = shared + kOffsetBarriers + Barriers::kBytes;
  }

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }
  DG_DEVICE u32 blocks() const { return ceil_div(k(), kBlockK); }
  DG_DEVICE u32 rank_k() const { return kClusterK > 1 ? cluster_rank() : 0; }
  DG_DEVICE Workspace workspace() const { return {stream.flags, stream.slots}; }
  using Walk = TileWalk<Scheduler, Order>;

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32;
    if (warp == kConsumers * 4) {
      if (elect_one()) {
        tma_prefetch_map(arg.map_a);
        tma_prefetch_map(arg.map_b);
        tma_prefetch_map(arg.map_scale_a);
        if constexpr (kTmaStore) tma_prefetch_map(arg.map_d);
        barriers.init();
        if constexpr (kShares > 1) reduction.init();
        barrier_init_fence();
      }
      __syncwarp();
    }
    if constexpr (kClusterSize > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    if (threadIdx.x >= kConsumers * 128) {
      if constexpr (Tile::kProducerRegisters > 0) registers_shrink<Tile::kProducerRegisters>();
      if (warp == kConsumers * 4 && elect_one()) produce_weights();
      if (warp == kConsumers * 4 + 1 && elect_one()) produce_tokens();
      if (warp == kConsumers * 4 + 2 && elect_one()) produce_scales();
      if ((kTmaStore || kStreams) && warp == kConsumers * 4 + 3) put_away_tiles();
      __syncwarp();
    } else {
      if constexpr (Tile::kConsumerRegisters > 0) registers_grow<Tile::kConsumerRegisters>();
      consume();
    }
    // No CTA may leave while another of its cluster can still arrive at its barriers.
    if constexpr (kClusterSize > 1) cluster_sync();
  }

  DG_DEVICE Scheduler schedule() const {
    if constexpr (kStreams) {
      return Scheduler(stream, blocks(), arg.band);
    } else {
      return Scheduler(m(), n(), arg.band);
    }
  }

  DG_DEVICE Walk walk() const {
    const Scheduler tile = schedule();
    if constexpr (kStreams) {
      return Walk(tile, tile.order());
    } else {
      return Walk(tile, Order(blocks(), rank_k(), 0));
    }
  }

  DG_DEVICE void load_weights(const Walk& at, u32 stage) {
    constexpr u16 kAll = (1u << kClusterM * kClusterN) - 1;
    const u32 full = barriers.full(stage), b = shared + kOffsetB + stage * kBytesB;
    barrier_arrive_expect(full, kBytesB + arg.box_rows * (kBlockK + 4));
    if constexpr (kClusterM > 1) {
      const u32 part = cluster_rank() * (kBlockN / kClusterM);
      tma_load_multicast(b + part * kBlockK, arg.map_b, full, at.block() * kBlockK, at.tile.column + part, kAll);
    } else {
      if (arg.b_read_once) {
        tma_load(b, arg.map_b, full, at.block() * kBlockK, at.tile.column, evict_first());
      } else {
        tma_load(b, arg.map_b, full, at.block() * kBlockK, at.tile.column);
      }
    }
  }

  DG_DEVICE void load_tokens(const Walk& at, u32 stage) {
    constexpr u16 kAll = (1u << kClusterM * kClusterN) - 1;
    const u32 full = barriers.full(stage), a = shared + stage * kBytesA;
    if constexpr (kClusterN > 1) {
      const u32 part = cluster_rank() * (kBlockM / kClusterN);
      tma_load_multicast(a + part * kBlockK, arg.map_a, full, at.block() * kBlockK, at.tile.row + part, kAll);
    } else {
      tma_load(a, arg.map_a, full, at.block() * kBlockK, at.tile.row);
    }
  }

  // Three threads, each in a warp of its own, load the stages of every tile in order: B, A, and A's scales. One alone
  // cannot issue loads as fast as narrow tiles need them. Constant weights do not wait for the previous kernel.
  DG_DEVICE void produce_weights() {
    if (!arg.constant_b) wait_for_previous_kernel();
    Cursor cursor;
    for (Walk at = walk(); at.valid(); at.advance(), cursor.advance()) {
      const u32 stage = cursor.stage;
      barrier_wait(barriers.empty(stage), cursor.parity ^ 1);
      if constexpr (kStreams) {
        if (at.gathers()) {
          const u32 steps = Workspace::kSteps, part = at.gathered();
          const u32 donor = at.tile.donor(part / steps + 1);
          workspace().load(shared + stage * kBytesA, barriers.full(stage), donor, part % steps);
          continue;
        }
      }
      load_weights(at, stage);
    }
  }

  DG_DEVICE void produce_tokens() {
    wait_for_previous_kernel();
    allow_next_kernel();
    Cursor cursor;
    for (Walk at = walk(); at.valid(); at.advance(), cursor.advance()) {
      barrier_wait(barriers.empty(cursor.stage), cursor.parity ^ 1);
      if (!at.gathers()) load_tokens(at, cursor.stage);
    }
  }

  DG_DEVICE void produce_scales() {
    wait_for_previous_kernel();
    Cursor cursor;
    for (Walk at = walk(); at.valid(); at.advance(), cursor.advance()) {
      const u32 stage = cursor.stage;
      barrier_wait(barriers.empty(stage), cursor.parity ^ 1);
      if (!at.gathers())
        tma_load(shared + kOffsetScale + stage * kBytesScale, arg.map_scale_a, barriers.full(stage), at.tile.row,
                 at.block());
    }
  }

  // A group's staging area. Its consumer and the warp that stores meet when it is free, and when it is full: at named
  // barriers, since ptxas does not follow products in flight past a loop that waits for an mbarrier.
  DG_DEVICE u32 staging(u32 group) const { return shared + kOffsetStaging + group * Store::kBytes; }
  static DG_DEVICE u32 area_free(u32 group) { return 4 + group; }
  static DG_DEVICE u32 area_full(u32 group) { return 8 + group; }
  enum : u32 { kMeeting = 128 + 32 };  // threads

  // One warp puts the tiles away, so that consumers need not wait: stores them, a few boxes at a time, since loads wait
  // behind stores, or tells their owner where the sums are.
  DG_DEVICE void put_away_tiles() {
    if (rank_k() > 0) return;  // the sums are in the first CTA of a cluster along K
    wait_for_previous_kernel();
    const u32 lane = threadIdx.x % 32;
    for (Scheduler tile = schedule(); tile.valid(); tile.advance()) {
      bool owned = true;
      if constexpr (kStreams) owned = tile.owned();
      if (kTmaStore || !owned) {
        for (u32 group = 0; group < kGroups; ++group) named_barrier_arrive(area_free(group), kMeeting);
#pragma unroll 1  // few registers
        for (u32 group = 0; group < kGroups; ++group) {
          named_barrier_sync(area_full(group), kMeeting);
          if (lane == 0 && owned)
            Store::store(arg.map_d, staging(group), tile.row + group * 64 * kSlices, tile.column, m(), n());
          __syncwarp();
        }
      }
      if constexpr (kStreams) {
        if (lane == 0 && !owned) workspace().announce();
        __syncwarp();
      }
    }
  }

  // One warpgroup: rows [64 * kSlices * its number, + 64 * kSlices) of every tile, or a share of the tile's K.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 first_row = consumer / kConsumersK * 64 * kSlices, turn = consumer % kConsumersK;
    const u32 share = rank_k() * kConsumersK + turn;
    Scheduler tile = schedule();
    Order order(blocks(), rank_k(), turn);
    if constexpr (kStreams) order = tile.order();
    float sum[kSlices][kBlockN / 2];

    const Weights weights(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(n(), 128), lane, order);
    Mainloop mainloop(barriers, Scaling(weights, shared + kOffsetScale + (first_row + warp * 16 + lane / 4) * 4),
                      uniform(descriptor_low(shared + first_row * kBlockK)), uniform(descriptor_low(shared + kOffsetB)),
                      consumer, lane);
    mainloop.at.stage = turn;
    if (!arg.constant_b) wait_for_previous_kernel();
    if (tile.valid()) mainloop.scaling.fetch(tile.column);
    if (arg.constant_b) wait_for_previous_kernel();  // before D is overwritten
    mainloop.turns.begin();
    if constexpr (kStartsEarly) {
      if (tile.valid()) mainloop.start();
    }
    while (tile.valid()) {
      if constexpr (kStartsEarly) {
        mainloop.resume(sum, uniform(order.mine()), tile.column);
      } else {
        mainloop.multiply(sum, uniform(order.mine()), tile.column);
      }

      const Scheduler done = tile;
      const u32 row = done.row + first_row, column = done.column;
      tile.advance();
      if constexpr (kStreams) mainloop.scaling.weights.order = order = tile.order();
      if (tile.valid()) {
        mainloop.scaling.fetch(tile.column);
        if constexpr (kStartsEarly) mainloop.start();  // other CTAs' sums may come first, but only for the last tile
      }
      if constexpr (kStreams) {
        if (done.owned()) {
          workspace().add(sum, done.donors, shared, consumer, thread, barriers, mainloop.at);
          store(sum, row, column, consumer, thread);
        } else {
          workspace().give(sum, consumer, thread);
          named_barrier_sync(area_free(consumer), kMeeting);  // or the tile before might not be put away yet
          named_barrier_arrive(area_full(consumer), kMeeting);
        }
      } else if constexpr (kShares > 1) {
        const u32 own_row = row + warp * 16 + lane / 4;
        const bool wanted[2] = {own_row < m(), own_row + 8 < m()};
        if (share > 0) {
          reduction.send(sum[0], share, thread, wanted);
        } else {
          reduction.receive(sum[0], thread, wanted);
          store(sum, row, column, consumer, thread);
        }
      } else {
        store(sum, row, column, consumer, thread);
      }
    }
    // For ptxas: with nothing here it takes the way out of the loop for one on which products are in flight, and
    // serialises them all.
    named_barrier_sync(1 + consumer, 128);
    mainloop.turns.end();
  }

  DG_DEVICE void store(const float (&sum)[kSlices][kBlockN / 2], u32 row, u32 column, u32 consumer, u32 thread) const {
    const u32 warp = thread / 32, lane = thread % 32;
    if constexpr (kTmaStore) {
      const u32 group = consumer / kConsumersK;
      named_barrier_sync(area_free(group), kMeeting);
      Store::stage(staging(group), sum, warp, lane);
      fence_shared_to_tma();
      named_barrier_arrive(area_full(group), kMeeting);
    } else {
      store_direct<kBlockN, kSlices>(arg.d, arg.d_stride, sum, row, column, m(), n(), warp, lane);
    }
  }
};
