// Sums over parts of K, one of each CTA that has a tile, added in the order of the parts by all these CTAs, each for some of the tile's
// elements. So results repeat bitwise.
#pragma once
#include "groups.cuh"

// kWarps warps of a CTA have the sums of its part, kCount in each lane. The numbers of parts and of tiles are those of the grid: blockIdx.y
// is the part. A CTA writes its sums to memory, counts itself, and waits for the other parts. If one of them takes too long, for instance
// because other kernels have its SM, those that wait leave, and the last one adds for all. So no kernel needs all its CTAs at once.
//
// Nothing clears the memory of a call. So a CTA begins by setting its tile's word to zero, if the word there does not have the mark:
// only CTAs of the same launch know that the mark has counts that matter. The last one that leaves sets it to zero again.
template <u32 kCount, u32 kWarps>
struct PartsTogether {
  // Each lane of a warp adds pairs of sums. Those of all lanes lie together.
  enum : u32 { kPairBytes = 32 * 8, kPairs = kWarps * kCount / 2, kTileBytes = kPairs * kPairBytes, kWordBytes = 128 };
  enum : u32 { kAtOnce = kWarps > 4 ? 48 : 36 };  // pairs that a lane reads together: as many as registers allow
  // A word has the mark; how many CTAs have left; whether one has left early; and how many have written their sums.
  enum : u64 { kMark = 0x93d1a86c4f000000, kLeft = 1 << 16, kEarly = 1 << 8, kOnes = 0xff, kCounts = 0xffffff };
  enum : u32 { kPatience = 1 << 19 };  // cycles that a CTA waits: about 0.3 ms
  static_assert(kCount % 8 == 0);

  u8 *word, *sums;
  i64 part_bytes;

  // `memory` begins with the words of all tiles.
  DG_DEVICE explicit PartsTogether(u8* memory)
      : word(memory + blockIdx.x * kWordBytes), sums(memory + gridDim.x * kWordBytes + blockIdx.x * static_cast<i64>(kTileBytes)),
        part_bytes(static_cast<i64>(gridDim.x) * kTileBytes) {}

  // Before a CTA's first products, by one thread. The previous kernel must have ended.
  DG_DEVICE void open() const {
    u64 found;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
    if ((found & ~static_cast<u64>(kCounts)) != kMark) exchange(found, kMark);  // if it fails, another part's CTA has set it
  }

  // Adds the sums of all parts. `sum(i)` is the i-th sum of this lane. `load(warp, i, pair)` sets what is added last to the sums i and
  // i + 1 of this lane in a warp, and `store(warp, i, pair)` takes what they add up to. `shared` is a word for the CTA.
  template <class Sum, class Load, class Store>
  DG_DEVICE void add(u32 shared, const Sum& sum, const Load& load, const Store& store) const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* to = sums + blockIdx.y * part_bytes + warp * (kCount / 2 * kPairBytes) + lane * 8;
#pragma unroll
    for (u32 i = 0; i < kCount; i += 2)
      asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to + i / 2 * kPairBytes), "f"(sum(i)), "f"(sum(i + 1)) : "memory");
    named_barrier_sync(kConsumerBarrier, kWarps * 32);
    if (threadIdx.x == 0) store_word(shared, meet());
    named_barrier_sync(kConsumerBarrier, kWarps * 32);
    u64 before = 0;
    if (threadIdx.x == 0) before = leave();
    const u32 adders = load_word(shared), first = (adders > 1 ? blockIdx.y : 0) * kWarps + warp;
    // As many pairs of a lane as let it read those of all parts together.
    if (gridDim.y <= kAtOnce / 4) {
      add_pairs<4>(first, adders, lane, load, store);
    } else if (gridDim.y <= kAtOnce / 2) {
      add_pairs<2>(first, adders, lane, load, store);
    } else {
      add_pairs<1>(first, adders, lane, load, store);
    }
    if (threadIdx.x == 0 && (before / kLeft & kOnes) + 1 == gridDim.y)
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(static_cast<u64>(kMark)) : "memory");
  }

 private:
  // One thread, after the CTA has written its sums: waits for the other parts. Returns how many CTAs add them: all; one, which is this one;
  // or 0, if this one does not. All see the same, since nobody leaves early once all have written.
  DG_DEVICE u32 meet() const {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    u64 seen = arrive() + 1;
    const bool last = (seen & kOnes) == gridDim.y;
    const u32 begin = clock();
    while ((seen & kOnes) != gridDim.y) {
      if (clock() - begin > kPatience && exchange(seen, seen | kEarly) == seen) return 0;
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
    }
    return (seen & kEarly) == 0 ? gridDim.y : last ? 1 : 0;
  }

  // Pairs of the warp `first` of all warps of `adders` CTAs, and of those that follow after all these warps.
  template <u32 kSome, class Load, class Store>
  DG_DEVICE void add_pairs(u32 first, u32 adders, u32 lane, const Load& load, const Store& store) const {
    constexpr u32 kParts = kAtOnce / kSome;
    static_assert(kCount / 2 % kSome == 0);
    const u32 end = adders > 0 ? +kPairs : 0;
#pragma unroll 1
    for (u32 pair = first * kSome; pair < end; pair += adders * kWarps * kSome) {
      const u32 warp = pair / (kCount / 2), from = pair % (kCount / 2);
      float last[kSome][2], total[kSome][2];
#pragma unroll
      for (u32 j = 0; j < kSome; ++j) {
        load(warp, (from + j) * 2, last[j]);
        total[j][0] = total[j][1] = 0.0f;
      }
#pragma unroll 1
      for (u32 part = 0; part < gridDim.y; part += kParts) {
        const u8* at = sums + part * part_bytes + pair * kPairBytes + lane * 8;
        float read[kParts][kSome][2];
#pragma unroll
        for (u32 i = 0; i < kParts; ++i) {
          if (part + i < gridDim.y) {
#pragma unroll
            for (u32 j = 0; j < kSome; ++j)
              asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                           : "=f"(read[i][j][0]), "=f"(read[i][j][1]) : "l"(at + i * part_bytes + j * kPairBytes) : "memory");
          }
        }
#pragma unroll
        for (u32 i = 0; i < kParts; ++i) {
          if (part + i < gridDim.y) {
#pragma unroll
            for (u32 j = 0; j < kSome; ++j)
              for (u32 k = 0; k < 2; ++k) total[j][k] = __fadd_rn(total[j][k], read[i][j][k]);
          }
        }
      }
#pragma unroll
      for (u32 j = 0; j < kSome; ++j) {
        for (u32 k = 0; k < 2; ++k) total[j][k] = __fadd_rn(total[j][k], last[j][k]);
        store(warp, (from + j) * 2, total[j]);
      }
    }
  }

  // Both return what the word was.
  DG_DEVICE u64 arrive() const {
    u64 before;
    asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
    return before;
  }
  DG_DEVICE u64 leave() const {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(static_cast<u64>(kLeft)) : "memory");
    return before;
  }

  // Sets the word if it is `from`, and returns what it was.
  DG_DEVICE u64 exchange(u64 from, u64 to) const {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(before) : "l"(word), "l"(from), "l"(to) : "memory");
    return before;
  }

  static DG_DEVICE u32 clock() {
    u32 cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
  }
};
