// Casts the rows of a matrix to FP8: a scale for each row per 128 columns.
#pragma once
#include "quantize.cuh"

// A CTA casts a tile. A thread has eight columns of kRows rows, and 16 threads have the columns that share scales.
template <u32 kSource, bool kGated, bool kGathered, bool kFactored, u32 kTileRows, u32 kTileColumns, u32 kThreads>
struct QuantizeRows {
  enum : u32 { kParts = kTileColumns / 8, kRows = kTileRows * kParts / kThreads };
  static_assert(kTileColumns % 128 == 0 && kRows * kThreads == kTileRows * kParts && 16 % kRows == 0);

  static DG_DEVICE void run(const QuantizedInput& from, u32 band, const ScaleRule& rule, const QuantizedOutput& to) {
    using Elements = EightElements<kSource, kGated>;
    using Scales = RowScales<Elements, kRows>;
    const TilePlace tile(band);
    const u32 thread = threadIdx.x, part = thread % 16;
    const u32 row = tile.row * kTileRows + thread / kParts * kRows;
    const u32 column = tile.column * kTileColumns + thread % kParts * 8;
    Elements v[kRows];
    wait_for_previous_kernel();
    allow_next_kernel();
    float factor = 0.0f;  // of the row whose scale this thread stores; loaded with the elements, so that nothing waits for it
    if constexpr (kFactored) {
      const u32 own = row + part / Scales::kSame;
      if (own < from.rows) factor = from.factors[own];
    }
    load_rows<kSource, kGated, kGathered, kRows>(from, row, column, v);
    Scales scales(v, part, rule);
    float inverse[kRows];
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) inverse[r] = scales.inverse_of(r);
    if constexpr (kFactored) scales.scale = __fmul_rn(scales.scale, factor);
    if (column / 128 * 128 < from.columns) scales.store(to, row, from.rows, column / 128, part);
    store_rows(to, row, column, from.rows, from.columns, v, [&](u32 r, u32) { return inverse[r]; });
  }
};
