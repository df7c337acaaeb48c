// Gives each choice of a token a row of its expert, and says of each row whose it is.
#pragma once
#include "moe_dispatch.cuh"

// Experts' rows begin at multiples of `room`; rows of no choice, such as those from the last expert's end to `capacity`, are padding.
template <u32 kThreads>
struct MoeRoute : MoeDispatch<kSourceBf16, false, false, false, kThreads> {
  using Base = MoeDispatch<kSourceBf16, false, false, false, kThreads>;
  i64* rows;  // of each choice, which is the last one, of padding, if it has none
  i64* tokens;
  int* index;  // the same as `tokens`
  int* labels;
  u32 capacity;

  DG_DEVICE void run(typename Base::Shared& shared) const {
    const u32 thread = threadIdx.x, first = this->split(blockIdx.x), last = this->split(blockIdx.x + 1);
    this->count(shared, first);
    this->find_first_rows(shared);
    __syncthreads();
    for (u32 e = thread; e < this->experts; e += kThreads) {
      const u32 end = shared.before[e] + shared.rest[e];
      if (blockIdx.x == 0) this->layout[e] = static_cast<int>(padded(end - shared.before[e]));
      shared.rest[e] = end;
    }
    __syncthreads();
    if (thread < 32) this->place(shared, first * this->top_k, last * this->top_k);
    __syncthreads();
    for (u32 choice = first * this->top_k + thread; choice < last * this->top_k; choice += kThreads) {
      const int row = this->places[choice];
      rows[choice] = row < 0 ? static_cast<i64>(capacity) - 1 : row;
      if (row >= 0) describe(static_cast<u32>(row), choice / this->top_k, static_cast<int>(this->expert_of(choice)));
    }
    for (u32 e = blockIdx.x; e < this->experts; e += gridDim.x)
      for (u32 row = shared.rest[e] + thread; row < padded(shared.rest[e]); row += kThreads) describe(row, this->from.rows, -1);
    const u32 end = padded(shared.rest[this->experts - 1]);
    for (u32 row = end + blockIdx.x * kThreads + thread; row < capacity; row += gridDim.x * kThreads) describe(row, this->from.rows, -1);
  }

 private:
  DG_DEVICE u32 padded(u32 row) const { return ceil_div(row, this->room) * this->room; }

  DG_DEVICE void describe(u32 row, u32 token, int label) const {
    tokens[row] = token, index[row] = static_cast<int>(token), labels[row] = label;
  }
};
