// The epilogue: what is done to final sums, those of all splits of K, before they are rounded.
//
//   D = activation(alpha * row_factor * product (+ C) + bias) + residual
//
// Each kernel calls `Epilogue` where its sums are final and their places in D are known: `scale`, then it adds C, then `finish`. A
// kernel with an epilogue names it before its first include, and has its arguments as parameters: `alpha`; `row_factor` with a stride;
// `bias`, a row vector, of each group with `bias_stride_g`; and `residual`, of D's element type. Steps are intrinsics, so that they are
// the same in all kernels: the compiler fuses no multiplication with an addition.
#pragma once
#include "output.cuh"
#include "scale_rule.cuh"
#include "sum_activations.cuh"

// In place of the elements of a bias that there is not.
enum : u32 { kNoBias = 255 };

#ifndef DG_EPILOGUE
#define DG_EPILOGUE Identity, false, false, kNoBias, false
#endif

// SwiGLU: rows of B are a gate's, and then up's, or with kTurn so many of each in turn: 1, or 8. kLimit, the bits of a float32, is that
// of `silu_mul`; infinity if there is none.
template <u32 kLimit, u32 kTurn = 0>
struct Swiglu {
  static DG_DEVICE float of(float gate, float up) {
    if constexpr (kLimit == 0x7F800000) return silu_mul(gate, up);
    else return silu_mul(gate, up, __uint_as_float(kLimit));
  }
};
// A user's own expression, which the kernel declares before its first include; see `Epilogue.custom`.
struct Custom;

template <class Activation>
struct Activates {
  enum : bool { kValue = true, kCustom = false };
};
template <>
struct Activates<Identity> {
  enum : bool { kValue = false, kCustom = false };
};
template <>
struct Activates<Custom> {
  enum : bool { kValue = true, kCustom = true };
};

// What an activation gets beside sums: vectors of rows and of columns, the row, and the column.
template <class Activation, bool kCustom>
struct Needs {
  enum : u32 { kRows = 0, kColumns = 0 };
  enum : bool { kNeedsRow = false, kNeedsColumn = false };
};
template <class Activation>
struct Needs<Activation, true> : Activation {};

