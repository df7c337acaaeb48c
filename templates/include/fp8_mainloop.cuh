// The main loop of a consumer warpgroup: multiply one block of K into partial sums, then promote these into float32 sums.
#pragma once
#include "pipeline.cuh"
#include "promotion.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// The sums of the parts of K that have ended, if there are several.
template <u32 kSlices, u32 kCount, bool kAny>
struct PartSums {};
template <u32 kSlices, u32 kCount>
struct PartSums<kSlices, kCount, true> {
  float total[kSlices][kCount];
};

// The tensor cores must not wait for promotion. The number of sets of partial sums that fit in registers gives the schedule:
//   1: promote a block, then issue the next one. The products of the other consumer hide the promotion of this one.
//   2: always issue the next product before promoting the previous one. Three or four sets brought nothing.
// With one set, consumers start their products in turn (ProductTurns). Otherwise they fall into step, because they wait for the
// same stages and the tensor cores alternate between them; then they promote at the same time and the tensor cores idle.
//
// Shape gives kStages; kConsumers; kStep (consumers that split K); kRows and kColumns (of the left and of the right operand's
// tile); kSlices; kPartials (the sets); kTurns (consumers that take turns, or 1); kInTurn (parts of K whose sums are added in order); kFresh (whether a tile's first block
// may overwrite the sums); kPeeks (whether the loop of two sets tests stages early). Scaling (see promotion.cuh) gives the scales.
template <class Shape, class Mma, class Barriers, class Scaling>
struct Fp8Mainloop : PartSums<Shape::kSlices, Shape::kColumns / 2, (Shape::kInTurn > 1)> {
  // Consumers that split K take stages in turn: each has every kStep-th.
  enum : u32 { kStep = Shape::kStep };
  enum : u32 { kSlices = Shape::kSlices, kColumns = Shape::kColumns, kBlockK = 128 };
  enum : u32 { kBytesLeft = Shape::kRows * kBlockK, kBytesRight = kColumns * kBlockK };
  enum : u32 { kPartials = Shape::kPartials };
  // A block is multiplied in units: one m64 slice by Mma::kN columns.
  enum : u32 { kParts = kColumns / Mma::kN, kUnits = kSlices * kParts };
  static_assert(kParts * Mma::kN == kColumns);
  static_assert(kPartials == 1 || (kPartials == 2 && kUnits <= 2 && Shape::kTurns == 1));
  static_assert(!Shape::kFresh || kPartials == 1);
  enum : u32 { kInTurn = Shape::kInTurn };  // each part has two blocks or more
  static_assert(kInTurn == 1 || kPartials == 1);

  struct Block {
    u32 stage;
    u32 full;  // address of the stage's full barrier
    typename Scaling::Factors factors;
  };
  using Sums = float[kSlices][kColumns / 2];
  enum : u32 { kPage = Scaling::kPage };
  // Whether a tile's first block overwrites the sums instead of adding to zeros. Zeroing took about 450 of the 1900 cycles between
  // two 256x128 tiles (H200). Not in swapped tiles: ptxas spills in some, and serialises products in others.
  enum : bool { kStartsFresh = Shape::kFresh && Scaling::kStartsFresh };
  // Whether the full barrier of the stage after the next is tested before promotion. A test takes 40 cycles, which then overlap
  // with promotion: blocks of 64x64, 64x128, 128x64 and 128x112 tiles took 5 to 8% less time (H200). From 128x128 on the tensor
  // cores are busy anyhow. Swapped tiles, which HBM limits, lost 1%.
  enum : bool { kPeeks = Shape::kPeeks };
  static_assert(!kPeeks || kPartials == 2);
  // Whether a block's scales are read after its products are issued. A lone consumer gains 2% of a block, as no other consumer
  // keeps the tensor cores busy. With two consumers the second loses as much.
  enum : bool { kScalesLast = kPeeks && Shape::kConsumers == 1 };

