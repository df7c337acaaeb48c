// Casts a matrix to FP8 with scales of columns or of tiles of 128 x 128, or writes the cast of its transpose.
#pragma once
#include "silu_gradient.cuh"

// The elements of a 128 x 128 tile that share a scale: a row, a column, or the whole tile. kNothingShared: no output.
enum Shared : u32 { kNothingShared, kRow, kColumn, kTileShared };

// A CTA casts one tile of 128 x 128. A thread has eight columns of kRows rows, and 16 threads cover a row. Maxima of columns go
// through shared memory; 128 threads compute a column's scale each. The transposed tile is staged there in words of four rows;
// the words of column c are swizzled (word XOR 2 (c / 8)), so that the threads of a warp write to and read from all banks.
//
// With kGated the input has twice as many columns, and silu(left half) * right half is cast; or with kGradient the input's gradient,
// given that of the product. With kGathered, rows are those of an index; with kFactored they are multiplied by a factor each, and
// rounded to the input's type.
template <u32 kSource, u32 kPlain, u32 kTransposed, bool kGated, u32 kThreads, bool kGathered = false, bool kFactored = false,
          bool kGradient = false>
struct QuantizeTile {
  enum : u32 { kTile = 128, kWarps = kThreads / 32, kRows = kTile * 16 / kThreads, kQuads = kTile / 4 };
  enum : bool { kColumns = kPlain == kColumn || kTransposed == kColumn };
  enum : bool { kWhole = kPlain == kTileShared || kTransposed == kTileShared };
  static_assert(kRows == 4 || kRows == 8);
  using Elements = EightElements<kSource, kGated>;
  enum : u32 { kWords = Elements::kWords, kElementBytes = Elements::kBytes };

  struct Shared {
    alignas(16) u32 transposed[kTransposed ? kTile * kQuads : 1];
    alignas(16) u32 columns[kColumns ? kWarps : 1][kColumns ? 16 * kWords : 1];  // largest magnitudes of each warp's rows
    alignas(16) float inverse[kColumns ? kTile : 1];
    u32 whole[kWhole ? kWarps : 1];
  };

