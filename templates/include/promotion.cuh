// FP8 promotion: the tensor cores' sum over one block of K is scaled and added to float32 sums.
#pragma once
#include "barrier.cuh"
#include "columns.cuh"

// Scale factors of B in registers, in pages of 32 blocks of K: lane l of each warp holds the factor of the page's l-th block. One
// coalesced load serves 32 blocks, and the next page is fetched while this one is used. A tile's first block is kept apart, so
// that loops over pages have an even number of blocks. Strides are arbitrary, so that B's scales never need a copy. `Order` gives
// the order of blocks.
//
// For a tile's first block only lane 0's factor is used. If all lanes loaded that one, ptxas would see a uniform value and wait
// for it at once, before the first product: 1000 cycles from HBM. With kSpreads each lane loads another factor instead, which
// costs a register.
template <u32 kRows, class Order, bool kSpreads = true>
struct BlockScales {
  enum : u32 { kPage = 32 };

  // A tile's rows of B's scales, and its blocks of K.
  struct Part {
    u32 row[kRows];
    Order order;
  };

  const float* base;
  i64 stride_n, stride_k;
  u32 rows, lane;
  Part part;
  float lead[kRows], now[kRows], next[kRows];

  DG_DEVICE BlockScales(const float* base, i64 stride_n, i64 stride_k, u32 rows, u32 lane, const Part& first)
      : base(base), stride_n(stride_n), stride_k(stride_k), rows(rows), lane(lane), part(first) {}

  // Starts loading the first tile's factors, well before they are needed.
  DG_DEVICE void open() { fetch_first(); }
  // Starts loading another tile's factors. Of the current tile's factors only those on the current page remain.
  DG_DEVICE void go_on(const Part& that) {
    part = that;
    fetch_first();
  }

  // The factors of the tile's first block. Those of the second block on are on the first page.
  DG_DEVICE void begin(float (&scale)[kRows]) {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) scale[r] = kSpreads ? __shfl_sync(0xffffffffu, lead[r], 0) : lead[r];
    turn(0);
  }

  // Turns to the page whose first block is `place`, a multiple of kPage. Places count from a tile's second block. The page must
  // exist.
  DG_DEVICE void turn(u32 place) {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) now[r] = next[r];
    fetch(1 + place + kPage + lane, next);
  }

  // The factors of block `place`, which must be on the current page.
  DG_DEVICE void get(u32 place, float (&scale)[kRows]) const {
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) scale[r] = __shfl_sync(0xffffffffu, now[r], place);
  }

 private:
  DG_DEVICE void fetch_first() {
    fetch(kSpreads ? lane : 0, lead);
    fetch(1 + lane, next);
  }

  DG_DEVICE void fetch(u32 count, float (&to)[kRows]) const {
    const u32 block = part.order.block(count);
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      const bool inside = block < part.order.blocks && part.row[r] < rows;
      to[r] = inside ? __ldg(base + part.row[r] * stride_n + block * stride_k) : 0.0f;
    }
  }
};

// A scale factor for products that were awaited. Multiplications by it stay behind that wait, because it passes through an asm
// statement: so partial sums, of which there are many more, need not.
DG_DEVICE float settled(float factor) {
  asm volatile("" : "+f"(factor));
  return factor;
}

template <bool kFresh>
DG_DEVICE void add(float& sum, float scale, float partial) {
  sum = kFresh ? scale * partial : sum + scale * partial;
}

// sum += scale_a * scale_b * partial for one m64 x kColumns accumulator, whose first column is the tile's kOffset-th. With kFresh,
// sum = scale_a * scale_b * partial. A thread's registers 4j..4j+3 hold two columns of row `lane / 4` and the same two columns
// of the row eight below, in 8-column chunk j.
template <bool kFresh, class Columns, u32 kColumns, u32 kOffset, u32 kScale = 0>
DG_DEVICE void promote(float* sum, const float* partial, const float (&scale_a)[2],
                       const float (&scale_b)[Columns::kScales]) {
  constexpr u32 kFrom = max_of(Columns::scale_begin(kScale), kOffset);
  constexpr u32 kTo = min_of(Columns::scale_end(kScale), kOffset + kColumns);
  if constexpr (kFrom < kTo) {
    constexpr u32 kIndex = kScale % Columns::kScales;
    const float low = settled(scale_a[0] * scale_b[kIndex]), high = settled(scale_a[1] * scale_b[kIndex]);
#pragma unroll
    for (u32 i = (kFrom - kOffset) / 2; i < (kTo - kOffset) / 2; ++i)
      add<kFresh>(sum[i], (i & 2) ? high : low, partial[i]);
  }
  if constexpr (Columns::scale_end(kScale) < kOffset + kColumns)
    promote<kFresh, Columns, kColumns, kOffset, kScale + 1>(sum, partial, scale_a, scale_b);
}

