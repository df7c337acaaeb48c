// Which columns of D, or rows of B, a tile has.
#pragma once
#include "types.cuh"

// A tile whose width does not divide 128 would meet the borders of B's scale blocks, each tile somewhere else, and choosing
// between two scales cost up to a fifth of a block of K. So its columns come in segments: as wide as the powers of two that
// the width is the sum of, the widest first. All tiles' first segments come before all second ones:
//
//   112 = 64 + 32 + 16, of T tiles: 64 columns from 64 j on, 32 from 64 T + 32 j, and 16 from 96 T + 16 j.
//
// A segment begins at a multiple of its width, so that up to 128 columns lie in one block of B's scales: where a tile's
// scales change is known to the compiler.
template <u32 kBlockN>
struct TileColumns {
  enum : u32 { kWidth = kBlockN };
  enum : u32 { kWidest = top_bit(kBlockN), kSecond = top_bit(kBlockN - kWidest) };
  enum : u32 { kThird = top_bit(kBlockN - kWidest - kSecond), kFourth = kBlockN - kWidest - kSecond - kThird };
  enum : u32 { kSegments = 1 + (kSecond > 0) + (kThird > 0) + (kFourth > 0) };
  static DG_DEVICE constexpr u32 width(u32 segment) {
    return segment == 0 ? kWidest : segment == 1 ? kSecond : segment == 2 ? kThird : kFourth;
  }
  // Where in the tile it begins.
  static DG_DEVICE constexpr u32 begin(u32 segment) { return kBlockN & ~(2 * width(segment) - 1); }

  // How many of B's scales a tile has for a block of K, and which columns of the tile each is for.
  enum : u32 { kScales = kBlockN == 256 ? 2 : +kSegments };
  static DG_DEVICE constexpr u32 scale_begin(u32 scale) { return kBlockN == 256 ? 128 * scale : begin(scale); }
  static DG_DEVICE constexpr u32 scale_end(u32 scale) { return scale + 1 < kScales ? scale_begin(scale + 1) : kBlockN; }

  u32 index, tiles;  // this one's place among those of a row of tiles, and how many these are

  DG_DEVICE u32 first(u32 segment) const { return begin(segment) * tiles + index * width(segment); }
  // The row of B's scales that a scale is from.
  DG_DEVICE u32 scale_row(u32 scale) const {
    return kBlockN == 256 ? first(0) / 128 + scale : first(scale) / 128;
  }
  // Where a column of the tile lies in D.
  DG_DEVICE u32 at(u32 column) const {
    u32 found = first(0) + column;
#pragma unroll
    for (u32 segment = 1; segment < kSegments; ++segment)
      if (column >= begin(segment)) found = first(segment) + column - begin(segment);
    return found;
  }
  // How many of them there are, of a matrix with `edge` columns.
  DG_DEVICE u32 existing(u32 edge) const {
    u32 found = 0;
#pragma unroll
    for (u32 segment = 0; segment < kSegments; ++segment) {
      const u32 from = first(segment);
      found += from < edge ? min_of(edge - from, width(segment)) : 0;
    }
    return found;
  }
};
