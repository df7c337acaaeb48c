// The epilogue: what is done to final sums, those of all splits of K, before they are rounded.
//
//   D = activation(alpha * row_factor * product (+ C) + bias) + residual
//
// Each kernel calls `Epilogue` where its sums are final and their places in D are known: `scale`, then it adds C, then `finish`. A
// kernel with an epilogue names it before its first include, and has its arguments as parameters: `alpha`; `row_factor` with a stride;
// `bias`, a row vector, of each group with `bias_stride_g`; and `residual`, of D's element type.
#pragma once
#include "activation.cuh"
#include "output.cuh"

// In place of the elements of a bias that there is not.
enum : u32 { kNoBias = 255 };

#ifndef DG_EPILOGUE
#define DG_EPILOGUE Identity, false, false, kNoBias, false
#endif

template <class Activation>
struct Activates {
  enum : bool { kValue = true };
};
template <>
struct Activates<Identity> {
  enum : bool { kValue = false };
};

// Out is the `Output` of D. A kernel gives its arguments `arg`, and its sizes `m()` and `n()`.
template <class Out, class Activation, bool kAlpha, bool kRowFactor, u32 kBias, bool kResidual>
struct EpilogueOf {
  enum : bool { kHasBias = kBias != kNoBias, kScales = kAlpha || kRowFactor, kActivates = Activates<Activation>::kValue };
  enum : bool { kFinishes = kHasBias || kActivates || kResidual, kAny = kScales || kFinishes };
  enum : bool { kNeedsRow = kRowFactor || kResidual };  // whether consumers must know the row of their tile

  // Both functions for sums whose rows are D's. `sum` are this thread's sums of kCount columns in row `row` and in the row eight
  // below. `at(i)` is the column of D of the i-th of these columns. Rows from `end` on are not read.
  template <u32 kCount, class Kernel>
  static DG_DEVICE void scale(const Kernel& kernel, float* sum, u32 row, u32 end) {
    const float low = factor(kernel, row, end), high = factor(kernel, row + 8, end);
#pragma unroll
    for (u32 i = 0; i < kCount / 2; ++i) sum[i] *= i & 2 ? high : low;
  }

  // `kPairs`: two neighbours of the residual can be read at once.
  template <u32 kCount, bool kPairs, class Kernel, class At>
  static DG_DEVICE void finish(const Kernel& kernel, float* sum, u32 row, u32 end, u32 group, u32 lane, const At& at) {
    float bias[ceil_div(kCount, 32)];  // each lane has those of every 32nd column
    if constexpr (kHasBias) {
#pragma unroll
      for (u32 i = 0; i < kCount; i += 32) bias[i / 32] = i + lane < kCount ? bias_of(kernel, at(i + lane), group) : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < kCount / 2; i += 4) {  // eight columns: two of them in this thread, for two rows
      if constexpr (kHasBias) {
        const u32 from = 2 * i % 32 + lane % 4 * 2;
        const float even = __shfl_sync(0xffffffffu, bias[i / 16], from), odd = __shfl_sync(0xffffffffu, bias[i / 16], from + 1);
        sum[i] += even;
        sum[i + 1] += odd;
        sum[i + 2] += even;
        sum[i + 3] += odd;
      }
      Activation::apply(sum[i], sum[i + 1]);
      Activation::apply(sum[i + 2], sum[i + 3]);
      if constexpr (kResidual) {
        const u32 x = at(2 * i) + lane % 4 * 2;
        add_residual<kPairs>(kernel, sum[i], sum[i + 1], row, x, end);
        add_residual<kPairs>(kernel, sum[i + 2], sum[i + 3], row + 8, x, end);
      }
    }
  }

  // Both for sums whose columns are D's rows, in chunks of eight. `sum` are this thread's sums of kTokens rows of D, from `token` on
  // with its own two of each chunk, in column `weight` and in the column eight further. Only chunks that are `wanted` are finished.
  template <u32 kTokens, class Kernel, class Wanted>
  static DG_DEVICE void scale_swapped(const Kernel& kernel, float* sum, u32 token, u32 end, const Wanted& wanted) {
#pragma unroll
    for (u32 chunk = 0; chunk < kTokens / 8; ++chunk) {
      if (wanted(chunk)) {
        const float even = factor(kernel, token + chunk * 8, end), odd = factor(kernel, token + chunk * 8 + 1, end);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum[chunk * 4 + i] *= i & 1 ? odd : even;
      }
    }
  }

  template <u32 kTokens, class Kernel, class Wanted>
  static DG_DEVICE void finish_swapped(const Kernel& kernel, float* sum, u32 token, u32 weight, u32 end, const Wanted& wanted) {
    float low = 0.0f, high = 0.0f;
    if constexpr (kHasBias) {
      low = bias_of(kernel, weight, 0);
      high = bias_of(kernel, weight + 8, 0);
    }
#pragma unroll
    for (u32 chunk = 0; chunk < kTokens / 8; ++chunk) {
      if (wanted(chunk)) {
        float* v = sum + chunk * 4;
        if constexpr (kHasBias) {
          v[0] += low;
          v[1] += low;
          v[2] += high;
          v[3] += high;
        }
        Activation::apply(v[0], v[1]);
        Activation::apply(v[2], v[3]);
        if constexpr (kResidual) {
#pragma unroll
          for (u32 i = 0; i < 4; ++i) add_residual(kernel, v[i], token + chunk * 8 + i % 2, weight + i / 2 * 8, end);
        }
      }
    }
  }

 private:
  template <class Kernel>
  static DG_DEVICE float factor(const Kernel& kernel, u32 row, u32 end) {
    float found = 1.0f;
    if constexpr (kRowFactor) found = row < end ? load_float(kernel.arg.row_factor + row * kernel.arg.row_factor_stride) : 0.0f;
    if constexpr (kAlpha) found *= kernel.arg.alpha;
    return found;
  }

  template <class Kernel>
  static DG_DEVICE float bias_of(const Kernel& kernel, u32 column, u32 group) {
    if (column >= kernel.n()) return 0.0f;
    return Output<kBias>::load(kernel.arg.bias, group * kernel.arg.bias_stride_g + column);
  }

  template <class Kernel>
  static DG_DEVICE void add_residual(const Kernel& kernel, float& sum, u32 row, u32 column, u32 end) {
    if (row < end && column < kernel.n()) sum += Out::load(kernel.arg.residual, row * kernel.arg.residual_stride + column);
  }

  // Of two neighbours. Rows of the residual begin at multiples of 16 bytes where those of D do.
  template <bool kPairs, class Kernel>
  static DG_DEVICE void add_residual(const Kernel& kernel, float& even, float& odd, u32 row, u32 column, u32 end) {
    if constexpr (kPairs) {
      if (row < end && column < kernel.n()) {
        float first, second;
        Out::load_pair(kernel.arg.residual, row * kernel.arg.residual_stride + column, first, second);
        even += first;
        odd += second;
      }
    } else {
      add_residual(kernel, even, row, column, end);
      add_residual(kernel, odd, row, column + 1, end);
    }
  }

  static DG_DEVICE float load_float(const float* at) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
  }
};

template <class Out>
using Epilogue = EpilogueOf<Out, DG_EPILOGUE>;
