// Stores a tile in parts, through one or two small buffers for each consumer. Used by the 16-bit kernels but that for few tokens,
// and by the FP8 kernel for any scaling.
#pragma once
#include "barrier.cuh"
#include "output.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// A consumer's kSlices x 64 rows by kColumns columns are cut into parts of 64 rows by kBoxColumns columns. Parts are staged one
// after the other, in one buffer or in two buffers by turns. Rows of a buffer are swizzled over their own length, as the tensor map
// of D expects. A consumer completes kWidth columns at a time, which are whole parts.
//
// With kSwapped the sums are those of D transposed: their columns are D's rows, of which a part has 64 or, at the end, fewer. Staging
// transposes them, so that a part is 64 of D's columns wide.
//
// Named barriers signal that a buffer is free or full. With mbarriers, whose wait is a loop, ptxas loses track of wgmma in flight
// and serialises it.
template <u32 kElement, u32 kColumns, u32 kSlices, u32 kConsumers, u32 kBuffers, u32 kWidth = kColumns, bool kSwapped = false>
struct PartStore {
  using Out = Output<kElement>;
  enum : u32 { kWidest = 128 / Out::kBytes };
  enum : u32 { kBoxColumns = kSwapped || kWidth % kWidest == 0 ? +kWidest : kWidth % 32 == 0 ? 32 : 16 };
  static_assert(!kSwapped || (Out::kBytes == 2 && kColumns % 8 == 0));
  enum : u32 { kRowBytes = kBoxColumns * Out::kBytes, kBoxBytes = 64 * kRowBytes };
  enum : u32 { kBoxes = ceil_div(kColumns, kBoxColumns), kParts = kSlices * kBoxes };
  enum : u32 { kBytes = kConsumers * kBuffers * kBoxBytes };
  // TMA stores that may still be reading shared memory when the store warp waits for the next part. All earlier ones have finished
  // reading, so their buffers are free.
  enum : u32 { kPending = kConsumers * kBuffers - (kBuffers == 2 ? +kConsumers : 1) };
  enum : u32 { kThreads = 128 + 32 };  // a consumer and the store warp
  // A part's words of a thread: pairs of 16-bit elements, float32, or for FP8 pairs of two rows that are eight apart.
  enum : u32 { kWords = kBoxColumns * Out::kBytes / 8 };
  static_assert(kConsumers * kBuffers <= 4);  // there are as many named barriers of each kind

  static DG_DEVICE u32 buffer(u32 staging, u32 consumer, u32 which) {
    return staging + (consumer * kBuffers + which) * kBoxBytes;
  }
  static DG_DEVICE u32 free_barrier(u32 consumer, u32 which) { return kAreaFreeBarrier + consumer * kBuffers + which; }
  static DG_DEVICE u32 full_barrier(u32 consumer, u32 which) { return kAreaFullBarrier + consumer * kBuffers + which; }

  // Columns of the sums in a part.
  static DG_DEVICE constexpr u32 columns_of(u32 part) { return min_of(+kBoxColumns, kColumns - part % kBoxes * kBoxColumns); }
  // The part's first column and row, from those of the consumer's part of the tile.
  static DG_DEVICE u32 column_of(u32 part) { return (kSwapped ? part / kBoxes : part % kBoxes) * kBoxColumns; }
  static DG_DEVICE u32 row_of(u32 part) { return (kSwapped ? part % kBoxes : part / kBoxes) * 64; }

  // Stages one part, the words of a thread, in the buffer that comes next. `part` is known at compile time.
  static DG_DEVICE void stage(u32 staging, const u32* words, u32 part, u32 consumer, u32& which, u32 warp, u32 lane) {
    const u32 to = buffer(staging, consumer, which);
    named_barrier_sync(free_barrier(consumer, which), kThreads);
    if constexpr (kElement == kF32) {
      const u32 row = warp * 16 + lane / 4;
#pragma unroll
      for (u32 i = 0; i < kWords; i += 4) {  // eight columns: two of them in this thread, for two rows
        const u32 unit = i / 2 + lane % 4 / 2, within = lane % 2 * 8;
        store_pair(to + row * kRowBytes + swizzled(row, unit) * 16 + within, words[i], words[i + 1]);
        store_pair(to + (row + 8) * kRowBytes + swizzled(row + 8, unit) * 16 + within, words[i + 2], words[i + 3]);
      }
    } else if constexpr (kElement == kE4m3) {
      const u32 row = warp * 16 + lane / 4;
#pragma unroll
      for (u32 i = 0; i < kWords; ++i) {  // eight columns
        const u32 place = to + swizzled(row, i / 2) * 16 + i % 2 * 8 + lane % 4 * 2;
        store_half(place + row * kRowBytes, words[i]);
        store_half(place + (row + 8) * kRowBytes, words[i] >> 16);
      }
    } else if constexpr (kSwapped) {
      const u32 row = lane % 8, unit = warp * 2 + lane / 8 % 2;  // this lane's address is of one row of D
      const u32 place = to + row * kRowBytes + (unit ^ row) * 16;
#pragma unroll
      for (u32 i = 0; i < kWords; i += 4) {  // sixteen rows of D, or the last eight
        const u32 left = columns_of(part) / 4 - min_of(i, columns_of(part) / 4);
        if (left >= 4)
          store_matrix_x4_transposed(place + (i / 2 + lane / 16) * 8 * kRowBytes, words[i], words[i + 1], words[i + 2], words[i + 3]);
        else if (left > 0)
          store_matrix_x2_transposed(place + i / 2 * 8 * kRowBytes, words[i], words[i + 1]);
      }
    } else {
      const u32 row = warp * 16 + lane % 16;  // the row whose address this lane supplies to stmatrix
#pragma unroll
      for (u32 i = 0; i < kWords; i += 4)  // sixteen columns
        store_matrix_x4(to + row * kRowBytes + swizzled(row, i / 2 + lane / 16) * 16, words[i], words[i + 1], words[i + 2],
                        words[i + 3]);
    }
    named_barrier_arrive(full_barrier(consumer, which), kThreads);
    if constexpr (kBuffers == 2) which ^= 1;
  }