// Scaling with tokens on the accumulators' rows: a thread has two tokens in each m64 slice, and all scales of columns.
template <class Weights, class Columns, u32 kSlices, u32 kBlockBytes>
struct RowTokens {
  // The scale factors of one block of K.
  struct Factors {
    float token[kSlices][2], weight[Columns::kScales];
  };
  enum : bool { kStartsFresh = true };
  enum : u32 { kPage = Weights::kPage };

  Weights weights;
  const u32 tokens;  // address of this thread's first scale of A in stage 0

  DG_DEVICE RowTokens(const Weights& weights, u32 tokens) : weights(weights), tokens(opaque(tokens)) {}

  DG_DEVICE void begin(Factors& factors) { weights.begin(factors.weight); }
  DG_DEVICE void before_arrival(Factors& factors, u32 place) { weights.get(place, factors.weight); }
  DG_DEVICE void arrive(Factors&, u32, u32) const {}

  DG_DEVICE void after_arrival(Factors& factors, u32 stage) {
    const u32 address = tokens + stage * kBlockBytes;
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice) {
      factors.token[slice][0] = load_shared(address + slice * 256);
      factors.token[slice][1] = load_shared(address + slice * 256 + 32);
    }
  }

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors& factors) const {
    ::promote<kFresh, Columns, kColumns, kColumn>(sum, partial, factors.token[kSlice], factors.weight);
  }
};

// Scaling with tokens on the accumulators' columns and weights on the rows: all rows of a consumer share one scale of B, and a
// thread has two of every eight tokens.
template <class Weights, u32 kTokens>
struct ColumnTokens {
  enum : u32 { kStageBytes = ceil_div(kTokens * 4, 128) * 128 };  // TMA's alignment
  struct Factors {
    float weight[1];
    float token[kTokens / 4];  // already times the scale of B
    u32 from;                  // address of this thread's first scale of A in the stage
  };
  enum : bool { kStartsFresh = false };
  enum : u32 { kPage = Weights::kPage };

  Weights weights;
  const u32 tokens;  // address of this thread's first scale of A in stage 0

  DG_DEVICE ColumnTokens(const Weights& weights, u32 tokens) : weights(weights), tokens(tokens) {}

  DG_DEVICE void begin(Factors& factors) { weights.begin(factors.weight); }
  DG_DEVICE void before_arrival(Factors& factors, u32 place) { weights.get(place, factors.weight); }
  DG_DEVICE void arrive(Factors&, u32, u32) const {}

  DG_DEVICE void after_arrival(Factors& factors, u32 stage) {
    factors.from = tokens + stage * kStageBytes;
#pragma unroll
    for (u32 i = 0; i < kTokens / 4; i += 2) {
      load_shared_pair(factors.from + i * 16, factors.token[i], factors.token[i + 1]);
      factors.token[i] *= factors.weight[0];
      factors.token[i + 1] *= factors.weight[0];
    }
  }

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors& factors) const {
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; i += 4) {  // a chunk of eight tokens: two of them in this thread, for two rows
      const float even = settled(factors.token[(kColumn + 2 * i) / 4]), odd = settled(factors.token[(kColumn + 2 * i) / 4 + 1]);
      add<kFresh>(sum[i], even, partial[i]);
      add<kFresh>(sum[i + 1], odd, partial[i + 1]);
      add<kFresh>(sum[i + 2], even, partial[i + 2]);
      add<kFresh>(sum[i + 3], odd, partial[i + 3]);
    }
  }
};
