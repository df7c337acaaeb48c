// Warpgroup-level matrix instructions: fences, groups, descriptors, register allocation.
#pragma once
#include "types.cuh"

DG_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DG_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
DG_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <u32 kRegisters>
DG_DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
DG_DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Low word of the descriptor of an operand tile in 128B-swizzled shared memory. To move the tile by some bytes add bytes / 16.
//   K-major: rows of 128 bytes in atoms of 8 rows, 1024 bytes apart. The leading offset is unused.
//   MN-major: boxes of 64 elements of M or N by a block of K, each a row of 128 bytes for one k, in atoms of 8 k. `box_bytes` is
//   the leading offset, from one box to the next.
DG_DEVICE u32 descriptor_low(u32 address, u32 box_bytes = 16) { return box_bytes / 16 << 16 | ((address & 0x3FFFF) >> 4); }

// Steps of a descriptor from one instruction to the next: 32 bytes of each row, or 16 rows of 128 bytes.
enum : u32 { kStepKMajor = 32 / 16, kStepMnMajor = 16 * 128 / 16 };

DG_DEVICE u64 matrix_descriptor(u32 low) {
  constexpr u64 kSwizzle128B = 1ull << 62;
  constexpr u64 kStrideOffset = static_cast<u64>(1024 >> 4) << 32;
  return kSwizzle128B | kStrideOffset | low;
}

// The descriptor of what lies `offset` behind the beginning of a stage; `low` is that of stage 0, and stages are kStep apart, both in
// units of 16 bytes. With kWide it is a 64-bit sum, and ptxas keeps whole descriptors in uniform registers: a block of a 128x160 tile
// had 15 instructions fewer than with a low word beside a constant.
template <u32 kStep, bool kWide>
DG_DEVICE u64 stage_descriptor(u32 low, u32 stage, u32 offset) {
  if constexpr (kWide) {
    return matrix_descriptor(low) + static_cast<u64>(stage) * kStep + offset;
  } else {
    return matrix_descriptor(low + stage * kStep + offset);
  }
}

// The value of lane 0 in all lanes. The compiler then knows that it is uniform, and does not compute it again.
DG_DEVICE u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

// True in exactly one lane of a converged warp.
DG_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// Four 8x8 matrices of 16-bit elements from the accumulator layout to shared memory; lane i supplies the address of row i.
DG_DEVICE void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same, transposed: lane i supplies the address for column i % 8 of matrix i / 8.
DG_DEVICE void store_matrix_x4_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same for two 8x8 matrices, transposed: lane i < 16 supplies the address for column i % 8 of matrix i / 8.
DG_DEVICE void store_matrix_x2_transposed(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(address), "r"(a), "r"(b) : "memory");
}
