// Edge boxes: tiles that reach past the edge of an operand are loaded with tensor maps of their own, whose boxes end at the edge.
// Rows outside a tensor cost TMA more time than rows inside: without edge boxes 133 x 28032 x 4864 took 101 us instead of 63
// with 128x128 tiles, and 129 x 1792 x 10624 took 38 instead of 19 with 128x32 (H200). Shared memory after an edge box keeps
// old values. They are multiplied into rows or columns of D that do not exist and are never stored.
#pragma once
#include "columns.cuh"
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

// Calls `use(each_box)`. There `each_box(load)` calls `load(map, place, row)` for each of a tile's boxes of B: one for each
// segment of its columns. If `kParts` CTAs of a cluster load a tile together, it is the part-th part of each segment. A box holds
// the rows of B from `row` on, and goes to the tile's row `place`. At most one box in all tiles is cut by the edge; its map is
// `last`. Only tiles that are not whole test for it in each stage.
template <u32 kParts, bool kMayLieOutside, class Columns, u32 kMaps, class Use>
DG_DEVICE void with_boxes(const Columns& columns, u32 part, u32 edge, const TensorMap* const (&maps)[kMaps],
                          const TensorMap* last, const Use& use) {
  if constexpr (Columns::kSegments == 1) {
    constexpr u32 kBox = Columns::width(0) / kParts;
    const u32 place = part * kBox, row = columns.first(0) + place;
    with_map<kBox, kMayLieOutside>(row, edge, maps[0], last, [&](const TensorMap* map) {
      use([&](const auto& load) {
        if (map) load(map, place, row);
      }, Index<1>());
    });
  } else {
    const auto each = [&](bool whole, const auto& load) {
#pragma unroll
      for (u32 segment = 0; segment < Columns::kSegments; ++segment) {
        const u32 box = Columns::width(segment) / kParts, row = columns.first(segment) + part * box;
        const u32 place = Columns::begin(segment) + part * box;
        if (whole) {
          load(maps[segment], place, row);
        } else if (row < edge) {
          load(row + box <= edge ? maps[segment] : last, place, row);
        }
      }
    };
    if (columns.existing(edge) == Columns::kWidth) {
      use([&](const auto& load) { each(true, load); }, Index<1>());
    } else {
      use([&](const auto& load) { each(false, load); }, Index<0>());
    }
  }
}
