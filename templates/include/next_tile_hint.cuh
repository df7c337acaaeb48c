// Which tile is next, for consumers: finding its place in the order is some 380 cycles of arithmetic, for which there is no
// time between their products. The warp that puts tiles away has the time, and tells them.
#pragma once
#include "barrier.cuh"

// A tile's columns, in one of two places in turn, and told two tiles ahead: what is told of a tile can be taken once the area
// is free for the tile two before it, and is overwritten when the tile before it has been staged, by consumers who have taken
// it. Of a CTA's second tile they hear at a barrier of their own: at the area's, the warp that tells would arrive twice in a
// row.
struct NextTileHint {
  enum : u32 { kBytes = 16 };
  u32 place;  // of what is told next, in shared memory

  DG_DEVICE explicit NextTileHint(u32 address) : place(address) {}

  template <class Tile>
  DG_DEVICE void publish(const Tile& ahead, bool writes) {
    if (writes) asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(ahead.column) : "memory");
    place ^= 8;
  }

  // Goes on to the next tile, of which consumers that store through areas need no more. If there is none, it has the columns of
  // the last.
  template <class Tile>
  DG_DEVICE void take(Tile& tile) {
    tile.index += tile.stride;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tile.column) : "r"(place) : "memory");
    place ^= 8;
  }

  // A consumer and the warp that tells meet before the first is followed.
  static DG_DEVICE void wait_for_first(u32 consumer) { named_barrier_sync(kConsumerBarrier + consumer, kThreads); }
  template <u32 kConsumers>
  static DG_DEVICE void allow_first() {
    for (u32 consumer = 0; consumer < kConsumers; ++consumer) named_barrier_arrive(kConsumerBarrier + consumer, kThreads);
  }

 private:
  enum : u32 { kThreads = 128 + 32 };
};
