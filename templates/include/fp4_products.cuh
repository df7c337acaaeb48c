// What the kernels of MXFP4 weights share: tokens in shared memory, the products of a block of K, and stores.
#pragma once
#include "fp4_weights.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

DG_DEVICE u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// C: kT tokens of a tile, kFp8 activations or BF16, kAbsolute exponents.
template <class C, class Mma>
struct Fp4Products {
  using Weights = Fragment<C::kFp8, C::kAbsolute>;
  // Tokens are in rows of 128 bytes; BF16 has two boxes for a block of K.
  enum : u32 { kT = C::kT, kTokenBytes = kT * 128 * (C::kFp8 ? 1 : 2), kScaleBytes = C::kFp8 ? ceil_div(kT * 4, 128) * 128 : 0 };
  // Products go to sums of their own, and are added to the final ones with a factor. BF16 of relative exponents needs none.
  enum : bool { kPromotes = C::kFp8 || C::kAbsolute };
  // 32 of K that one asm statement multiplies.
  enum : u32 { kTogether = C::kAbsolute ? 1 : 2, kRegisters = kTogether * Weights::kRegisters };
  using Sums = float[kT / 2];

  // Prefetches the maps, and initialises a ring's barriers: a full one and an empty one for each stage. One thread.
  template <u32 kStages, class Arguments>
  static DG_DEVICE void open(const Arguments& arg, u32 barriers, u32 consumers) {
    tma_prefetch_map(arg.map_a);
    if constexpr (C::kFp8) tma_prefetch_map(arg.map_sfa);
    for (u32 stage = 0; stage < kStages; ++stage) {
      barrier_init(barriers + stage * 16, 1);
      barrier_init(barriers + stage * 16 + 8, consumers);
    }
  }

  static DG_DEVICE void clear(Sums& sum) {
#pragma unroll
    for (u32 i = 0; i < kT / 2; ++i) sum[i] = 0;
  }

  // Loads a block of K of kT tokens from `row` on; their scales are those of `scale_row` on in a matrix that begins at `scale_block`.
  template <class Arguments>
  static DG_DEVICE void load_tokens(const Arguments& arg, u32 to, [[maybe_unused]] u32 scales, u32 barrier, u32 block, u32 row,
                                    [[maybe_unused]] u32 scale_row, [[maybe_unused]] u32 scale_block) {
    tma_load(to, arg.map_a, barrier, block * kPieceK, row);
    if constexpr (C::kFp8) {
      tma_load(scales, arg.map_sfa, barrier, scale_row, scale_block + block);
    } else {
      tma_load(to + kT * 128, arg.map_a, barrier, block * kPieceK + 64, row);
    }
  }

  // The descriptor's step to the s-th 32 of K.
  static DG_DEVICE constexpr u32 step_of(u32 s) { return C::kFp8 ? 2 * s : s / 2 * (kT * 8) + s % 2 * 4; }

  // Adds the products of a block of K. `keep` is 0 in the first block of a tile.
  static DG_DEVICE void block(Sums& sum, Sums& partial, u32 weights, u32 exponents, u32 scales, u64 b, u32 keep) {
    Weights words;
    words.load(weights, exponents);
    if constexpr (C::kAbsolute) {
      float scale[kT / 4];
      if constexpr (C::kFp8) load_scales(scale, scales);
      each<0>(words, sum, partial, scale, b);
      each<1>(words, sum, partial, scale, b);
      each<2>(words, sum, partial, scale, b);
      each<3>(words, sum, partial, scale, b);
    } else {
      Sums& products = either(partial, sum);
      u32 a0[kRegisters], a1[kRegisters];
      words.template decode<0, 2>(a0);
      words.template decode<2, 2>(a1);
      wgmma_fence();
      Mma::multiply(products, a0, b, kPromotes ? 0 : keep);
      Mma::multiply(products, a1, b + step_of(2), 1);
      wgmma_commit();
      [[maybe_unused]] float scale[kT / 4];
      // Early where there are registers for them.
      if constexpr (C::kFp8 && kT <= 32) load_scales(scale, scales);
      wgmma_wait<0>();
      Mma::settle(products);
      if constexpr (C::kFp8) {
        if constexpr (kT > 32) load_scales(scale, scales);
#pragma unroll
        for (u32 i = 0; i < kT / 2; ++i) sum[i] += products[i] * scale[i / 4 * 2 + i % 2];
      }
    }
  }

  // Eight tokens' sums of a warp's 16 rows, times the rows' factors, as bf16 to 1024 bytes of staging.
  static DG_DEVICE void stage(u32 to, const float* v, float f0, float f1, u32 warp, u32 lane) {
    const u32 token = lane % 8, unit = warp * 2 + lane / 8 % 2;
    store_matrix_x2_transposed(to + token * 128 + (unit ^ token) * 16, pack_bf16(v[0] * f0, v[1] * f0), pack_bf16(v[2] * f1, v[3] * f1));
  }

  // Stores kRows staged tokens, those before `last`, from `row` on, to 64 columns of d. One consumer.
  template <u32 kRows, class Arguments>
  static DG_DEVICE void store(const Arguments& arg, u32 staging, u32 row, u32 last, u32 column, u32 thread) {
    const u32 x = column + thread % 8 * 8;
    if (x >= arg.n) return;
#pragma unroll
    for (u32 first = 0; first < kRows; first += 16) {
      const u32 y = first + thread / 8;
      if (y >= kRows || row + y >= last) continue;
      const Bytes16 v = load_shared_16(staging + y / 8 * 1024 + y % 8 * 128 + (thread % 8 ^ y % 8) * 16);
      u16* to = reinterpret_cast<u16*>(arg.d) + static_cast<u64>(row + y) * arg.d_stride + x;
      if (arg.aligned) {
        store_16(to, v);
      } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
          if (x + i < arg.n) to[i] = static_cast<u16>(v.words[i / 2] >> (16 * (i % 2)));
      }
    }
  }

 private:
  static DG_DEVICE Sums& either(Sums& partial, Sums& sum) {
    if constexpr (kPromotes) return partial; else return sum;
  }

  static DG_DEVICE void load_scales(float (&scale)[kT / 4], u32 scales) {
#pragma unroll
    for (u32 c = 0; c < kT / 8; ++c) load_shared_pair(scales + c * 32, scale[c * 2], scale[c * 2 + 1]);
  }

  // The s-th 32 of K, with absolute exponents.
  template <u32 kS>
  static DG_DEVICE void each(const Weights& words, Sums& sum, Sums& partial, [[maybe_unused]] const float (&scale)[kT / 4], u64 b) {
    u32 a[kRegisters];
    words.template decode<kS, 1>(a);
    wgmma_fence();
    Mma::multiply(partial, a, b + step_of(kS), 0);
    wgmma_commit();
    const float f0 = words.power(0, kS), f1 = words.power(1, kS);
    wgmma_wait<0>();
    Mma::settle(partial);
#pragma unroll
    for (u32 i = 0; i < kT / 2; ++i) {
      const float product = partial[i] * (i % 4 < 2 ? f0 : f1);
      if constexpr (C::kFp8) sum[i] += product * scale[i / 4 * 2 + i % 2]; else sum[i] += product;
    }
  }
};
