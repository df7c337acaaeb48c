// Scaling of FP8 products with 1 x 128 scales on both sides, or with one scale for each row of A and of B. Scaling by 1 x 128 and
// 128 x 128 scales is in promotion.cuh.
#pragma once
#include "promotion.cuh"

// The names that kernels/sm90_fp8_scaled.py uses.
enum ScalingKind : u32 { k1D1D, k1D2D, kRowwise };

// The scale of one of `rows` rows, and 0 for rows that do not exist.
DG_DEVICE float scale_of(const float* scales, i64 stride, u32 row, u32 rows) {
  float value = 0.0f;
  if (row < rows) asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(scales + row * stride) : "memory");
  return value;
}

// For scales that are not kept in pages of registers (see BlockScales).
struct NoPages {
  static DG_DEVICE void turn(u32) {}
};

// 1D1D: each row of A and each row of B has a scale for each block of K. Scales of A are read before the block's products are
// promoted. Scales of B are read in pairs during promotion, because they do not all fit in registers. By then the block's stage
// has been released, so B's scales have slots of their own, twice as many as stages. A slot is filled again two rounds later. A
// consumer releases the stage of the round in between only after it has read this slot.
//
// Blocks of 128 x 128 took 870 cycles or more (H200, 32 SMs, so that power does not limit). Without reading scales of B they took 770,
// and without multiplying by them 630: shared memory feeds the products too, and is busy most of the time. Reading them four at a time,
// from rows of B that TMA interleaved for that, took 0 to 4% longer.
//
// Consumers with two m64 slices keep the scales of the first for the second, if a slice is multiplied at once (`kKept` columns).
// With 256x64 tiles that took 9% off 4096 x 2112 x 7168 (H100).
template <u32 kSlices, u32 kStages, u32 kRowBytes, u32 kColumnBytes, u32 kKept>
struct RowColumnScales {
  struct Factors {
    float row[kSlices][2];
    u32 columns;  // address of this thread's first scale of B
    mutable float kept[max_of(1u, kKept / 4)];
  };
  enum : bool { kStartsFresh = true };
  enum : u32 { kPage = 1u << 30 };

  NoPages weights;
  const u32 rows, columns;  // addresses of this thread's first scale of A in stage 0, and of B in slot 0

  DG_DEVICE RowColumnScales(u32 rows, u32 columns) : rows(opaque(rows)), columns(opaque(columns)) {}

  DG_DEVICE void begin(Factors&) const {}
  DG_DEVICE void before_arrival(Factors&, u32) const {}
  DG_DEVICE void arrive(Factors& factors, u32 stage, u32 parity) const {
    factors.columns = columns + (stage + parity * kStages) * kColumnBytes;
  }

  DG_DEVICE void after_arrival(Factors& factors, u32 stage) const {
    const u32 address = rows + stage * kRowBytes;
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice) {
      factors.row[slice][0] = load_shared(address + slice * 256);
      factors.row[slice][1] = load_shared(address + slice * 256 + 32);
    }
  }

  // A product is multiplied by B's scale, and then added times A's scale. Multiplying the two scales first took 2 to 5% longer: with
  // one factor for all sums of a row, the register file is read less.
  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors& factors) const {
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; i += 4) {  // eight columns: two of them in this thread, for two rows
      float even, odd;
      if constexpr (kKept > 0 && kSlice > 0) {
        even = settled(factors.kept[i / 2]);
        odd = settled(factors.kept[i / 2 + 1]);
      } else {
        load_shared_pair(factors.columns + (kColumn + 2 * i) * 4, even, odd);
      }
      if constexpr (kKept > 0 && kSlice == 0) {
        factors.kept[i / 2] = even;
        factors.kept[i / 2 + 1] = odd;
      }
#pragma unroll
      for (u32 row = 0; row < 2; ++row) {
        add<kFresh>(sum[i + 2 * row], factors.row[kSlice][row], partial[i + 2 * row] * even);
        add<kFresh>(sum[i + 2 * row + 1], factors.row[kSlice][row], partial[i + 2 * row + 1] * odd);
      }
    }
  }
};