  const Barriers barriers;
  Scaling scaling;
  const u32 left, right;  // low words of the descriptors of this consumer's rows and of the columns, in stage 0
  const ProductTurns<Shape::kTurns> turns;
  const u32 lane;
  PipelineCursor<Shape::kStages> at;
  bool full = false;  // whether stage `at` is known to be full
  u32 opaque_zero;  // zero, which the compiler must not know
  float partial[kPartials][Mma::kN / 2];
  DG_DEVICE Fp8Mainloop(const Barriers& barriers, const Scaling& scaling, u32 left, u32 right, u32 consumer, u32 lane)
      : barriers(barriers), scaling(scaling), left(left), right(right), turns(consumer), lane(lane) {
    asm volatile("mov.u32 %0, 0;" : "=r"(opaque_zero));
#pragma unroll
    for (u32 set = 0; set < kPartials; ++set)
#pragma unroll
      for (u32 i = 0; i < Mma::kN / 2; ++i) partial[set][i] = 0.0f;
  }

  // Computes a tile's sums over `blocks` blocks of K. `look_ahead()` is called once, near the end, while a product runs: the scales
  // of B that are still needed are then all on the current page.
  template <class LookAhead>
  DG_DEVICE void multiply(Sums& sum, u32 blocks, const LookAhead& look_ahead) {
    if (blocks > 0) {
      start();
      resume(sum, blocks, look_ahead, Nothing());
    } else {  // fewer blocks of K than splits
      scaling.begin(first.factors);
      look_ahead();
      clear(sum);
    }
  }

  // `multiply` in two halves, for one block or more. Between them the first product runs, while the caller stores the sums of the
  // previous tile.
  DG_DEVICE void start() {
    full = false;
    arrive(first);
    turns.wait();
    issue<0>(partial[0], first);
  }

  // `finished(unit)` is called when a unit's sums are final, while another product runs; it is not called for the last unit.
  template <class LookAhead, class Finished>
  DG_DEVICE void resume(Sums& sum, u32 blocks, const LookAhead& look_ahead, const Finished& finished) {
    scaling.begin(first.factors);
    if constexpr (!kStartsFresh) clear(sum);
    scaling.after_arrival(first.factors, first.stage);
    if constexpr (kPartials == 1) {
      one_by_one(sum, blocks, look_ahead, finished);
    } else {
      always_ahead(sum, blocks, look_ahead, finished);
    }
  }

