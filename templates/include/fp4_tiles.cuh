// The tiles of a CTA in products of many rows with MXFP4 weights, in order.
#pragma once
#include "groups.cuh"

template <class C, class Arguments>
struct Fp4Tiles {
  // With labels, groups begin at multiples of 128 rows, and a tile may end with the rows of its group.
  enum : u32 { kUnit = +C::kGrouping == kIndex ? 128 : +C::kT, kUnits = C::kT / kUnit, kColumns = C::kColumns };
  using Table = GroupTable<C::kGrouping, kUnit, C::kSegments, C::kThreads>;
  // Where segments begin, in rows of tiles.
  enum : u32 { kBegin = kUnits > 1 ? +Table::kBytes : +Table::kBegin };
  enum : u32 { kNone = ~0u };
  enum : u32 { kBytes = has_table(C::kGrouping) ? Table::kBytes + (kUnits > 1 ? ceil_div((C::kSegments + 1) * 4, 128) * 128 : 0) : 0 };

  u32 index;
  u32 row, last, group, column;  // the tile: its first row, the one behind its group's last, its first row of W

  DG_DEVICE Fp4Tiles(const Arguments& arg, u32 table) : index(blockIdx.x) { locate(arg, table); }
  DG_DEVICE bool valid() const { return index != kNone; }
  DG_DEVICE void advance(const Arguments& arg, u32 table) {
    index += gridDim.x;
    locate(arg, table);
  }
  // How many they are.
  static DG_DEVICE u32 count(const Arguments& arg, u32 table) {
    const u32 tiles = rows(arg, table) * ceil_div(arg.n, kColumns);
    return blockIdx.x < tiles ? ceil_div(tiles - blockIdx.x, gridDim.x) : 0;
  }

  // One warp lists where segments begin in rows of tiles.
  static DG_DEVICE void list(u32 table, u32 lane) {
    u32 total = 0;
#pragma unroll 1
    for (u32 first = 0; first < C::kSegments; first += 32) {
      const u32 at = table + Table::kBegin + (first + lane) * 4;
      const u32 own = ceil_div(load_word(at + 4) - load_word(at), kUnits);
      u32 sum = own;
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      store_word(table + kBegin + (first + lane) * 4, total + sum - own);
      total += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) store_word(table + kBegin + C::kSegments * 4, total);
  }

 private:
  static DG_DEVICE u32 rows(const Arguments& arg, u32 table) {
    return +C::kGrouping == kUngrouped ? ceil_div(arg.m, C::kT) : load_word(table + kBegin + C::kSegments * 4);
  }
  DG_DEVICE void locate(const Arguments& arg, u32 table) {
    const u32 columns = ceil_div(arg.n, kColumns);
    // What follows is of no use then, and does no harm. A branch around it would serialise products.
    if (index >= rows(arg, table) * columns) index = kNone;
    if constexpr (+C::kGrouping == kUngrouped) {
      group = 0, last = arg.m;
      place(index, rows(arg, table), columns, 0);
    } else {
      const u32 target = index / columns;
      u32 segment = 0;
#pragma unroll
      for (u32 bit = C::kSegments / 2; bit > 0; bit /= 2)
        if (load_word(table + kBegin + (segment + bit) * 4) <= target) segment += bit;
      const u32 before = load_word(table + kBegin + segment * 4), used = Table::used_of(table, segment);
      group = Table::group_of(table, segment);
      // Padding beside rows of a group is written with them.
      last = +C::kGrouping == kIndex ? min_of(arg.m, ceil_div(used, kUnit) * kUnit) : used;
      place(index - before * columns, load_word(table + kBegin + (segment + 1) * 4) - before, columns, load_word(table + Table::kRow + segment * 4));
    }
  }
  // In strips of rows of tiles, so that the tokens that CTAs read at a time stay in L2.
  DG_DEVICE void place(u32 in_group, u32 height, u32 columns, u32 first) {
    const u32 strip = in_group / (kStrip * columns), in_strip = in_group - strip * kStrip * columns;
    const u32 rows = min_of(+kStrip, height - strip * kStrip), x = in_strip / rows;
    column = x * kColumns;
    row = first + (strip * kStrip + in_strip - x * rows) * C::kT;
  }
};
