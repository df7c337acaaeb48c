// D[m, n] = (C[m, n] +) A[m, k] @ B[n, k]^T with mma.sync, for compute capability 8.0 and later. 16-bit operands are K-major or MN-major.
// FP8 is K-major, with scales of 1x128 for A and of 128x128 for B, or with exponents of 1x128 for both. Rows may be in groups, each with a
// matrix B of its own.
//
// All warps of a CTA do the same: they copy blocks of K to a ring in shared memory by cp.async, kStages - 1 blocks ahead, read fragments
// one step of K ahead, and multiply. The copies of a tile's first blocks run while the tile before is multiplied and stored.
//
// Rows of A are rows of the sums. With kSwapped rows of B are: for few rows of A, or of a group, which then are columns of sums and no
// products are wasted. Without groups K can be split over CTAs then, whose sums are added in order.
//
// Constants supplies sizes and kinds (see kernels/mma_gemm.cu.jinja).
#pragma once
#include "groups.cuh"
#include "mma_operand.cuh"
#include "mma_output.cuh"
#include "mma_products.cuh"
#include "mma_scales.cuh"
#include "scheduler.cuh"

template <class Constants>
struct MmaGemmLayout {
  using Tile = Constants;
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kStages = Tile::kStages, kDepth = Tile::kDepth };
  enum : u32 { kWarpsM = Tile::kWarpsM, kWarpsN = Tile::kWarpsN, kThreads = kWarpsM * kWarpsN * 32 };
  enum : bool { kScaled = Tile::kMma >= kMmaE4m3, kSwapped = Tile::kSwapped };
  enum : u32 { kSize = kScaled ? 1 : 2, kSteps = kDepth / 32, kBlockK = kDepth / kSize };  // bytes of an element; steps and elements of a block
  static_assert(!kScaled || (kDepth == 128 && kBlockN <= 128), "a tile has one scale of B in a block of K");
  using A = MmaOperand<kBlockM, kDepth, Tile::kMnMajorA, kThreads>;
  // Whether lanes store columns as they have them. Elsewhere they exchange them first: what is computed of columns takes them in the usual order.
  enum : bool {
    kSpread = !kSwapped && !Tile::kMnMajorB && Tile::kAligned && Tile::kElement != kF32 && Tile::kAccumulate == kNothing &&
              !Epilogue<Output<Tile::kElement>>::kFinishes && kBlockN / kWarpsN % 32 == 0
  };
  using B = MmaOperand<kBlockN, kDepth, Tile::kMnMajorB, kThreads, kSpread>;

  // The operands whose rows are rows and columns of the sums, and those of a warp.
  using Left = Choice<kSwapped, B, A>;
  using Right = Choice<kSwapped, A, B>;
  enum : bool { kMnMajorLeft = kSwapped ? +Tile::kMnMajorB : +Tile::kMnMajorA, kMnMajorRight = kSwapped ? +Tile::kMnMajorA : +Tile::kMnMajorB };
  enum : u32 { kWarpRows = (kSwapped ? +kBlockN : +kBlockM) / kWarpsM, kWarpColumns = (kSwapped ? +kBlockM : +kBlockN) / kWarpsN };
  enum : u32 { kTilesM = kWarpRows / 16, kTilesN = kWarpColumns / 8 };
  static_assert((!kMnMajorLeft || 64 % kWarpRows == 0) && (!kMnMajorRight || 64 % kWarpColumns == 0), "a warp's rows lie in one atom");
  static_assert(kTilesN % 2 == 0, "a warp reads fragments of 16 columns");
  using Sums = float[kTilesM][kTilesN * 4];

  enum : u32 { kGrouping = Tile::kGrouping, kSegments = Tile::kSegments };
  enum : bool { kGrouped = has_table(kGrouping), kSplits = kSwapped && !kGrouped };
  using Table = GroupTable<kGrouping, kBlockM, kSegments, kThreads>;
  using Scheduler = Choice<kGrouped, GroupedScheduler<Table, kGrouping, kBlockM, kBlockN, kSegments>, TileScheduler<kBlockM, kBlockN, 1, 1, 1>>;
  using Out = Choice<kSwapped, MmaSwappedOutput<Tile::kElement, Tile::kAccumulate, kTilesM, kTilesN>,
                     MmaOutput<Tile::kElement, Tile::kAccumulate, kTilesM, kTilesN, Tile::kAligned, kSpread>>;
  using Scales = MmaScalesOf<Tile, kTilesM, kTilesN, kSwapped, kSpread>;

  // A stage is a part of A, and then one of B.
  enum : u32 { kStageBytes = A::kBytes + B::kBytes, kOffsetGroups = kStages * kStageBytes };
  enum : u32 { kSharedBytes = kOffsetGroups + (kGrouped ? +Table::kBytes : 0) };
  static_assert(kStages >= 3 && kSteps % 2 == 0);
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");
};

