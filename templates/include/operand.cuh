// One operand of a GEMM in shared memory, K-major or MN-major, and the thread that loads it.
#pragma once
#include "barrier.cuh"
#include "columns.cuh"
#include "edge_boxes.cuh"
#include "pipeline.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// A tile of kRows rows of A or B by a block of K of 128 bytes. Each of kParts CTAs of a cluster loads a part and multicasts it.
//   K-major: one box of 128 bytes of K by the part's rows, or an edge box (see edge_boxes.cuh).
//   MN-major (16-bit elements only): boxes of 64 rows (128 bytes) by the block of K. Boxes past the edge are not loaded.
// Either way 64 rows take 8192 bytes.
// If kMapRows is not zero, the maps have boxes of kMapRows rows, and those that begin before the edge are loaded.
template <u32 kRows, bool kMnMajor, u32 kParts, bool kMayLieOutside, u32 kElementBytes = 2, u32 kMapRows = 0>
struct OperandTile {
  enum : u32 { kBlockK = 128 / kElementBytes, kBoxBytes = 64 * 128 };
  enum : u32 { kBytes = kRows * 128, kPartRows = kRows / kParts };
  enum : bool { kAlongRows = kMnMajor };  // rows, not K, are contiguous
  enum : u32 { kHalves = 1 };  // 2 for a tile of two halves of the operand
  static DG_DEVICE u32 rows(u32 n) { return n; }  // of the maps, for a group's n rows of B
  static DG_DEVICE void prefetch(const TensorMap* map, u32 k, u32 row) { tma_prefetch(map, k, row); }
  enum : bool { kSegmented = false };
  static_assert(kMapRows == 0 || (kParts == 1 && kRows % kMapRows == 0));
  static_assert(kPartRows * kParts == kRows && (!kMnMajor || (kPartRows % 64 == 0 && kElementBytes == 2)));

  // The operand's launch arguments.
  struct Source {
    const TensorMap *map, *last;
    u32 edge, last_rows;  // its rows, and those of an edge box
  };

  // Bytes that arrive for the tile whose first row is `first`.
  static DG_DEVICE u32 bytes(const Source& from, u32 first) {
    if constexpr (kMnMajor) {
      return boxes<64, kRows>(from, first) * kBoxBytes;
    } else if constexpr (kMapRows > 0) {
      return boxes<kMapRows, kRows>(from, first) * kMapRows * 128;
    } else {
      return rows_loaded<kRows, kMayLieOutside>(first, from.edge, from.last_rows) * 128;
    }
  }

  // Calls `use(each_box)`. There `each_box(k, load)` calls `load(map, place, x, y)` for each box of the part in the block of K
  // that begins at k: `place` is the box's offset in the tile, x and y are its coordinates, innermost first.
  template <class Use>
  static DG_DEVICE void with_boxes(const Source& from, u32 first, u32 part, const Use& use) {
    const u32 row = first + part * kPartRows;
    if constexpr (kMnMajor) {
      const u32 count = boxes<64, kPartRows>(from, row);
      use([&](u32 k, const auto& load) {
#pragma unroll
        for (u32 box = 0; box < kPartRows / 64; ++box)
          if (box < count) load(from.map, part * kPartRows * 128 + box * kBoxBytes, row + box * 64, k);
      });
    } else if constexpr (kMapRows > 0) {
      const u32 count = boxes<kMapRows, kRows>(from, row);
      use([&](u32 k, const auto& load) {
#pragma unroll
        for (u32 box = 0; box < kRows / kMapRows; ++box)
          if (box < count) load(from.map, box * kMapRows * 128, k, row + box * kMapRows);
      });
    } else {
      const u32 loaded = rows_loaded<kRows, kMayLieOutside>(first, from.edge, from.last_rows);
      with_map<kPartRows, kMayLieOutside>(part * kPartRows, loaded, from.map, from.last, [&](const TensorMap* map) {
        use([&](u32 k, const auto& load) {
          if (map) load(map, part * kPartRows * 128, k, row);
        });
      });
    }
  }

  // How many of the boxes of kBox rows that make up `kOf` rows from `first` on begin before the edge.
  template <u32 kBox, u32 kOf>
  static DG_DEVICE u32 boxes(const Source& from, u32 first) {
    return first < from.edge ? min_of(ceil_div(from.edge - first, kBox), kOf / kBox) : 0;
  }

