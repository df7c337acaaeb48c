// Dot products of a token's row with the rows of its choices: gradients of a router's weights.
#pragma once
#include "quantize.cuh"

// A CTA has a token, and eight of its choices at a time; a choice without a row has zero. Sums have one order for a number of columns:
// of a thread, then of a warp, then of warps in their order.
template <u32 kThreads>
struct MoeDots {
  enum : u32 { kTogether = 8, kWarps = kThreads / 32 };
  using Elements = EightElements<kSourceBf16, false>;

  const u8* input;
  i64 input_stride;
  const int* places;
  const u8* rows;
  i64 rows_stride;
  float* output;
  u32 columns, top_k;

  DG_DEVICE void run() const {
    __shared__ float sums[kTogether][kWarps];
    const u32 token = blockIdx.x, thread = threadIdx.x;
    const u8* const own = rows + token * rows_stride * 2;
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (u32 first = 0; first < top_k; first += kTogether) {
      int at[kTogether];
      float sum[kTogether] = {};
#pragma unroll
      for (u32 i = 0; i < kTogether; ++i) at[i] = first + i < top_k ? places[token * top_k + first + i] : -1;
#pragma unroll 1
      for (u32 column = thread * 8; column < columns; column += kThreads * 8) {
        Elements d, v[kTogether];
        load(own + column * 2, d);
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i)
          load_sixteen(input + (at[i] * input_stride + column) * 2, at[i] >= 0, v[i].words);
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i)
#pragma unroll
          for (u32 e = 0; e < 8; ++e) sum[i] = __fmaf_rn(v[i].get(e), d.get(e), sum[i]);
      }
#pragma unroll
      for (u32 i = 0; i < kTogether; ++i) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2)
          sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], distance));
        if (thread % 32 == 0) sums[i][thread / 32] = sum[i];
      }
      __syncthreads();
      if (thread < kTogether && first + thread < top_k) {
        float total = sums[thread][0];
#pragma unroll
        for (u32 i = 1; i < kWarps; ++i) total = __fadd_rn(total, sums[thread][i]);
        output[token * top_k + first + thread] = total;
      }
      __syncthreads();
    }
  }

 private:
  // Rows of a gradient may begin anywhere.
  static DG_DEVICE void load(const u8* at, Elements& d) {
    if ((reinterpret_cast<u64>(at) & 15) == 0) {
      load_sixteen(at, true, d.words);
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u16* const pair = reinterpret_cast<const u16*>(at) + 2 * i;
        d.words[i] = pair[0] | static_cast<u32>(pair[1]) << 16;
      }
    }
  }
};
