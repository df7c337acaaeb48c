// An operand of mma.sync kernels: how a CTA copies its part of a block of K to shared memory, and how a warp reads fragments there.
#pragma once
#include "mma_ptx.cuh"

// kRows rows of an operand and kDepth bytes of K of each. In shared memory they are atoms with rows of 64 or 128 bytes, whose pieces of
// 16 bytes are permuted by XOR, so that the eight rows of an 8x8 matrix lie in different banks.
//
// K-major: one atom, whose rows are the operand's. MN-major, for 16-bit elements: an atom for each 64 rows of the operand, whose rows
// are elements of K, and which are transposed while they are read.
//
// kSpread: a matrix has the rows 0, 1, 8, 9, 16, 17, 24 and 25 of 32, and others the same some rows further. So a lane has eight neighbouring
// columns of sums in four products.
template <u32 kRows, u32 kDepth, bool kMnMajor, u32 kThreads, bool kSpread = false>
struct MmaOperand {
  enum : u32 { kAtomBytes = kMnMajor ? 128 : kDepth, kAtomRows = kMnMajor ? kDepth / 2 : kRows };
  enum : u32 { kAtoms = kMnMajor ? kRows / 64 : 1, kAtomSize = kAtomBytes * kAtomRows, kBytes = kRows * kDepth };
  enum : u32 { kUnits = kAtomBytes / 16, kStep = kThreads / kUnits, kPasses = ceil_div(kAtomRows, kStep) };
  static_assert(kAtomBytes == 64 || kAtomBytes == 128);
  static_assert(!kMnMajor || kRows % 64 == 0);
  static_assert(kStep % 8 == 0 && (!kSpread || !kMnMajor), "a thread's rows have one place in matrices");

  static DG_DEVICE u32 permuted(u32 row, u32 unit) {
    const u32 matrix = kSpread ? row / 8 % 4 * 2 + row % 2 : row;  // the row's place in a matrix
    return unit ^ (matrix / (128 / kAtomBytes) % kUnits);
  }

  // The copies of one thread: 16 bytes of every kStep-th row of each atom.
  struct Copies {
    const u8* from;  // of the next block
    i64 step;        // bytes from a row to the one kStep further
    i64 block;       // bytes from a block of K to the next
    int rows, bytes;  // left after this thread's first row, and after its place in a row: those of K count down

    // The operand's part from `row` on of its `rows` rows, and from `first` on of its K elements. Elements have kSize bytes.
    template <u32 kSize>
    DG_DEVICE void start(const u8* base, i64 stride, u32 row, u32 rows_of_operand, u32 first, u32 k, u32 thread) {
      const u32 unit = thread % kUnits, own = thread / kUnits;
      const i64 row_bytes = stride * kSize;
      step = kStep * row_bytes;
      if constexpr (kMnMajor) {
        from = base + (first + own) * row_bytes + row * kSize + unit * 16;
        block = kDepth / 2 * row_bytes;
        rows = static_cast<int>(k - first) - static_cast<int>(own);
        bytes = static_cast<int>((rows_of_operand - row) * kSize) - static_cast<int>(unit * 16);
      } else {
        from = base + (row + own) * row_bytes + first * kSize + unit * 16;
        block = kDepth;
        rows = static_cast<int>(rows_of_operand) - static_cast<int>(row + own);
        bytes = static_cast<int>((k - first) * kSize) - static_cast<int>(unit * 16);
      }
    }

    // Starts the copies of the next block to `stage`. What lies outside of the operand becomes zeros, and is not read.
    DG_DEVICE void next(u32 stage, u32 thread) {
      const u32 own = thread / kUnits, to = stage + own * kAtomBytes + permuted(own, thread % kUnits) * 16;
      const u8* row = from;
#pragma unroll
      for (u32 pass = 0; pass < kPasses; ++pass) {
        const bool exists = static_cast<int>(pass * kStep) < rows;
        if (kAtomRows % kStep == 0 || own + pass * kStep < kAtomRows) {
#pragma unroll
          for (u32 atom = 0; atom < kAtoms; ++atom) {
            const int left = bytes - static_cast<int>(atom * 128);
            const u32 count = exists ? static_cast<u32>(left < 0 ? 0 : left > 16 ? 16 : left) : 0;
            const u32 place = to ^ permuted(pass * kStep, 0) * 16;
            copy_async(place + atom * kAtomSize + pass * kStep * kAtomBytes, row + atom * 128, count);
          }
        }
        row += step;
      }
      from += block;
      if constexpr (kMnMajor) rows -= kDepth / 2;
      else bytes -= kDepth;
    }
  };

  // Where a lane reads fragments, from row `first` of the operand on. kLeft: the rows are rows of sums, otherwise columns. A matrix x4
  // has 16 rows and 32 bytes of K: for rows of sums in the order (0, 0) (8, 0) (0, 16) (8, 16) of rows and bytes, for columns
  // (0, 0) (0, 16) (8, 0) (8, 16).
  template <bool kLeft>
  static DG_DEVICE u32 place(u32 first, u32 lane) {
    const u32 inner = lane % 8, middle = lane / 8 % 2, outer = lane / 16;
    const u32 row = kLeft ? middle : outer, depth = kLeft ? outer : middle;  // which half of 16 rows, and of 32 bytes
    if constexpr (kMnMajor) {
      const u32 element = depth * 8 + inner;
      return first / 64 * kAtomSize + element * 128 + permuted(element, first % 64 / 8 + row) * 16;
    } else {
      const u32 at = first + (kSpread ? row * 2 + inner / 2 * 8 + inner % 2 : row * 8 + inner);
      return at * kAtomBytes + permuted(at, depth) * 16;
    }
  }

  // The place of rows 16 * tile and of bytes 32 * step further. Places are permuted by XOR, so a warp's rows must not cross an atom.
  static DG_DEVICE u32 address(u32 place, u32 tile, u32 step) {
    if constexpr (kMnMajor) return (place ^ (tile * 32)) + step * 16 * 128;
    else return (place ^ (step * 32)) + (kSpread ? tile / 2 * 32 + tile % 2 * 4 : tile * 16) * kAtomBytes;
  }
};
