// Tokens of a tile past its last m64 slice, eight to 32 of them: a slice of their own would be mostly padding. They are
// multiplied with operands swapped, as columns, by weights that are in shared memory anyhow: each consumer takes 64 of the
// tile's weights as rows. Their products follow those of a block's last unit, in the same group.
#pragma once
#include "barrier.cuh"
#include "columns.cuh"
#include "epilogue.cuh"
#include "fp8_gemm_arguments.cuh"
#include "promotion.cuh"
#include "warpgroup.cuh"

// What main loops of tiles without any have instead.
struct NoExtraTokens {
  enum : bool { kSome = false };
  struct Scales {};
  template <class... Places>
  DG_DEVICE explicit NoExtraTokens(Places...) {}
  DG_DEVICE void read(Scales&, u32) const {}
  DG_DEVICE void issue(u32, u32) {}
  DG_DEVICE void settle() {}
  template <bool kFresh>
  DG_DEVICE void promote(const Scales&, float) {}
  DG_DEVICE void clear() {}
  DG_DEVICE void store(const Fp8GemmArguments&, u32, u32, u32, u32, u32, u32) const {}
};

// kBytesTokens and kBytesWeights are a stage's parts of A and of B, kBytesScale that of A's scales.
template <class Mma, u32 kBytesTokens, u32 kBytesWeights, u32 kBytesScale>
struct ExtraTokens {
  enum : bool { kSome = true };
  enum : u32 { kTokens = Mma::kN };
  struct Scales {
    float token[kTokens / 4];  // of the columns that this thread has
  };

  const u32 weights, tokens;  // low descriptor words of this consumer's weights, and of the tokens, in stage 0
  const u32 scales;           // address of this thread's first scale there
  float sum[1][kTokens / 2];
  float partial[kTokens / 2];

  // By addresses in stage 0.
  DG_DEVICE ExtraTokens(u32 weights, u32 tokens, u32 scales)
      : weights(uniform(descriptor_low(weights))), tokens(uniform(descriptor_low(tokens))), scales(scales) {
#pragma unroll
    for (u32 i = 0; i < kTokens / 2; ++i) partial[i] = 0.0f;
  }

  DG_DEVICE void read(Scales& to, u32 stage) const {
#pragma unroll
    for (u32 i = 0; i < kTokens / 4; i += 2)
      load_shared_pair(scales + stage * kBytesScale + i * 16, to.token[i], to.token[i + 1]);
  }

  DG_DEVICE void issue(u32 stage, u32 opaque_zero) {
    const u32 a = weights + stage * (kBytesWeights / 16), b = tokens + stage * (kBytesTokens / 16);
    Mma::multiply(partial, matrix_descriptor(a), matrix_descriptor(b), opaque_zero);
  }

  // Behind the wait for the products.
  DG_DEVICE void settle() { Mma::settle(partial); }

  template <bool kFresh>
  DG_DEVICE void promote(const Scales& of, float weight) {
#pragma unroll
    for (u32 i = 0; i < kTokens / 2; ++i) add<kFresh>(sum[0][i], of.token[i / 4 * 2 + i % 2] * weight, partial[i]);
  }

  DG_DEVICE void clear() {
#pragma unroll
    for (u32 i = 0; i < kTokens / 2; ++i) sum[0][i] = 0.0f;
  }

  // This consumer's weights are the columns of D from `column` on. Element by element: a tile has few.
  DG_DEVICE void store(const Fp8GemmArguments& arg, u32 row, u32 column, u32 rows, u32 columns, u32 warp, u32 lane) const {
    store_direct_transposed<kTokens, 1>(arg.d, arg.d_stride, sum, row, column, rows, columns, warp, lane,
                                        [](u32) { return true; });
  }
};
