// The end of a tile of mma.sync kernels: C, the epilogue, and stores from registers. No shared memory is used, so that the copies of the
// next tile's operands go on meanwhile.
#pragma once
#include "finish.cuh"
#include "mma_ptx.cuh"
#include "parts_in_order.cuh"

// A warp's sums: kTilesM times 16 rows, and kTilesN times 8 columns, of D. kAligned: rows of D and C begin at multiples of 16 bytes and
// have whole pieces of 16 bytes. kSpread: see MmaOperand.
template <u32 kElement, u32 kAccumulate, u32 kTilesM, u32 kTilesN, bool kAligned, bool kSpread>
struct MmaOutput {
  using Out = Output<kElement>;
  using Final = Epilogue<Out>;
  enum : u32 { kColumns = kTilesN * 8, kRun = kColumns % 32 == 0 ? 32 : 16 };
  static_assert(kElement != kE4m3 && !Final::kGated, "other kernels cast D to FP8, and have gates");
  static_assert(kTilesN % 2 == 0, "an epilogue takes 16 columns");

  // `row` and `column` are the warp's first ones. Rows from `end` on are neither read nor stored. `group` is the tile's, or empty.
  template <class Kernel, class Group>
  static DG_DEVICE void store(const Kernel& kernel, float (&sum)[kTilesM][kTilesN * 4], u32 row, u32 column, u32 end, Group group,
                              u32 lane) {
#pragma unroll
    for (u32 tile = 0; tile < kTilesM; ++tile) {
      float* own = sum[tile];
      const u32 y = row + tile * 16 + lane / 4;
      if constexpr (Final::kScales) Final::template scale<kColumns>(kernel, own, y, end);
      if constexpr (kAccumulate == kReads) add_c(kernel, own, y, column, end, lane);
      if constexpr (Final::kFinishes)
        Final::template finish<kColumns, kAligned, kRun>(kernel, own, y, end, group, lane, [&](u32 i) { return column + i; });
      store_rows(kernel, own, y, column, end, lane);
    }
  }

 private:
  // Calls `use(pair, x)` for the neighbours of each eight columns in one of a thread's two rows: half 0, or half 1 eight rows below.
  template <class Use>
  static DG_DEVICE void each_pair(float* sum, u32 half, u32 column, u32 columns, u32 lane, const Use& use) {
#pragma unroll
    for (u32 chunk = 0; chunk < kTilesN; ++chunk) {
      const u32 x = column + chunk * 8 + lane % 4 * 2;
      if (x < columns) use(sum + chunk * 4 + half * 2, x);
    }
  }

  template <class Kernel>
  static DG_DEVICE void add_c(const Kernel& kernel, float* sum, u32 row, u32 column, u32 end, u32 lane) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 y = opaque(row + half * 8);  // addresses take no registers between rows
      if (y >= end) continue;
      each_pair(sum, half, column, kernel.n(), lane, [&](float* pair, u32 x) {
        const i64 at = y * kernel.arg.c_stride + x;
        float first, second = 0.0f;
        if constexpr (kAligned) {
          Out::load_pair(kernel.arg.c, at, first, second);
        } else {
          first = Out::load(kernel.arg.c, at);
          if (x + 1 < kernel.n()) second = Out::load(kernel.arg.c, at + 1);
        }
        pair[0] = __fadd_rn(pair[0], first);
        pair[1] = __fadd_rn(pair[1], second);
      });
    }
  }

  template <class Kernel>
  static DG_DEVICE void store_rows(const Kernel& kernel, float* sum, u32 row, u32 column, u32 end, u32 lane) {
    const u32 n = kernel.n();
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 y = opaque(row + half * 8);
      u8* to = kernel.arg.d + (y * kernel.arg.d_stride) * Out::kBytes;
      if constexpr (kAligned && Out::kBytes == 2 && kTilesN % 4 == 0) {
#pragma unroll
        for (u32 chunk = 0; chunk < kTilesN; chunk += 4) {
          u32 words[4];
#pragma unroll
          for (u32 i = 0; i < 4; ++i) words[i] = Out::apply(sum[(chunk + i) * 4 + half * 2], sum[(chunk + i) * 4 + half * 2 + 1]);
          if constexpr (!kSpread) transpose_in_quad(words, lane);
          const u32 x = column + (chunk + lane % 4) * 8;
          if (y < end && x < n) store_words(to + x * 2, words);
        }
      } else if (y < end) {
        each_pair(sum, half, column, n, lane, [&](const float* pair, u32 x) {
          if constexpr (kAligned) {
            if constexpr (kElement == kF32) store_words(to + x * 4, pair[0], pair[1]);
            else store_words(to + x * 2, Out::apply(pair[0], pair[1]));
          } else {
            Out::store(to, x, pair[0]);
            if (x + 1 < n) Out::store(to, x + 1, pair[1]);
          }
        });
      }
    }
  }

  // Lane i of four gets the i-th words of all four, in their order. All lanes of a warp.
  static DG_DEVICE void transpose_in_quad(u32 (&x)[4], u32 lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) exchange(x[i], x[i + 1], odd, 1);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) exchange(x[i], x[i + 2], upper, 2);
  }

  // The upper lane of two gives its first word for the second one of the other.
  static DG_DEVICE void exchange(u32& first, u32& second, bool upper, u32 apart) {
    const u32 other = __shfl_xor_sync(0xffffffffu, upper ? first : second, apart);
    (upper ? first : second) = other;
  }
};