  // In place of `start` and `resume` for a tile of which this consumer has no rows: it releases stages, passes its turns on, and its
  // sums are zeros.
  template <class LookAhead, class Finished>
  DG_DEVICE void idle(Sums& sum, u32 blocks, const LookAhead& look_ahead, const Finished& finished) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      const u32 stage = at.stage;
      barrier_wait(barriers.full(stage), at.parity);
      at.template advance<kStep>();
#pragma unroll
      for (u32 unit = 0; unit < kUnits; ++unit) {
        turns.wait();
        turns.pass();
      }
      barriers.release(stage, lane);
    }
    look_ahead();
    clear(sum);
    all_finished<0>(finished);
  }

  struct Nothing {
    template <class Unit>
    DG_DEVICE void operator()(Unit) const {}
  };

 private:
  // Calls `finished` for all units but the last.
  template <u32 kUnit, class Finished>
  static DG_DEVICE void all_finished(const Finished& finished) {
    if constexpr (kUnit + 1 < kUnits) {
      finished(Index<kUnit>());
      all_finished<kUnit + 1>(finished);
    }
  }

  Block first;  // the first block of the tile that was started

  DG_DEVICE void clear(Sums& sum) {
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (u32 i = 0; i < kColumns / 2; ++i) sum[slice][i] = 0.0f;
  }

  // One set of partial sums. The next block's barrier and scales are awaited while the last product of this block runs.
  template <class LookAhead, class Finished>
  DG_DEVICE void one_by_one(Sums& sum, u32 blocks, const LookAhead& look_ahead, const Finished& finished) {
    Block block = first;
    const u32 others = blocks - 1;
    u32 place = 0;
    if constexpr (kStartsFresh) {
      if (others > 0) {
        each_block<true>(sum, block, place++);
      } else {
        asm volatile("");  // keeps the zeroing in this branch: ptxas would hoist it, and every tile would pay
        clear(sum);
      }
    }
    // Two nested loops: over pages of B's scales or parts of K, and over the blocks of one. One loop with a branch that is taken once
    // in 32 blocks cost 20 of 620 cycles a block in 128x128 tiles.
    u32 part = 1, end = kInTurn > 1 ? min_of(others, blocks / kInTurn) : others;
    while (place < others) {
      if (place > 0 && place % kPage == 0) scaling.weights.turn(place);
      const u32 stop = opaque(min_of(end, place / kPage * kPage + kPage));  // in a register: not computed again for each block
      for (; place < stop; ++place) each_block<false>(sum, block, place);
      if constexpr (kInTurn > 1) {
        if (place == end && place < others) {
          end_part(sum, part++);
          end = min_of(others, blocks * part / kInTurn);
        }
      }
    }
    look_ahead();
    each_unit<false, 0>(sum, block, nullptr, 0, finished);
  }

  // The sums of the `part`-th part of K are complete, and those of the next one begin. It is not the last one.
  DG_DEVICE void end_part(Sums& sum, u32 part) {
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (u32 i = 0; i < kColumns / 2; ++i)
        this->total[slice][i] = part == 1 ? sum[slice][i] : this->total[slice][i] + sum[slice][i];
    clear(sum);
  }

  // A unit's sums of the last part of K are complete.
  template <u32 kUnit>
  DG_DEVICE void add_total(Sums& sum) const {
    constexpr u32 kSlice = kUnit / kParts, kColumn = kUnit % kParts * Mma::kN;
#pragma unroll
    for (u32 i = kColumn / 2; i < (kColumn + Mma::kN) / 2; ++i) sum[kSlice][i] = this->total[kSlice][i] + sum[kSlice][i];
  }

  // With kFresh this block overwrites the sums.
  template <bool kFresh>
  DG_DEVICE void each_block(Sums& sum, Block& block, u32 place) {
    Block next;
    each_unit<kFresh, 0>(sum, block, &next, place, Nothing());
    block = next;
  }

  // Finishes the unit that was started, then the units after it, and starts the next block.
  template <bool kFresh, u32 kUnit, class Finished>
  DG_DEVICE void each_unit(Sums& sum, const Block& block, Block* next, u32 place, const Finished& finished) {
    constexpr bool kLast = kUnit + 1 == kUnits;
    if (kLast && next != nullptr) open(*next, place);
    // Wait for this consumer's turn now: between two products there is no time.
    if (!kLast || next != nullptr) turns.wait();
    wgmma_wait<0>();
    if constexpr (kLast) release(block);
    promote_unit<kFresh, kUnit>(sum, partial[0], block);
    if constexpr (kInTurn > 1) {
      if (next == nullptr) add_total<kUnit>(sum);
    }
    if constexpr (!kLast) {
      issue<kUnit + 1>(partial[0], block);
      finished(Index<kUnit>());
      each_unit<kFresh, kUnit + 1>(sum, block, next, place, finished);
    } else if (next != nullptr) {
      issue<0>(partial[0], *next);
    }
  }

  // Two sets of partial sums, used by units in turn, across blocks as well. With two units each block starts with set 0.
  template <class LookAhead, class Finished>
  DG_DEVICE void always_ahead(Sums& sum, u32 blocks, const LookAhead& look_ahead, const Finished& finished) {
    Block even = first, odd;
    const u32 others = blocks - 1;
    u32 place = 0;
    while (place + 1 < others) {
      if (place > 0) scaling.weights.turn(place);
      for (const u32 stop = min_of(others & ~1u, place + kPage); place < stop; place += 2) {
        all_but_last<0>(sum, even, Nothing());
        follow<0>(sum, odd, even, place);
        all_but_last<0>(sum, odd, Nothing());
        follow<1>(sum, even, odd, place + 1);
      }
    }
    if (place < others && place > 0 && place % kPage == 0) scaling.weights.turn(place);
    look_ahead();
    if (place < others) {
      all_but_last<0>(sum, even, Nothing());
      follow<0>(sum, odd, even, place);
      all_but_last<0>(sum, odd, finished);
      last<1>(sum, odd);
    } else {  // do not hoist the line that both branches begin with: ptxas would then serialise the products
      all_but_last<0>(sum, even, finished);
      last<0>(sum, even);
    }
  }

  // All units of a block but the last: starts the next unit before finishing the current one.
  template <u32 kUnit, class Finished>
  DG_DEVICE void all_but_last(Sums& sum, const Block& block, const Finished& finished) {
    if constexpr (kUnit + 1 < kUnits) {
      issue<kUnit + 1>(partial[(kUnit + 1) % 2], block);
      wgmma_wait<1>();
      promote_unit<false, kUnit>(sum, partial[kUnit % 2], block);
      finished(Index<kUnit>());
      all_but_last<kUnit + 1>(sum, block, finished);
    }
  }

  // Starts the next block, then finishes the last unit of the previous block. kOdd says whether that block's place is odd.
  template <u32 kOdd>
  DG_DEVICE void follow(Sums& sum, Block& next, const Block& previous, u32 place) {
    constexpr u32 kLast = kUnits == 1 ? kOdd : 1;
    if constexpr (kScalesLast) {
      arrive(next);
      issue<0>(partial[1 - kLast], next);
      take_scales(next, place);
    } else {
      open(next, place);
      issue<0>(partial[1 - kLast], next);
    }
    if constexpr (kPeeks) full = barrier_test(barriers.full(at.stage), at.parity);
    wgmma_wait<1>();
    release(previous);
    promote_unit<false, kUnits - 1>(sum, partial[kLast], previous);
  }

  template <u32 kOdd>
  DG_DEVICE void last(Sums& sum, const Block& block) {
    constexpr u32 kLast = kUnits == 1 ? kOdd : 1;
    wgmma_wait<0>();
    release(block);
    promote_unit<false, kUnits - 1>(sum, partial[kLast], block);
  }

  // Waits for the next block's stage and reads its scales; `place` is its place among B's scales.
  DG_DEVICE void open(Block& block, u32 place) {
    scaling.before_arrival(block.factors, place);
    arrive(block);
    scaling.after_arrival(block.factors, block.stage);
  }

  DG_DEVICE void take_scales(Block& block, u32 place) {
    scaling.before_arrival(block.factors, place);
    scaling.after_arrival(block.factors, block.stage);
  }

  DG_DEVICE void arrive(Block& block) {
    block.stage = at.stage;
    block.full = barriers.full(at.stage);
    scaling.arrive(block.factors, at.stage, at.parity);
    if (!(kPeeks && full)) barrier_wait(block.full, at.parity);
    at.template advance<kStep>();
  }

  // Frees a block's stage. Call it when the products of this block and of all blocks before it are done.
  DG_DEVICE void release(const Block& block) { barriers.release_at(block.full, lane); }

  // Issues a unit's product: four k32 instructions in one group. The turn is passed on before issuing. The next consumer has to
  // promote first, so it still issues after this one, except for a tile's first product.
  template <u32 kUnit>
  DG_DEVICE void issue(float (&set)[Mma::kN / 2], const Block& block) {
    constexpr bool kWide = kPartials == 1;  // two sets: 3 or 4 instructions fewer of 136 to 240, but never timed
    constexpr u32 kLeft = kUnit / kParts * 64 * kBlockK / 16, kRight = kUnit % kParts * Mma::kN * kBlockK / 16;
    wgmma_fence();
    turns.pass();
    Mma::multiply(set, stage_descriptor<kBytesLeft / 16, kWide>(left, block.stage, kLeft),
                  stage_descriptor<kBytesRight / 16, kWide>(right, block.stage, kRight), opaque_zero);
    wgmma_commit();
  }

  template <bool kFresh, u32 kUnit>
  DG_DEVICE void promote_unit(Sums& sum, const float (&set)[Mma::kN / 2], const Block& block) {
    constexpr u32 kSlice = kUnit / kParts, kColumn = kUnit % kParts * Mma::kN;
    scaling.template promote<kFresh, kSlice, kColumn, Mma::kN>(&sum[kSlice][kColumn / 2], set, block.factors);
  }
};
