// Epilogues of the FP8 kernels, and of others with 16-bit output: float32 accumulators to D.
#pragma once
#include "barrier.cuh"
#include "columns.cuh"
#include "output.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// Sums are staged in shared memory and then stored either by TMA, which clips at the edges of D (`store`), or by the warp that
// staged them (`copy`). A TMA store leaves consumers free for the next tile. A copy finishes sooner: a TMA store waits for a
// barrier and for a fence of some 300 cycles, and takes as long for rows of 64 bytes as for rows of 128. A warpgroup's staging
// area has 64 x kBlockN bf16 for each m64 slice, cut into boxes of kBoxColumns columns. Rows of a box are swizzled over their own
// length, as the tensor map expects.
template <u32 kBlockN, u32 kSlices, class Out = Output<kBf16>>
struct TmaStore {
  enum : u32 { kBoxColumns = kBlockN % 64 == 0 ? 64 : kBlockN % 32 == 0 ? 32 : 16 };
  enum : u32 { kRowBytes = kBoxColumns * 2 };
  enum : u32 { kBoxBytes = 64 * kRowBytes };
  enum : u32 { kBytes = kSlices * 64 * kBlockN * 2 };  // one warpgroup's staging area

  // Where a 16-byte unit of a row lies: TMA's swizzle uses the address bits above those of the row.
  static DG_DEVICE u32 swizzled(u32 row, u32 unit) {
    constexpr u32 kUnits = kRowBytes / 16;
    return unit ^ (row / (8 / kUnits) % kUnits);
  }

  // Stages columns [kColumn, kColumn + kColumns) of one slice. `sum` is the accumulator of the first of them.
  template <u32 kSlice, u32 kColumn, u32 kColumns>
  static DG_DEVICE void stage(u32 staging, const float* sum, u32 warp, u32 lane) {
    static_assert(kColumn % 16 == 0 && kColumns % 16 == 0);
    const u32 row = warp * 16 + lane % 16;  // the row whose address this lane supplies to stmatrix
#pragma unroll
    for (u32 column = kColumn; column < kColumn + kColumns; column += 16) {
      const float* v = sum + (column - kColumn) / 2;
      const u32 box = staging + (kSlice * (kBlockN / kBoxColumns) + column / kBoxColumns) * kBoxBytes;
      const u32 unit = column % kBoxColumns / 8 + lane / 16;
      store_matrix_x4(box + row * kRowBytes + swizzled(row, unit) * 16, Out::apply(v[0], v[1]), Out::apply(v[2], v[3]),
                      Out::apply(v[4], v[5]), Out::apply(v[6], v[7]));
    }
  }

  // Stages kBlockN columns of every slice, beginning with accumulator register `first`.
  template <class Sums>
  static DG_DEVICE void stage_all(u32 staging, const Sums& sum, u32 first, u32 warp, u32 lane) {
    static_assert(kSlices <= 2);
    stage<0, 0, kBlockN>(staging, &sum[0][first], warp, lane);
    if constexpr (kSlices > 1) stage<1, 0, kBlockN>(staging, &sum[1][first], warp, lane);
  }

  // Copies the boxes that this warp has staged of its own rows of a slice to D, whose rows begin at `row`. D must have a multiple
  // of eight columns. No other warp takes part, so __syncwarp is enough before it.
  template <u32 kSlice, u32 kColumn, u32 kColumns, class Columns>
  static DG_DEVICE void copy(u32 staging, u16* d, i64 stride, u32 row, const Columns& tile, u32 rows, u32 columns, u32 warp,
                             u32 lane) {
    static_assert(kColumn % kBoxColumns == 0 && kColumns % kBoxColumns == 0);
    constexpr u32 kUnits = kRowBytes / 16, kRows = 32 / kUnits;  // rows that a warp copies at once
    const u32 first = warp * 16 + lane / kUnits, unit = lane % kUnits;
#pragma unroll
    for (u32 column = kColumn; column < kColumn + kColumns; column += kBoxColumns) {
      const u32 box = staging + (kSlice * (kBlockN / kBoxColumns) + column / kBoxColumns) * kBoxBytes;
      const u32 x = tile.at(column) + unit * 8;
#pragma unroll
      for (u32 r = first; r < first + 16; r += kRows) {
        const u32 y = row + kSlice * 64 + r;
        if (y < rows && x < columns)
          store_16(d + y * stride + x, load_shared_16(box + r * kRowBytes + swizzled(r, unit) * 16));
      }
    }
  }

  // Stores the part-th of kParts equal parts of the area: whole slices, or some of their columns. The area's first column is the
  // tile's `column`-th. At most two boxes are in flight; the last may still be read when this returns.
  template <u32 kParts, class Columns>
  static DG_DEVICE void store(const TensorMap* map, u32 staging, u32 row, u32 column, const Columns& tile, u32 rows,
                              u32 columns, u32 part, LatePolicy policy) {
    constexpr u32 kBoxes = kBlockN / kBoxColumns, kAcross = kParts / kSlices == 0 ? 1 : kParts / kSlices;
    constexpr u32 kPartSlices = kSlices * kAcross / kParts, kPartBoxes = kBoxes / kAcross;
    static_assert(kPartSlices * kParts == kSlices * kAcross && kPartBoxes * kAcross == kBoxes);
    const u32 first_slice = part / kAcross * kPartSlices, first_box = part % kAcross * kPartBoxes;
#pragma unroll 1  // TMA takes longer for a box than this code, and compilers for copies of it
    for (u32 slice = first_slice; slice < first_slice + kPartSlices; ++slice) {
#pragma unroll 1
      for (u32 box = first_box; box < first_box + kPartBoxes; ++box) {
        const u32 x = tile.at(column + box * kBoxColumns);
        if (row + slice * 64 < rows && x < columns)
          tma_store(map, staging + (slice * kBoxes + box) * kBoxBytes, x, row + slice * 64, policy);
        tma_store_commit();
        tma_store_wait_read<1>();
      }
    }
  }
};

// Element by element, for a D whose rows do not begin on 16-byte boundaries. Stores the columns that this split owns.
template <u32 kBlockN, u32 kSlices, u32 kSplits, class Out = Output<kBf16>>
DG_DEVICE void store_direct(u16* d, i64 stride, const float (&sum)[kSlices][kBlockN / 2], u32 row,
                            const TileColumns<kBlockN>& tile, u32 rows, u32 columns, u32 warp, u32 lane, u32 split) {
#pragma unroll
  for (u32 slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (u32 i = 0; i < kBlockN / 2; i += 2) {
      const u32 y = row + slice * 64 + warp * 16 + lane / 4 + (i & 2) * 4;
      const u32 x = tile.at(i / 4 * 8) + lane % 4 * 2;
      if (y < rows && i / (kBlockN / 2 / kSplits) == split) {
        const u32 packed = Out::apply(sum[slice][i], sum[slice][i + 1]);
        u16* out = d + y * stride + x;
        if (x < columns) out[0] = static_cast<u16>(packed);
        if (x + 1 < columns) out[1] = static_cast<u16>(packed >> 16);
      }
    }
  }
}

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
