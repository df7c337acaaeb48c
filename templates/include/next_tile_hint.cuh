// The next-tile hint: the store warp computes the column of the next tile and publishes it in shared memory. The arithmetic
// takes about 380 cycles, which consumers do not have between two products.
#pragma once
#include "barrier.cuh"

// Two slots are used in turn, and the store warp is two tiles ahead. The barrier "area free" of tile t makes the hint for tile
// t + 2 visible. A slot is overwritten after tile t + 1 was staged, and consumers have read it by then. The hint for a CTA's
// second tile has a barrier of its own, since the store warp must not arrive twice in a row at "area free".
struct NextTileHint {
  enum : u32 { kBytes = 16 };
  u32 place;  // address of the slot that comes next

  DG_DEVICE explicit NextTileHint(u32 address) : place(address) {}

  template <bool kRow, class Tile>
  DG_DEVICE void publish(const Tile& ahead, bool writes) {
    if (writes) {
      if constexpr (kRow) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place), "r"(ahead.column), "r"(ahead.row) : "memory");
      } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(ahead.column) : "memory");
      }
    }
    place ^= 8;
  }

  // Moves `tile` to the next one: its index and its column, and its row if consumers need it. Past the last tile they are those of
  // the last.
  template <bool kRow, class Tile>
  DG_DEVICE void take(Tile& tile) {
    tile.index += tile.stride;
    if constexpr (kRow) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(tile.column), "=r"(tile.row) : "r"(place) : "memory");
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tile.column) : "r"(place) : "memory");
    }
    place ^= 8;
  }

  // A consumer waits here before its first `take`; the store warp lets all of them go on with `allow_first`.
  static DG_DEVICE void wait_for_first(u32 consumer) { named_barrier_sync(kConsumerBarrier + consumer, kThreads); }
  template <u32 kConsumers>
  static DG_DEVICE void allow_first() {
    for (u32 consumer = 0; consumer < kConsumers; ++consumer) named_barrier_arrive(kConsumerBarrier + consumer, kThreads);
  }

 private:
  enum : u32 { kThreads = 128 + 32 };
};
