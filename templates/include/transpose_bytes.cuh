// Transposes a matrix of bytes: element (row, column), at input[row + column * stride], goes to output[row * columns + column].
// `columns` is a multiple of 16.
#pragma once
#include "barrier.cuh"

// Byte i of the result is byte `from` of x (0 to 3) or of y (4 to 7), for the i-th digit of `selector`.
DG_DEVICE u32 pick_bytes(u32 x, u32 y, u32 selector) {
  u32 picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(x), "r"(y), "r"(selector));
  return picked;
}

// Four words of four bytes each, transposed in place.
DG_DEVICE void transpose_4x4(u32& a, u32& b, u32& c, u32& d) {
  const u32 ab_low = pick_bytes(a, b, 0x5140), ab_high = pick_bytes(a, b, 0x7362);
  const u32 cd_low = pick_bytes(c, d, 0x5140), cd_high = pick_bytes(c, d, 0x7362);
  a = pick_bytes(ab_low, cd_low, 0x5410);
  b = pick_bytes(ab_low, cd_low, 0x7632);
  c = pick_bytes(ab_high, cd_high, 0x5410);
  d = pick_bytes(ab_high, cd_high, 0x7632);
}

// A CTA transposes tiles of 128 x 128. A thread reads 16 rows of four columns and transposes them in registers, so that shared
// memory moves words. Then it writes 16 bytes of a row. The 16-byte units of row r are swizzled (unit XOR r / 16), so that the
// threads of a warp write to and read from all banks. A grid of any size does all tiles.
template <u32 kThreads>
DG_DEVICE void transpose_bytes(const u8* input, u8* output, u32 rows, u32 columns, i64 stride) {
  constexpr u32 kTile = 128;
  static_assert(kThreads == kTile * kTile / 64);
  __shared__ alignas(16) u32 tile[kTile * kTile / 4];
  const u32 across = ceil_div(columns, kTile);
  const i64 tiles = static_cast<i64>(ceil_div(rows, kTile)) * across;
  const bool wide = ((reinterpret_cast<u64>(input) | static_cast<u64>(stride)) & 15) == 0;
  const u32 part = threadIdx.x % 8, quad = threadIdx.x / 8;  // 16 rows of eight parts, four columns of 32
  wait_for_previous_kernel();
  allow_next_kernel();
  for (i64 index = blockIdx.x; index < tiles; index += gridDim.x) {
    const u32 first_row = static_cast<u32>(index / across) * kTile, first_column = static_cast<u32>(index % across) * kTile;
    const u32 row = first_row + part * 16, column = first_column + quad * 4;
    u32 words[4][4] = {};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u8* from = input + row + (column + i) * stride;
      if (column + i < columns) {
        if (wide && row + 16 <= rows) {
          const uint4 loaded = *reinterpret_cast<const uint4*>(from);
          words[i][0] = loaded.x, words[i][1] = loaded.y, words[i][2] = loaded.z, words[i][3] = loaded.w;
        } else {
#pragma unroll
          for (u32 j = 0; j < 16; ++j)
            if (row + j < rows) words[i][j / 4] |= static_cast<u32>(from[j]) << j % 4 * 8;
        }
      }
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      transpose_4x4(words[0][j], words[1][j], words[2][j], words[3][j]);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) tile[(part * 16 + j * 4 + i) * 32 + (quad ^ part * 4)] = words[i][j];
    }
    __syncthreads();
#pragma unroll
    for (u32 step = 0; step < kTile * kTile / 16 / kThreads; ++step) {
      const u32 i = step * kThreads + threadIdx.x, y = i / 8, unit = i % 8;
      if (first_row + y < rows && first_column + unit * 16 < columns)
        *reinterpret_cast<uint4*>(output + static_cast<i64>(first_row + y) * columns + first_column + unit * 16) =
            *reinterpret_cast<const uint4*>(&tile[y * 32 + (unit ^ y / 16) * 4]);
    }
    __syncthreads();
  }
}
