// D = A @ W^T of many rows, W in MXFP4: 128 tokens by 256 weights, one CTA an SM, whole tiles in order. Weights are wgmma's A, which
// consumers decode into registers while products run. A consumer has two slices of 64 weights.
#pragma once
#include "fp4_products.cuh"
#include "fp4_tiles.cuh"
#include "promotion.cuh"

template <class C, class Mma, class Arguments>
struct Fp4Wide {
  using Products = Fp4Products<C, Mma>;
  using Weights = typename Products::Weights;
  using Tiles = Fp4Tiles<C, Arguments>;
  using Table = typename Tiles::Table;
  // A stage has a block of K, and with a tile's last one the factors of its rows of W and a note where it is.
  enum : u32 { kT = C::kT, kStages = C::kStages, kConsumers = 2, kSlices = 2, kPieces = kConsumers * kSlices, kPiece = piece_bytes(false) };
  enum : u32 { kTokenBytes = Products::kTokenBytes, kScaleBytes = Products::kScaleBytes, kWeightBytes = kPieces * kPiece };
  enum : u32 { kFactorBytes = kPieceRows * 4, kStaging = kT * 128 };
  enum : u32 { kOffsetStaging = kStages * kTokenBytes, kOffsetScales = kOffsetStaging + kConsumers * kStaging };
  enum : u32 { kOffsetWeights = kOffsetScales + kStages * kScaleBytes, kOffsetFactors = kOffsetWeights + kStages * kWeightBytes };
  enum : u32 { kOffsetTable = kOffsetFactors + kStages * kPieces * kFactorBytes };
  enum : u32 { kOffsetNotes = kOffsetTable + Tiles::kBytes, kOffsetBarriers = kOffsetNotes + kStages * 16 };
  static_assert(kOffsetBarriers + kStages * 16 == C::kSharedBytes && C::kThreads == (kConsumers + 1) * 128 && !C::kAbsolute);
  // What is multiplied in one group of instructions.
  enum : u32 { kUnit = Mma::kN / 2 };
  using Sums = float[kSlices][kT / 2];

  const Arguments& arg;
  u32 shared;

