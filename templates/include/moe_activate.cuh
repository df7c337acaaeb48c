// The activation between the products of experts, of the rows that choices have.
#pragma once
#include "rows.cuh"

// A CTA has kTileColumns of the row of a choice, wherever it is: rows that no choice has are neither read nor written. Function is a
// SiluMul without factors; a bias is that of the choice's expert.
template <class Tile, class Function>
struct MoeActivate {
  using Rows = Elementwise<Tile, Function>;
  static_assert(Tile::kLanes == Tile::kWarps * 32, "a CTA has one row");

  const int* places;  // the row of each choice, or -1
  const i64* chosen;
  u32 room;  // rows of an expert, and what is added to a scale's place for each expert before; 0 if they follow each other
  i64 scale_stride_group;
  Rows rows;

  DG_DEVICE void run(Tile tile, const RowsInput (&from)[Rows::kInputs], RowsOutput out) {
    const u32 across = ceil_div(tile.columns, Tile::kColumns), choice = blockIdx.x / across;
    tile.first = blockIdx.x % across * Tile::kColumns;
    wait_for_previous_kernel();
    allow_next_kernel();
    const int row = places[choice];
    if (row < 0) return;
    tile.row = static_cast<u32>(row);
    if constexpr (Function::kBiases > 0) rows.function.group = static_cast<int>(chosen[choice]);
    if (room > 0) out.to.scales += tile.row / room * scale_stride_group;
    rows.compute(tile, from, out);
  }
};
