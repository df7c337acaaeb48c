// Sends tokens to their experts: gives each choice of a token a row of its expert, and writes the token there as FP8 or BF16.
#pragma once
#include "quantize.cuh"

enum : u32 { kSourceE4m3 = 3, kSourceCopied = 4 };  // what tokens are: FP8, BF16 that stays so, or one of `Source`, which are cast

// Choices are numbered token by token. An expert's rows are in the order of its choices. A choice that is no expert has no row, nor has
// one for which there is no room.
//
// Each CTA counts the choices of all tokens, so that none waits for another one. Then it writes the rows of its own tokens: a token is
// read and cast once. With kMasked an expert has `room` rows, otherwise its rows begin at the next multiple of `room`.
template <u32 kSource, bool kMasked, bool kWeighted, bool kCounted, u32 kThreads>
struct MoeDispatch {
  enum : u32 { kExperts = 2048, kWarps = kThreads / 32, kAll = 0xffffffff };  // kExperts: at most

  const i64* chosen;
  const float* weights;  // of each choice, which become `factors` of rows
  u32 experts, top_k, room;
  int* layout;  // kMasked: the number of rows of each expert, otherwise the row at which they end
  int* places;  // the row of each choice, or -1
  float* factors;
  int* stats;  // to which the number of rows of each expert is added
  QuantizedInput from;
  const float* source_scales;  // of tokens in FP8
  i64 source_scale_row, source_scale_column;
  ScaleRule rule;
  QuantizedOutput to;
  i64 scale_stride_group;  // kMasked: what is added to a scale's place for each expert before

  struct Shared {
    u32 before[kExperts], rest[kExperts];  // choices of earlier CTAs' tokens; others. Then `before` is the row of the next choice.
    u32 sums[kWarps];
  };

  DG_DEVICE void run(Shared& shared) const {
    const u32 thread = threadIdx.x, first = split(blockIdx.x), last = split(blockIdx.x + 1);
    count(shared, first);
    find_first_rows(shared);
    __syncthreads();
    if (thread < 32) place(shared, first * top_k, last * top_k);
    __syncthreads();
    write(first, last);
  }

 protected:
  DG_DEVICE void count(Shared& shared, u32 first) const {
    const u32 thread = threadIdx.x;
    for (u32 e = thread; e < experts; e += kThreads) shared.before[e] = shared.rest[e] = 0;
    wait_for_previous_kernel();
    allow_next_kernel();
    __syncthreads();
    // The order in which integers are added does not change their sum.
    for (u32 choice = thread; choice < from.rows * top_k; choice += kThreads) {
      const u32 e = expert_of(choice);
      if (e < experts) atomicAdd(choice < first * top_k ? &shared.before[e] : &shared.rest[e], 1u);
    }
    __syncthreads();
  }

  // The first token of a CTA.
  DG_DEVICE u32 split(u32 cta) const { return static_cast<u32>(static_cast<u64>(from.rows) * cta / gridDim.x); }

  DG_DEVICE u32 expert_of(u32 choice) const {
    const i64 e = chosen[choice];
    return e < 0 || e >= static_cast<i64>(experts) ? experts : static_cast<u32>(e);
  }

