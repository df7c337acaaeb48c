// Stores of whole tiles of bf16, for `Fp8Gemm`: staging in shared memory, the warp that stores by TMA, and stores element by element.
#pragma once
#include "barrier.cuh"
#include "columns.cuh"
#include "next_tile_hint.cuh"
#include "output.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// Sums are staged in shared memory and then stored either by TMA, which clips at the edges of D (`store`), or by the warp that
// staged them (`copy`). A TMA store leaves consumers free for the next tile. A copy finishes sooner: a TMA store waits for a
// barrier and for a fence of some 300 cycles, and takes as long for rows of 64 bytes as for rows of 128. A warpgroup's staging
// area has 64 x kBlockN bf16 for each m64 slice, cut into boxes of kBoxColumns columns. Rows of a box are swizzled over their own
// length, as the tensor map expects.
template <u32 kBlockN, u32 kSlices, class Out = Output<kBf16>>
struct TmaStore {
  enum : u32 { kBoxColumns = kBlockN % 64 == 0 ? 64 : kBlockN % 32 == 0 ? 32 : 16 };
  enum : u32 { kRowBytes = kBoxColumns * 2 };
  enum : u32 { kBoxBytes = 64 * kRowBytes };
  enum : u32 { kBytes = kSlices * 64 * kBlockN * 2 };  // one warpgroup's staging area

  // Where a 16-byte unit of a row lies: TMA's swizzle uses the address bits above those of the row.
  static DG_DEVICE u32 swizzled(u32 row, u32 unit) {
    constexpr u32 kUnits = kRowBytes / 16;
    return unit ^ (row / (8 / kUnits) % kUnits);
  }

  // Stages columns [kColumn, kColumn + kColumns) of one slice. `sum` is the accumulator of the first of them.
  template <u32 kSlice, u32 kColumn, u32 kColumns>
  static DG_DEVICE void stage(u32 staging, const float* sum, u32 warp, u32 lane) {
    static_assert(kColumn % 16 == 0 && kColumns % 16 == 0);
    const u32 row = warp * 16 + lane % 16;  // the row whose address this lane supplies to stmatrix
#pragma unroll
    for (u32 column = kColumn; column < kColumn + kColumns; column += 16) {
      const float* v = sum + (column - kColumn) / 2;
      const u32 box = staging + (kSlice * (kBlockN / kBoxColumns) + column / kBoxColumns) * kBoxBytes;
      const u32 unit = column % kBoxColumns / 8 + lane / 16;
      store_matrix_x4(box + row * kRowBytes + swizzled(row, unit) * 16, Out::apply(v[0], v[1]), Out::apply(v[2], v[3]),
                      Out::apply(v[4], v[5]), Out::apply(v[6], v[7]));
    }
  }

  // Stages kBlockN columns of every slice, beginning with accumulator register `first`.
  template <class Sums>
  static DG_DEVICE void stage_all(u32 staging, const Sums& sum, u32 first, u32 warp, u32 lane) {
    static_assert(kSlices <= 2);
    stage<0, 0, kBlockN>(staging, &sum[0][first], warp, lane);
    if constexpr (kSlices > 1) stage<1, 0, kBlockN>(staging, &sum[1][first], warp, lane);
  }

  // Copies the boxes that this warp has staged of its own rows of a slice to D, whose rows begin at `row`. D must have a multiple
  // of eight columns. No other warp takes part, so __syncwarp is enough before it.
  template <u32 kSlice, u32 kColumn, u32 kColumns, class Columns>
  static DG_DEVICE void copy(u32 staging, u16* d, i64 stride, u32 row, const Columns& tile, u32 rows, u32 columns, u32 warp,
                             u32 lane) {
    static_assert(kColumn % kBoxColumns == 0 && kColumns % kBoxColumns == 0);
    constexpr u32 kUnits = kRowBytes / 16, kRows = 32 / kUnits;  // rows that a warp copies at once
    const u32 first = warp * 16 + lane / kUnits, unit = lane % kUnits;
#pragma unroll
    for (u32 column = kColumn; column < kColumn + kColumns; column += kBoxColumns) {
      const u32 box = staging + (kSlice * (kBlockN / kBoxColumns) + column / kBoxColumns) * kBoxBytes;
      const u32 x = tile.at(column) + unit * 8;
#pragma unroll
      for (u32 r = first; r < first + 16; r += kRows) {
        const u32 y = row + kSlice * 64 + r;
        if (y < rows && x < columns)
          store_16(d + y * stride + x, load_shared_16(box + r * kRowBytes + swizzled(r, unit) * 16));
      }
    }
  }

