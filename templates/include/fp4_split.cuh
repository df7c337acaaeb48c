// D = A @ W^T of few tokens, W in MXFP4: see fp4_gemm.cuh. There are fewer tiles than SMs, and each takes a few microseconds. So a CTA
// has 64 rows of W, its consumers take blocks of K in turn, and the CTAs of a cluster have a part of K each. Sums meet through shared
// memory. Two or three CTAs fit on an SM, so that the next launch's prologue overlaps with this one's end.
#pragma once
#include "fp4_products.cuh"
#include "groups.cuh"
#include "split_k_exchange.cuh"

template <class C, class Mma, class Arguments>
struct Fp4Split {
  using Products = Fp4Products<C, Mma>;
  using Sums = typename Products::Sums;
  enum : u32 { kT = C::kT, kStages = C::kStages, kPiece = piece_bytes(C::kAbsolute), kConsumers = C::kN, kCluster = C::kCluster };
  using Exchange = SplitKExchange<kT, 1, kCluster, kConsumers, kConsumers>;
  enum : u32 { kTokenBytes = Products::kTokenBytes, kScaleBytes = Products::kScaleBytes, kStaging = Exchange::kOwned * 1024 };
  enum : u32 { kOffsetStaging = kStages * kTokenBytes, kOffsetSlots = kOffsetStaging + kConsumers * kStaging };
  // Consumers that own sums have slots.
  enum : u32 { kSlots = min_of(Exchange::kOwners, kConsumers) * Exchange::kConsumerBytes };
  enum : u32 { kOffsetScales = kOffsetSlots + kSlots, kOffsetWeights = kOffsetScales + kStages * kScaleBytes };
  enum : u32 { kOffsetBarriers = kOffsetWeights + kStages * kPiece };
  static_assert(kOffsetBarriers + kStages * 16 + Exchange::kBarrierBytes == C::kSharedBytes);
  static_assert(C::kThreads == kConsumers * 128 + (C::kProducerRegisters > 0 ? 128 : 32) && kStages % kConsumers == 0);

  const Arguments& arg;
  u32 shared;

  DG_DEVICE u32 full(u32 stage) const { return shared + kOffsetBarriers + stage * 16; }
  DG_DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32, rank = kCluster > 1 ? cluster_rank() : 0;
    Exchange exchange;
    exchange.slots = shared + kOffsetSlots;
    exchange.barriers = shared + kOffsetBarriers + kStages * 16;
    if (warp == kConsumers * 4) {
      if (elect_one()) {
        Products::template open<kStages>(arg, full(0), 4);
        exchange.init(rank);
        barrier_init_fence();
      }
      __syncwarp();
    }
    const u32 tile = blockIdx.x / kCluster, height = ceil_div(arg.m, kT), piece = tile / height, row = (tile - piece * height) * kT;
    const u32 first = arg.blocks * rank / kCluster, count = arg.blocks * (rank + 1) / kCluster - first;
    prologue_sync<kCluster>();
    if (warp >= kConsumers * 4) {
      if constexpr (C::kProducerRegisters > 0) registers_shrink<C::kProducerRegisters>();
      if (warp == kConsumers * 4 && elect_one()) produce(piece, row, first, count);
      __syncwarp();
    } else {
      if constexpr (C::kConsumerRegisters > 0) registers_grow<C::kConsumerRegisters>();
      consume(exchange, rank, piece, row, first, count);
    }
  }

  DG_DEVICE const u8* weights(u32 piece, u32 block) const { return arg.packed + (static_cast<u64>(piece) * arg.blocks + block) * kPiece; }

  DG_DEVICE void load_weights(u32 piece, u32 block, u32 stage) const {
    barrier_arrive_expect(full(stage), kPiece + kTokenBytes + (C::kFp8 ? kT * 4 : 0));
    bulk_load(shared + kOffsetWeights + stage * kPiece, weights(piece, block), kPiece, full(stage), evict_first());
  }

  // The first stages of constant weights are loaded before the previous kernel has ended. Of weights that may change, they are
  // prefetched into L2.
  DG_DEVICE void produce(u32 piece, u32 row, u32 first, u32 count) const {
    const u32 begun = min_of(count, kStages), early = arg.early > 0 ? begun : 0;
    if (early == 0 && begun > 0) bulk_prefetch(weights(piece, first), begun * kPiece);
    for (u32 i = 0; i < early; ++i) load_weights(piece, first + i, i);
    wait_for_previous_kernel();
    allow_next_kernel();
    for (u32 i = 0, stage = 0, parity = 0; i < count; ++i) {
      if (i >= early) {
        barrier_wait(empty(stage), parity ^ 1);
        load_weights(piece, first + i, stage);
      }
      Products::load_tokens(arg, shared + stage * kTokenBytes, shared + kOffsetScales + stage * kScaleBytes, full(stage), first + i, row, row, 0);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }

  DG_DEVICE void consume(Exchange& exchange, u32 rank, u32 piece, u32 row, u32 first, u32 count) const {
    const u32 consumer = uniform(threadIdx.x / 128), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 split = rank * kConsumers + consumer;
    float sums[1][kT / 2];
    Sums& sum = sums[0];
    Sums partial;
    Products::clear(sum);
    Products::clear(partial);
    const u32 mine = opaque(shared + kOffsetWeights + warp * 1024 + lane * 16);
    const u32 exponents = opaque(shared + kOffsetWeights + Products::Weights::exponents_offset(warp, lane));
    const u32 scales = opaque(shared + kOffsetScales + lane % 4 * 8);
    const u32 tokens = uniform(descriptor_low(shared)), barriers = uniform(full(0));
    u32 stage = consumer, parity = 0;
    wait_for_previous_kernel();
    float f0 = 1.0f, f1 = 1.0f;
    if constexpr (!C::kAbsolute) {
      const float* factors = arg.factors + piece * kPieceRows + warp * 16 + lane / 4;
      f0 = __ldg(factors), f1 = __ldg(factors + 8);
    }
#pragma unroll 1
    for (u32 i = consumer; i < count; i += kConsumers) {
      barrier_wait(barriers + stage * 16, parity);
      Products::block(sum, partial, mine + stage * kPiece, exponents + stage * kPiece, scales + stage * kScaleBytes,
                      matrix_descriptor(tokens + stage * (kTokenBytes / 16)), i - consumer);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers + stage * 16 + 8);
      stage += kConsumers;
      if (stage >= kStages) stage -= kStages, parity ^= 1;
    }
    exchange.exchange(sums, 0, consumer, split, thread, false);
    const u32 staging = shared + kOffsetStaging + consumer * kStaging;
#pragma unroll
    for (u32 c = 0; c < kT / 8; ++c)
      if (c / Exchange::kOwned == split) Products::stage(staging + c % Exchange::kOwned * 1024, &sum[c * 4], f0, f1, warp, lane);
    if (split * Exchange::kOwned >= kT / 8) return;
    named_barrier_sync(kConsumerBarrier + consumer, 128);
    // Rows of the next owner are in d, too.
    const u32 own = row + split * Exchange::kOwned * 8;
    Products::template store<Exchange::kOwned * 8>(arg, staging, own, min_of(arg.m, row + kT), piece * kPieceRows, thread);
  }
};
