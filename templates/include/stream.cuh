// Stream K: where whole tiles do not fill the last wave, the blocks of K of the tiles that are left are dealt out evenly,
// so that a CTA's part begins and ends inside a tile. Who has a tile's last block owns the tile; the others give it
// their sums through global memory, and it adds them in a fixed order.
#pragma once
#include "barrier.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "raster.cuh"
#include "tma.cuh"

// CTAs work in groups of `members` that do the same blocks of K of tiles below each other, so that one of them brings
// B's rows into L2 for all. First whole tiles, one wave after the other; then the part of the last ones, from its end
// back to its begin: what is given to others is done first, and what needs the others' sums last. It is always a group
// of a lower number that is waited for, so that nobody waits for a CTA that has no SM yet.
//
// A group's part of the streamed tiles is `share` blocks of K, and one more for the first `longer` groups. What all CTAs
// have in common is worked out by the host (see kernels/stream_k.py): producers have few registers.
struct StreamArguments {
  u32 members, groups;
  u32 whole;  // tiles that are not dealt out, a multiple of groups
  u32 share, longer;
  u32* flags;  // see StreamWorkspace
  u8* slots;
};

template <u32 kBlockM, u32 kGatherSteps>
struct StreamScheduler {
  enum : bool { kStreams = true };

  const StreamArguments& arg;
  const Raster* raster;
  const u32 blocks;
  u32 index;           // the next whole tile
  u32 to;              // where what is left of this group's part ends, in blocks of K of streamed tiles
  u32 row, column;     // this CTA's current tile: its first row, and its place in a row of tiles
  u32 begin, end;      // blocks of K of the piece at hand
  u32 donors;          // groups whose sums it needs

  DG_DEVICE StreamScheduler(const StreamArguments& arg, u32 blocks, const Raster* raster)
      : arg(arg), raster(raster), blocks(blocks), index(group()), to(cut(group() + 1)) {
    advance();
  }

  DG_DEVICE bool valid() const { return end > 0; }
  DG_DEVICE bool owned() const { return end == blocks; }
  DG_DEVICE u32 gathered() const { return donors * kGatherSteps; }
  DG_DEVICE u32 columns() const { return raster->columns; }  // tiles in a row of them
  DG_DEVICE BlockOrder<1, 1, 1> order() const { return BlockOrder<1, 1, 1>::piece(begin, end, blocks); }
  // The CTA that does what this one does in the group `before` groups lower.
  DG_DEVICE u32 donor(u32 before) const { return blockIdx.x - before * arg.members; }

  DG_DEVICE void advance() {
    donors = 0;
    if (index < arg.whole) {
      begin = 0;
      end = blocks;
      locate(index);
      index += arg.groups;
    } else if (const u32 from = cut(group()); from < to) {
      const u32 tile = (to - 1) / blocks, first = tile * blocks;
      begin = from > first ? from - first : 0;
      end = to - first;
      to = first + begin;
      if (owned() && begin > 0)
        while (cut(group() - donors) > first) ++donors;
      locate(arg.whole + tile);
    } else {
      end = 0;
    }
  }

 private:
  DG_DEVICE u32 group() const { return blockIdx.x / arg.members; }
  DG_DEVICE u32 cut(u32 at) const { return at * arg.share + min_of(at, arg.longer); }

  DG_DEVICE void locate(u32 tile) {
    raster->locate(tile, row, column);
    row = (row * arg.members + blockIdx.x - group() * arg.members) * kBlockM;
  }
};

// Sums on their way from one CTA to another: for each CTA a slot, and a flag, which is zero between launches. A slot is
// read in steps of 32 columns of the tile, through the place of A in the ring's stages.
template <u32 kBlockM, u32 kBlockN, u32 kSlices>
struct StreamWorkspace {
  enum : u32 { kSteps = kBlockN / 32, kStepBytes = kBlockM * 128 };
  static_assert(kBlockN % 32 == 0);

  u32* flags;
  u8* slots;

  DG_DEVICE u8* slot(u32 cta) const { return slots + static_cast<u64>(cta) * (kSteps * kStepBytes); }

  // Where a thread's q-th four of 32 columns of a slice lie in a step.
  static DG_DEVICE u32 place(u32 consumer, u32 slice, u32 q, u32 thread) {
    return ((consumer * kSlices + slice) * 4 + q) * 2048 + thread * 16;
  }

  // One consumer's sums, for whoever owns the tile.
  DG_DEVICE void give(const float (&sum)[kSlices][kBlockN / 2], u32 consumer, u32 thread) const {
    u8* out = slot(blockIdx.x) + place(consumer, 0, 0, thread);
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step)
#pragma unroll
      for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (u32 q = 0; q < 4; ++q)
          {
          const float* v = &sum[slice][step * 16 + q * 4];
          // Plain C++, so that addresses are one and constants.
          *reinterpret_cast<float4*>(out + step * kStepBytes + (slice * 4 + q) * 2048) = {v[0], v[1], v[2], v[3]};
        }
  }

  // Says so, once all consumers have: to be called by one thread that has met them since.
  DG_DEVICE void announce() const {
    fence_global_to_tma();
    count_release(flags + blockIdx.x);
  }

  // Starts loading a step of another CTA's sums, once they are all there; its flag is zero again then.
  DG_DEVICE void load(u32 stage_address, u32 full, u32 cta, u32 step) const {
    if (step == 0) {
      wait_for_previous_kernel();  // it may use the same workspace, and constant weights did not wait for it
      wait_for_count(flags + cta, 1);
      fence_global_to_tma();
    }
    barrier_arrive_expect(full, kStepBytes);
    bulk_load(stage_address, slot(cta) + step * kStepBytes, kStepBytes, full);
  }

  // Adds what `load` brought, one CTA's sums after the other, nearest first.
  template <class Barriers, class Cursor>
  DG_DEVICE void add(float (&sum)[kSlices][kBlockN / 2], u32 donors, u32 stages, u32 consumer, u32 thread,
                     const Barriers& barriers, Cursor& at) const {
    for (; donors > 0; --donors) {
#pragma unroll
      for (u32 step = 0; step < kSteps; ++step) {
        barrier_wait(barriers.full(at.stage), at.parity);
#pragma unroll
        for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
          for (u32 q = 0; q < 4; ++q)
            add_shared(stages + at.stage * kStepBytes + place(consumer, slice, q, thread),
                       &sum[slice][step * 16 + q * 4]);
        fence_shared_to_tma();  // an arrival alone does not keep reads that TMA overwrites behind it
        named_barrier_sync(1 + consumer, 128);
        barriers.release(at.stage, thread % 32);
        at.advance();
      }
    }
  }
};
