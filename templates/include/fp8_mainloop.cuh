// A consumer warpgroup's walk along K: multiply a block of K into partial sums, promote them into float32 sums.
#pragma once
#include "pipeline.cuh"
#include "promotion.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// The tensor cores must not wait for promotion. Two schedules, by how many sets of partial sums fit in registers:
//   1: one block after the other; the other consumers' products hide this one's promotion.
//   2: the next products are always issued before the last ones are promoted. Three or four sets brought nothing.
// In the first, consumers may have to start their products in turn. Left alone they fall into step, since they wait for
// the same stages and the tensor cores take instructions of theirs alternately: then they promote at the same time, and
// the tensor cores idle.
// Shape gives kStages, kConsumers, kStep, kRows and kColumns (of the left and of the
// right operand's tile), kSlices, kPartials, kTurns (consumers that take turns, or 1), kUnrolls (whether the loop of the
// first schedule goes round the ring in steps that know their stage), kPeeks (whether the second looks at stages early);
// Scaling (see promotion.cuh) what promotion multiplies by.
template <class Shape, class Mma, class Barriers, class Scaling>
struct Fp8Mainloop {
  // Consumers that share a tile's K take its stages in turn; each walks every kStep-th.
  enum : u32 { kStep = Shape::kStep };
  enum : u32 { kSlices = Shape::kSlices, kColumns = Shape::kColumns, kBlockK = 128 };
  enum : u32 { kBytesLeft = Shape::kRows * kBlockK, kBytesRight = kColumns * kBlockK };
  enum : u32 { kPartials = Shape::kPartials };
  // A block's products come in units of one m64 slice by Mma::kN columns.
  enum : u32 { kParts = kColumns / Mma::kN, kUnits = kSlices * kParts };
  static_assert(kParts * Mma::kN == kColumns);
  static_assert(kPartials == 1 || (kPartials == 2 && kUnits <= 2 && Shape::kTurns == 1));
  static_assert(!Shape::kUnrolls || (kPartials == 1 && kStep == 1));

  // Nothing reads these members. They keep the binaries as they were: register numbers follow the layout of structs.
  struct Unread {};

  struct Block {
    u32 stage;
    typename Scaling::Factors factors;
    Unread unread;
  };
  using Sums = float[kSlices][kColumns / 2];
  enum : u32 { kPage = Scaling::kPage };
  // Whether a tile's first block makes its sums, which then need no clearing: that took about 450 cycles of 1900 between two
  // 256x128 tiles on an H200. Not in swapped tiles, of which ptxas would make some spill, or serialise products.
  enum : bool { kStartsFresh = Shape::kUnrolls && Scaling::kStartsFresh };
  // Whether it is asked before promotion if the stage after the next block's is full: the answer takes 40 cycles, in which a
  // consumer could start that block's products. On an H200 blocks of 64x64, 64x128, 128x64 and 128x112 tiles got 5 to 8%
  // shorter. From 128x128 on the tensor cores are busy anyhow, and swapped tiles, of which HBM is the limit, lost 1%.
  enum : bool { kPeeks = Shape::kPeeks };
  static_assert(!kPeeks || kPartials == 2);
  // Whether a block's scales are read behind its products rather than before: one consumer alone has nobody to keep the
  // tensor cores busy meanwhile. It is 2% of such a block; of two consumers the second loses it again.
  enum : bool { kScalesLast = kPeeks && Shape::kConsumers == 1 };

  const Barriers barriers;
  Scaling scaling;
  const u32 left, right;  // low descriptor words of this consumer's rows, and of all columns, in stage 0
  const ProductTurns<Shape::kTurns> turns;
  const u32 lane;
  PipelineCursor<Shape::kStages> at;
  u32 unread_count = 0;
  bool full = false;  // whether that stage is known to be
  u32 opaque_zero;  // zero, but not to the compiler
  float partial[kPartials][Mma::kN / 2];
  Unread unread;