  // Stores the part-th of kParts equal parts of the area: whole slices, or some of their columns. The area's first column is the
  // tile's `column`-th. At most two boxes are in flight; the last may still be read when this returns.
  template <u32 kParts, class Columns>
  static DG_DEVICE void store(const TensorMap* map, u32 staging, u32 row, u32 column, const Columns& tile, u32 rows,
                              u32 columns, u32 part, LatePolicy policy) {
    constexpr u32 kBoxes = kBlockN / kBoxColumns, kAcross = kParts / kSlices == 0 ? 1 : kParts / kSlices;
    constexpr u32 kPartSlices = kSlices * kAcross / kParts, kPartBoxes = kBoxes / kAcross;
    static_assert(kPartSlices * kParts == kSlices * kAcross && kPartBoxes * kAcross == kBoxes);
    const u32 first_slice = part / kAcross * kPartSlices, first_box = part % kAcross * kPartBoxes;
#pragma unroll 1  // TMA takes longer for a box than this code, and compilers for copies of it
    for (u32 slice = first_slice; slice < first_slice + kPartSlices; ++slice) {
#pragma unroll 1
      for (u32 box = first_box; box < first_box + kPartBoxes; ++box) {
        const u32 x = tile.at(column + box * kBoxColumns);
        if (row + slice * 64 < rows && x < columns)
          tma_store(map, staging + (slice * kBoxes + box) * kBoxBytes, x, row + slice * 64, policy);
        tma_store_commit();
        tma_store_wait_read<1>();
      }
    }
  }
};

// Staging areas: the shared memory from which a tile's bf16 values are stored.
//
// Each consumer has one area. In persistent CTAs areas lie after the ring, because the ring is loading the next tile. A CTA with
// one tile places them in stages that are not filled again, in the part of A or of B. That leaves room for one or two more
// stages: 512 x 7168 x 16384 with 128x224 tiles went from 90.4 to 86.9 us on an H200, whose L2 takes 1400 to 1800 cycles under
// load.
template <u32 kStages, u32 kConsumers, u32 kBytesA, u32 kBytesB, u32 kAreaBytes, bool kPersistent>
struct StagingAreas {
  enum : u32 { kOffsetB = kStages * kBytesA, kOffsetOwn = kOffsetB + kStages * kBytesB };
  enum : u32 { kOwnBytes = kPersistent ? kConsumers * kAreaBytes : 0 };
  // Areas that fit into a stage (from the beginning of A's part, and one in B's), and stages that all areas need.
  enum : bool { kInB = kBytesB >= kAreaBytes };
  enum : u32 { kInStage = kBytesA / kAreaBytes + kInB };
  enum : u32 { kStagesLent = kPersistent ? 0 : ceil_div(kConsumers, max_of(kInStage, 1u)) };
  static_assert(kPersistent || (kInStage > 0 && kStagesLent <= kStages));  // no two consumers may get the same area

  // Offset of a consumer's area in shared memory; `next_stage` is the stage that would be filled next.
  static DG_DEVICE u32 offset(u32 consumer, u32 next_stage) {
    if constexpr (kPersistent) {
      return kOffsetOwn + consumer * kAreaBytes;
    } else {
      const u32 stage = (next_stage + consumer / kInStage) % kStages, place = consumer % kInStage;
      if (kInB && place + 1 == kInStage) return kOffsetB + stage * kBytesB;
      return stage * kBytesA + place * kAreaBytes;
    }
  }

