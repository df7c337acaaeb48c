// What the casts to FP8 (E4M3) share; see scale_rule.cuh for their arithmetic.
#pragma once
#include "activation.cuh"
#include "barrier.cuh"
#include "scale_rule.cuh"

enum Source : u32 { kSourceBf16, kSourceF16, kSourceF32 };

// The matrix to cast: rows are `stride` elements apart. With kGathered, row i of the cast is row index[i] of the matrix, which has
// `source_rows`; it is zeros if there is no such row. With kFactored, the scales that are stored for row i are those of its values
// times factors[i].
struct QuantizedInput {
  const u8* elements;
  i64 stride;
  u32 rows, columns;
  const u32* index;
  u32 source_rows;
  const float* factors;
};

// An output: values, whose rows are `stride` bytes apart, and scales with any strides. `odd`: the last bits of the addresses.
struct QuantizedOutput {
  u8* values;
  i64 stride;
  float* scales;
  i64 scale_stride_row, scale_stride_column;
  u32 odd;

  DG_DEVICE void scale(u32 row, u32 column, float value) const {
    scales[row * scale_stride_row + column * scale_stride_column] = value;
  }
};

// The tile of this CTA. The grid goes down 2^band tiles before it goes to the right, since its second dimension is limited.
struct TilePlace {
  u32 row, column;
  DG_DEVICE explicit TilePlace(u32 band)
      : row((blockIdx.y << band) + (blockIdx.x & ((1u << band) - 1))), column(blockIdx.x >> band) {}
};

// Sixteen bytes, or zeros. Hints that L1 need not keep them made casts 3% slower on an H100.
DG_DEVICE void load_sixteen(const u8* at, bool exist, u32* words) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n mov.u32 %3, 0;\n"
      " @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(at), "r"(static_cast<u32>(exist)));
}