// The cast of final sums to FP8 with 1x128 scales, if D has such. kPowersOfTwo: these are powers of two. The bytes are those of quantize.cuh.
template <bool kPowersOfTwo>
struct CastOf {
  // `sum` are this thread's sums of 128 columns, the `block`-th ones of D, as in `EpilogueOf::finish`; their scales are stored. Each
  // word of `words` is for eight columns: two neighbours of row `row`, and two of the row eight below.
  template <class Kernel, class Group>
  static DG_DEVICE void cast(const Kernel& kernel, const float* sum, u32 (&words)[16], u32 row, u32 end, u32 block, Group group, u32 lane) {
    u32 largest[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 64; ++i) largest[i / 2 % 2] = max_of(largest[i / 2 % 2], __float_as_uint(sum[i]) & 0x7FFFFFFF);
    // A tile without a gate, or the last one of a cluster, may go past D.
    if (Kernel::B::kHalves == 1 && block * 128 >= kernel.columns()) end = 0;
    float inverse[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      u32 found = max_of(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      found = max_of(found, __shfl_xor_sync(0xffffffffu, found, 2));
      const float scale = rule().scale_of_normal(found);
      inverse[i] = ScaleRule::inverse_of_normal(scale);
      if (lane % 4 == 0 && row + i * 8 < end) *place(kernel, row + i * 8, block, group) = scale;
    }
#pragma unroll
    for (u32 i = 0; i < 64; i += 4)
      words[i / 4] = to_e4m3(sum[i] * inverse[0], sum[i + 1] * inverse[0], sum[i + 2] * inverse[1], sum[i + 3] * inverse[1]);
  }

  // Stores the scales of a row of zeros. All lanes of a warp.
  template <class Kernel>
  static DG_DEVICE void scale_zeros(const Kernel& kernel, u32 row, u32 lane) {
#pragma unroll 1  // the store warp has few registers
    for (u32 block = lane; block < kernel.columns() / 128; block += 32)
      *place(kernel, row, block, Index<0>()) = rule().scale_of_normal(0);
  }

 private:
  static DG_DEVICE constexpr ScaleRule rule() { return {0x38D1B717, kPowersOfTwo}; }  // 1e-4

  // Where the scale of a row of D is. Groups of the masked form are `sfd_stride_g` further apart than their rows.
  template <class Kernel>
  static DG_DEVICE float* place(const Kernel& kernel, u32 row, u32 block, Index<0>) {
    return kernel.arg.sfd + opaque(row) * kernel.arg.sfd_stride_m + block * kernel.arg.sfd_stride_n;
  }
  template <class Kernel>
  static DG_DEVICE float* place(const Kernel& kernel, u32 row, u32 block, u32 group) {
    return place(kernel, row, block, Index<0>()) + opaque(group) * kernel.arg.sfd_stride_g;
  }
};

// Out is the `Output` of D. A kernel gives its arguments `arg`, and its sizes `m()`, `n()` and, for FP8, `columns()`.
template <class Out, class Activation, bool kAlpha, bool kRowFactor, u32 kBias, bool kResidual, bool kPowersOfTwo = false>
struct EpilogueOf : CastOf<kPowersOfTwo> {
  enum : bool { kGated = false, kInterleaved = false };
  enum : u32 { kTurn = 0 };
  enum : bool { kHasBias = kBias != kNoBias, kScales = kAlpha || kRowFactor, kActivates = Activates<Activation>::kValue };
  enum : bool { kFinishes = kHasBias || kActivates || kResidual, kAny = kScales || kFinishes };
  enum : bool { kCustom = Activates<Activation>::kCustom };
  using Own = Needs<Activation, kCustom>;
  enum : bool { kNeedsGroup = kHasBias };  // whether consumers must know the group of their tile
  enum : bool { kNeedsRow = kRowFactor || kResidual || Own::kNeedsRow };  // whether consumers must know the row of their tile

  // Both functions for sums whose rows are D's. `sum` are this thread's sums of kCount columns in row `row` and in the row eight
  // below. `at(i)` is the column of D of the i-th of these columns. Rows from `end` on are not read. `group` is the tile's, or empty.
  template <u32 kCount, class Kernel>
  static DG_DEVICE void scale(const Kernel& kernel, float* sum, u32 row, u32 end) {
    const float low = factor(kernel, row, end), high = factor(kernel, row + 8, end);
#pragma unroll
    for (u32 i = 0; i < kCount / 2; ++i) sum[i] = __fmul_rn(sum[i], i & 2 ? high : low);
  }

