// Warpgroup-level matrix instructions: fences, groups, descriptors, register allocation; and conversions to bf16.
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

// Low word of the descriptor of a K-major operand tile in 128B-swizzled shared memory: rows of 128 bytes in atoms of 8 rows. The
// stride offset is an atom's 1024 bytes, and the leading offset is unused. To move the tile by some bytes add bytes / 16.
DG_DEVICE u32 descriptor_low(u32 address) {
  constexpr u32 kLeadingOffset = 1u << 16;
  return kLeadingOffset | ((address & 0x3FFFF) >> 4);
}

// Step of a descriptor from one k32 instruction to the next: 32 bytes.
enum : u32 { kInstructionStep = 32 / 16 };

DG_DEVICE u64 matrix_descriptor(u32 low) {
  constexpr u64 kSwizzle128B = 1ull << 62;
  constexpr u64 kStrideOffset = static_cast<u64>(1024 >> 4) << 32;
  return kSwizzle128B | kStrideOffset | low;
}

// The value of lane 0 in all lanes. The compiler then knows that it is uniform, and does not compute it again.
DG_DEVICE u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

// True in exactly one lane of a converged warp.
DG_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

DG_DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four 8x8 matrices of 16-bit elements from the accumulator layout to shared memory; lane i supplies the address of row i.
DG_DEVICE void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same for two 8x8 matrices, transposed: lane i < 16 supplies the address for column i % 8 of matrix i / 8.
DG_DEVICE void store_matrix_x2_transposed(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(address), "r"(a), "r"(b) : "memory");
}