  // Turns counts into the row that each expert's next choice gets.
  DG_DEVICE void find_first_rows(Shared& shared) const {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 start = 0;  // the first row of the experts of this step
#pragma unroll 1
    for (u32 step = 0; step < experts; step += kThreads) {
      const u32 e = step + thread;
      u32 count = e < experts ? shared.before[e] + shared.rest[e] : 0;
      if constexpr (kMasked) count = min_of(count, room);
      u32 row = e * room;
      if constexpr (!kMasked) {
        const u32 own = ceil_div(count, room) * room;
        u32 end = own;  // becomes the sum of this thread's rows and of those before it
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
          const u32 other = __shfl_up_sync(kAll, end, distance);
          if (lane >= distance) end += other;
        }
        if (lane == 31) shared.sums[warp] = end;
        __syncthreads();
        row = start + end - own;
#pragma unroll
        for (u32 w = 0; w < kWarps; ++w) {
          if (w < warp) row += shared.sums[w];
          start += shared.sums[w];
        }
        __syncthreads();
      }
      if (e >= experts) continue;
      shared.before[e] += row;
      if (blockIdx.x > 0) continue;
      layout[e] = static_cast<int>(kMasked ? count : row + count);
      if constexpr (kCounted) stats[e] += static_cast<int>(count);
    }
  }

  // Gives rows to choices, 32 at a time. One warp.
  DG_DEVICE void place(Shared& shared, u32 first, u32 last) const {
    const u32 lane = threadIdx.x;
    u32 next = first + lane < last ? expert_of(first + lane) : experts;
#pragma unroll 1
    for (u32 step = first; step < last; step += 32) {
      const u32 choice = step + lane, e = next;
      next = choice + 32 < last ? expert_of(choice + 32) : experts;  // loaded while this step works
      const u32 same = __match_any_sync(kAll, e), lower = same & ((1u << lane) - 1);
      const u32 row = e < experts ? shared.before[e] + __popc(lower) : 0;
      __syncwarp();
      if (e < experts && same >> lane == 1) shared.before[e] = row + 1;  // the last one of them
      __syncwarp();
      if (choice >= last) continue;
      const bool has_row = e < experts && (!kMasked || row < (e + 1) * room);
      places[choice] = has_row ? static_cast<int>(row) : -1;
      if constexpr (kWeighted)
        if (has_row) factors[row] = weights[choice];
    }
  }

  // Writes tokens to their rows. 16 threads have the columns of a scale, and a thread has eight of them.
  DG_DEVICE void write(u32 first, u32 last) const {
    using Elements = EightElements<kSource == kSourceE4m3 || kSource == kSourceCopied ? +kSourceBf16 : kSource, false>;
    const u32 lane = threadIdx.x % 32, part = lane % 16, across = ceil_div(from.columns, 128) * 16;
#pragma unroll 1
    for (u32 i = threadIdx.x; i - lane < (last - first) * across; i += kThreads) {
      const bool exists = i < (last - first) * across;
      const u32 token = exists ? first + i / across : from.rows, column = i % across * 8;
      uint2 bytes{0, 0};
      float scale = 0.0f;
      Bytes16 copied{};
      if constexpr (kSource == kSourceE4m3) {
        if (exists && column < from.columns) {
          bytes = *reinterpret_cast<const uint2*>(from.elements + token * from.stride + column);
          scale = source_scales[token * source_scale_row + column / 128 * source_scale_column];
        }
      } else if constexpr (kSource == kSourceCopied) {
        Elements v[1];
        load_rows<kSourceBf16, false, false, 1>(from, token, column, v);
        copied = Bytes16{v[0].words[0], v[0].words[1], v[0].words[2], v[0].words[3]};
      } else {
        Elements v[1];
        load_rows<kSource, false, false, 1>(from, token, column, v);
        const RowScales<Elements, 1> scales(v, part, rule);
        const float inverse = scales.inverse;
        scale = scales.scale;
        bytes = uint2{to_e4m3(v[0].get(0) * inverse, v[0].get(1) * inverse, v[0].get(2) * inverse, v[0].get(3) * inverse),
                      to_e4m3(v[0].get(4) * inverse, v[0].get(5) * inverse, v[0].get(6) * inverse, v[0].get(7) * inverse)};
      }
      if (!exists || column >= from.columns) continue;
      for (u32 k = 0; k < top_k; ++k) {
        const int row = places[token * top_k + k];
        if (row < 0) continue;
        if constexpr (kSource == kSourceCopied) {
          store_16(to.values + (row * to.stride + column) * 2, copied);
          continue;
        }
        *reinterpret_cast<uint2*>(to.values + row * to.stride + column) = bytes;
        if (part == 0) {
          QuantizedOutput of_expert = to;
          if constexpr (kMasked) of_expert.scales += row / static_cast<int>(room) * scale_stride_group;
          of_expert.scale(static_cast<u32>(row), column / 128, scale);
        }
      }
    }
  }
};
