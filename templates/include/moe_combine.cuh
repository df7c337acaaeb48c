// Adds the rows of a token's choices, which experts have computed.
#pragma once
#include "quantize.cuh"

// A thread adds eight columns of a token in float32, in the order of its choices, and rounds once. A choice without a row adds zero.
// With kBiased, its expert's bias is added to a row first.
template <bool kWeighted, bool kBiased = false>
struct MoeCombine {
  enum : u32 { kAhead = 4 };  // rows that are loaded before they are added
  using Elements = EightElements<kSourceBf16, false>;

  const u8* input;
  i64 input_stride;
  const int* places;
  const float* weights;
  const i64* chosen;
  const u8* bias;
  i64 bias_stride;
  u8* output;
  i64 output_stride;
  u32 tokens, columns, top_k;

  DG_DEVICE void run() const {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x, across = columns / 8;
    const u32 token = index / across, column = index % across * 8;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (token >= tokens) return;
    float sums[8] = {};
#pragma unroll 1
    for (u32 first = 0; first < top_k; first += kAhead) {
      Elements v[kAhead];
      [[maybe_unused]] Elements b[kAhead];
      float factor[kAhead];
#pragma unroll
      for (u32 i = 0; i < kAhead; ++i) {
        const u32 choice = token * top_k + first + i;
        const int row = first + i < top_k ? places[choice] : -1;
        factor[i] = kWeighted && row >= 0 ? weights[choice] : 1.0f;
        load_sixteen(input + (row * input_stride + column) * 2, row >= 0, v[i].words);
        if constexpr (kBiased) load_sixteen(bias + ((row >= 0 ? chosen[choice] : 0) * bias_stride + column) * 2, row >= 0, b[i].words);
      }
#pragma unroll
      for (u32 i = 0; i < kAhead; ++i)
#pragma unroll
        for (u32 e = 0; e < 8; ++e) {
          float each = v[i].get(e);
          if constexpr (kBiased) each = __fadd_rn(each, b[i].get(e));
          sums[e] = __fadd_rn(sums[e], kWeighted ? __fmul_rn(each, factor[i]) : each);
        }
    }
    Bytes16 packed;
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.words[i]) : "f"(sums[2 * i + 1]), "f"(sums[2 * i]));
    store_16(output + (token * output_stride + column) * 2, packed);
  }
};