  // A consumer and the store warp synchronise when the area is free, and when one of its `kParts` parts is full. These are named
  // barriers: with mbarriers, whose wait is a loop, ptxas loses track of wgmma in flight and serialises it. In a CTA with one tile
  // a loader reports the areas free, once it has waited for all rounds of those stages.
  static DG_DEVICE void free_all() {
    for (u32 consumer = 0; consumer < kConsumers; ++consumer) named_barrier_arrive(kAreaFreeBarrier + consumer, kThreads);
  }
  static DG_DEVICE void wait_until_free(u32 consumer) { named_barrier_sync(kAreaFreeBarrier + consumer, kThreads); }
  template <u32 kParts>
  static DG_DEVICE void fill(u32 consumer, u32 part) {
    named_barrier_arrive(kAreaFullBarrier + consumer * kParts + part, kThreads);
  }
  template <u32 kParts>
  static DG_DEVICE void wait_until_full(u32 consumer, u32 part) {
    named_barrier_sync(kAreaFullBarrier + consumer * kParts + part, kThreads);
  }

 private:
  enum : u32 { kThreads = 128 + 32 };
};

// One warp of the producer warpgroup stores finished tiles by TMA, so that consumers go on at once. It stores a few boxes at a
// time, because TMA loads queue behind TMA stores. It also publishes the next tile (see next_tile_hint.cuh).
template <class Gemm>
DG_DEVICE void store_tiles(const Gemm& gemm, typename Gemm::Scheduler tile) {
  using Areas = typename Gemm::Areas;
  const auto& kernel = gemm.kernel;
  constexpr u32 kParts = Gemm::kStoreParts;
  const u32 lane = threadIdx.x % 32;
  NextTileHint hint = gemm.hint();
  auto next = tile, ahead = tile;
  const auto look_ahead = [&] {
    if constexpr (Gemm::kHints) {
      next = ahead;
      ahead.advance();
      hint.template publish<Gemm::kNeedsRow>(ahead, lane == 0);
      __syncwarp();
    }
  };
  const auto go_on = [&] {
    if constexpr (Gemm::kHints) tile = next;
    else tile.advance();
  };
  look_ahead();
  if constexpr (Gemm::kHints) NextTileHint::allow_first<Gemm::kConsumers>();
  wait_for_previous_kernel();
  for (; tile.valid(); go_on()) {
    look_ahead();
    if (elect_one()) tma_store_wait_read<0>();  // the previous tile has been read
    __syncwarp();
    Areas::free_all();
#pragma unroll 1  // few registers
    for (u32 i = 0; i < Gemm::kConsumers * kParts; ++i) {
      const u32 consumer = i % Gemm::kConsumers, part = i / Gemm::kConsumers;
      const u32 row = tile.row + consumer * 64 * Gemm::kSlices, column = kernel.rank_k() * Gemm::kColumns;
      Areas::template wait_until_full<kParts>(consumer, part);
      if (elect_one()) {  // ptxas knows that this is one thread
        const u32 area = kernel.shared + Areas::offset(consumer, 0);
        fence_shared_to_tma();
        Gemm::Store::template store<kParts>(kernel.arg.map_d, area, row, column, Gemm::columns_of(tile), kernel.m(), kernel.n(), part,
                                            LatePolicy{(kernel.arg.evict_first & kEvictD) != 0});
      }
      __syncwarp();
    }
  }
  if (elect_one()) tma_store_wait_read<0>();  // shared memory must outlive the reads
}

// Element by element, for a D whose rows do not begin on 16-byte boundaries. Stores the columns that this split owns.
template <u32 kBlockN, u32 kSlices, u32 kSplits, class Out = Output<kBf16>>
DG_DEVICE void store_direct(u16* d, i64 stride, const float (&sum)[kSlices][kBlockN / 2], u32 row,
                            const TileColumns<kBlockN>& tile, u32 rows, u32 columns, u32 warp, u32 lane, u32 split) {
#pragma unroll
  for (u32 slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (u32 i = 0; i < kBlockN / 2; i += 2) {
      const u32 y = row + slice * 64 + warp * 16 + lane / 4 + (i & 2) * 4;
      const u32 x = tile.at(i / 4 * 8) + lane % 4 * 2;
      if (y < rows && i / (kBlockN / 2 / kSplits) == split) {
        const u32 packed = Out::apply(sum[slice][i], sum[slice][i + 1]);
        u16* out = d + y * stride + x;
        if (x < columns) out[0] = static_cast<u16>(packed);
        if (x + 1 < columns) out[1] = static_cast<u16>(packed >> 16);
      }
    }
  }
}
