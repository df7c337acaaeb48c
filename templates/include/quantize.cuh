// Casts a matrix to FP8 (E4M3) with a scale for each block of it: value / scale, where scale = max(largest magnitude, epsilon) /
// 448, or the next power of two. Every step is an IEEE float32 operation, so that torch computes the same bytes (see
// quantisation.py).
#pragma once
#include "barrier.cuh"

// The elements of a 128 x 128 tile that share a scale: a row, a column, or the whole tile. kNothingShared: no output.
enum Shared : u32 { kNothingShared, kRow, kColumn, kTileShared };

enum Source : u32 { kSourceBf16, kSourceF16, kSourceF32 };

// An output: values, whose rows are `stride` bytes apart, and scales with any strides. `wide`: eight bytes may be stored at once.
struct QuantizedOutput {
  u8* values;
  i64 stride;
  float* scales;
  i64 scale_stride_row, scale_stride_column;
  bool wide;
};

DG_DEVICE u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

DG_DEVICE u32 shuffled_max(u32 x, u32 lanes) { return max_of(x, __shfl_xor_sync(0xffffffffu, x, lanes)); }

struct ScaleRule {
  u32 epsilon;  // float32 bits
  bool power_of_two;

  // Magnitudes are compared as integers, so that NaN is the largest.
  DG_DEVICE float scale(u32 largest) const {
    const float exact = __fdiv_rn(__uint_as_float(max_of(largest, epsilon)), 448.0f);
    const u32 bits = __float_as_uint(exact);
    return power_of_two && exact == exact ? __uint_as_float((bits + 0x007FFFFF) & 0x7F800000) : exact;
  }

  // The factor for values: 1 / scale. Blocks of zeros without an epsilon stay zeros.
  static DG_DEVICE float inverse(float scale) {
    const float exact = __frcp_rn(scale), largest = __uint_as_float(0x7F7FFFFF);
    return scale == 0.0f ? 0.0f : exact > largest ? largest : exact;
  }
};

// Four values as bytes, the first in the lowest.
DG_DEVICE u32 to_e4m3(float a, float b, float c, float d) {
  u32 packed;
  asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

template <u32 kSource>
struct SourceElement {
  enum : u32 { kBytes = kSource == kSourceF32 ? 4 : 2, kWords = 2 * kBytes };  // words of eight elements

  static DG_DEVICE float widen(u32 bits) {
    float value;
    if constexpr (kSource == kSourceBf16) {
      value = __uint_as_float(bits << 16);
    } else {
      asm("{\n .reg .b16 half;\n cvt.u16.u32 half, %1;\n cvt.f32.f16 %0, half;\n}" : "=f"(value) : "r"(bits));
    }
    return value;
  }

  // The i-th of eight elements.
  static DG_DEVICE float get(const u32 (&words)[kWords], u32 i) {
    if constexpr (kSource == kSourceF32) return __uint_as_float(words[i]);
    else return widen(i % 2 == 0 ? words[i / 2] & 0xFFFF : words[i / 2] >> 16);
  }

  // Eight elements from `at` on. The first `exist` of them exist; the others are read as zeros.
  static DG_DEVICE void load(const u8* at, bool wide, u32 exist, u32 (&words)[kWords]) {
    if (wide && exist >= 8) {
#pragma unroll
      for (u32 i = 0; i < kWords; i += 4) {
        const uint4 loaded = *reinterpret_cast<const uint4*>(at + i * 4);
        words[i] = loaded.x, words[i + 1] = loaded.y, words[i + 2] = loaded.z, words[i + 3] = loaded.w;
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < kWords; ++i) words[i] = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        if (i < exist) {
          if constexpr (kSource == kSourceF32) words[i] = *reinterpret_cast<const u32*>(at + i * 4);
          else words[i / 2] |= static_cast<u32>(*reinterpret_cast<const u16*>(at + i * 2)) << i % 2 * 16;
        }
      }
    }
  }
};

// A CTA of 256 threads quantises one tile of 128 x 128. A thread has eight rows of eight columns. 16 threads cover a row, so a
// row's maximum takes four shuffles. A column's maximum goes through shared memory. The transposed tile is staged there in units
// of eight bytes; the units of column c are swizzled (unit XOR c / 8), so that the threads of a warp write to and read from all
// banks.
//
// With kGated the input has twice as many columns, and silu(left half) * right half is quantised.
template <u32 kSource, u32 kPlain, u32 kTransposed, bool kGated, u32 kThreads>
struct Quantize {
  enum : u32 { kTile = 128, kEach = 8 };
  static_assert(kThreads * kEach * kEach == kTile * kTile);
  enum : bool { kColumns = kPlain == kColumn || kTransposed == kColumn };
  enum : bool { kWhole = kPlain == kTileShared || kTransposed == kTileShared };
  using Element = SourceElement<kSource>;

