// Adds up partial sums of a matrix, and C, in a fixed order: D[m, n] = (C[m, n] +) parts[0][m, n] + parts[1][m, n] + ...
#pragma once
#include "barrier.cuh"
#include "output.cuh"

// Four float32 that lie together, which the previous kernel may have written.
DG_DEVICE void load_four(const float* from, float (&v)[4]) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(from) : "memory");
}

// A thread has four columns of a row. Rows of parts begin at multiples of 16 bytes. With `wide` D is float32, otherwise bf16; C is as
// D is.
template <u32 kThreads>
DG_DEVICE void sum_parts(const float* parts, const u8* c, u8* d, u32 rows, u32 columns, u32 count, i64 stride_part, i64 stride_row,
                         i64 c_stride, i64 d_stride, u32 adds, u32 wide) {
  constexpr u32 kAhead = 4;  // parts whose loads are on their way together
  const u32 across = ceil_div(columns, 4), index = blockIdx.x * kThreads + threadIdx.x;
  const u32 row = index / across, column = index % across * 4;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row >= rows) return;
  const float* from = parts + row * stride_row + column;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (u32 first = 0; first < count; first += kAhead) {
    float each[kAhead][4];
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i)
      if (first + i < count) load_four(from + (first + i) * stride_part, each[i]);
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i)
      if (first + i < count) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) sum[j] += each[i][j];
      }
  }
  const auto store = [&](auto out) {
    using Out = decltype(out);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      if (column + j >= columns) break;
      const float added = adds ? Out::load(c, row * c_stride + column + j) : 0.0f;
      Out::store(d, row * d_stride + column + j, sum[j] + added);
    }
  };
  if (wide) {
    store(Output<kF32>());
  } else {
    store(Output<kBf16>());
  }
}
