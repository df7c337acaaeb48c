// The columns of D, or rows of B, that belong to a tile.
#pragma once
#include "types.cuh"

// If a tile were one range of columns and its width did not divide 128, borders of B's scale blocks would fall at a different
// column in each tile. Selecting between two scales took up to a fifth of a block's time. So a tile consists of segments, one
// for each power of two in its width, widest first. In D all tiles' first segments come before all second segments:
//
//   112 = 64 + 32 + 16: tile j of T has 64 columns from 64 j on, 32 from 64 T + 32 j, and 16 from 96 T + 16 j.
//
// A segment begins at a multiple of its width, so it lies in one scale block of B (two if it has 256 columns). The columns at
// which the scale changes are compile-time constants.
template <u32 kBlockN>
struct TileColumns {
  enum : u32 { kWidth = kBlockN };
  enum : u32 { kWidest = top_bit(kBlockN), kSecond = top_bit(kBlockN - kWidest) };
  enum : u32 { kThird = top_bit(kBlockN - kWidest - kSecond), kFourth = kBlockN - kWidest - kSecond - kThird };
  enum : u32 { kSegments = 1 + (kSecond > 0) + (kThird > 0) + (kFourth > 0) };
  static DG_DEVICE constexpr u32 width(u32 segment) {
    return segment == 0 ? kWidest : segment == 1 ? kSecond : segment == 2 ? kThird : kFourth;
  }
  // The column of the tile at which a segment begins.
  static DG_DEVICE constexpr u32 begin(u32 segment) { return kBlockN & ~(2 * width(segment) - 1); }

  // How many scales of B a tile has in a block of K, and the columns that each is for.
  enum : u32 { kScales = kBlockN == 256 ? 2 : +kSegments };
  static DG_DEVICE constexpr u32 scale_begin(u32 scale) { return kBlockN == 256 ? 128 * scale : begin(scale); }
  static DG_DEVICE constexpr u32 scale_end(u32 scale) { return scale + 1 < kScales ? scale_begin(scale + 1) : kBlockN; }

  u32 index, tiles;  // this tile's place in its row of tiles, and the length of the row

  DG_DEVICE u32 first(u32 segment) const { return begin(segment) * tiles + index * width(segment); }
  // The row of B's scale tensor for a scale of the tile.
  DG_DEVICE u32 scale_row(u32 scale) const {
    return kBlockN == 256 ? first(0) / 128 + scale : first(scale) / 128;
  }
  // The column of D for a column of the tile.
  DG_DEVICE u32 at(u32 column) const {
    u32 found = first(0) + column;
#pragma unroll
    for (u32 segment = 1; segment < kSegments; ++segment)
      if (column >= begin(segment)) found = first(segment) + column - begin(segment);
    return found;
  }
  // How many of the tile's columns exist in a matrix with `edge` columns.
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

// The columns of a tile that are one range, which begins at a multiple of the tile's width. Scale blocks of B end at the same columns in all
// tiles if the width divides 128 or is a multiple of it. Otherwise they end at multiples of the greatest power of two in the width, and
// each such piece has a scale, although neighbours may have the same one.
template <u32 kBlockN>
struct BlockColumns {
  enum : u32 { kPiece = min_of(kBlockN & (~kBlockN + 1), 128u), kScales = kBlockN / kPiece };
  static DG_DEVICE constexpr u32 scale_begin(u32 scale) { return scale * kPiece; }
  static DG_DEVICE constexpr u32 scale_end(u32 scale) { return (scale + 1) * kPiece; }
};

// The columns of a tile of a product with a gate: half of them are gate's, and half of them up's.
template <u32 kBlockN>
struct GatedColumns {
  enum : u32 { kScales = 2, kSegments = 1 };
  static DG_DEVICE constexpr u32 scale_begin(u32 scale) { return scale * (kBlockN / 2); }
  static DG_DEVICE constexpr u32 scale_end(u32 scale) { return (scale + 1) * (kBlockN / 2); }
};

// The same where B's rows are interleaved: 64 columns of gate and the same ones of up are of one block, so that of 256 columns the first
// and the third 64 have the first scale.
template <u32 kBlockN>
struct InterleavedColumns {
  enum : u32 { kScales = kBlockN == 256 ? 2 : 1, kSegments = 1, kEach = kBlockN == 256 ? 64 : +kBlockN };
  static DG_DEVICE constexpr u32 scale_begin(u32 scale) { return scale * kEach; }
  static DG_DEVICE constexpr u32 scale_end(u32 scale) { return (scale + 1) * kEach; }
};
