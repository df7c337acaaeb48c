// What is loaded of a tile that hangs over the edge of an operand. Rows outside keep TMA longer than rows inside: on an H200
// boxes that hang over made 133 x 28032 x 4864 take 101 us for 63 with tiles of 128x128, and 129 x 1792 x 10624 38 for 19 with
// 128x32. So such tiles have maps of their own, with boxes that end at the edge. What is not loaded holds anything: it is
// multiplied into rows or columns of D that do not exist.
#pragma once
#include "columns.cuh"
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

// Goes on with what brings a tile's boxes of B: `use(bring)`, and `bring(load)` calls `load(map, place, row)` for each box, of
// every segment of the tile's columns, or if `kParts` of a cluster share them, of the part-th part of each. A box brings the
// rows from `row` on, which belong where the tile's row `place` is. At most one box of all tiles ends at the edge: it has
// the map `last`. Only tiles with that one, or with none for some segment, look for it in each stage.
template <u32 kParts, bool kMayLieOutside, class Columns, class Use>
DG_DEVICE void with_boxes(const Columns& columns, u32 part, u32 edge, const TensorMap* const (&maps)[4],
                          const TensorMap* last, const Use& use) {
  if constexpr (Columns::kSegments == 1) {
    constexpr u32 kBox = Columns::width(0) / kParts;
    const u32 place = part * kBox, row = columns.first(0) + place;
    with_map<kBox, kMayLieOutside>(row, edge, maps[0], last, [&](const TensorMap* map) {
      use([&](const auto& load) {
        if (map) load(map, place, row);
      });
    });
  } else {
    const auto each = [&](bool whole, const auto& load) {
#pragma unroll
      for (u32 segment = 0; segment < Columns::kSegments; ++segment) {
        const u32 box = Columns::width(segment) / kParts, row = columns.first(segment) + part * box;
        const u32 place = Columns::begin(segment) + part * box;
        if (whole || row + box <= edge) {
          load(maps[segment], place, row);
        } else if (row < edge) {
          load(last, place, row);
        }
      }
    };
    if (columns.existing(edge) == Columns::kWidth) {
      use([&](const auto& load) { each(true, load); });
    } else {
      use([&](const auto& load) { each(false, load); });
    }
  }
}