  // `kPairs`: two neighbours of the residual can be read at once. Each kRun columns, 16 or 32, are next to each other in D, and their
  // biases kApart elements from one to the next.
  template <u32 kCount, bool kPairs, u32 kRun, u32 kApart = 1, class Kernel, class Group, class At>
  static DG_DEVICE void finish(const Kernel& kernel, float* sum, u32 row, u32 end, Group group, u32 lane, const At& at) {
    float bias = 0.0f;  // each lane has that of another column
    Values<Own::kColumns> each, even_values, odd_values;  // of a user's vectors: each lane has those of another column
    Values<Own::kRows> low, high;
    load_values(kernel, low, row, end);
    load_values(kernel, high, row + 8, end);
    u32 begin = at(0) + lane % 4 * 2;
    if constexpr (Own::kNeedsColumn) begin = hidden(begin, row, lane);
#pragma unroll
    for (u32 i = 0; i < kCount / 2; i += 4) {  // eight columns: two of them in this thread, for two rows
      if constexpr (kHasBias) {
        if (2 * i % kRun == 0)
          bias = of_column<kBias>(kernel, kernel.arg.bias, kernel.arg.bias_stride_g, at(2 * i) + lane % kRun * kApart, group);
        const u32 from = 2 * i % kRun + lane % 4 * 2;
        const float even = __shfl_sync(0xffffffffu, bias, from), odd = __shfl_sync(0xffffffffu, bias, from + 1);
        sum[i] = __fadd_rn(sum[i], even);
        sum[i + 1] = __fadd_rn(sum[i + 1], odd);
        sum[i + 2] = __fadd_rn(sum[i + 2], even);
        sum[i + 3] = __fadd_rn(sum[i + 3], odd);
      }
      if constexpr (kCustom) {
        const u32 column = begin + (at(2 * i) - at(0));
        if (2 * i % kRun == 0) load_values(kernel, each, at(2 * i) + lane % kRun, kernel.n(), Own::kRows);
        each.give(2 * i % kRun + lane % 4 * 2, even_values, odd_values);
        sum[i] = Activation::apply(sum[i], row, column, low.at, even_values.at);
        sum[i + 1] = Activation::apply(sum[i + 1], row, column + 1, low.at, odd_values.at);
        sum[i + 2] = Activation::apply(sum[i + 2], row + 8, column, high.at, even_values.at);
        sum[i + 3] = Activation::apply(sum[i + 3], row + 8, column + 1, high.at, odd_values.at);
      } else {
        Activation::apply(sum[i], sum[i + 1]);
        Activation::apply(sum[i + 2], sum[i + 3]);
      }
    }
    if constexpr (kResidual) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {  // one row after the other, which takes fewer registers
        const u32 y = opaque(row + half * 8);
        if (y < end) {
          const u8* base = kernel.arg.residual + y * kernel.arg.residual_stride * Out::kBytes;
#pragma unroll
          for (u32 i = 2 * half; i < kCount / 2; i += 4)
            add_residual<kPairs>(kernel, base, sum[i], sum[i + 1], at(i / 4 * 8) + lane % 4 * 2);
        }
      }
    }
  }

