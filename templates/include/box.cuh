// What is loaded of a tile that hangs over the edge of an operand. Rows outside keep TMA longer than rows inside: on an H200
// boxes that hang over made 133 x 28032 x 4864 take 101 us for 63 with tiles of 128x128, and 129 x 1792 x 10624 38 for 19 with
// 128x32. So such tiles have maps of their own, with boxes that end at the edge. What is not loaded holds anything: it is
// multiplied into rows or columns of D that do not exist.
#pragma once
#include "tma.cuh"

// Rows that are loaded of a tile's `kBlock` from `first` on, of an operand with `edge` rows: all, those of the last tile,
// or none, where clusters reach past the edge.
template <u32 kBlock, bool kMayLieOutside>
DG_DEVICE u32 rows_loaded(u32 first, u32 edge, u32 last) {
  return first + kBlock <= edge ? kBlock : !kMayLieOutside || first < edge ? last : 0;
}

// Goes on with the map for what this CTA loads of a tile, `kBox` rows from `part` on if as many of its `rows` are left, or
// with none. By branches: a map that is chosen goes through registers, for which every load would wait.
template <u32 kBox, bool kMayLieOutside, class Load>
DG_DEVICE void with_map(u32 part, u32 rows, const TensorMap* whole, const TensorMap* last, const Load& load) {
  if (part + kBox <= rows) {
    load(whole);
  } else if (!kMayLieOutside || part < rows) {
    load(last);
  } else {
    load(nullptr);
  }
}
