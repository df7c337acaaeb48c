// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors: 1 x 128 for A, 128 x 128 for B.
// Warp-specialised and persistent: a producer warp fills a ring of stages by TMA; each consumer warpgroup multiplies its
// own rows of the tile, promotes, and stores through its own staging area while the producer already loads the next
// tile.
//
// Tile supplies the block sizes and Mma the wgmma of this kernel (see kernels/fp8_gemm.cu.jinja).
#pragma once
#include "barrier.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "promotion.cuh"
#include "scheduler.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

struct Fp8GemmArguments {
  const TensorMap *map_a, *map_b, *map_scale_a, *map_d;
  const float* scale_b;
  i64 scale_b_stride_n, scale_b_stride_k;
  u16* d;
  i64 d_stride;
  u32 m, n, k;
  u32 box_rows;  // rows of A, and of its scales, that one load brings: fewer than kBlockM when m is small
  u32 band;      // see TileScheduler
};

template <class Tile, class Mma>
struct Fp8Gemm {
  static constexpr u32 kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 128;
  static constexpr u32 kStages = Tile::kStages, kConsumers = Tile::kConsumers;
  static constexpr u32 kClusterM = Tile::kClusterM, kClusterN = Tile::kClusterN;
  static constexpr u32 kClusterSize = kClusterM * kClusterN;
  static constexpr bool kTmaStore = Tile::kTmaStore;

  // One consumer's share: kSlices m64 slices of rows, each covered by kParts instructions of Mma::kN columns.
  static constexpr u32 kSlices = kBlockM / (64 * kConsumers);
  static constexpr u32 kParts = kBlockN / Mma::kN;
  // K blocks whose partial sums are in flight together, so that short instructions hide each other's latency.
  static constexpr u32 kDepth = Tile::kDepth;
  static_assert(kSlices * 64 * kConsumers == kBlockM && kParts * Mma::kN == kBlockN);
  static_assert(kDepth == 1 || kSlices * kParts == 1);

  // Width of the column groups that lie in one 128-column block of B's scales, and how many blocks a tile can touch.
  static constexpr u32 kGroup = Tile::kScaleGroup;
  static constexpr u32 kScaleRows = 128 % kBlockN == 0 ? 1 : 2;

  using Store = TmaStore<kBlockN, kSlices>;
  using Scheduler = TileScheduler<kBlockM, kBlockN, kClusterM, kClusterN>;
  using Barriers = PipelineBarriers<kStages, kConsumers * 4, kClusterSize>;
  using Cursor = PipelineCursor<kStages>;

  // Shared memory, in this order; everything that is swizzled starts on a 1024-byte boundary.
  static constexpr u32 kBytesA = kBlockM * kBlockK, kBytesB = kBlockN * kBlockK, kBytesScale = kBlockM * 4;
  static constexpr u32 kOffsetB = kStages * kBytesA;
  static constexpr u32 kOffsetStaging = kOffsetB + kStages * kBytesB;
  static constexpr u32 kOffsetScale = kOffsetStaging + (kTmaStore ? kConsumers * Store::kBytes : 0);
  static constexpr u32 kOffsetBarriers = kOffsetScale + kStages * kBytesScale;
  static constexpr u32 kSharedBytes = kOffsetBarriers + Barriers::kBytes;
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  const Fp8GemmArguments& arg;
  u32 shared;
  Barriers barriers;
  u32 opaque_zero;  // zero, but not to the compiler

