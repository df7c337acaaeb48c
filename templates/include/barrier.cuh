// Synchronisation: mbarriers, named barriers, cluster barriers and programmatic dependent launch; and shared-memory accesses.
#pragma once
#include "types.cuh"

DG_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DG_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the async proxy and to the other CTAs of the cluster.
DG_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DG_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier at the same offset in the shared memory of CTA `rank` of this cluster. It only announces that shared
// memory was read, so it has no release at cluster scope, which would cost a membar.gpu.
DG_DEVICE void barrier_arrive_remote(u32 barrier, u32 rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
      ::"r"(barrier), "r"(rank) : "memory");
}

DG_DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

template <bool kAcquireCluster>
DG_DEVICE bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  if constexpr (kAcquireCluster) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } else {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
  return done != 0;
}

// Whether the phase with this parity has completed, without waiting.
DG_DEVICE bool barrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}

// A debug build traps after a second instead of hanging. A working pipeline waits for microseconds.
struct WaitBound {
#if DG_DEBUG
  u64 start = global_time();
  DG_DEVICE void check() const {
    if (global_time() - start > 1000000000) __trap();
  }
  static DG_DEVICE u64 global_time() {
    u64 nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
#else
  DG_DEVICE void check() const {}
#endif
};

// Blocks until the phase with this parity has completed. With kAcquireCluster, writes of other CTAs of the cluster before their
// arrival are then visible.
template <bool kAcquireCluster = false>
DG_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  const WaitBound bound;
  while (!barrier_try_wait<kAcquireCluster>(barrier, parity)) bound.check();
}

// Waits for `cycles` clock cycles. One asm statement, because NVVM would make two copies of a loop around it.
DG_DEVICE void pass_cycles(u32 cycles) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .b32 begin, now;\n"
      " setp.eq.u32 p, %0, 0;\n @p bra done;\n mov.u32 begin, %%clock;\n"
      "again:\n mov.u32 now, %%clock;\n sub.u32 now, now, begin;\n setp.lt.u32 p, now, %0;\n @p bra again;\n"
      "done:\n}"
      ::"r"(cycles) : "memory");
}

// The cluster address of the shared-memory `address` in CTA `rank`.
DG_DEVICE u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Arrives at a barrier anywhere in the cluster and releases this thread's writes.
DG_DEVICE void barrier_arrive_release(u32 remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

// The named barriers of a CTA, each the first of a range with one for each consumer. Hardware has ids 0 to 15, and 0 is
// __syncthreads. There are at most three consumers, and two that take turns.
enum NamedBarrier : u32 {
  kConsumerBarrier = 1,      // the threads of one consumer; before the first tile, those and the store warp
  kAreaFreeBarrier = 4,      // a consumer's staging area may be written
  kAreaFullBarrier = 8,      // a part of a staging area is full; up to four of them
  kProductTurnBarrier = 12,  // a consumer may start its product
};

// A barrier among `threads` threads of one CTA.
DG_DEVICE void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting.
DG_DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Consumers start products in turn: 0, 1, 0, 1, and so on, each as often as the others. One named barrier a consumer.
template <u32 kConsumers>
struct ProductTurns {
  enum : u32 { kThreads = 2 * 128 };  // of the consumer that waits, and of the one that lets it start
  u32 consumer, mine, next;

  DG_DEVICE explicit ProductTurns(u32 consumer)
      : consumer(consumer), mine(opaque(kProductTurnBarrier + consumer)),
        next(opaque(kProductTurnBarrier + (consumer + 1 == kConsumers ? 0 : consumer + 1))) {}

  DG_DEVICE void begin() const {
    if (consumer + 1 == kConsumers) pass();
  }
  DG_DEVICE void wait() const {
    if constexpr (kConsumers > 1) named_barrier_sync(mine, kThreads);
  }
  DG_DEVICE void pass() const {
    if constexpr (kConsumers > 1) named_barrier_arrive(next, kThreads);
  }
  // Consumes the last turn that was passed, so that no arrival is left over.
  DG_DEVICE void end() const {
    if (consumer == 0) wait();
  }
};

DG_DEVICE float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

DG_DEVICE void load_shared_pair(u32 address, float& first, float& second) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}

struct Bytes16 {
  u32 words[4];
};

DG_DEVICE Bytes16 load_shared_16(u32 address) {
  Bytes16 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3]) : "r"(address) : "memory");
  return x;
}

DG_DEVICE u16 load_shared_2(u32 address) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

DG_DEVICE void store_16(void* to, const Bytes16& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]), "r"(x.words[3]) : "memory");
}

DG_DEVICE void add_shared(u32 address, float* to) {
  float v[4];
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(address) : "memory");
#pragma unroll
  for (u32 i = 0; i < 4; ++i) to[i] += v[i];
}

DG_DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The barrier after the prologue, for all threads of the CTA or of its cluster. It only has to publish mbarriers, which
// barrier_init_fence has fenced, so the arrival is relaxed. A releasing arrival is a membar.gpu in each warp: clusters waited 1300
// cycles for it before their first load (H200).
template <u32 kClusterSize>
DG_DEVICE void prologue_sync() {
  if constexpr (kClusterSize > 1) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    asm volatile("bar.sync 0;" ::: "memory");  // __syncthreads, which producers and consumers may call from different branches
  }
}

// Programmatic dependent launch. Both are no-ops in a kernel launched without the attribute, which GPUs before Hopper do not have.
DG_DEVICE void wait_for_previous_kernel() {
  if constexpr (kCapability >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}
DG_DEVICE void allow_next_kernel() {
  if constexpr (kCapability >= 900) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