  struct Shared {
    u32 columns[kColumns ? 8 : 1][kColumns ? kTile : 1];  // largest magnitudes of each warp's rows
    u32 whole[8];
    alignas(16) u32 transposed[kTransposed ? kTile * kTile / 4 : 1];
  };

  static DG_DEVICE void run(const u8* input, i64 stride, u32 rows, u32 columns, const ScaleRule& rule,
                            const QuantizedOutput& plain, const QuantizedOutput& transposed, Shared& shared) {
    const u32 across = ceil_div(columns, kTile), thread = threadIdx.x, warp = thread / 32;
    const u32 block_row = blockIdx.x / across, block_column = blockIdx.x % across;
    const u32 part = thread % 16, group = thread / 16;
    const u32 row = block_row * kTile + group * kEach, column = block_column * kTile + part * kEach;
    float v[kEach][kEach];
    wait_for_previous_kernel();
    allow_next_kernel();
    load(input, stride, rows, columns, row, column, v);

    float row_scale[kPlain == kRow ? +kEach : 1];
    if constexpr (kPlain == kRow) {
#pragma unroll
      for (u32 r = 0; r < kEach; ++r) {
        u32 largest = 0;
#pragma unroll
        for (u32 c = 0; c < kEach; ++c) largest = max_of(largest, magnitude(v[r][c]));
#pragma unroll
        for (u32 lanes = 8; lanes > 0; lanes /= 2) largest = shuffled_max(largest, lanes);
        row_scale[r] = rule.scale(largest);
      }
      float mine = row_scale[0];
#pragma unroll
      for (u32 r = 1; r < kEach; ++r) mine = part == r ? row_scale[r] : mine;
      if (part < kEach && row + part < rows)
        plain.scales[(row + part) * plain.scale_stride_row + block_column * plain.scale_stride_column] = mine;
    }
    if constexpr (kColumns) {
#pragma unroll
      for (u32 c = 0; c < kEach; ++c) {
        u32 largest = 0;
#pragma unroll
        for (u32 r = 0; r < kEach; ++r) largest = max_of(largest, magnitude(v[r][c]));
        largest = shuffled_max(largest, 16);
        if (thread % 32 < 16) shared.columns[warp][part * kEach + c] = largest;
      }
    }
    if constexpr (kWhole) {
      u32 largest = 0;
#pragma unroll
      for (u32 r = 0; r < kEach; ++r)
#pragma unroll
        for (u32 c = 0; c < kEach; ++c) largest = max_of(largest, magnitude(v[r][c]));
#pragma unroll
      for (u32 lanes = 16; lanes > 0; lanes /= 2) largest = shuffled_max(largest, lanes);
      if (thread % 32 == 0) shared.whole[warp] = largest;
    }
    if constexpr (kColumns || kWhole) __syncthreads();

    float column_inverse[kColumns ? +kEach : 1], whole_inverse = 0.0f;
    if constexpr (kColumns) {
#pragma unroll
      for (u32 c = 0; c < kEach; ++c) column_inverse[c] = rule.inverse(column_scale(shared, part * kEach + c, rule));
      if (thread < kTile && block_column * kTile + thread < columns) {
        const float scale = column_scale(shared, thread, rule);
        const u32 at = block_column * kTile + thread;
        // A column of the input is a row of the transpose.
        if constexpr (kTransposed == kColumn)
          transposed.scales[at * transposed.scale_stride_row + block_row * transposed.scale_stride_column] = scale;
        if constexpr (kPlain == kColumn)
          plain.scales[block_row * plain.scale_stride_row + at * plain.scale_stride_column] = scale;
      }
    }
    if constexpr (kWhole) {
      u32 largest = shared.whole[0];
#pragma unroll
      for (u32 i = 1; i < 8; ++i) largest = max_of(largest, shared.whole[i]);
      const float scale = rule.scale(largest);
      whole_inverse = rule.inverse(scale);
      if (thread == 0) {
        if constexpr (kPlain == kTileShared)
          plain.scales[block_row * plain.scale_stride_row + block_column * plain.scale_stride_column] = scale;
        if constexpr (kTransposed == kTileShared)
          transposed.scales[block_column * transposed.scale_stride_row + block_row * transposed.scale_stride_column] = scale;
      }
    }

    if constexpr (kPlain != kNothingShared) {
#pragma unroll
      for (u32 r = 0; r < kEach; ++r) {
        if (row + r >= rows || column >= columns) continue;
        float q[kEach];
        const float same = kPlain == kRow ? rule.inverse(row_scale[kPlain == kRow ? r : 0]) : whole_inverse;
#pragma unroll
        for (u32 c = 0; c < kEach; ++c) q[c] = v[r][c] * (kPlain == kColumn ? column_inverse[kColumns ? c : 0] : same);
        store(plain, row + r, column, min_of(columns - column, +kEach), to_e4m3(q[0], q[1], q[2], q[3]),
              to_e4m3(q[4], q[5], q[6], q[7]));
      }
    }
    if constexpr (kTransposed != kNothingShared) {
#pragma unroll
      for (u32 c = 0; c < kEach; ++c) {
        float q[kEach];
        const float same = kTransposed == kColumn ? column_inverse[kColumns ? c : 0] : whole_inverse;
#pragma unroll
        for (u32 r = 0; r < kEach; ++r) q[r] = v[r][c] * same;
        u32* to = &shared.transposed[(part * kEach + c) * (kTile / 4) + (group ^ part) * 2];
        to[0] = to_e4m3(q[0], q[1], q[2], q[3]);
        to[1] = to_e4m3(q[4], q[5], q[6], q[7]);
      }
      __syncthreads();
#pragma unroll
      for (u32 step = 0; step < kTile * kTile / 8 / kThreads; ++step) {
        const u32 i = step * kThreads + thread, at = i / 16, unit = i % 16;
        const u32 y = block_column * kTile + at, x = block_row * kTile + unit * 8;
        const u32* from = &shared.transposed[at * (kTile / 4) + (unit ^ at / 8) * 2];
        if (y < columns && x < rows) store(transposed, y, x, min_of(rows - x, +kEach), from[0], from[1]);
      }
    }
  }