  // Both for sums whose columns are D's rows, in chunks of eight. `sum` are this thread's sums of kTokens rows of D, from `row` on, in
  // column `weight` and in the column eight further; it has two rows of each chunk. Only chunks that are `wanted` are finished.
  template <u32 kTokens, class Kernel, class Wanted>
  static DG_DEVICE void scale_swapped(const Kernel& kernel, float* sum, u32 row, u32 end, u32 lane, const Wanted& wanted) {
    float each = 0.0f;  // each lane has the factor of another row
#pragma unroll
    for (u32 chunk = 0; chunk < kTokens / 8; ++chunk) {
      if (chunk % 4 == 0) each = factor(kernel, row + chunk * 8 + lane, end);
      const u32 from = chunk % 4 * 8 + lane % 4 * 2;
      const float even = __shfl_sync(0xffffffffu, each, from), odd = __shfl_sync(0xffffffffu, each, from + 1);
      if (wanted(chunk)) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum[chunk * 4 + i] = __fmul_rn(sum[chunk * 4 + i], i & 1 ? odd : even);
      }
    }
  }

  template <u32 kTokens, class Kernel, class Wanted>
  static DG_DEVICE void finish_swapped(const Kernel& kernel, float* sum, u32 row, u32 weight, u32 end, u32 lane,
                                       const Wanted& wanted) {
    float low = 0.0f, high = 0.0f;
    if constexpr (kHasBias) {
      low = of_column<kBias>(kernel, kernel.arg.bias, 0, weight, Index<0>());
      high = of_column<kBias>(kernel, kernel.arg.bias, 0, weight + 8, Index<0>());
    }
    Values<Own::kRows> each, even, odd;  // of a user's vectors: each lane has those of another row
    Values<Own::kColumns> low_values, high_values;
    load_values(kernel, low_values, weight, kernel.n(), Own::kRows);
    load_values(kernel, high_values, weight + 8, kernel.n(), Own::kRows);
    u32 begin = row + lane % 4 * 2;
    if constexpr (Own::kNeedsRow) begin = hidden(begin, weight, lane);
    const bool left = kResidual && weight < kernel.n(), right = kResidual && weight + 8 < kernel.n();
#pragma unroll
    for (u32 chunk = 0; chunk < kTokens / 8; ++chunk) {
      if (kTokens > 64) __syncwarp();  // ptxas would mix the chunks, and run out of registers
      if (chunk % 4 == 0) load_values(kernel, each, row + chunk * 8 + lane, end);
      each.give(chunk % 4 * 8 + lane % 4 * 2, even, odd);
      if (wanted(chunk)) {
        float* v = sum + chunk * 4;
        if constexpr (kHasBias) {
          v[0] = __fadd_rn(v[0], low);
          v[1] = __fadd_rn(v[1], low);
          v[2] = __fadd_rn(v[2], high);
          v[3] = __fadd_rn(v[3], high);
        }
        if constexpr (kCustom) {
          const u32 y = begin + chunk * 8;
          v[0] = Activation::apply(v[0], y, weight, even.at, low_values.at);
          v[1] = Activation::apply(v[1], y + 1, weight, odd.at, low_values.at);
          v[2] = Activation::apply(v[2], y, weight + 8, even.at, high_values.at);
          v[3] = Activation::apply(v[3], y + 1, weight + 8, odd.at, high_values.at);
        } else {
          Activation::apply(v[0], v[1]);
          Activation::apply(v[2], v[3]);
        }
        if constexpr (kResidual) {
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            const u32 y = opaque(row) + chunk * 8 + lane % 4 * 2 + i;  // addresses take no registers between tokens
            const i64 at = y * kernel.arg.residual_stride + weight;
            v[i] = __fadd_rn(v[i], Out::load_if(y < end && left, kernel.arg.residual, at));
            v[i + 2] = __fadd_rn(v[i + 2], Out::load_if(y < end && right, kernel.arg.residual, at + 8));
          }
        }
      }
    }
  }

 private:
  // `place`, in a way that ptxas does not know. It would keep the places of all sums of a slice in registers for those of the next.
  static DG_DEVICE u32 hidden(u32 place, u32 slice, u32 lane) { return __shfl_sync(0xffffffffu, place + slice, lane) - slice; }

  // The elements of a user's vectors in one row or column.
  template <u32 kVectors>
  struct Values {
    float at[kVectors ? kVectors : 1];

    // Those of two neighbours, of which lane `from` has the first, and the next lane the second.
    DG_DEVICE void give(u32 from, Values& first, Values& second) const {
      if constexpr (kVectors > 0) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
          first.at[i] = __shfl_sync(0xffffffffu, at[i], from);
          second.at[i] = __shfl_sync(0xffffffffu, at[i], from + 1);
        }
      }
    }
  };

  template <u32 kVectors, class Kernel>
  static DG_DEVICE void load_values(const Kernel& kernel, Values<kVectors>& found, u32 index, u32 end, u32 first = 0) {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (u32 i = 0; i < kVectors; ++i) found.at[i] = index < end ? load_float(kernel.arg.vectors[first + i] + index) : 0.0f;
    }
  }

  template <class Kernel>
  static DG_DEVICE float factor(const Kernel& kernel, u32 row, u32 end) {
    float found = 1.0f;
    if constexpr (kRowFactor)
      found = row < end ? load_float(kernel.arg.row_factor + opaque(row) * kernel.arg.row_factor_stride) : 0.0f;
    if constexpr (kAlpha) found = __fmul_rn(found, kernel.arg.alpha);
    return found;
  }

  // The element of a vector of the product's columns, of each group if there are groups.
  template <u32 kElement, class Kernel>
  static DG_DEVICE float of_column(const Kernel& kernel, const u8* vector, i64, u32 column, Index<0>) {
    return column < kernel.n() ? Output<kElement>::load(vector, column) : 0.0f;
  }
  template <u32 kElement, class Kernel>  // the row's address takes no registers between calls
  static DG_DEVICE float of_column(const Kernel& kernel, const u8* vector, i64 stride_g, u32 column, u32 group) {
    return column < kernel.n() ? Output<kElement>::load(vector, opaque(group) * stride_g + column) : 0.0f;
  }

  // Of two neighbours in a row. Rows of the residual begin at multiples of 16 bytes where those of D do.
  template <bool kPairs, class Kernel>
  static DG_DEVICE void add_residual(const Kernel& kernel, const u8* base, float& even, float& odd, u32 column) {
    float first, second = 0.0f;
    if constexpr (kPairs) {
      Out::load_pair_if(column < kernel.n(), base, column, first, second);
    } else {
      if (column >= kernel.n()) return;
      first = Out::load(base, column);
      if (column + 1 < kernel.n()) second = Out::load(base, column + 1);
    }
    even = __fadd_rn(even, first);
    odd = __fadd_rn(odd, second);
  }

  static DG_DEVICE float load_float(const float* at) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
  }
};

