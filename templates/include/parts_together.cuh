// Sums over parts of K, one of each CTA that has a tile, added in the order of the parts by all these CTAs, each for some of the tile's
// elements. So results repeat bitwise.
#pragma once
#include "bulk.cuh"
#include "groups.cuh"

// kWarps warps of a CTA have the sums of its part, kCount in each lane. The numbers of parts and of tiles are those of the grid: blockIdx.y
// is the part. A CTA writes its sums to memory, counts itself, and waits for the other parts. If one of them takes too long, for instance
// because other kernels have its SM, those that wait leave, and the last one adds for all. So no kernel needs all its CTAs at once.
//
// Each CTA adds a slice of the tile, of which all parts lie together, so that one copy brings them to shared memory. Many loads that wait
// for one another take longer, and so does code that has them all in registers: in a first call its instructions come from HBM.
//
// Nothing clears the memory of a call. So a CTA begins by setting its tile's word to zero, if the word there does not have the mark:
// only CTAs of the same launch know that the mark has counts that matter. The last one that leaves sets it to zero again.
template <u32 kCount, u32 kWarps>
struct PartsTogether {
  // Each lane of a warp adds pairs of sums. Those of all lanes lie together.
  enum : u32 { kPairBytes = 32 * 8, kPairs = kWarps * kCount / 2, kWordBytes = 128 };
  // Slices are of equal size, so that all of them have up to 14 pairs more than the tile.
  enum : u32 { kMostPairs = kPairs + 16 };
  // Shared memory: a word, a barrier, and a slice of all parts.
  enum : u32 { kBarrier = 8, kSlice = 128, kSharedBytes = kSlice + (kPairs + 255) * kPairBytes };
  // A word has the mark; how many CTAs have left; whether one has left early; and how many have written their sums.
  enum : u64 { kMark = 0x93d1a86c4f000000, kLeft = 1 << 16, kEarly = 1 << 8, kOnes = 0xff, kCounts = 0xffffff };
  enum : u32 { kPatience = 1 << 19 };  // cycles that a CTA waits: about 0.3 ms
  static_assert(kPairs <= 256);

  u8 *word, *sums;
  u32 each, slice_bytes;  // pairs of a slice, and the bytes of all its parts

  // `memory` begins with the words of all tiles.
  DG_DEVICE explicit PartsTogether(u8* memory)
      : word(memory + blockIdx.x * kWordBytes),
        sums(memory + gridDim.x * kWordBytes + static_cast<i64>(blockIdx.x * gridDim.y) * (kMostPairs * kPairBytes)),
        each(ceil_div(+kPairs, gridDim.y)), slice_bytes(gridDim.y * each * kPairBytes) {}

  // Before a CTA's first products, by one thread. The previous kernel must have ended.
  DG_DEVICE void open() const {
    u64 found;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
    if ((found & ~static_cast<u64>(kCounts)) != kMark) exchange(found, kMark);  // if it fails, another part's CTA has set it
  }

  // By a warp that has no sums: calls `touch(warp, i)` for what `add` will load, unless a CTA leaves early.
  template <class Touch>
  DG_DEVICE void each_pair(const Touch& touch) const {
    const u32 from = blockIdx.y * each;
#pragma unroll 1
    for (u32 pair = from; pair < min_of(from + each, +kPairs); ++pair) touch(pair / (kCount / 2), pair % (kCount / 2) * 2);
  }

