// The end of a tile whose operands are swapped: C is added to final sums, the epilogue is applied, and they are stored.
#pragma once
#include "epilogue.cuh"
#include "finish.cuh"

// Layout gives kBlockM, Out, Store, Exchange, Tile, and kStaged: whether tiles are staged, to be copied in pieces of 16 bytes.
template <class Layout>
struct SwappedOutput {
  using Tile = typename Layout::Tile;
  using Store = typename Layout::Store;
  using Out = typename Layout::Out;
  using Final = Epilogue<Out>;
  enum : u32 { kBlockM = Layout::kBlockM, kSplits = Layout::kClusterK * Layout::kConsumersK };
  using Sums = float[1][kBlockM / 2];

  // Stores the chunks that are wanted of a tile whose first token is `row` and whose first weight is `column`, in the matrix D of a
  // product.
  template <class Kernel, class Wanted>
  static DG_DEVICE void store(const Kernel& kernel, Sums& sum, u32 row, u32 column, u32 staging, u32 split, u32 warp, u32 lane,
                              const Wanted& wanted, u32 matrix = 0) {
    const auto& arg = kernel.arg;
    if constexpr (Final::kScales) Final::template scale_swapped<kBlockM>(kernel, sum[0], row, kernel.m(), lane, wanted);
    if constexpr (Tile::kAccumulate == kReads) {
      each(kernel, sum, row, column, warp, lane, wanted,
           [&](float& value, u32 y, u32 x) { value += Out::load(arg.c, y * arg.c_stride + x); });
    }
    if constexpr (Final::kFinishes)
      Final::template finish_swapped<kBlockM>(kernel, sum[0], row, column + warp * 16 + lane / 4, kernel.m(), lane, wanted);
    if constexpr (Layout::kStaged) {
      __syncwarp();  // the warp has copied the previous tile
      Store::stage(staging, sum, warp, lane, wanted);
      __syncwarp();
      const u32 token = row + (kSplits == 1 ? 0 : split * Layout::Exchange::kOwned * 8);
      Store::copy(staging, reinterpret_cast<u16*>(arg.d) + kernel.d_matrix(matrix), arg.d_stride, token, column,
                  min_of(kernel.m(), row + kBlockM), kernel.n(), warp, lane);
    } else {
      each(kernel, sum, row, column, warp, lane, wanted,
           [&](float value, u32 y, u32 x) { Out::store(arg.d, kernel.d_matrix(matrix) + y * arg.d_stride + x, value); });
    }
  }

  // Calls `use(sum, y, x)` for each sum of the chunks that are wanted: token y, weight x.
  template <class Kernel, class Wanted, class Use>
  static DG_DEVICE void each(const Kernel& kernel, Sums& sum, u32 row, u32 column, u32 warp, u32 lane, const Wanted& wanted,
                             const Use& use) {
#pragma unroll
    for (u32 chunk = 0; chunk < kBlockM / 8; ++chunk) {
      if (wanted(chunk)) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          const u32 x = column + warp * 16 + lane / 4 + i / 2 * 8, y = row + chunk * 8 + lane % 4 * 2 + i % 2;
          if (x < kernel.n() && y < kernel.m()) use(sum[0][chunk * 4 + i], y, x);
        }
      }
    }
  }
};
