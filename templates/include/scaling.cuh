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
// and without multiplying by them 630: shared memory feeds the products too, and is busy most of the time.
template <u32 kSlices, u32 kStages, u32 kRowBytes, u32 kColumnBytes>
struct RowColumnScales {
  struct Factors {
    float row[kSlices][2];
    u32 columns;  // address of this thread's first scale of B
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
      load_shared_pair(factors.columns + (kColumn + 2 * i) * 4, even, odd);
#pragma unroll
      for (u32 row = 0; row < 2; ++row) {
        add<kFresh>(sum[i + 2 * row], factors.row[kSlice][row], partial[i + 2 * row] * even);
        add<kFresh>(sum[i + 2 * row + 1], factors.row[kSlice][row], partial[i + 2 * row + 1] * odd);
      }
    }
  }
};

// For scales that are the same for all of K: unscaled products are added up, and the epilogue scales the sums.
struct LateScales {
  struct Factors {};
  enum : bool { kStartsFresh = true };
  enum : u32 { kPage = 1u << 30 };

  NoPages weights;
  float one;  // 1, hidden from the compiler, which would otherwise delay reading the accumulators and serialise the products

  DG_DEVICE LateScales() { asm volatile("mov.f32 %0, 0f3F800000;" : "=f"(one)); }

  DG_DEVICE void begin(Factors&) const {}
  DG_DEVICE void before_arrival(Factors&, u32) const {}
  DG_DEVICE void arrive(Factors&, u32, u32) const {}
  DG_DEVICE void after_arrival(Factors&, u32) const {}

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors&) const {
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; ++i) add<kFresh>(sum[i], one, partial[i]);
  }
};

// Those scales of one tile: two rows of A in each m64 slice of a thread, and every 32nd row of B, which a lane passes on to the
// other lanes.
template <u32 kSlices, u32 kColumns>
struct TileFactors {
  float row[kSlices][2], column[ceil_div(kColumns, 32)];

  // `row` is this thread's first row of D, `column` the tile's first column.
  template <class Arguments>
  DG_DEVICE void load(const Arguments& arg, u32 row, u32 column, u32 m, u32 n, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < kSlices * 2; ++i)
      this->row[i / 2][i % 2] = scale_of(arg.scale_a, arg.scale_a_stride, row + i / 2 * 64 + i % 2 * 8, m);
#pragma unroll
    for (u32 i = 0; i < kColumns; i += 32) this->column[i / 32] = scale_of(arg.scale_b, arg.scale_b_stride, column + i + lane, n);
  }

  // Scales kCount columns of a slice, from the tile's column `first` on. `sum` is this thread's first one.
  template <u32 kCount>
  DG_DEVICE void apply(float* sum, u32 slice, u32 first, u32 lane) const {
#pragma unroll
    for (u32 i = 0; i < kCount / 2; i += 4) {  // eight columns: two of them in this thread, for two rows
      const u32 place = first + 2 * i, from = place % 32 + lane % 4 * 2;
      const float even = __shfl_sync(0xffffffffu, column[place / 32], from);
      const float odd = __shfl_sync(0xffffffffu, column[place / 32], from + 1);
      sum[i] *= row[slice][0] * even;
      sum[i + 1] *= row[slice][0] * odd;
      sum[i + 2] *= row[slice][1] * even;
      sum[i + 3] *= row[slice][1] * odd;
    }
  }
};
