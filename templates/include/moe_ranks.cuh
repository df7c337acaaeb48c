// What ranks of a mixture of experts exchange, through addresses of each other's memory. Each rank has experts of its own, and pulls the
// tokens that chose them; rows go back to slots of the token's owner. All ranks call in the same order, with as many tokens.
#pragma once
#include "barrier.cuh"

// What `peers` has the addresses of, for each rank.
enum RankField : u32 { kTokens, kTokenScales, kChoices, kWeights, kSlots, kFlags, kFields };

DG_DEVICE u8* address_of(const i64* peers, u32 rank, RankField field) { return reinterpret_cast<u8*>(peers[rank * kFields + field]); }

DG_DEVICE void store_release_system(u32* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DG_DEVICE u32 load_acquire_system(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Ranks wait for each other at meeting `which` of a call: 0, before tokens are pulled, and 1, before rows are added. Between two meetings of
// one kind each rank passes one of the other kind, so that none can be two calls ahead, and flags need not be reset. What a rank's
// earlier kernels wrote is visible to the later kernels of all. One warp: lane r tells rank r, and waits for it, up to kPatience polls.
//
// It is a kernel of its own, of one CTA, so that ranks that share a GPU do not wait on SMs that another one needs.
struct MoeMeet {
  enum : u32 { kPatience = 1 << 26 };  // about a minute: others may have to compile kernels

  static DG_DEVICE void run(const i64* peers, u32* epochs, u32 rank, u32 ranks, u32 which) {
    const u32 lane = threadIdx.x;
    wait_for_previous_kernel();
    const u32 epoch = epochs[which] + 1;
    if (lane < ranks) store_release_system(reinterpret_cast<u32*>(address_of(peers, lane, kFlags)) + which * ranks + rank, epoch);
    __syncwarp();
    if (lane < ranks) {
      const u32* const flag = reinterpret_cast<const u32*>(address_of(peers, rank, kFlags)) + which * ranks + lane;
      for (u32 polls = 0; static_cast<int>(load_acquire_system(flag) - epoch) < 0; ++polls) {
        if (polls == kPatience) __trap();
        asm volatile("nanosleep.u32 %0;" ::"r"(100u) : "memory");
      }
    }
    __syncwarp();
    if (lane == 0) epochs[which] = epoch;
    allow_next_kernel();
  }
};

// A warp copies `count` times 16 bytes.
DG_DEVICE void copy_by_warp(u8* to, const u8* from, u32 count) {
  for (u32 i = threadIdx.x % 32; i < count; i += 32) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

// Copies the tokens of all ranks that chose an expert of this one, in FP8 with their scales, and what they chose: numbers of this rank's
// experts, or -1. A warp has a token. `slots_of` gets the slot of each choice of this rank's own tokens, or -1 if it is no expert.
struct MoePull {
  const i64* peers;
  u32 rank, ranks, tokens, width, experts, all_experts, top_k;
  u8* values;
  float* scales;
  i64* chosen;
  float* weights;
  int* slots_of;

  DG_DEVICE void run() const {
    const u32 lane = threadIdx.x % 32, blocks = (width + 127) / 128, warps = gridDim.x * blockDim.x / 32;
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (u32 index = (blockIdx.x * blockDim.x + threadIdx.x) / 32; index < ranks * tokens; index += warps) {
      const u32 owner = index / tokens;
      const u64 token = index - owner * tokens, place = index;
      const i64* const all = reinterpret_cast<const i64*>(address_of(peers, owner, kChoices)) + token * top_k;
      const float* const their = reinterpret_cast<const float*>(address_of(peers, owner, kWeights)) + token * top_k;
      bool any = false;
      for (u32 k = lane; k < top_k; k += 32) {
        const i64 expert = all[k], own = expert - static_cast<i64>(rank * experts);
        const bool here = own >= 0 && own < static_cast<i64>(experts);
        any |= here;
        chosen[place * top_k + k] = here ? own : -1;
        weights[place * top_k + k] = their[k];
        if (owner == rank)
          slots_of[token * top_k + k] = expert >= 0 && expert < static_cast<i64>(all_experts) ? static_cast<int>(token * top_k + k) : -1;
      }
      if (__ballot_sync(0xffffffffu, any) == 0) continue;
      copy_by_warp(values + place * width, address_of(peers, owner, kTokens) + token * width, width / 16);
      const float* const from = reinterpret_cast<const float*>(address_of(peers, owner, kTokenScales)) + token * blocks;
      for (u32 i = lane; i < blocks; i += 32) scales[place * blocks + i] = from[i];
    }
  }
};

// Copies the rows of choices, bfloat16, to the slots of their tokens' owners. A warp has a choice.
struct MoeReturn {
  const i64* peers;
  const u8* rows;
  i64 stride;  // in elements
  const int* places;  // the row of each choice of each pulled token, or -1
  u32 ranks, tokens, width, top_k;

  DG_DEVICE void run() const {
    const u32 warps = gridDim.x * blockDim.x / 32;
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (u32 index = (blockIdx.x * blockDim.x + threadIdx.x) / 32; index < ranks * tokens * top_k; index += warps) {
      const int row = places[index];
      if (row < 0) continue;
      const u32 owner = index / (tokens * top_k);
      const u64 slot = index - owner * (tokens * top_k);
      copy_by_warp(address_of(peers, owner, kSlots) + slot * width * 2, rows + row * stride * 2, width / 8);
    }
  }
};