template <class Constants, class Arguments>
struct MmaGemm {
  using Layout = MmaGemmLayout<Constants>;
  using Tile = Constants;
  using A = typename Layout::A;
  using B = typename Layout::B;
  using Left = typename Layout::Left;
  using Right = typename Layout::Right;
  using Scheduler = typename Layout::Scheduler;
  using Sums = typename Layout::Sums;
  using Products = MmaProducts<Tile::kMma, Layout::kTilesM, Layout::kTilesN>;
  using Fragments = typename Products::Fragments;
  enum : u32 { kTilesM = Layout::kTilesM, kTilesN = Layout::kTilesN, kSteps = Layout::kSteps, kStages = Layout::kStages };
  enum : bool { kGrouped = Layout::kGrouped, kScaled = Layout::kScaled, kSwapped = Layout::kSwapped };
  // Whether a stage is filled again as soon as all warps have read it. Promotion has no registers left there.
  enum : bool { kEarly = !kSwapped && !kScaled };
  enum : u32 { kAhead = kStages - (kEarly ? 0 : 1) };  // blocks that are copied before they are multiplied

  const Arguments& arg;
  u32 shared;

  DG_DEVICE u32 m() const { return Tile::kShapeM ? +Tile::kShapeM : arg.m; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? +Tile::kShapeN : arg.n; }
  DG_DEVICE u32 k() const { return Tile::kShapeK ? +Tile::kShapeK : arg.k; }
  DG_DEVICE u32 columns() const { return n(); }

  DG_DEVICE void run() const {
    wait_for_previous_kernel();
    allow_next_kernel();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_row = warp % Layout::kWarpsM * Layout::kWarpRows, first_column = warp / Layout::kWarpsM * Layout::kWarpColumns;
    if constexpr (kGrouped) Layout::Table::build(arg, table(), m());
    const u32 all = ceil_div(k(), Layout::kBlockK), begin = part_of(all, blockIdx.y), blocks = part_of(all, blockIdx.y + 1) - begin;
    const auto parts = parts_of(warp, lane);
    if constexpr (Layout::kSplits) {
      if (gridDim.y > 1) parts.open(lane);
    }
    const Scheduler first = tiles();
    Copies copies(*this, first, begin, blocks);
#pragma unroll 1
    for (u32 stage = 0; stage < kAhead; ++stage) {
      copies.next();
      copies.advance();
    }
    Reader reader{shared, shared + (kSwapped ? +A::kBytes : 0) + Left::template place<true>(first_row, lane),
                  shared + (kSwapped ? 0 : +A::kBytes) + Right::template place<false>(first_column, lane)};
    wait_for_copies<kAhead - 1>();
    __syncthreads();
    Fragments fragments[2];
    reader.read(fragments[0], 0);
    // Multiplies a block of K, and reads the first fragments of the next one.
    const auto multiply = [&](Sums& sum, const auto& factors) {
#pragma unroll
      for (u32 step = 0; step < kSteps; ++step) {
        if (step + 1 == kSteps) {  // the next block has come, and all warps have read this one
          wait_for_copies<kStages - 2>();
          __syncthreads();
          reader.advance(shared);
        }
        reader.read(fragments[(step + 1) % 2], (step + 1) % kSteps);
        if (step == (kEarly ? kSteps - 1 : 0)) copies.next();  // to the stage of the block that all warps have read
        Products::add(sum, fragments[step % 2], factors);
      }
      copies.advance();
    };
#pragma unroll 1
    for (Scheduler tile = first; tile.valid(); tile.advance()) {
      const u32 row = tile.row + (kSwapped ? first_column : first_row), column = tile.column + (kSwapped ? first_row : first_column);
      Sums sum;
      Products::clear(sum);
      // The first fragments are read again, so that they take no registers while a user's expression is computed from vectors of columns.
      if constexpr (Layout::Out::Final::Own::kColumns > 0) reader.read(fragments[0], 0);
      if constexpr (kScaled) {
        typename Layout::Scales scales(*this, row, column, end(tile), group_of(tile), begin, all, lane);
        if (blocks > 0) scales.load(*this);
#pragma unroll 1
        for (u32 block = 0; block < blocks; ++block) {
          Sums partial;
          Products::clear(partial);
          const auto factors = scales.take();
          if (block + 1 < blocks) scales.load(*this);
          multiply(partial, factors);
          factors.promote(sum, partial);
        }
      } else {
#pragma unroll 1
        for (u32 block = 0; block < blocks; ++block) multiply(sum, MmaOnes());
      }
      if constexpr (Layout::kSplits) {
        if (gridDim.y > 1) {
          float(&own)[kTilesM * kTilesN * 4] = reinterpret_cast<float(&)[kTilesM * kTilesN * 4]>(sum);
          if (!parts.close(own, lane)) break;
          parts.add(own, 0);
        }
      }
      Layout::Out::store(*this, sum, row, column, end(tile), group_of(tile), lane);
      if constexpr (Layout::kSplits) break;  // a CTA has one tile
    }
    wait_for_copies<0>();  // shared memory must outlive them
    if constexpr (Layout::kGrouping == kIndex) {
      if (warp == 0)
        zero_padding<typename Layout::Table, Layout::kBlockM, Layout::kSegments, Layout::Out::Out::kBytes>(
            table(), arg.d, arg.d_stride, m(), columns(), Tile::kAligned, lane, [](u32) {});
    }
  }