// For scales that are the same for all of K: products are added times A's scale, and the epilogue multiplies the sums by B's.
// Whether A's rows are the accumulators' rows or their columns, sums are the same bits. A tile's scales of A are loaded when the
// tile before it has been multiplied.
//
// Here A's rows are the accumulators' rows: a thread has two in each m64 slice.
template <u32 kSlices>
struct RowScales {
  struct Factors {};
  enum : bool { kStartsFresh = true };
  enum : u32 { kPage = 1u << 30 };

  NoPages weights;
  const float* scales;
  i64 stride;
  u32 rows;
  float scale[kSlices][2];

  DG_DEVICE RowScales(const float* scales, i64 stride, u32 rows) : scales(scales), stride(stride), rows(rows) {}

  // Starts loading the scales of a tile; `row` is this thread's first row.
  DG_DEVICE void fetch(u32 row) {
#pragma unroll
    for (u32 i = 0; i < kSlices * 2; ++i) scale[i / 2][i % 2] = scale_of(scales, stride, row + i / 2 * 64 + i % 2 * 8, rows);
  }

  DG_DEVICE void begin(Factors&) const {}
  DG_DEVICE void before_arrival(Factors&, u32) const {}
  DG_DEVICE void arrive(Factors&, u32, u32) const {}
  DG_DEVICE void after_arrival(Factors&, u32) const {}

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors&) const {
    const float factor[2] = {settled(scale[kSlice][0]), settled(scale[kSlice][1])};
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; ++i) add<kFresh>(sum[i], factor[i / 2 % 2], partial[i]);
  }
};

// The same with A's rows on the accumulators' columns: a thread has two of every eight.
template <u32 kTokens>
struct TokenScales {
  struct Factors {};
  enum : bool { kStartsFresh = false };
  enum : u32 { kPage = 1u << 30 };

  NoPages weights;
  const float* scales;
  i64 stride;
  u32 rows;
  float scale[kTokens / 4];

  DG_DEVICE TokenScales(const float* scales, i64 stride, u32 rows) : scales(scales), stride(stride), rows(rows) {}

  DG_DEVICE void fetch(u32 row) {
#pragma unroll
    for (u32 i = 0; i < kTokens / 4; ++i) scale[i] = scale_of(scales, stride, row + i / 2 * 8 + i % 2, rows);
  }

  DG_DEVICE void begin(Factors&) const {}
  DG_DEVICE void before_arrival(Factors&, u32) const {}
  DG_DEVICE void arrive(Factors&, u32, u32) const {}
  DG_DEVICE void after_arrival(Factors&, u32) const {}

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors&) const {
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; i += 4) {  // as in ColumnTokens
      const float even = settled(scale[(kColumn + 2 * i) / 4]), odd = settled(scale[(kColumn + 2 * i) / 4 + 1]);
      add<kFresh>(sum[i], even, partial[i]);
      add<kFresh>(sum[i + 1], odd, partial[i + 1]);
      add<kFresh>(sum[i + 2], even, partial[i + 2]);
      add<kFresh>(sum[i + 3], odd, partial[i + 3]);
    }
  }
};

// B's scales for the epilogue of one tile: each lane has those of every 32nd column, and passes them on to the other lanes.
template <u32 kColumns>
struct ColumnScales {
  float scale[ceil_div(kColumns, 32)];

  // `place(i)` is the column of D, of `columns`, whose scale is this lane's i / 32-th.
  template <class Place>
  DG_DEVICE void load(const float* scales, i64 stride, u32 columns, const Place& place) {
#pragma unroll
    for (u32 i = 0; i < kColumns; i += 32) scale[i / 32] = scale_of(scales, stride, place(i), columns);
  }

  // Multiplies the sums of kCount columns from the tile's column `first` on. `sum` is this thread's first one.
  template <u32 kCount>
  DG_DEVICE void apply(float* sum, u32 first, u32 lane) const {
#pragma unroll
    for (u32 i = 0; i < kCount / 2; i += 4) {  // eight columns: two of them in this thread, for two rows
      const u32 column = first + 2 * i, from = column % 32 + lane % 4 * 2;
      const float even = __shfl_sync(0xffffffffu, scale[column / 32], from);
      const float odd = __shfl_sync(0xffffffffu, scale[column / 32], from + 1);
      sum[i] *= even;
      sum[i + 1] *= odd;
      sum[i + 2] *= even;
      sum[i + 3] *= odd;
    }
  }
};
