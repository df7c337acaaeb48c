// Edge boxes: tiles that reach past the edge of an operand are loaded with tensor maps of their own, whose boxes end at the edge.
// Rows outside a tensor cost TMA more time than rows inside: without edge boxes 133 x 28032 x 4864 took 101 us instead of 63
// with 128x128 tiles, and 129 x 1792 x 10624 took 38 instead of 19 with 128x32 (H200). Shared memory after an edge box keeps
// old values. They are multiplied into rows or columns of D that do not exist and are never stored.
#pragma once
#include "tma.cuh"

// How many of a tile's `kBlock` rows are loaded, if the tile begins at row `first` of an operand with `edge` rows: all of them,
// `last` in the last tile, or none for a tile of a cluster that lies outside.
template <u32 kBlock, bool kMayLieOutside>
DG_DEVICE u32 rows_loaded(u32 first, u32 edge, u32 last) {
  return first + kBlock <= edge ? kBlock : !kMayLieOutside || first < edge ? last : 0;
}

// Calls `load(map)` with the map for the `kBox` rows from `part` on that this CTA loads of a tile of which `rows` exist: the
// whole box, the edge box, or nullptr if none of them exist. Branches choose the map. A conditional expression would put its
// address into a register, and every load would wait for it.
template <u32 kBox, bool kMayLieOutside, class Load>
DG_DEVICE void with_map(u32 part, u32 rows, const TensorMap* whole, const TensorMap* last, const Load& load) {
  if (!kMayLieOutside || part < rows) {
    load(part + kBox <= rows ? whole : last);
  } else {
    load(nullptr);
  }
}
