// A consumer warpgroup's walk along K: multiply a block of K into partial sums, promote them into float32 sums.
#pragma once
#include "pipeline.cuh"
#include "promotion.cuh"
#include "warpgroup.cuh"

// The tensor cores must not wait for promotion. Three schedules, by how many sets of partial sums fit in registers:
//   1: one block after the other; the other consumer's products hide this one's promotion.
//   2: the next products are always issued before the last ones are promoted.
//   more: a whole round of short products is issued, then promoted in order; for narrow tiles, whose instructions are
//      all latency. Blocks are padded to whole rounds: loads past the end of K bring zeros.
template <class Tile, class Mma, class Barriers, u32 kSlices, u32 kScaleRows>
struct Fp8Mainloop {
  static constexpr u32 kBlockN = Tile::kBlockN, kBlockK = 128;
  static constexpr u32 kBytesA = Tile::kBlockM * kBlockK, kBytesB = kBlockN * kBlockK, kBytesScale = Tile::kBlockM * 4;
  static constexpr u32 kPartials = Tile::kPartials;
  // A block's products come in units of one m64 slice by Mma::kN columns.
  static constexpr u32 kParts = kBlockN / Mma::kN, kUnits = kSlices * kParts;
  static_assert(kParts * Mma::kN == kBlockN);
  static_assert(kPartials == 1 || kUnits == 1 || (kPartials == 2 && kUnits == 2));

  // What one block of K needs besides its operands, read before its products start.
  struct Block {
    u32 stage;
    float scale_a[kSlices][2], scale_b[kScaleRows];
  };
  using Sums = float[kSlices][kBlockN / 2];

  const Barriers barriers;
  ColumnScales<kScaleRows> scales;
  const u32 tile_a, tile_b;  // low descriptor words of this consumer's rows of A, and of B, in stage 0
  const u32 scale_row;       // address of this thread's first scale of A in stage 0
  const u32 lane;
  PipelineCursor<Tile::kStages> at;
  u32 opaque_zero;  // zero, but not to the compiler
  u32 next_block, first_columns;
  float partial[kPartials][Mma::kN / 2];

  DG_DEVICE Fp8Mainloop(const Barriers& barriers, const ColumnScales<kScaleRows>& scales, u32 tile_a, u32 tile_b,
                        u32 scale_row, u32 lane)
      : barriers(barriers), scales(scales), tile_a(tile_a), tile_b(tile_b), scale_row(scale_row), lane(lane) {
    asm volatile("mov.u32 %0, 0;" : "=r"(opaque_zero));
#pragma unroll
    for (u32 set = 0; set < kPartials; ++set)
#pragma unroll
      for (u32 i = 0; i < Mma::kN / 2; ++i) partial[set][i] = 0.0f;
  }

  // Starts fetching B's scales for the tile at `column`, well before multiply() needs them.
  DG_DEVICE void open(u32 column) { scales.open(column / 128); }

  static DG_DEVICE u32 padded(u32 blocks) { return kPartials > 2 ? ceil_div(blocks, kPartials) * kPartials : blocks; }

  // Adds `blocks` blocks of K of the opened tile to `sum`. Its first `first_columns` columns lie in one row of B's scales.
  DG_DEVICE void multiply(Sums& sum, u32 blocks, u32 first_columns) {
    this->first_columns = first_columns;
    next_block = 0;
    if constexpr (kPartials == 1) {
      for (u32 i = 0; i < blocks; ++i) one_by_one(sum);
    } else if constexpr (kPartials == 2) {
      always_ahead(sum, blocks);
    } else {
      for (u32 i = 0; i < blocks; i += kPartials) whole_round(sum);
    }
  }

 private:
  DG_DEVICE void one_by_one(Sums& sum) {
    Block block;
    open(block);
    each_unit<0>(sum, block);
  }

  template <u32 kUnit>
  DG_DEVICE void each_unit(Sums& sum, const Block& block) {
    issue<kUnit>(partial[0], block);
    finish<0>(partial[0]);
    if constexpr (kUnit + 1 == kUnits) release(block);
    promote_unit<kUnit>(sum, partial[0], block);
    if constexpr (kUnit + 1 < kUnits) each_unit<kUnit + 1>(sum, block);
  }