  DG_DEVICE Fp8Mainloop(const Barriers& barriers, const Scaling& scaling, u32 left, u32 right, u32 consumer, u32 lane)
      : barriers(barriers), scaling(scaling), left(left), right(right), turns(consumer), lane(lane) {
    asm volatile("mov.u32 %0, 0;" : "=r"(opaque_zero));
#pragma unroll
    for (u32 set = 0; set < kPartials; ++set)
#pragma unroll
      for (u32 i = 0; i < Mma::kN / 2; ++i) partial[set][i] = 0.0f;
  }

  // The sum of `blocks` blocks of K of a tile. `look_ahead()` is called once, near the end: while a product runs, and when all
  // scale factors of B were taken, or are on the page at hand.
  template <class LookAhead>
  DG_DEVICE void multiply(Sums& sum, u32 blocks, const LookAhead& look_ahead) {
    if (blocks > 0) {
      start();
      resume(sum, blocks, look_ahead, Nothing());
    } else {  // more shares of K than blocks
      scaling.begin(first.factors);
      look_ahead();
      clear(sum);
    }
  }

  // The two halves of the same, for one block or more: between them, the tensor cores have something to do already, and
  // the sums of the tile before can be put away.
  DG_DEVICE void start() {
    full = false;
    arrive(first);
    turns.wait();
    issue<0>(partial[0], first);
  }

  // `finished(unit)` is called when a unit's sums are final, but for the last unit's, while another product runs.
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

  struct Nothing {
    template <class Unit>
    DG_DEVICE void operator()(Unit) const {}
  };

 private:
  Block first;  // of the tile that was started

  DG_DEVICE void clear(Sums& sum) {
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (u32 i = 0; i < kColumns / 2; ++i) sum[slice][i] = 0.0f;
  }

  // The next block is opened while the last products of this one run: only promotion stands between the two.
  template <class LookAhead, class Finished>
  DG_DEVICE void one_by_one(Sums& sum, u32 blocks, const LookAhead& look_ahead, const Finished& finished) {
    Block block = first;
    const u32 others = blocks - 1;
    if constexpr (Shape::kUnrolls) {
      u32 place = 0;
      if constexpr (kStartsFresh) {
        if (others > 0) {
          each_block<true>(sum, block, place++);
        } else {
          asm volatile("");  // a place of its own for the zeros: else they are made before the branch, in every tile
          clear(sum);
        }
      }
      while (place < others) {
        if (place > 0 && place % kPage == 0) scaling.weights.turn(place);
        go_round(sum, block, place, min_of(others, place / kPage * kPage + kPage));
      }
    } else {
      // Nested, over pages of B's scales and over a page's blocks: a branch in each block, never taken but once in 32,
      // cost 20 of 620 cycles in 128x128 tiles.
      for (u32 place = 0; place < others;) {
        if (place > 0) scaling.weights.turn(place);
        for (const u32 stop = min_of(others, place + kPage); place < stop; ++place) each_block<false>(sum, block, place);
      }
    }
    look_ahead();
    each_unit<false, 0>(sum, block, nullptr, 0, finished);
  }

  // Goes on to the block at `stop`, round the ring in steps whose stage is known: its addresses are numbers in the code, and
  // no step computes any. That is 20 instructions less of 131 in 128x128 tiles, and up to 4% of a block of K in wide ones.
  DG_DEVICE void go_round(Sums& sum, Block& block, u32& place, u32 stop) {
    static_assert(Shape::kStages <= 16);
#define DG_STEP(kStage)                         \
  case kStage:                                  \
    if constexpr (kStage < Shape::kStages) {    \
      block.stage = kStage;                     \
      at.stage = (kStage + 1) % Shape::kStages; \
      each_block<false>(sum, block, place);     \
      if (++place == stop) return;              \
    }
    switch (block.stage) {
      for (;;) {
        DG_STEP(0) DG_STEP(1) DG_STEP(2) DG_STEP(3) DG_STEP(4) DG_STEP(5) DG_STEP(6) DG_STEP(7)
        DG_STEP(8) DG_STEP(9) DG_STEP(10) DG_STEP(11) DG_STEP(12) DG_STEP(13) DG_STEP(14) DG_STEP(15)
      }
    }
#undef DG_STEP
  }

  // With kFresh, sums are those of this block alone.
  template <bool kFresh>
  DG_DEVICE void each_block(Sums& sum, Block& block, u32 place) {
    Block next;
    each_unit<kFresh, 0>(sum, block, &next, place, Nothing());
    block = next;
  }

