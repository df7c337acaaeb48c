// Scaling of FP8 products with 1 x 128 scales on both sides, or with one scale for each row of A and of B. Scaling by 1 x 128 and
// 128 x 128 scales is in promotion.cuh.
#pragma once
#include "promotion.cuh"

// The names that kernels/sm90_fp8_scaled.py uses.
enum ScalingKind : u32 { k1D1D, k1D2D, kRowwise };

// For scales that are not kept in pages of registers (see BlockScales).
struct NoPages {
  static DG_DEVICE void turn(u32) {}
};

// 1D1D: each row of A and each row of B has a scale for each block of K. Scales of A are read before the block's products are
// promoted. Scales of B are read in pairs during promotion, because they do not all fit in registers. By then the block's stage
// has been released, so B's scales have slots of their own, twice as many as stages. A slot is filled again two rounds later. A
// consumer releases the stage of the round in between only after it has read this slot.
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

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors& factors) const {
    const float low = factors.row[kSlice][0], high = factors.row[kSlice][1];
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; i += 4) {  // eight columns: two of them in this thread, for two rows
      float even, odd;
      load_shared_pair(factors.columns + (kColumn + 2 * i) * 4, even, odd);
      add<kFresh>(sum[i], low * even, partial[i]);
      add<kFresh>(sum[i + 1], low * odd, partial[i + 1]);
      add<kFresh>(sum[i + 2], high * even, partial[i + 2]);
      add<kFresh>(sum[i + 3], high * odd, partial[i + 3]);
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