// Two elements as a word, the first in the lower half.
template <u32 kTarget>
DG_DEVICE u32 to_pair(float low, float high) {
  u32 packed;
  if constexpr (kTarget == kSourceBf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Eight bytes of a row, or only the first `exist` of them at the row's end.
DG_DEVICE void store_some(u8* at, bool wide, u32 exist, u32 low, u32 high) {
  if (wide && exist >= 8) {
    *reinterpret_cast<uint2*>(at) = uint2{low, high};
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
      if (i < exist) at[i] = static_cast<u8>((i < 4 ? low : high) >> i % 4 * 8);
  }
}

// Eight adjacent elements of a row in registers: two to a word as they are in memory, or as float32 if the matrix is float32 or
// gated. Magnitudes have the same form as the elements, as integers; those of 16 bits are compared two at a time.
template <u32 kSource, bool kGated>
struct EightElements {
  enum : bool { kPacked = kSource != kSourceF32 && !kGated };
  enum : u32 { kBytes = kSource == kSourceF32 ? 4 : 2, kRead = 2 * kBytes, kWords = kPacked ? 4 : 8 };

  u32 words[kWords];

  DG_DEVICE float get(u32 i) const {
    if constexpr (kPacked) return widen(i % 2 == 0 ? words[i / 2] & 0xFFFF : words[i / 2] >> 16);
    else return __uint_as_float(words[i]);
  }

  DG_DEVICE u32 magnitude(u32 word) const { return words[word] & (kPacked ? 0x7FFF7FFF : 0x7FFFFFFF); }

  static DG_DEVICE u32 larger(u32 x, u32 y) {
    if constexpr (!kPacked) {
      return max_of(x, y);
    } else if constexpr (kCapability >= 900) {
      u32 found;
      asm("max.u16x2 %0, %1, %2;" : "=r"(found) : "r"(x), "r"(y));
      return found;
    } else {
      return max_of_halves(x, y);
    }
  }

  // The largest magnitude among the eight, or two of which one is the largest.
  DG_DEVICE u32 largest() const {
    u32 found = magnitude(0);
#pragma unroll
    for (u32 i = 1; i < kWords; ++i) found = larger(found, magnitude(i));
    return found;
  }

  // The larger half of a word of magnitudes, as the bits of a float32.
  static DG_DEVICE u32 of_word(u32 word) {
    if constexpr (kPacked) return __float_as_uint(widen(max_of(word & 0xFFFF, word >> 16)));
    else return word;
  }

  static DG_DEVICE float widen(u32 bits) {
    float value;
    if constexpr (kSource == kSourceBf16) {
      value = __uint_as_float(bits << 16);
    } else {
      asm("{\n .reg .b16 half;\n cvt.u16.u32 half, %1;\n cvt.f32.f16 %0, half;\n}" : "=f"(value) : "r"(bits));
    }
    return value;
  }

  // Makes the compiler convert the elements again when they are used next, instead of keeping the converted ones in registers.
  DG_DEVICE void forget_conversions() {
    if constexpr (kPacked)
#pragma unroll
      for (u32 i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
  }
};

// Loads eight columns from `column` on of rows row, row + 1, ... Elements that do not exist are zeros.
template <u32 kSource, bool kGated, bool kGathered, u32 kRows>
DG_DEVICE void load_rows(const QuantizedInput& from, u32 row, u32 column, EightElements<kSource, kGated> (&v)[kRows]) {
  using Elements = EightElements<kSource, kGated>;
  constexpr u32 kRead = Elements::kRead;
  const i64 step = from.stride * Elements::kBytes;
  const i64 right = static_cast<i64>(from.columns) * Elements::kBytes;  // from an element to the one that it gates
  const u64 places = reinterpret_cast<u64>(from.elements) | static_cast<u64>(step) | (kGated ? static_cast<u64>(right) : 0);
  const u32 across = column < from.columns ? min_of(from.columns - column, 8) : 0;
  const bool wide = (places & 15) == 0 && (across & 7) == 0;
  const u8* first = from.elements + static_cast<i64>(column) * Elements::kBytes;
  const u8* at[kRows];
  bool exist[kRows];
#pragma unroll
  for (u32 r = 0; r < kRows; ++r) {
    u32 source = row + r;
    exist[r] = source < from.rows;
    if constexpr (kGathered) {
      source = exist[r] ? from.index[source] : from.source_rows;
      exist[r] = source < from.source_rows;
    }
    at[r] = first + source * step;
  }
  const auto load = [&](i64 offset, u32 (&words)[kRows][kRead]) {
    if (wide) {
#pragma unroll
      for (u32 r = 0; r < kRows; ++r)
#pragma unroll
        for (u32 i = 0; i < kRead; i += 4) load_sixteen(at[r] + offset + i * 4, exist[r] && across != 0, &words[r][i]);
    } else {
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) {
        const u8* some = at[r] + offset;
#pragma unroll
        for (u32 i = 0; i < kRead; ++i) words[r][i] = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
          if (exist[r] && i < across) {
            if constexpr (kSource == kSourceF32) words[r][i] = *reinterpret_cast<const u32*>(some + i * 4);
            else words[r][i / 2] |= static_cast<u32>(*reinterpret_cast<const u16*>(some + i * 2)) << i % 2 * 16;
          }
        }
      }
    }
  };
  u32 words[kRows][kRead];
  load(0, words);
  const auto element = [](const u32 (&eight)[kRead], u32 i) {
    if constexpr (kSource == kSourceF32) return __uint_as_float(eight[i]);
    else return Elements::widen(i % 2 == 0 ? eight[i / 2] & 0xFFFF : eight[i / 2] >> 16);
  };
  if constexpr (!kGated) {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r)
#pragma unroll
      for (u32 i = 0; i < kRead; ++i) v[r].words[i] = words[r][i];
  } else {
    u32 others[kRows][kRead];
    load(right, others);
#pragma unroll
    for (u32 r = 0; r < kRows; ++r)
#pragma unroll
      for (u32 i = 0; i < 8; ++i) v[r].words[i] = __float_as_uint(silu(element(words[r], i)) * element(others[r], i));
  }
}