// The same with swapped operands, for few rows: a warp's sums are kTilesM times 16 columns of D, and kTilesN times 8 rows. D has few
// elements, which are stored one by one, so that it may have any stride.
template <u32 kElement, u32 kAccumulate, u32 kTilesM, u32 kTilesN>
struct MmaSwappedOutput {
  using Out = Output<kElement>;
  using Final = Epilogue<Out>;
  enum : u32 { kRows = kTilesN * 8 };
  static_assert(kElement != kE4m3 && !Final::kGated, "other kernels cast D to FP8, and have gates");

  template <class Kernel, class Group>
  static DG_DEVICE void store(const Kernel& kernel, float (&sum)[kTilesM][kTilesN * 4], u32 row, u32 column, u32 end, Group group,
                              u32 lane) {
    const auto all = [](u32) { return true; };
#pragma unroll
    for (u32 tile = 0; tile < kTilesM; ++tile) {
      float* own = sum[tile];
      const u32 first = column + tile * 16 + lane / 4;
      const auto each = [&](const auto& use) {
#pragma unroll
        for (u32 i = 0; i < kTilesN * 4; ++i) {
          const u32 y = opaque(row) + i / 4 * 8 + lane % 4 * 2 + i % 2, x = first + i / 2 % 2 * 8;  // addresses take no registers
          if (y < end && x < kernel.n()) use(own[i], y, x);
        }
      };
      if constexpr (Final::kScales) Final::template scale_swapped<kRows>(kernel, own, row, end, lane, all);
      if constexpr (kAccumulate == kReads)
        each([&](float& value, u32 y, u32 x) { value = __fadd_rn(value, Out::load(kernel.arg.c, y * kernel.arg.c_stride + x)); });
      if constexpr (Final::kFinishes) {
        const u32 before = biases_before(kernel, group);
        Final::template finish_swapped<kRows>(WithGroup<Kernel>{kernel.arg, before + kernel.n()}, own, row, before + first, end, lane, all);
      }
      each([&](float value, u32 y, u32 x) { Out::store(kernel.arg.d, y * kernel.arg.d_stride + x, value); });
    }
  }

 private:
  // A kernel whose columns are places in the biases of all groups. An epilogue of groups has nothing else of columns.
  template <class Kernel>
  struct WithGroup {
    decltype(Kernel::arg) arg;
    u32 columns;
    DG_DEVICE u32 n() const { return columns; }
  };

  template <class Kernel>
  static DG_DEVICE u32 biases_before(const Kernel&, Index<0>) { return 0; }
  template <class Kernel>
  static DG_DEVICE u32 biases_before(const Kernel& kernel, u32 group) {
    if constexpr (Final::kHasBias) return group * static_cast<u32>(kernel.arg.bias_stride_g);
    else return 0;
  }
};