  // Adds the sums of all parts. `sum(i)` is the i-th sum of this lane. `load(warp, i, pair)` sets what is added last to the sums i and
  // i + 1 of this lane in a warp, and `store(warp, i, pair)` takes what they add up to. `shared` is kSharedBytes that nobody needs any
  // more.
  template <class Sum, class Load, class Store>
  DG_DEVICE void add(u32 shared, const Sum& sum, const Load& load, const Store& store) const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 slice = warp * (kCount / 2) / each, place = warp * (kCount / 2) - slice * each;
    u8* to = sums + static_cast<i64>(slice) * slice_bytes + (blockIdx.y * each + place) * kPairBytes + lane * 8;
#pragma unroll
    for (u32 i = 0; i < kCount; i += 2) {
      asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(sum(i)), "f"(sum(i + 1)) : "memory");
      const bool ends = ++place == each;
      to += kPairBytes + (ends ? slice_bytes - each * kPairBytes : 0);
      place = ends ? 0 : place;
    }
    named_barrier_sync(kConsumerBarrier, kWarps * 32);
    if (threadIdx.x == 0) {
      barrier_init(shared + kBarrier, 1);
      barrier_init_fence();
      const u32 adders = meet();
      store_word(shared, adders);
      const auto [first, end] = slices(adders);
      if (first < end) fetch(shared, first);
    }
    named_barrier_sync(kConsumerBarrier, kWarps * 32);
    u64 before = 0;
    if (threadIdx.x == 0) before = leave();
    const auto [first, end] = slices(load_word(shared));
#pragma unroll 1
    for (slice = first; slice < end; ++slice) {
      if (slice > first) {
        named_barrier_sync(kConsumerBarrier, kWarps * 32);  // the slice before has been read
        if (threadIdx.x == 0) fetch(shared, slice);
      }
      const auto all_here = [&, turn = slice - first] { barrier_wait(shared + kBarrier, turn & 1); };
      const u32 from = slice * each, count = min_of(each, kPairs - from);
      if (count <= kWarps) {
        add_pairs<1>(shared + kSlice, from, count, all_here, load, store);
      } else {
        add_pairs<4>(shared + kSlice, from, count, all_here, load, store);
      }
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

  // The slices that this CTA adds, if `adders` CTAs do.
  struct Slices {
    u32 first, end;
  };
  DG_DEVICE Slices slices(u32 adders) const {
    const u32 all = ceil_div(+kPairs, each);
    return adders > 1 ? Slices{blockIdx.y, min_of(blockIdx.y + 1, all)} : Slices{0, adders > 0 ? all : 0};
  }

  // One thread: copies a slice of all parts to shared memory.
  DG_DEVICE void fetch(u32 shared, u32 slice) const {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // other CTAs wrote the sums by ordinary stores
    barrier_arrive_expect(shared + kBarrier, slice_bytes);
    bulk_load(shared + kSlice, sums + static_cast<i64>(slice) * slice_bytes, slice_bytes, shared + kBarrier);
  }

  // `count` pairs of lanes from the pair `from` on, kSome of them together.
  template <u32 kSome, class AllHere, class Load, class Store>
  DG_DEVICE void add_pairs(u32 slice, u32 from, u32 count, const AllHere& all_here, const Load& load, const Store& store) const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 pair = warp; pair < count; pair += kSome * kWarps) {
      float last[kSome][2], total[kSome][2];
      u32 at[kSome];
#pragma unroll
      for (u32 j = 0; j < kSome; ++j) {
        const u32 own = min_of(pair + j * kWarps, count - 1), place = from + own;
        load(place / (kCount / 2), place % (kCount / 2) * 2, last[j]);
        at[j] = slice + own * kPairBytes + lane * 8;
        total[j][0] = total[j][1] = 0.0f;
      }
      all_here();
#pragma unroll(8 / kSome)
      for (u32 part = 0; part < gridDim.y; ++part) {
#pragma unroll
        for (u32 j = 0; j < kSome; ++j) {
          float read[2];
          load_shared_pair(at[j] + part * each * kPairBytes, read[0], read[1]);
          for (u32 k = 0; k < 2; ++k) total[j][k] = __fadd_rn(total[j][k], read[k]);
        }
      }
#pragma unroll
      for (u32 j = 0; j < kSome; ++j) {
        const u32 own = pair + j * kWarps, place = from + own;
        for (u32 k = 0; k < 2; ++k) total[j][k] = __fadd_rn(total[j][k], last[j][k]);
        if (own < count) store(place / (kCount / 2), place % (kCount / 2) * 2, total[j]);
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