// The scales of 128 columns of kRows rows, whose elements 16 threads hold. Thread `part` of them finds the scale of row
// part / (16 / kRows): in each exchange with another thread it keeps half of the rows.
template <class Elements, u32 kRows>
struct RowScales {
  enum : u32 { kSame = 16 / kRows };  // threads with the same scale
  float scale, inverse;

  DG_DEVICE RowScales(const Elements (&v)[kRows], u32 part, const ScaleRule& rule) {
    u32 largest;
    if constexpr (Elements::kPacked && kRows > 1) {
      u32 pairs[kRows / 2];  // the maxima of two rows
#pragma unroll
      for (u32 i = 0; i < kRows / 2; ++i) {
        const u32 first = v[2 * i].largest(), second = v[2 * i + 1].largest();
        pairs[i] = Elements::larger(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
      }
      const u32 pair = exchanged<kRows / 2, 8>(pairs, part);
      largest = Elements::of_word(part & kSame ? pair >> 16 : pair & 0xFFFF);
    } else {
      u32 rows[kRows];
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) rows[r] = v[r].largest();
      largest = Elements::of_word(exchanged<kRows, 8>(rows, part));
    }
    scale = rule.scale(largest);
    inverse = ScaleRule::inverse(scale);
  }

  DG_DEVICE float inverse_of(u32 row) const { return kRows == 1 ? inverse : __shfl_sync(0xffffffffu, inverse, row * kSame, 16); }

  // Stores the scales of the rows that exist.
  DG_DEVICE void store(const QuantizedOutput& to, u32 row, u32 rows, u32 block, u32 part) const {
    if (part % kSame == 0 && row + part / kSame < rows) to.scale(row + part / kSame, block, scale);
  }

 private:
  template <u32 kCount, u32 kLanes>
  static DG_DEVICE u32 exchanged(const u32 (&x)[kCount], u32 part) {
    if constexpr (kCount > 1) {
      const bool upper = part & kLanes;
      u32 kept[kCount / 2];
#pragma unroll
      for (u32 i = 0; i < kCount / 2; ++i) {
        const u32 low = x[i], high = x[kCount / 2 + i];
        kept[i] = Elements::larger(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, kLanes));
      }
      return exchanged<kCount / 2, kLanes / 2>(kept, part);
    } else if constexpr (kLanes > 0) {
      const u32 kept[1] = {Elements::larger(x[0], __shfl_xor_sync(0xffffffffu, x[0], kLanes))};
      return exchanged<1, kLanes / 2>(kept, part);
    } else {
      return x[0];
    }
  }
};

// Stores eight columns of rows row, row + 1, ... of the matrix. factor(r, c) is what element (r, c) is multiplied by.
template <class Elements, u32 kRows, class Factor>
DG_DEVICE void store_rows(const QuantizedOutput& to, u32 row, u32 column, u32 rows, u32 columns, const Elements (&v)[kRows],
                          const Factor& factor) {
  const u32 across = column < columns ? min_of(columns - column, 8) : 0;
  u8* at = to.values + row * to.stride + column;
  const auto cast = [&](u32 r, u32 first) {
    return to_e4m3(v[r].get(first) * factor(r, first), v[r].get(first + 1) * factor(r, first + 1),
                   v[r].get(first + 2) * factor(r, first + 2), v[r].get(first + 3) * factor(r, first + 3));
  };
  if (across == 8 && (to.odd & 7) == 0) {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      const uint2 q{cast(r, 0), cast(r, 4)};
      if (row + r < rows) *reinterpret_cast<uint2*>(at + r * to.stride) = q;
    }
  } else {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r)
      if (row + r < rows) store_some(at + r * to.stride, false, across, cast(r, 0), cast(r, 4));
  }
}
