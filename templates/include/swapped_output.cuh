// The end of a tile whose operands are swapped: C is added to final sums, the epilogue is applied, and they are stored.
#pragma once
#include "barrier.cuh"
#include "finish.cuh"
#include "output.cuh"
#include "warpgroup.cuh"

// For accumulators with weights on rows and tokens on columns: staging transposes them, and each warp copies what it has staged.
// `wanted(chunk)` says which chunks of eight tokens this warpgroup stores: up to kStored of them, adjacent, and beginning with a
// multiple of kStored.
//
// TMA stores need an additional fence and two additional barriers. With constant weights in a graph, 32 x 576 x 7168 took 3.10 us
// with TMA and 2.94 with copies, and 1 x 7168 x 2048 took 4.23 and 4.08 (H200).
template <u32 kTokens, u32 kStored, class Out = Output<kBf16>>
struct TransposedStore {
  enum : u32 { kChunkBytes = 8 * 128 };  // eight tokens, 64 weights: one swizzle atom
  enum : u32 { kBytes = kStored * kChunkBytes };  // one warpgroup's staging area

  template <class Wanted>
  static DG_DEVICE void stage(u32 staging, const float (&sum)[1][kTokens / 2], u32 warp, u32 lane,
                              const Wanted& wanted) {
    const u32 token = lane % 8, unit = warp * 2 + lane / 8 % 2;
    const u32 place = staging + token * 128 + (unit ^ token) * 16;
#pragma unroll
    for (u32 chunk = 0; chunk < kTokens / 8; ++chunk) {
      if (wanted(chunk)) {
        const float* v = &sum[0][chunk * 4];
        store_matrix_x2_transposed(place + chunk % kStored * kChunkBytes, Out::apply(v[0], v[1]), Out::apply(v[2], v[3]));
      }
    }
  }

  // Copies the 16 weights that this warp has staged to D for every token: eight weights and two chunks at once, or one by one where
  // D's columns are no multiple of eight.
  static DG_DEVICE void copy(u32 staging, u16* d, i64 stride, u32 token, u32 weight, u32 tokens, u32 weights, u32 warp,
                             u32 lane) {
    const auto place = [&](u32 slice, u32 chunk, u32 row, u32 unit) {
      return staging + (slice * kStored + chunk) * kChunkBytes + row * 128 + (unit ^ row) * 16;
    };
    if (weights % 8 == 0) {
      const u32 row = lane % 8, unit = warp * 2 + lane / 8 % 2;
#pragma unroll
      for (u32 pair = 0; pair < kStored; pair += 2) {
        const u32 chunk = pair + lane / 16, y = token + chunk * 8 + row, x = weight + unit * 8;
        if (chunk < kStored && y < tokens && x < weights)
          store_16(d + y * stride + x, load_shared_16(place(0, chunk, row, unit)));
      }
    } else {
#pragma unroll 1
      for (u32 i = lane; i < kStored * 128; i += 32) {
        const u32 at = warp * 16 + i % 16, row = i / 16 % 8, chunk = i / 128 % kStored, slice = i / 128 / kStored;
        const u32 y = token + chunk * 8 + row, x = weight + slice * 64 + at;
        if (y < tokens && x < weights) d[y * stride + x] = load_shared_2(place(slice, chunk, row, at / 8) + at % 8 * 2);
      }
    }
  }
};

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
