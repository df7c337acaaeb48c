// Asynchronous copies by threads, as opposed to TMA's: each is asked for by the thread that wants it, by address, and needs
// neither a tensor map nor a barrier. They belong to the generic proxy: what wgmma is to read needs a fence behind them.
#pragma once
#include "types.cuh"

// If `wanted`, 16 bytes past L1; zeros if they do not exist: then nothing is read. Without a branch, which would be longer.
DG_DEVICE void copy_16(bool wanted, u32 to, const void* from, bool exists) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %0, 0;\n @p cp.async.cg.shared.global [%1], [%2], 16, %3;\n}"
               ::"r"(static_cast<u32>(wanted)), "r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

DG_DEVICE void copy_4(bool wanted, u32 to, const void* from) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %0, 0;\n @p cp.async.ca.shared.global [%1], [%2], 4;\n}"
               ::"r"(static_cast<u32>(wanted)), "r"(to), "l"(from) : "memory");
}

// Brings a line into L2, which all writers and readers share: it may still be written.
DG_DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }

// What the calling thread has asked for since the last group makes one, be it nothing.
DG_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the thread's last `kPending` groups are there.
template <u32 kPending>
DG_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
