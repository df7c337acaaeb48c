// Copies and prefetches of contiguous bytes, multiples of 16.
#pragma once
#include "types.cuh"

DG_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
DG_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
DG_DEVICE void bulk_prefetch(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}
// The line of an address.
DG_DEVICE void prefetch_line(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory"); }