  // Low word of the descriptor of the tile at `address`.
  static DG_DEVICE u32 descriptor(u32 address) { return descriptor_low(address, kMnMajor ? kBoxBytes : 16); }
};

// The tile of a K-major B of a product with a gate: half of its rows are gate's, from `first` on, and half of them up's, which are half
// of B's rows further on; or with kTurn so many of B's rows are gate's and up's in turn, and there is a map of gate's rows and one of
// up's. Eight rows in turn are the second of three dimensions of these: boxes have the same rows in the same places. Rows past the last one of gate or of up are others, or zeros: no column of D is made of them.
template <u32 kRows, u32 kParts, u32 kElementBytes, u32 kTurn>
struct GatedTile : OperandTile<kRows, false, kParts, false, kElementBytes> {
  using Source = typename OperandTile<kRows, false, kParts, false, kElementBytes>::Source;
  enum : u32 { kHalves = 2, kBytes = kRows * 128, kBoxRows = kRows / 2 / kParts };
  static_assert(kTurn <= 1 || (kTurn == 8 && kParts == 1));

  static DG_DEVICE u32 rows(u32 n) { return kTurn > 0 ? n / 2 : n; }
  static DG_DEVICE u32 bytes(const Source&, u32) { return kBytes; }
  static DG_DEVICE void prefetch(const TensorMap* map, u32 k, u32 row) {
    if constexpr (kTurn == 8) tma_prefetch_3d(map, k, 0, row / 8);
    else tma_prefetch(map, k, row);
  }

  template <class Use>
  static DG_DEVICE void with_boxes(const Source& from, u32 first, u32 part, const Use& use) {
    const u32 row = first + part * kBoxRows;
    use([&](u32 k, const auto& load) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 place = (half * kRows / 2 + part * kBoxRows) * 128;
        if constexpr (kTurn == 0) {
          load(from.map, place, k, row + half * (from.edge / 2));
        } else {
          const TensorMap* map = half ? from.last : from.map;
          if constexpr (kTurn == 8) load(map, place, k, 0, row / 8);
          else load(map, place, k, row);
        }
      }
    });
  }
};

// A tile of B whose rows are the columns of a TileColumns: one box for each segment. If kParts CTAs of a cluster load a tile together,
// each loads a part of each segment. A tile is given by its place in its row of tiles.
template <class Columns, u32 kParts, bool kMayLieOutside>
struct SegmentedTile {
  enum : u32 { kBytes = Columns::kWidth * 128, kHalves = 1 };
  enum : bool { kAlongRows = false, kSegmented = true };

  struct Source {
    const TensorMap *const *maps, *last;  // a map for each segment, and that of the box that the edge cuts
    u32 edge, tiles;                      // rows of B, and the tiles in a row
  };

  static DG_DEVICE u32 bytes(const Source& from, u32 place) { return Columns{place, from.tiles}.existing(from.edge) * 128; }

  // As `OperandTile::with_boxes`. At most one box in all tiles is cut by the edge. Only tiles that are not whole test for it in each
  // stage: they give `use` a second argument.
  template <class Use>
  static DG_DEVICE void with_boxes(const Source& from, u32 index, u32 part, const Use& use) {
    const Columns columns{index, from.tiles};
    if constexpr (Columns::kSegments == 1) {
      constexpr u32 kBox = Columns::width(0) / kParts;
      const u32 place = part * kBox, row = columns.first(0) + place;
      with_map<kBox, kMayLieOutside>(row, from.edge, from.maps[0], from.last, [&](const TensorMap* map) {
        use([&](u32 k, const auto& load) {
          if (map) load(map, place * 128, k, row);
        });
      });
    } else {
      const auto each = [&](bool whole, u32 k, const auto& load) {
#pragma unroll
        for (u32 segment = 0; segment < Columns::kSegments; ++segment) {
          const u32 box = Columns::width(segment) / kParts, row = columns.first(segment) + part * box;
          const u32 place = (Columns::begin(segment) + part * box) * 128;
          if (whole) {
            load(from.maps[segment], place, k, row);
          } else if (row < from.edge) {
            load(row + box <= from.edge ? from.maps[segment] : from.last, place, k, row);
          }
        }
      };
      if (columns.existing(from.edge) == Columns::kWidth) {
        use([&](u32 k, const auto& load) { each(true, k, load); });
      } else {
        use([&](u32 k, const auto& load) { each(false, k, load); }, Rarely());
      }
    }
  }
};
