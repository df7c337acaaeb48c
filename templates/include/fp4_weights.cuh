// MXFP4 weights as `transform_fp4_weights` arranges them, and their decoding into wgmma's A, which comes from registers.
//
// A piece is 64 rows of b by 128 of K: 4096 bytes of codes, then the exponents of its rows' blocks of 32. A thread's codes of one row
// are 16 bytes, a word for each 32 of K.
//   Relative: 4 bits an exponent, d, under the base of the row. Codes times 2^d are numbers of the tensor core's type, so a block of K
//   is one product, and the row's base is a factor of the final sums. This holds all exponents that span at most 15 in a row.
//   Absolute: 8 bits an exponent. Codes alone are decoded, and sums of each 32 of K are multiplied by the power of two. This holds
//   every exponent, and NaN. It takes longer.
#pragma once
#include "barrier.cuh"
#include "bulk.cuh"

enum : u32 { kPieceRows = 64, kPieceK = 128, kCodeBytes = 4096 };

DG_DEVICE constexpr u32 piece_bytes(bool absolute) { return kCodeBytes + (absolute ? 256 : 128); }

DG_DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
DG_DEVICE u32 multiply_bf16(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// 8 weights of one row and 32 of K as E5M2: value * 2^(d - 13). wgmma multiplies E5M2 by E4M3 as fast as E4M3, and E5M2 has exponents
// for d up to 26 without subnormals. Bytes of a table are the magnitudes; codes select them, and signs are merged.
DG_DEVICE void decode_fp8(u32 w, u32 d, u32& first, u32& second) {
  const u32 low = d * 0x04040400u + 0x0A080400u, high = d * 0x04040404u + 0x12100E0Cu;
  const u32 selectors = w & 0x77777777u;
  first = permute_bytes(low, high, selectors) | (w & 0x80808080u);
  second = permute_bytes(low, high, selectors >> 16) | ((w << 4) & 0x80808080u);
}

// 8 weights of one row and 32 of K as BF16: value * 2^(d - 14). Rotations bring two codes to the top of the mantissa and the lowest
// bits of the exponent, where they are subnormals and small numbers; the multiplication by 2^(112 + d), `factor` twice, is exact. The
// last two codes fill what rotations leave. A product with 2^3 + 2^8 + 2^14 has each of their bits where it belongs, without carries.
DG_DEVICE void decode_bf16(u32 w, u32 factor, u32& p0, u32& p1, u32& p2, u32& p3) {
  const u32 mask = 0x81C081C0u;
  p0 = multiply_bf16(w & mask, factor);
  p1 = multiply_bf16(__funnelshift_r(w, w, 3) & mask, factor);
  p2 = multiply_bf16(__funnelshift_r(w, w, 6) & mask, factor);
  p3 = multiply_bf16((w & 0x001B001Bu) * 0x4108u & mask, factor);
}

// 2^(e - 127), or NaN.
DG_DEVICE float power_of(u32 e) { return __uint_as_float(e == 0 ? 0x00400000u : e == 255 ? 0x7FC00000u : e << 23); }

// What a thread has of a piece: rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <bool kFp8, bool kAbsolute>
struct Fragment {
  // Registers of A for one instruction, and instructions for 32 of K.
  enum : u32 { kSteps = kFp8 ? 1 : 2, kRegisters = 4 * kSteps };
  // Decoding adds this to a weight's exponent; see above.
  enum : u32 { kPlain = kFp8 ? 13 : 14 };

  u32 codes[2][4], exponents[kAbsolute ? 2 : 1];

  DG_DEVICE void load(u32 mine, u32 exponents_at) {
    exponents[0] = load_shared_word(exponents_at);
    if constexpr (kAbsolute) exponents[1] = load_shared_word(exponents_at + 32);
    const Bytes16 top = load_shared_16(mine), bottom = load_shared_16(mine + 512);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) codes[0][i] = top.words[i], codes[1][i] = bottom.words[i];
  }

  // The first 32 of K of a piece in kCount of them, from kFirst on.
  template <u32 kFirst, u32 kCount>
  DG_DEVICE void decode(u32 (&a)[kCount * kRegisters]) const {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const u32 s = kFirst + i, at = i * kRegisters + h;
        if constexpr (kFp8) {
          decode_fp8(codes[h][s], kAbsolute ? +kPlain : exponent(h, s), a[at], a[at + 2]);
        } else {
          decode_bf16(codes[h][s], factor(h, s), a[at], a[at + 2], a[at + 4], a[at + 6]);
        }
      }
    }
  }

  // The factor of row h's sums of the s-th 32 of K.
  DG_DEVICE float power(u32 h, u32 s) const {
    static_assert(kAbsolute);
    return power_of(exponents[h] >> (8 * s) & 255);
  }

  // Where this thread's exponents lie in a piece.
  static DG_DEVICE u32 exponents_offset(u32 warp, u32 lane) {
    return kCodeBytes + (kAbsolute ? warp * 64 : warp * 32) + lane / 4 * 4;
  }

 private:
  // d of row h and the s-th 32 of K, by a byte of the even or of the odd ones.
  DG_DEVICE u32 exponent(u32 h, u32 s) const {
    return permute_bytes((s % 2 ? exponents[0] >> 4 : exponents[0]) & 0x0F0F0F0Fu, 0, 0x4440u + 2 * h + s / 2);
  }

  // 2^(112 + d) twice. The four bits of d need not be the lowest ones.
  DG_DEVICE u32 factor(u32 h, u32 s) const {
    if constexpr (kAbsolute) return kPlain * 0x00800080u + 0x77807780u;
    const u32 two = exponents[0] >> (16 * h + 8 * (s / 2));
    return (s % 2 ? (two & 0xF0u) * 0x00080008u : (two & 0x0Fu) * 0x00800080u) + 0x77807780u;
  }

  static DG_DEVICE u32 load_shared_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
  }
};