  DG_DEVICE Fp8Gemm(const Fp8GemmArguments& arg, u32 shared) : arg(arg), shared(shared) {
    barriers.base = shared + kOffsetBarriers;
    asm volatile("mov.u32 %0, 0;" : "=r"(opaque_zero));
  }

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }
  // Blocks of K, rounded up to whole rounds of kDepth: loads past the end bring zeros, and zero scales.
  DG_DEVICE u32 rounds() const { return ceil_div(k(), kBlockK * kDepth); }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32;
    if (warp == kConsumers * 4) {
      if (elect_one()) {
        tma_prefetch_map(arg.map_a);
        tma_prefetch_map(arg.map_b);
        tma_prefetch_map(arg.map_scale_a);
        if constexpr (kTmaStore) tma_prefetch_map(arg.map_d);
        barriers.init();
      }
      __syncwarp();
    }
    if constexpr (kClusterSize > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    // Everything below may read what the previous kernel wrote, or overwrite what it reads.
    wait_for_previous_kernel();
    allow_next_kernel();

    if (threadIdx.x >= kConsumers * 128) {
      if constexpr (Tile::kProducerRegisters > 0) registers_shrink<Tile::kProducerRegisters>();
      if (warp == kConsumers * 4 && elect_one()) produce();
      __syncwarp();
    } else {
      if constexpr (Tile::kConsumerRegisters > 0) registers_grow<Tile::kConsumerRegisters>();
      consume();
    }
    // No CTA may leave while another of its cluster can still arrive at its barriers.
    if constexpr (kClusterSize > 1) cluster_sync();
  }

  // One thread: loads the stages of every tile in order.
  DG_DEVICE void produce() {
    constexpr u16 kAll = (1u << kClusterSize) - 1;
    const u32 bytes = kBytesB + arg.box_rows * (kBlockK + 4);
    const u32 rank = kClusterSize > 1 ? cluster_rank() : 0;
    const u32 blocks = rounds() * kDepth;
    Cursor at;
    for (Scheduler tile(m(), n(), arg.band); tile.valid(); tile.advance()) {
      for (u32 block = 0; block < blocks; ++block, at.advance()) {
        barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
        const u32 full = barriers.full(at.stage);
        const u32 a = shared + at.stage * kBytesA, b = shared + kOffsetB + at.stage * kBytesB;
        barrier_arrive_expect(full, bytes);
        if constexpr (kClusterN > 1) {
          const u32 part = rank * (kBlockM / kClusterSize);
          tma_load_multicast(a + part * kBlockK, arg.map_a, full, block * kBlockK, tile.row + part, kAll);
        } else {
          tma_load(a, arg.map_a, full, block * kBlockK, tile.row);
        }
        if constexpr (kClusterM > 1) {
          const u32 part = rank * (kBlockN / kClusterSize);
          tma_load_multicast(b + part * kBlockK, arg.map_b, full, block * kBlockK, tile.column + part, kAll);
        } else {
          tma_load(b, arg.map_b, full, block * kBlockK, tile.column);
        }
        tma_load(shared + kOffsetScale + at.stage * kBytesScale, arg.map_scale_a, full, tile.row, block);
      }
    }
  }

  // One warpgroup: rows [consumer * 64 * kSlices, + 64 * kSlices) of every tile.
  DG_DEVICE void consume() {
    const u32 consumer = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 first_row = consumer * 64 * kSlices;
    const u32 staging = shared + kOffsetStaging + consumer * Store::kBytes;
    float sum[kSlices][kBlockN / 2], partial[kDepth][Mma::kN / 2];
#pragma unroll
    for (u32 d = 0; d < kDepth; ++d)
#pragma unroll
      for (u32 i = 0; i < Mma::kN / 2; ++i) partial[d][i] = 0.0f;

    ColumnScales<kScaleRows> scales(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(n(), 128),
                                    ceil_div(k(), kBlockK), lane);
    Cursor at;
    Scheduler tile(m(), n(), arg.band);
    if (tile.valid()) scales.open(tile.column / 128);
    while (tile.valid()) {
      const u32 first_columns = 128 - tile.column % 128;
#pragma unroll
      for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (u32 i = 0; i < kBlockN / 2; ++i) sum[slice][i] = 0.0f;

      const u32 count = rounds();
      for (u32 round = 0; round < count; ++round)
        multiply_round(sum, partial, scales, at, round, first_row + warp * 16 + lane / 4, first_row, lane, first_columns);

      const u32 row = tile.row + first_row, column = tile.column;
      tile.advance();
      if (tile.valid()) scales.open(tile.column / 128);
      if constexpr (kTmaStore) {
        // The staging area is free once the stores of the tile before have been read out of it.
        if (thread == 0) tma_store_wait_read();
        named_barrier_sync(1 + consumer, 128);
        Store::stage(staging, sum, warp, lane);
        fence_shared_to_tma();
        named_barrier_sync(1 + consumer, 128);
        if (thread == 0) Store::store(arg.map_d, staging, row, column, m(), n());
      } else {
        store_direct<kBlockN, kSlices>(arg.d, arg.d_stride, sum, row, column, m(), n(), warp, lane);
      }
    }
    if constexpr (kTmaStore) {
      if (thread == 0) tma_store_wait_read();
    }
  }

  // kDepth blocks of K: all of the round's products are issued before the first is promoted.
  DG_DEVICE void multiply_round(float (&sum)[kSlices][kBlockN / 2], float (&partial)[kDepth][Mma::kN / 2],
                                ColumnScales<kScaleRows>& scales, Cursor& at, u32 round, u32 scale_row, u32 first_row, u32 lane, u32 first_columns) {
    float scale_a[kDepth][kSlices][2], scale_b[kDepth][kScaleRows];
    u32 stage[kDepth];
#pragma unroll
    for (u32 d = 0; d < kDepth; ++d, at.advance()) {
      stage[d] = at.stage;
      scales.get(round * kDepth + d, scale_b[d]);
      barrier_wait(barriers.full(at.stage), at.parity);
      read_scales(scale_a[d], at.stage, scale_row);
      if constexpr (kDepth > 1) issue(partial[d], at.stage, first_row, 0, 0);
    }
    if constexpr (kDepth > 1) {
      drain<0>(sum, partial, scale_a, scale_b, stage, lane, first_columns);
    } else {
#pragma unroll
      for (u32 slice = 0; slice < kSlices; ++slice) {
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
          issue(partial[0], stage[0], first_row, slice, part);
          finish<0>(partial[0]);
          if (slice == kSlices - 1 && part == kParts - 1) barriers.release(stage[0], lane);
          if (part == 0)
            promote<Mma::kN, 0, kGroup>(&sum[slice][0], partial[0], scale_a[0][slice], scale_b[0], first_columns);
          else
            promote<Mma::kN, Mma::kN, kGroup>(&sum[slice][Mma::kN / 2 % (kBlockN / 2)], partial[0], scale_a[0][slice],
                                              scale_b[0], first_columns);
        }
      }
    }
  }

  // Promotes the partial sums of a round in the order in which they were issued.
  template <u32 kIndex>
  DG_DEVICE void drain(float (&sum)[kSlices][kBlockN / 2], float (&partial)[kDepth][Mma::kN / 2],
                       const float (&scale_a)[kDepth][kSlices][2], const float (&scale_b)[kDepth][kScaleRows],
                       const u32 (&stage)[kDepth], u32 lane, u32 first_columns) {
    finish<kDepth - 1 - kIndex>(partial[kIndex]);
    barriers.release(stage[kIndex], lane);
    promote<Mma::kN, 0, kGroup>(sum[0], partial[kIndex], scale_a[kIndex][0], scale_b[kIndex], first_columns);
    if constexpr (kIndex + 1 < kDepth)
      drain<kIndex + 1>(sum, partial, scale_a, scale_b, stage, lane, first_columns);
  }

  // The factors of this thread's two rows in each m64 slice.
  DG_DEVICE void read_scales(float (&scale)[kSlices][2], u32 stage, u32 row) {
    const u32 base = shared + kOffsetScale + stage * kBytesScale + row * 4;
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice) {
      scale[slice][0] = load_shared(base + slice * 256);
      scale[slice][1] = load_shared(base + slice * 256 + 32);
    }
  }

  static DG_DEVICE float load_shared(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
  }

  // Starts the product of one K block: four instructions of k32.
  DG_DEVICE void issue(float (&partial)[Mma::kN / 2], u32 stage, u32 first_row, u32 slice, u32 part) {
    const u64 a = matrix_descriptor(shared + stage * kBytesA + (first_row + slice * 64) * kBlockK);
    const u64 b = matrix_descriptor(shared + kOffsetB + stage * kBytesB + part * Mma::kN * kBlockK);
    wgmma_fence();
    Mma::start(partial, a, b, opaque_zero);
#pragma unroll
    for (u32 step = 1; step < kBlockK / 32; ++step) Mma::accumulate(partial, a + step * 2, b + step * 2);
    wgmma_commit();
  }

  template <int kPending>
  DG_DEVICE void finish(float (&partial)[Mma::kN / 2]) {
    wgmma_wait<kPending>();
#pragma unroll
    for (u32 i = 0; i < Mma::kN / 2; ++i) pin_register(partial[i]);
  }
};