  DG_DEVICE void always_ahead(Sums& sum, u32 blocks) {
    Block even, odd;
    open(even);
    issue<0>(partial[0], even);
    if constexpr (kUnits == 1) {
      for (; blocks > 2; blocks -= 2) {
        follow<0, 0>(sum, partial[1], odd, partial[0], even);
        follow<0, 0>(sum, partial[0], even, partial[1], odd);
      }
      if (blocks == 2) {
        follow<0, 0>(sum, partial[1], odd, partial[0], even);
        last<0>(sum, partial[1], odd);
      } else {
        last<0>(sum, partial[0], even);
      }
    } else {
      for (; blocks > 2; blocks -= 2) {
        both_units(sum, even);
        follow<0, 1>(sum, partial[0], odd, partial[1], even);
        both_units(sum, odd);
        follow<0, 1>(sum, partial[0], even, partial[1], odd);
      }
      if (blocks == 2) {
        both_units(sum, even);
        follow<0, 1>(sum, partial[0], odd, partial[1], even);
        both_units(sum, odd);
        last<1>(sum, partial[1], odd);
      } else {
        both_units(sum, even);
        last<1>(sum, partial[1], even);
      }
    }
  }

  // Starts the second unit of a block, then ends the first.
  DG_DEVICE void both_units(Sums& sum, const Block& block) {
    issue<1>(partial[1], block);
    finish<1>(partial[0]);
    promote_unit<0>(sum, partial[0], block);
  }

  // Starts unit kNext of the next block in one set, then ends unit kPrevious, the last of its block, in the other.
  template <u32 kNext, u32 kPrevious>
  DG_DEVICE void follow(Sums& sum, float (&next)[Mma::kN / 2], Block& next_block, float (&previous)[Mma::kN / 2],
                        const Block& previous_block) {
    open(next_block);
    issue<kNext>(next, next_block);
    finish<1>(previous);
    release(previous_block);
    promote_unit<kPrevious>(sum, previous, previous_block);
  }

  template <u32 kUnit>
  DG_DEVICE void last(Sums& sum, float (&set)[Mma::kN / 2], const Block& block) {
    finish<0>(set);
    release(block);
    promote_unit<kUnit>(sum, set, block);
  }

  DG_DEVICE void whole_round(Sums& sum) {
    Block round[kPartials];
#pragma unroll
    for (u32 i = 0; i < kPartials; ++i) {
      open(round[i]);
      issue<0>(partial[i], round[i]);
    }
    drain<0>(sum, round);
  }

  template <u32 kIndex>
  DG_DEVICE void drain(Sums& sum, const Block (&round)[kPartials]) {
    finish<kPartials - 1 - kIndex>(partial[kIndex]);
    release(round[kIndex]);
    promote_unit<0>(sum, partial[kIndex], round[kIndex]);
    if constexpr (kIndex + 1 < kPartials) drain<kIndex + 1>(sum, round);
  }

  // Waits for the next block's bytes and takes its scales: for this thread's two rows in each slice, and the tile's.
  DG_DEVICE void open(Block& block) {
    block.stage = at.stage;
    scales.get(next_block++, block.scale_b);
    barrier_wait(barriers.full(at.stage), at.parity);
    const u32 address = scale_row + at.stage * kBytesScale;
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice) {
      block.scale_a[slice][0] = load_shared(address + slice * 256);
      block.scale_a[slice][1] = load_shared(address + slice * 256 + 32);
    }
    at.advance();
  }

  DG_DEVICE void release(const Block& block) { barriers.release(block.stage, lane); }

  // Starts a unit's product: four instructions of k32 in one group.
  template <u32 kUnit>
  DG_DEVICE void issue(float (&set)[Mma::kN / 2], const Block& block) {
    const u32 a = tile_a + (block.stage * kBytesA + kUnit / kParts * 64 * kBlockK) / 16;
    const u32 b = tile_b + (block.stage * kBytesB + kUnit % kParts * Mma::kN * kBlockK) / 16;
    wgmma_fence();
    Mma::start(set, matrix_descriptor(a), matrix_descriptor(b), opaque_zero);
#pragma unroll
    for (u32 step = 1; step < kBlockK / 32; ++step)
      Mma::accumulate(set, matrix_descriptor(a + step * 2), matrix_descriptor(b + step * 2));
    wgmma_commit();
  }

  template <u32 kPending>
  DG_DEVICE void finish(float (&set)[Mma::kN / 2]) {
    wgmma_wait<kPending>();
#pragma unroll
    for (u32 i = 0; i < Mma::kN / 2; ++i) pin_register(set[i]);
  }

  template <u32 kUnit>
  DG_DEVICE void promote_unit(Sums& sum, const float (&set)[Mma::kN / 2], const Block& block) {
    constexpr u32 kSlice = kUnit / kParts, kColumn = kUnit % kParts * Mma::kN;
    promote<Mma::kN, kColumn, Tile::kScaleGroup>(&sum[kSlice][kColumn / 2], set, block.scale_a[kSlice], block.scale_b,
                                                 first_columns);
  }
};