  // The store warp: stores the parts of every tile to D in the order in which consumers stage them. `place(tile, consumer, x, y)`
  // sets the first column and row of a consumer's part of the tile, and returns the first row that it must not write;
  // `copy(tile, source, x, y, last)` stores one part by TMA, which clips at the edges of D; a part that is `last` may be short. If
  // kEnds, tiles end inside D as well: `copy_rows(source, x, y, rows)` stores the first rows of a part, with the whole warp.
  template <bool kEnds, class Tile, class Place, class Copy, class CopyRows>
  static DG_DEVICE void store_all(u32 staging, Tile tile, const Place& place, const Copy& copy, const CopyRows& copy_rows, u32 columns) {
    for (u32 consumer = 0; consumer < kConsumers; ++consumer)
      for (u32 which = 0; which < kBuffers; ++which) named_barrier_arrive(free_barrier(consumer, which), kThreads);
    u32 which = 0;
    bool before = false;  // whether a buffer has been stored that must be freed
    u32 first = 0;        // with one buffer: how many of the first parts have been stored
    for (; tile.valid(); tile.advance()) {
#pragma unroll 1
      for (u32 part = 0; part < kParts; ++part) {
#pragma unroll 1
        for (u32 consumer = 0; consumer < kConsumers; ++consumer) {
          named_barrier_sync(full_barrier(consumer, which), kThreads);
          if constexpr (kEnds) {
            u32 x, y;
            const u32 end = place(tile, consumer, x, y);
            x += column_of(part);
            y += row_of(part);
            if (x < columns && y < end && end - y < 64) copy_rows(buffer(staging, consumer, which), x, y, end - y);
            __syncwarp();
          }
          if (elect_one()) {  // ptxas knows that this is one thread
            u32 x, y;
            const u32 end = place(tile, consumer, x, y);
            x += column_of(part);
            y += row_of(part);
            fence_shared_to_tma();
            if (x < columns && (kEnds ? y + 64 <= end : y < end))
              copy(tile, buffer(staging, consumer, which), x, y, kSwapped && part % kBoxes + 1 == kBoxes);
            tma_store_commit();
            tma_store_wait_read<kPending>();
          }
          __syncwarp();
          if constexpr (kBuffers == 2) {
            if (before) named_barrier_arrive(free_barrier(consumer, which ^ 1), kThreads);
          } else {
            if (first != kPending) ++first;
            else named_barrier_arrive(free_barrier((consumer + kConsumers - kPending) % kConsumers, 0), kThreads);
          }
        }
        if constexpr (kBuffers == 2) {
          which ^= 1;
          before = true;
        }
      }
    }
    if (elect_one()) tma_store_wait_read<0>();  // shared memory must outlive the reads
  }

  // Copies the first `rows` rows of a buffer of 16-bit elements to D, whose rows begin at multiples of 16 bytes, and of which
  // `columns` are left.
  static DG_DEVICE void copy_rows(u32 source, u8* d, i64 stride, u32 rows, u32 columns, u32 lane) {
    constexpr u32 kUnits = kRowBytes / 16, kRows = 32 / kUnits, kEach = 16 / Out::kBytes;
    const u32 unit = lane % kUnits;
#pragma unroll 4
    for (u32 row = lane / kUnits; row < rows; row += kRows)
      if (unit * kEach < columns)
        store_16(d + (row * stride + unit * kEach) * Out::kBytes, load_shared_16(source + row * kRowBytes + swizzled(row, unit) * 16));
  }

 private:
  // Where a 16-byte unit of a row lies: TMA's swizzle uses the address bits above those of the row.
  static DG_DEVICE u32 swizzled(u32 row, u32 unit) {
    constexpr u32 kUnits = kRowBytes / 16;
    return unit ^ (row / (8 / kUnits) % kUnits);
  }

  static DG_DEVICE void store_half(u32 address, u32 word) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(word)) : "memory");
  }

  static DG_DEVICE void store_pair(u32 address, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
  }
};