  // Ends a unit that was started, does those after it, and starts the next block.
  template <bool kFresh, u32 kUnit, class Finished>
  DG_DEVICE void each_unit(Sums& sum, const Block& block, Block* next, u32 place, const Finished& finished) {
    constexpr bool kLast = kUnit + 1 == kUnits;
    if (kLast && next != nullptr) open(*next, place);
    // For the products that come next; asked for while there is time, since the way from one product to the next is long.
    if (!kLast || next != nullptr) turns.wait();
    finish<0>(partial[0]);
    if constexpr (kLast) release(block);
    promote_unit<kFresh, kUnit>(sum, partial[0], block);
    if constexpr (!kLast) {
      issue<kUnit + 1>(partial[0], block);
      finished(Index<kUnit>());
      each_unit<kFresh, kUnit + 1>(sum, block, next, place, finished);
    } else if (next != nullptr) {
      issue<0>(partial[0], *next);
    }
  }

  // Units take the two sets in turn, over the borders of blocks: an even number of units starts each block with set 0.
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
    } else {  // the same first line in both: hoisted, ptxas would no longer see that no product is touched in flight
      all_but_last<0>(sum, even, finished);
      last<0>(sum, even);
    }
  }

  // Starts each next unit of a block before it ends the one before.
  template <u32 kUnit, class Finished>
  DG_DEVICE void all_but_last(Sums& sum, const Block& block, const Finished& finished) {
    if constexpr (kUnit + 1 < kUnits) {
      issue<kUnit + 1>(partial[(kUnit + 1) % 2], block);
      finish<1>(partial[kUnit % 2]);
      promote_unit<false, kUnit>(sum, partial[kUnit % 2], block);
      finished(Index<kUnit>());
      all_but_last<kUnit + 1>(sum, block, finished);
    }
  }

  // Starts the next block, then ends the last unit of the previous one, whose place is odd or even.
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
    finish<1>(partial[kLast]);
    release(previous);
    promote_unit<false, kUnits - 1>(sum, partial[kLast], previous);
  }

  template <u32 kOdd>
  DG_DEVICE void last(Sums& sum, const Block& block) {
    constexpr u32 kLast = kUnits == 1 ? kOdd : 1;
    finish<0>(partial[kLast]);
    release(block);
    promote_unit<false, kUnits - 1>(sum, partial[kLast], block);
  }

  // Waits for the next block's bytes and takes its scales; `place` is its own on the page of B's.
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
    if (!(kPeeks && full)) barrier_wait(barriers.full(at.stage), at.parity);
    unread_count = 0;
    at.template advance<kStep>();
  }

  // After a block's products, and after those of all blocks before it.
  DG_DEVICE void release(const Block& block) { barriers.release(block.stage, lane); }

  // Starts a unit's product: four instructions of k32 in one group. The next consumer is told at once that it may start: it
  // promotes first, so that it starts after this one, but for a tile's first product.
  template <u32 kUnit>
  DG_DEVICE void issue(float (&set)[Mma::kN / 2], const Block& block) {
    const u32 a = left + (block.stage * kBytesLeft + kUnit / kParts * 64 * kBlockK) / 16;
    const u32 b = right + (block.stage * kBytesRight + kUnit % kParts * Mma::kN * kBlockK) / 16;
    wgmma_fence();
    turns.pass();
    Mma::multiply(set, matrix_descriptor(a), matrix_descriptor(b), opaque_zero);
    wgmma_commit();
  }

  template <u32 kPending>
  DG_DEVICE void finish(float (&set)[Mma::kN / 2]) {
    wgmma_wait<kPending>();
    Mma::settle(set);
  }

  template <bool kFresh, u32 kUnit>
  DG_DEVICE void promote_unit(Sums& sum, const float (&set)[Mma::kN / 2], const Block& block) {
    constexpr u32 kSlice = kUnit / kParts, kColumn = kUnit % kParts * Mma::kN;
    scaling.template promote<kFresh, kSlice, kColumn, Mma::kN>(&sum[kSlice][kColumn / 2], set, block.factors);
  }
};