 private:
  DG_DEVICE u32 table() const { return shared + Layout::kOffsetGroups; }

  DG_DEVICE Scheduler tiles() const {
    if constexpr (kGrouped) return Scheduler(arg.raster, table(), m());
    else return Scheduler(arg.raster);
  }
  // The first row that a tile must not store.
  DG_DEVICE u32 end(const Scheduler& tile) const {
    if constexpr (kGrouped) return tile.end;
    else return m();
  }
  static DG_DEVICE auto group_of(const Scheduler& tile) {
    if constexpr (kGrouped) return tile.group;
    else return Index<0>();
  }

  // Where the part of K of a CTA begins, and that of the next one.
  static DG_DEVICE u32 part_of(u32 blocks, u32 part) {
    if constexpr (Layout::kSplits) return blocks * part / gridDim.y;
    else return part == blockIdx.y ? 0 : blocks;
  }
  DG_DEVICE auto parts_of(u32 warp, u32 lane) const {
    if constexpr (Layout::kSplits) return PartsInOrder<kTilesM * kTilesN * 4, 64>(arg.memory, Layout::kThreads / 32, warp, lane);
    else return Index<0>();
  }

  // Where this warp reads: the stage, and the places of its first fragments there.
  struct Reader {
    u32 stage, left, right;

    DG_DEVICE void read(Fragments& x, u32 step) const {
#pragma unroll
      for (u32 i = 0; i < kTilesM; ++i)
        load_matrices<Layout::kMnMajorLeft>(Left::address(left, i, step), x.left[i][0], x.left[i][1], x.left[i][2], x.left[i][3]);
#pragma unroll
      for (u32 i = 0; i < kTilesN; i += 2)
        load_matrices<Layout::kMnMajorRight>(Right::address(right, i / 2, step), x.right[i][0], x.right[i][1], x.right[i + 1][0],
                                             x.right[i + 1][1]);
    }

    DG_DEVICE void advance(u32 first) {
      const bool last = stage == first + (kStages - 1) * Layout::kStageBytes;
      const u32 by = last ? 0u - (kStages - 1) * Layout::kStageBytes : +Layout::kStageBytes;
      stage += by;
      left += by;
      right += by;
    }
  };

  // The copies of one block after the other, of one tile after the other.
  struct Copies {
    const MmaGemm& kernel;
    Scheduler tile;
    u32 begin, blocks, left, stage;  // of a tile's K: the first block and how many; those that are left, and where the next one goes
    typename A::Copies a;
    typename B::Copies b;

    DG_DEVICE Copies(const MmaGemm& kernel, const Scheduler& first, u32 begin, u32 blocks)
        : kernel(kernel), tile(first), begin(begin), blocks(blocks), stage(kernel.shared) {
      start();
    }

    // Without another tile the copies are zeros that nobody reads, so that a block of K is multiplied without a branch.
    DG_DEVICE void start() {
      if (blocks > 0 && tile.valid()) {
        const auto& arg = kernel.arg;
        const u32 first = begin * Layout::kBlockK;
        left = blocks;
        const u8* of_group = arg.b;
        u32 rows = kernel.m();
        if constexpr (kGrouped) {
          of_group += static_cast<i64>(tile.group) * (Tile::kMnMajorB ? kernel.k() : kernel.n()) * arg.b_stride * Layout::kSize;
          rows = min_of(tile.used, tile.end);
        }
        a.template start<Layout::kSize>(arg.a, arg.a_stride, tile.row, rows, first, kernel.k(), threadIdx.x);
        b.template start<Layout::kSize>(of_group, arg.b_stride, tile.column, kernel.n(), first, kernel.k(), threadIdx.x);
      } else {
        left = ~0u;
        a.rows = b.rows = 0;
      }
    }

    DG_DEVICE void next() {
      a.next(stage, threadIdx.x);
      b.next(stage + A::kBytes, threadIdx.x);
      commit_copies();
      stage = stage == kernel.shared + (kStages - 1) * Layout::kStageBytes ? kernel.shared : stage + Layout::kStageBytes;
    }

    // After each block.
    DG_DEVICE void advance() {
      if (--left > 0) return;
      tile.advance();
      start();
    }
  };
};