  static DG_DEVICE void run(const QuantizedInput& from, u32 band, const ScaleRule& rule, const QuantizedOutput& plain,
                            const QuantizedOutput& transposed, Shared& shared, const GradientInput& gradient = {}) {
    const TilePlace tile(band);
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, part = thread % 16, group = thread / 16;
    const u32 first_row = tile.row * kTile, first_column = tile.column * kTile;
    if (first_row >= from.rows) return;  // the last band is not whole
    const u32 row = first_row + group * kRows, column = first_column + part * 8;
    Elements v[kRows];
    wait_for_previous_kernel();
    allow_next_kernel();
    if constexpr (kGradient) load_silu_gradient<kSource, kRows>(from, gradient, row, column, v);
    else load_rows<kSource, kGated, kGathered, kRows>(from, row, column, v);
    if constexpr (kFactored) multiply(from, row, v);

    if constexpr (kColumns) {
      u32 largest[kWords];
#pragma unroll
      for (u32 i = 0; i < kWords; ++i) {
        largest[i] = v[0].magnitude(i);
#pragma unroll
        for (u32 r = 1; r < kRows; ++r) largest[i] = Elements::larger(largest[i], v[r].magnitude(i));
        largest[i] = Elements::larger(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 16));
      }
      if (lane < 16) {
#pragma unroll
        for (u32 i = 0; i < kWords; i += 4)
          *reinterpret_cast<uint4*>(&shared.columns[warp][part * kWords + i]) =
              uint4{largest[i], largest[i + 1], largest[i + 2], largest[i + 3]};
      }
    }
    if constexpr (kWhole) {
      u32 largest = v[0].largest();
#pragma unroll
      for (u32 r = 1; r < kRows; ++r) largest = Elements::larger(largest, v[r].largest());
#pragma unroll
      for (u32 lanes = 16; lanes > 0; lanes /= 2)
        largest = Elements::larger(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
      if (lane == 0) shared.whole[warp] = largest;
    }
    if constexpr (kColumns || kWhole) __syncthreads();

    if constexpr (kColumns) {
      if (thread < kTile) {
        u32 largest = column_magnitude(shared, 0, thread);
#pragma unroll
        for (u32 i = 1; i < kWarps; ++i) largest = max_of(largest, column_magnitude(shared, i, thread));
        const float scale = rule.scale(Elements::of_word(largest));
        shared.inverse[thread] = ScaleRule::inverse(scale);
        if (first_column + thread < from.columns) {
          // A column of the input is a row of the transpose.
          if constexpr (kTransposed == kColumn) transposed.scale(first_column + thread, tile.row, scale);
          if constexpr (kPlain == kColumn) plain.scale(tile.row, first_column + thread, scale);
        }
      }
    }
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) v[r].forget_conversions();
    if constexpr (kPlain == kRow) {  // while other warps compute the scales of columns
      const RowScales<Elements, kRows> scales(v, part, rule);
      float inverse[kRows];
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) inverse[r] = scales.inverse_of(r);
      scales.store(plain, row, from.rows, tile.column, part);
      store_rows(plain, row, column, from.rows, from.columns, v, [&](u32 r, u32) { return inverse[r]; });
    }
    float inverse[8];
    if constexpr (kColumns) {
      __syncthreads();
#pragma unroll
      for (u32 c = 0; c < 8; c += 4) {
        const float4 found = *reinterpret_cast<const float4*>(&shared.inverse[part * 8 + c]);
        inverse[c] = found.x, inverse[c + 1] = found.y, inverse[c + 2] = found.z, inverse[c + 3] = found.w;
      }
    }
    if constexpr (kWhole) {
      u32 largest = shared.whole[0];
#pragma unroll
      for (u32 i = 1; i < kWarps; ++i) largest = Elements::larger(largest, shared.whole[i]);
      const float scale = rule.scale(Elements::of_word(largest));
#pragma unroll
      for (u32 c = 0; c < 8; ++c) inverse[c] = ScaleRule::inverse(scale);
      if (thread == 0) {
        if constexpr (kPlain == kTileShared) plain.scale(tile.row, tile.column, scale);
        if constexpr (kTransposed == kTileShared) transposed.scale(tile.column, tile.row, scale);
      }
    }
    if constexpr (kPlain == kColumn || kPlain == kTileShared)
      store_rows(plain, row, column, from.rows, from.columns, v, [&](u32, u32 c) { return inverse[c]; });
    if constexpr (kTransposed != kNothingShared) {
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) v[r].forget_conversions();
#pragma unroll
      for (u32 c = 0; c < 8; ++c) {
        u32* to = &shared.transposed[(part * 8 + c) * kQuads + ((group * (kRows / 4)) ^ (2 * part))];
#pragma unroll
        for (u32 r = 0; r < kRows; r += 4)
          to[r / 4] = to_e4m3(v[r].get(c) * inverse[c], v[r + 1].get(c) * inverse[c], v[r + 2].get(c) * inverse[c],
                              v[r + 3].get(c) * inverse[c]);
      }
      __syncthreads();
      store_transposed(transposed, first_column, first_row, from.columns, from.rows, shared);
    }
  }

 private:
  static DG_DEVICE void multiply(const QuantizedInput& from, u32 row, Elements (&v)[kRows]) {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      const float factor = row + r < from.rows ? from.factors[row + r] : 0.0f;
#pragma unroll
      for (u32 i = 0; i < kWords; ++i) {
        if constexpr (Elements::kPacked)
          v[r].words[i] = to_pair<kSource>(__fmul_rn(v[r].get(2 * i), factor), __fmul_rn(v[r].get(2 * i + 1), factor));
        else v[r].words[i] = __float_as_uint(__fmul_rn(v[r].get(i), factor));
      }
    }
  }

  // The largest magnitude of a column among a warp's rows.
  static DG_DEVICE u32 column_magnitude(const Shared& shared, u32 warp, u32 column) {
    if constexpr (Elements::kPacked) return reinterpret_cast<const u16*>(shared.columns[warp])[column];
    else return shared.columns[warp][column];
  }

  // Eight threads store 128 bytes of a row of the transpose: 16 bytes each.
  static DG_DEVICE void store_transposed(const QuantizedOutput& to, u32 y, u32 x, u32 height, u32 width, const Shared& shared) {
    enum : u32 { kTogether = kThreads / 8 };
    const u32 unit = threadIdx.x % 8, first = threadIdx.x / 8;
    u8* at = to.values + (y + first) * to.stride + x + unit * 16;
    const auto staged = [&](u32 line) {
      const u32 turned = 2 * (line / 8);
      const uint4 found = *reinterpret_cast<const uint4*>(&shared.transposed[line * kQuads + ((unit * 4) ^ (turned & ~3u))]);
      return turned & 2 ? uint4{found.z, found.w, found.x, found.y} : found;
    };
    if ((to.odd & 15) == 0 && y + kTile <= height && x + kTile <= width) {
#pragma unroll
      for (u32 i = 0; i < kTile; i += kTogether) *reinterpret_cast<uint4*>(at + i * to.stride) = staged(i + first);
    } else if (x + unit * 16 < width) {
      const u32 exist = width - (x + unit * 16);
#pragma unroll 1
      for (u32 i = first; i < kTile && y + i < height; i += kTogether) {
        const uint4 q = staged(i);
        u8* line = to.values + (y + i) * to.stride + x + unit * 16;
        store_some(line, (to.odd & 7) == 0, exist, q.x, q.y);
        if (exist > 8) store_some(line + 8, (to.odd & 7) == 0, exist - 8, q.z, q.w);
      }
    }
  }
};