// D = swiglu(alpha * gate + bias, alpha * up + bias) * row_factor, for a product whose columns are those of gate and of up.
template <class Out, u32 kLimit, u32 kEach, bool kAlpha, bool kRowFactor, u32 kBias, bool kPowersOfTwo>
struct EpilogueOf<Out, Swiglu<kLimit, kEach>, kAlpha, kRowFactor, kBias, false, kPowersOfTwo> : CastOf<kPowersOfTwo> {
  using Before = EpilogueOf<Out, Identity, kAlpha, false, kBias, false>;
  using After = EpilogueOf<Out, Identity, false, kRowFactor, kNoBias, false>;
  enum : bool { kGated = true, kInterleaved = kEach == 1, kHasBias = Before::kHasBias, kNeedsGroup = kHasBias };
  enum : u32 { kTurn = kEach };
  static_assert(kTurn <= 1 || !kHasBias, "its elements are a gate's and up's, or one of each in turn");
  enum : bool { kScales = false, kFinishes = false };

  // As `EpilogueOf::finish`, for sums of kCount columns of each; the result takes the place of gate's. Up begins `n` columns after gate, or
  // with kInterleaved one.
  template <u32 kCount, u32 kRun, class Kernel, class Group, class At>
  static DG_DEVICE void finish(const Kernel& kernel, float* gate, float* up, u32 row, u32 end, Group group, u32 lane, u32 n, const At& at) {
    // ptxas would mix all columns where alpha is all that comes before the activation, or in the one consumer of 256 columns, and run out
    // of registers.
    constexpr u32 kPart = (Kernel::kConsumers == 1 || (kAlpha && !kHasBias)) && kCount > 64 ? 32 : kCount;
#pragma unroll
    for (u32 part = 0; part < kCount; part += kPart, gate += kPart / 2, up += kPart / 2) {
      if constexpr (kPart < kCount) __syncwarp();
      if constexpr (Before::kScales) {
        Before::template scale<kPart>(kernel, gate, row, end);
        Before::template scale<kPart>(kernel, up, row, end);
      }
      if constexpr (kHasBias) {
        constexpr u32 kApart = kInterleaved ? 2 : 1;
        Before::template finish<kPart, false, kRun, kApart>(kernel, gate, row, end, group, lane,
                                                            [&](u32 i) { return at(part + i) * kApart; });
        Before::template finish<kPart, false, kRun, kApart>(kernel, up, row, end, group, lane,
                                                            [&](u32 i) { return (kInterleaved ? 1 : n) + at(part + i) * kApart; });
      }
#pragma unroll
      for (u32 i = 0; i < kPart / 2; ++i) gate[i] = Swiglu<kLimit>::of(gate[i], up[i]);
    }
    gate -= kCount / 2;
    if constexpr (After::kScales) After::template scale<kCount>(kernel, gate, row, end);
  }
};

template <class Out>
using Epilogue = EpilogueOf<Out, DG_EPILOGUE>;
