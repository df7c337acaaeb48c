// Sums over parts of K, one of each cluster that has a tile, added in the order of the parts. So results repeat bitwise.
#pragma once
#include "output.cuh"

// Each lane of a warp has kCount sums of a tile. Every part has such a warp, and the numbers of parts and of tiles are those of the grid:
// blockIdx.y is the part. A warp writes its sums to memory and counts itself. The warp that comes last reads those of all parts, its own
// too, kAtOnce together, and adds them from the first part on, whichever it is itself. No warp waits for another one.
//
// Nothing clears the memory of a call. So a warp begins by setting the count of its place to zero, if the word there does not have the
// mark: only warps of the same launch know that the mark has a count that matters. The last warp sets it to zero again.
template <u32 kCount, u32 kAtOnce>
struct PartsInOrder {
  enum : u32 { kBytes = 32 * kCount * 4 };
  enum : u64 { kMark = 0xb3f1a96c52de0700, kCounted = 0xff };
  static_assert(kCount % 8 == 0);

  u8 *count, *sums;  // of this warp's place among all that a part has
  i64 part_bytes;

  // `memory` begins with a word of 64 bits for each place.
  DG_DEVICE PartsInOrder(u8* memory, u32 warps, u32 warp, u32 lane) {
    const u32 places = gridDim.x * warps, place = blockIdx.x * warps + warp;
    count = memory + place * 8;
    sums = memory + ceil_div(places, 16) * 128 + place * kBytes + lane * 16;
    part_bytes = static_cast<i64>(places) * kBytes;
  }

  // Before a warp's first products. The previous kernel must have ended.
  DG_DEVICE void open(u32 lane) const {
    if (lane == 0) {
      u64 found;
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(count) : "memory");
      if ((found & ~static_cast<u64>(kCounted)) != kMark)  // if the exchange fails, another part's warp has set it
        asm volatile("{\n .reg .b64 t;\n atom.relaxed.gpu.global.cas.b64 t, [%0], %1, %2;\n}"
                     ::"l"(count), "l"(found), "l"(static_cast<u64>(kMark)) : "memory");
    }
    __syncwarp();
  }

  // Writes the sums. Returns whether this warp is the last one.
  DG_DEVICE bool close(const float (&sum)[kCount], u32 lane) const {
    u8* to = sums + blockIdx.y * part_bytes;
#pragma unroll
    for (u32 i = 0; i < kCount; i += 4)
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                   ::"l"(to + i * 128), "f"(sum[i]), "f"(sum[i + 1]), "f"(sum[i + 2]), "f"(sum[i + 3]) : "memory");
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    __syncwarp();
    u64 before = 0;
    if (lane == 0) asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(count) : "memory");
    __syncwarp();
    const bool last = __shfl_sync(0xffffffffu, static_cast<u32>(before & kCounted), 0) + 1 == gridDim.y;
    if (last && lane == 0)
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(count), "l"(static_cast<u64>(kMark)) : "memory");
    return last;
  }

  // The last warp: the sums of all parts, from the `from`-th of a lane on. Those of some parts are read together.
  template <u32 kSome>
  DG_DEVICE void add(float (&sum)[kSome], u32 from) const {
    constexpr u32 kTogether = kAtOnce / kSome;
#pragma unroll
    for (u32 i = 0; i < kSome; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (u32 first = 0; first < gridDim.y; first += kTogether) {
      float part[kTogether][kSome];
#pragma unroll
      for (u32 i = 0; i < kTogether; ++i)
        if (first + i < gridDim.y) read(part[i], sums + (first + i) * part_bytes + from * 128);
#pragma unroll
      for (u32 i = 0; i < kTogether; ++i) {
        if (first + i < gridDim.y) {
#pragma unroll
          for (u32 j = 0; j < kSome; ++j) sum[j] = __fadd_rn(sum[j], part[i][j]);
        }
      }
    }
  }

 private:
  template <u32 kSome>
  static DG_DEVICE void read(float (&sum)[kSome], const u8* from) {
#pragma unroll
    for (u32 i = 0; i < kSome; i += 4)
      asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(sum[i]), "=f"(sum[i + 1]), "=f"(sum[i + 2]), "=f"(sum[i + 3]) : "l"(from + i * 128));
  }
};
