// The schedule of paged logits: how the requests' keys are shared out among CTAs. See PagedLogits.
#pragma once
#include "barrier.cuh"

// Keys are cut into splits of 256, in order. Each slot has as many of them, and the last ones one more. Row s of the schedule is the
// request and the split in it that slot s begins with; the last row is (batch, 0). By one CTA.
template <u32 kThreads>
struct LogitSchedule {
  enum : u32 { kSplitKeys = 256, kWarps = kThreads / 32 };

  const int* lengths;  // of the last token of each request
  i64 stride;
  u32 batch, slots;
  u32* schedule;

  DG_DEVICE u32 splits(u32 request) const {
    const int keys = lengths[request * stride];
    return keys > 0 ? ceil_div(keys, kSplitKeys) : 0;
  }

  DG_DEVICE void run(u32* sums) const {
    const u32 thread = threadIdx.x, lane = thread % 32, each = ceil_div(batch, kThreads);
    const u32 from = min_of(batch, thread * each), to = min_of(batch, from + each);
    wait_for_previous_kernel();
    allow_next_kernel();
    u32 own = 0;
    for (u32 request = from; request < to; ++request) own += splits(request);
    u32 end = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFF, end, step);
      if (lane >= step) end += other;
    }
    if (lane == 31) sums[thread / 32] = end;
    __syncthreads();
    u32 total = 0;
#pragma unroll
    for (u32 warp = 0; warp < kWarps; ++warp) {
      if (warp == thread / 32) end += total;
      total += sums[warp];
    }
    const u32 fair = total / slots, plain = slots - total % slots;  // slots that have no more than that
    const auto begin = [&](u32 slot) { return slot * fair + (slot > plain ? slot - plain : 0); };
    const auto write = [&](u32 slot, u32 request, u32 split) {
      schedule[2 * slot] = request;
      schedule[2 * slot + 1] = split;
    };
    // The first slot that begins at this thread's splits or later.
    u32 before = end - own, low = 0, high = slots;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (begin(middle) < before) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    u32 slot = low;
    for (u32 request = from; request < to; ++request) {
      const u32 after = before + splits(request);
      for (; slot < slots && begin(slot) < after; ++slot) write(slot, request, begin(slot) - before);
      before = after;
    }
    // Slots without work, and the end.
    for (u32 idle = thread; idle <= slots; idle += kThreads) {
      if (idle == slots || begin(idle) >= total) write(idle, batch, 0);
    }
  }
};