  DG_DEVICE u32 full(u32 stage) const { return shared + kOffsetBarriers + stage * 16; }
  DG_DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32, table = shared + kOffsetTable;
    if (warp == kConsumers * 4) {
      if (elect_one()) {
        Products::template open<kStages>(arg, full(0), kConsumers * 4);
        barrier_init_fence();
      }
      __syncwarp();
    }
    wait_for_previous_kernel();
    if constexpr (has_table(C::kGrouping)) Table::build(arg, table, arg.m);
    __syncthreads();
    if constexpr (+C::kGrouping == kIndex) {
      if (warp == kConsumers * 4 + 1)
        zero_padding<Table, kT, C::kSegments, 2>(table, arg.d, arg.d_stride, arg.m, arg.n, arg.aligned != 0, threadIdx.x % 32, [](u32) {});
    }
    if (warp >= kConsumers * 4) {
      registers_shrink<C::kProducerRegisters>();
      if (warp == kConsumers * 4) produce();
    } else {
      registers_grow<C::kConsumerRegisters>();
      const u32 count = uniform(Tiles::count(arg, table));
      if (count > 0) consume(count);
    }
  }

  // Four lanes load a piece each, and one of them the tokens.
  DG_DEVICE void produce() const {
    allow_next_kernel();
    const u32 lane = threadIdx.x % 32;
    if (lane >= kPieces) return;
    const u32 table = shared + kOffsetTable;
    u32 stage = 0, parity = 0;
    for (Tiles tile(arg, table); tile.valid(); tile.advance(arg, table)) {
      // Past the last row of W its last piece again.
      const u32 piece = tile.group * arg.pieces + min_of(tile.column / kPieceRows + lane, arg.pieces - 1);
      const u8* from = arg.packed + static_cast<u64>(piece * arg.blocks) * kPiece;
      // Scales of masked groups are matrices of m rows, one below the other.
      const u32 masked = +C::kGrouping == kMasked ? tile.group : 0;
#pragma unroll 1
      for (u32 block = 0; block < arg.blocks; ++block, from += kPiece) {
        const u32 barrier = full(stage);
        barrier_wait(barrier + 8, parity ^ 1);
        if (lane == 0) {
          const u32 factors = block + 1 == arg.blocks ? min_of(+kPieces, arg.pieces - tile.column / kPieceRows) * kFactorBytes : 0;
          if (factors > 0) {
            const u32 note = shared + kOffsetNotes + stage * 16;
            store_word(note, tile.row), store_word(note + 4, tile.last), store_word(note + 8, tile.column);
          }
          barrier_arrive_expect(barrier, kWeightBytes + kTokenBytes + (C::kFp8 ? kT * 4 : 0) + factors);
          Products::load_tokens(arg, shared + stage * kTokenBytes, shared + kOffsetScales + stage * kScaleBytes, barrier, block, tile.row,
                                tile.row - masked * arg.m, masked * arg.blocks);
          if (factors > 0)
            bulk_load(shared + kOffsetFactors + stage * kPieces * kFactorBytes,
                      arg.factors + (tile.group * arg.pieces * kPieceRows + tile.column), factors, barrier);
        }
        bulk_load(shared + kOffsetWeights + stage * kWeightBytes + lane * kPiece, from, kPiece, barrier);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
  }

  // A consumer's place in the ring, and addresses in stage 0.
  struct Place {
    const u32 barriers, weights, exponents, scales, tokens, consumer, thread;
    u32 zero;  // which the compiler must not know
    u32 stage, parity, next, next_parity;

    DG_DEVICE Place(u32 shared)
        : barriers(uniform(shared + kOffsetBarriers)), weights(opaque(first_weights(shared) + threadIdx.x % 128 * 16 + threadIdx.x % 128 / 32 * 512)),
          exponents(opaque(first_weights(shared) + Weights::exponents_offset(threadIdx.x % 128 / 32, threadIdx.x % 32))),
          scales(opaque(shared + kOffsetScales + threadIdx.x % 4 * 8)), tokens(uniform(descriptor_low(shared))),
          consumer(uniform(threadIdx.x / 128)), thread(threadIdx.x % 128), stage(0), parity(0) {
      asm volatile("mov.u32 %0, 0;" : "=r"(zero));
      look();
    }
    static DG_DEVICE u32 first_weights(u32 shared) { return shared + kOffsetWeights + threadIdx.x / 128 * (kSlices * kPiece); }

    DG_DEVICE void look() {
      const bool turns = stage + 1 == kStages;
      next = turns ? 0 : stage + 1, next_parity = turns ? parity ^ 1 : parity;
    }
    DG_DEVICE void go_on() {
      stage = next, parity = next_parity;
      look();
    }
    DG_DEVICE void wait() const { barrier_wait(barriers + stage * 16, parity); }
    DG_DEVICE void wait_next() const { barrier_wait(barriers + next * 16, next_parity); }
    DG_DEVICE void release() const {
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(barriers + stage * 16 + 8);
    }

    // Decodes all of a slice's block of K, or in BF16 a half of it.
    template <u32 kSlice, u32 kHalf>
    DG_DEVICE void decode(u32 (&a)[16], u32 from) const {
      Weights words;
      words.load(weights + from * kWeightBytes + kSlice * kPiece, exponents + from * kWeightBytes + kSlice * kPiece);
      if constexpr (C::kFp8) words.template decode<0, 4>(a); else words.template decode<kHalf * 2, 2>(a);
    }

    // Issues the products of a half of the tokens, or in BF16 of a half of K.
    template <u32 kHalf>
    DG_DEVICE void issue(float* sum, const u32 (&a)[16], u32 from, u32 keep) const {
      constexpr u32 kStep = C::kFp8 ? Mma::kN * 128 / 16 : kT * 128 / 16;
      wgmma_fence();
      Mma::multiply(*reinterpret_cast<float(*)[kUnit]>(sum), a, stage_descriptor<kTokenBytes / 16, true>(tokens, from, kHalf * kStep), keep);
      wgmma_commit();
    }

    // This thread's scales of a half of the tokens.
    template <u32 kHalf>
    DG_DEVICE void load_scales(float (&scale)[16]) const {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) load_shared_pair(scales + stage * kScaleBytes + kHalf * 256 + i * 32, scale[i * 2], scale[i * 2 + 1]);
    }
  };

  // Adds the products of a half of the tokens.
  static DG_DEVICE void promote(float* sum, const float (&partial)[kUnit], const float (&scale)[16]) {
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
      const float factor = settled(scale[i]);
      sum[i / 2 * 4 + i % 2] += factor * partial[i / 2 * 4 + i % 2], sum[i / 2 * 4 + 2 + i % 2] += factor * partial[i / 2 * 4 + 2 + i % 2];
    }
  }

  // Registers that a product reads are used here, so that nothing else is in them before its end.
  static DG_DEVICE void keep(const u32 (&a)[16]) {
    asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]),
                 "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]) : "memory");
  }

  static DG_DEVICE void clear(float (&sum)[kT / 2]) {
#pragma unroll
    for (u32 i = 0; i < kT / 2; ++i) sum[i] = 0.0f;
  }

  // Where a tile is, and two rows' factors.
  struct Note {
    u32 row, last, column;
    float f0, f1;
  };
  DG_DEVICE Note note(const Place& at, u32 slice) const {
    const u32 note = shared + kOffsetNotes + at.stage * 16, index = at.consumer * kSlices + slice;
    const u32 factors = shared + kOffsetFactors + (at.stage * kPieces + index) * kFactorBytes + at.thread / 32 * 64 + at.thread % 32 / 4 * 4;
    return {load_word(note), load_word(note + 4), load_word(note + 8) + index * kPieceRows, load_shared(factors), load_shared(factors + 32)};
  }

  // Stores the sums of a slice.
  DG_DEVICE void finish(const float (&sum)[kT / 2], const Note& note, const Place& at) const {
    const u32 thread = opaque(at.thread), staging = shared + kOffsetStaging + at.consumer * kStaging;
    named_barrier_sync(kConsumerBarrier + at.consumer, 128);  // what was staged before has been copied
#pragma unroll
    for (u32 c = 0; c < kT / 8; ++c) Products::stage(staging + c * 1024, &sum[c * 4], note.f0, note.f1, thread / 32, thread % 32);
    named_barrier_sync(kConsumerBarrier + at.consumer, 128);
    Products::template store<kT>(arg, staging, note.row, note.last, note.column, thread);
  }

  DG_DEVICE void consume(u32 tiles) const {
    Place at(shared);
    Sums sum;
    u32 a0[16], a1[16];
    u32 steps = tiles * arg.blocks, left = arg.blocks;  // in all, and of this tile
    float p0[kUnit] = {}, p1[kUnit] = {};  // partial sums of FP8
    at.wait();
    at.template decode<0, 0>(a0, 0);
    at.template issue<0>(C::kFp8 ? p0 : sum[0], a0, 0, at.zero);
    if constexpr (C::kFp8) clear(sum[0]), clear(sum[1]);
#pragma unroll 1
    for (; steps > 0; --steps) {
      [[maybe_unused]] const u32 begun = left == arg.blocks ? at.zero : 1;
      const bool last = --left == 0;
      if (last) left = arg.blocks;
      if constexpr (C::kFp8) step_fp8(at, sum, p0, p1, a0, a1, last, steps > 1); else step_bf16(at, sum, a0, a1, begun, last, steps > 1);
    }
    // Two waits, for ptxas: if products that cross the loop's end had one wait behind the loop, it would take them to last until then,
    // and serialise all.
    if (at.consumer == 0) {
      asm volatile("wgmma.wait_group.sync.aligned 0;  // of the first consumer" ::: "memory");
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 0;  // of the second consumer" ::: "memory");
    }
  }

  // A block of K. The products of the first slice and the first half of tokens are running; in the end, those of the next block are,
  // or of any numbers behind the last one.
  DG_DEVICE void step_fp8(Place& at, Sums& sum, float (&p0)[kUnit], float (&p1)[kUnit], u32 (&a0)[16], u32 (&a1)[16], bool last, bool more) const {
    float scale[16];
    at.template issue<1>(p1, a0, at.stage, at.zero);
    at.template load_scales<0>(scale);
    wgmma_wait<1>();
    promote(sum[0], p0, scale);
    at.template decode<1, 0>(a1, at.stage);
    at.template issue<1>(p0, a1, at.stage, at.zero);
    wgmma_wait<1>();
    keep(a0);
    at.template load_scales<1>(scale);
    promote(sum[0] + kUnit, p1, scale);
    at.template issue<0>(p1, a1, at.stage, at.zero);
    if (last) {
      finish(sum[0], note(at, 0), at);
      clear(sum[0]);
      at.template load_scales<1>(scale);
    }
    wgmma_wait<1>();
    promote(sum[1] + kUnit, p0, scale);
    if (more) at.wait_next();
    at.template decode<0, 0>(a0, at.next);
    at.template issue<0>(p0, a0, at.next, at.zero);
    wgmma_wait<1>();
    keep(a1);
    at.template load_scales<0>(scale);
    promote(sum[1], p1, scale);
    if (last) {
      finish(sum[1], note(at, 1), at);
      clear(sum[1]);
    }
    at.release();
    at.go_on();
  }

  // The same for BF16: the products of the first slice and the first half of K are running.
  DG_DEVICE void step_bf16(Place& at, Sums& sum, u32 (&a0)[16], u32 (&a1)[16], u32 begun, bool last, bool more) const {
    at.template decode<1, 0>(a1, at.stage);
    at.template issue<0>(sum[1], a1, at.stage, begun);
    wgmma_wait<1>();
    keep(a0);
    at.template decode<0, 1>(a0, at.stage);
    at.template issue<1>(sum[0], a0, at.stage, 1);
    wgmma_wait<1>();
    keep(a1);
    at.template decode<1, 1>(a1, at.stage);
    at.template issue<1>(sum[1], a1, at.stage, 1);
    wgmma_wait<1>();
    keep(a0);
    if (last) {
      settle(sum[0]);
      finish(sum[0], note(at, 0), at);
    }
    if (more) at.wait_next();
    at.template decode<0, 0>(a0, at.next);
    at.template issue<0>(sum[0], a0, at.next, last ? at.zero : 1);
    wgmma_wait<1>();
    keep(a1);
    if (last) {
      settle(sum[1]);
      finish(sum[1], note(at, 1), at);
    }
    at.release();
    at.go_on();
  }

  static DG_DEVICE void settle(float (&sum)[kT / 2]) {
    if constexpr (Mma::kN == kT) Mma::settle(sum);
  }
};