 private:
  static DG_DEVICE void load(const u8* input, i64 stride, u32 rows, u32 columns, u32 row, u32 column, float (&v)[kEach][kEach]) {
    const i64 step = stride * Element::kBytes;
    const u8* at = input + row * step + static_cast<i64>(column) * Element::kBytes;
    const i64 right = static_cast<i64>(columns) * Element::kBytes;  // from an element to the one that it gates
    const u64 places = reinterpret_cast<u64>(input) | static_cast<u64>(step) | (kGated ? static_cast<u64>(right) : 0);
    const bool wide = (places & 15) == 0;
    const u32 across = column < columns ? min_of(columns - column, +kEach) : 0;
    u32 words[kEach][Element::kWords];
#pragma unroll
    for (u32 r = 0; r < kEach; ++r) Element::load(at + r * step, wide, row + r < rows ? across : 0, words[r]);
#pragma unroll
    for (u32 r = 0; r < kEach; ++r)
#pragma unroll
      for (u32 c = 0; c < kEach; ++c) v[r][c] = Element::get(words[r], c);
    if constexpr (kGated) {
#pragma unroll
      for (u32 r = 0; r < kEach; ++r) Element::load(at + right + r * step, wide, row + r < rows ? across : 0, words[r]);
#pragma unroll
      for (u32 r = 0; r < kEach; ++r)
#pragma unroll
        for (u32 c = 0; c < kEach; ++c) v[r][c] = silu(v[r][c]) * Element::get(words[r], c);
    }
  }

  static DG_DEVICE float silu(float x) {
    float power, sigmoid;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
    return x * sigmoid;
  }

  static DG_DEVICE float column_scale(const Shared& shared, u32 column, const ScaleRule& rule) {
    u32 largest = shared.columns[0][column];
#pragma unroll
    for (u32 i = 1; i < 8; ++i) largest = max_of(largest, shared.columns[i][column]);
    return rule.scale(largest);
  }

  // Stores eight bytes of a row, or only the first `exist` of them at the row's end.
  static DG_DEVICE void store(const QuantizedOutput& to, u32 row, u32 column, u32 exist, u32 low, u32 high) {
    u8* at = to.values + row * to.stride + column;
    if (to.wide && exist == kEach) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(low), "r"(high) : "memory");
    } else {
#pragma unroll
      for (u32 i = 0; i < kEach; ++i)
        if (i < exist) at[i] = static_cast<u8>((i < 4 ? low : high) >> i % 4 * 8);
    }
  }
};
