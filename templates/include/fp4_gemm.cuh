// D[row, n] = A[row, k] @ W[n, k]^T with W in MXFP4, alone or of each group of rows. Operands are swapped: weights are wgmma's A,
// decoded into registers, and kT tokens its B.
//
// Stream-K: all (tile, two blocks of K) in order are cut into equal shares, one for each CTA. Who has a tile's first block owns it.
// Others compute the tails of tiles at the *beginning* of their shares, so the owner, at its end, finds them in memory, and adds them
// in order: results repeat bitwise. Nobody waits before it has written what others wait for, and a CTA waits only for CTAs with higher
// numbers, which need no more than one place to run in. Under batch invariance shares are whole tiles.
#pragma once
#include "fp4_products.cuh"
#include "groups.cuh"

// The share of a CTA. All lanes of a warp walk together.
template <class C, class Arguments>
struct Fp4Walk {
  using Table = GroupTable<C::kGrouping, C::kT, C::kSegments, C::kThreads>;
  const Arguments& arg;
  u32 table, columns, units, step, share, more, at, end;
  // The segment: a group, the first row of the tile and the one behind its last, a row of tiles of W, units of K.
  u32 group, row, last, column, k0, k1, unit;

  DG_DEVICE Fp4Walk(const Arguments& arg, u32 table) : arg(arg), table(table) {
    columns = ceil_div(arg.pieces, C::kN);
    units = ceil_div(arg.blocks, 2);
    const u32 rows = +C::kGrouping == kUngrouped ? ceil_div(arg.m, C::kT) : load_word(table + Table::kBegin + C::kSegments * 4);
    step = arg.whole_tiles ? units : 1;
    const u32 total = rows * columns * (units / step);
    share = total / gridDim.x;
    more = total - share * gridDim.x;
    at = begin_of(blockIdx.x);
    end = begin_of(blockIdx.x + 1);
  }
  DG_DEVICE u32 begin_of(u32 cta) const { return (cta * share + min_of(cta, more)) * step; }

  DG_DEVICE bool next() {
    if (at >= end) return false;
    unit = at;
    const u32 tile = at / units;
    k0 = at - tile * units;
    k1 = min_of(units, k0 + end - at);
    at += k1 - k0;
    if constexpr (+C::kGrouping == kUngrouped) {
      place(tile, ceil_div(arg.m, C::kT), 0);
      group = 0, last = arg.m;
    } else {
      const u32 target = tile / columns;
      u32 segment = 0;
#pragma unroll
      for (u32 bit = C::kSegments / 2; bit > 0; bit /= 2)
        if (load_word(table + Table::kBegin + (segment + bit) * 4) <= target) segment += bit;
      const u32 before = load_word(table + Table::kBegin + segment * 4);
      place(tile - before * columns, load_word(table + Table::kBegin + (segment + 1) * 4) - before,
            load_word(table + Table::kRow + segment * 4));
      group = Table::group_of(table, segment);
      last = +C::kGrouping == kIndex ? arg.m : Table::used_of(table, segment);
    }
    return true;
  }

 private:
  // Tiles of one group run along m first, so that CTAs that run together read the same weights.
  DG_DEVICE void place(u32 in_group, u32 height, u32 first) {
    column = in_group / height;
    row = first + (in_group - column * height) * C::kT;
  }
};

template <class C, class Mma, class Arguments>
struct Fp4Gemm {
  using Products = Fp4Products<C, Mma>;
  using Sums = typename Products::Sums;
  using Walk = Fp4Walk<C, Arguments>;
  using Table = typename Walk::Table;
  // A stage has two blocks of 128 of K: half as many barriers and addresses. The second one may not exist.
  enum : u32 { kT = C::kT, kN = C::kN, kStages = C::kStages, kPiece = piece_bytes(C::kAbsolute) };
  enum : u32 { kBlockTokens = Products::kTokenBytes, kTokenBytes = 2 * kBlockTokens };
  enum : u32 { kBlockScales = Products::kScaleBytes, kScaleBytes = 2 * kBlockScales };
  enum : u32 { kConsumerBytes = 2 * kPiece, kWeightBytes = kN * kConsumerBytes, kStaging = kT * 128 };
  enum : u32 { kOffsetStaging = kStages * kTokenBytes, kOffsetScales = kOffsetStaging + kN * kStaging };
  enum : u32 { kOffsetWeights = kOffsetScales + kStages * kScaleBytes, kOffsetTable = kOffsetWeights + kStages * kWeightBytes };
  enum : u32 { kOffsetBarriers = kOffsetTable + (has_table(C::kGrouping) ? Table::kBytes : 0) };
  static_assert(kOffsetBarriers + kStages * 16 == C::kSharedBytes && C::kThreads == (kN + 1) * 128);
  // A flag that is set. Nothing clears the memory of a call; no sums have these bits, since they are NaNs that no arithmetic makes.
  enum : u64 { kReady = 0xFFB1A96CFFDE5072ull };
  enum : u32 { kFlagBytes = 8 };

  const Arguments& arg;
  u32 shared;

  DG_DEVICE u32 full(u32 stage) const { return shared + kOffsetBarriers + stage * 16; }
  DG_DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32;
    if (warp == kN * 4) {
      if (elect_one()) {
        Products::template open<kStages>(arg, full(0), kN * 4);
        barrier_init_fence();
        if (arg.early > 0) prefetch_ahead();
      }
      __syncwarp();
    }
    wait_for_previous_kernel();
    if constexpr (has_table(C::kGrouping)) Table::build(arg, shared + kOffsetTable, arg.m);
    __syncthreads();
    // Before any other values need registers: later it spilled.
    if constexpr (+C::kGrouping == kIndex) {
      if (warp == kN * 4 + 1)
        zero_padding<Table, kT, C::kSegments, 2>(shared + kOffsetTable, arg.d, arg.d_stride, arg.m, arg.n, arg.aligned != 0,
                                                 threadIdx.x % 32, [](u32) {});
    }
    Walk walk(arg, shared + kOffsetTable);
    // Consumers and producer together must fit in what the launch allocated, or the launch hangs: see `Fp4Config.registers`.
    if (warp >= kN * 4) {
      registers_shrink<C::kProducerRegisters>();
      if (warp == kN * 4) produce(walk);
    } else {
      registers_grow<C::kConsumerRegisters>();
      consume(walk);
    }
  }

  // Prefetches into L2 what this CTA has first if every group has one row of tiles. Another kernel may still write it: all writes go
  // through L2.
  DG_DEVICE void prefetch_ahead() const {
    const u32 columns = ceil_div(arg.pieces, kN), units = ceil_div(arg.blocks, 2), total = arg.groups * columns * units;
    const u32 share = total / gridDim.x, at = blockIdx.x * share + min_of(blockIdx.x, total - share * gridDim.x);
    if (at >= total) return;
    const u32 tile = at / units, block = (at - tile * units) * 2, group = tile / columns, column = tile - group * columns;
#pragma unroll
    for (u32 c = 0; c < kN; ++c)
      bulk_prefetch(arg.packed + piece(group, column * kN + c, block), min_of(min_of(arg.early, max_of(share, 1)) * 2, arg.blocks - block) * kPiece);
  }

  // Consumers past the last row of W multiply its last piece again, and store nothing.
  DG_DEVICE u64 piece(u32 group, u32 index, u32 block) const {
    return ((static_cast<u64>(group) * arg.pieces + min_of(index, arg.pieces - 1)) * arg.blocks + block) * kPiece;
  }

  DG_DEVICE void load(const Walk& walk, u32 unit, u32 stage) const {
    const u32 block = unit * 2, count = min_of(2, arg.blocks - block);
    barrier_arrive_expect(full(stage), count * (kN * kPiece + kBlockTokens + (C::kFp8 ? kT * 4 : 0)));
#pragma unroll
    for (u32 c = 0; c < kN; ++c)
      bulk_load(shared + kOffsetWeights + stage * kWeightBytes + c * kConsumerBytes,
                arg.packed + piece(walk.group, walk.column * kN + c, block), count * kPiece, full(stage), evict_first());
    // Scales of masked groups are matrices of m rows, one below the other.
    const u32 masked = +C::kGrouping == kMasked ? walk.group : 0;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (i >= count) break;
      Products::load_tokens(arg, shared + stage * kTokenBytes + i * kBlockTokens,
                            shared + kOffsetScales + stage * kScaleBytes + i * kBlockScales, full(stage), block + i, walk.row,
                            walk.row - masked * arg.m, masked * arg.blocks);
    }
  }

  DG_DEVICE void produce(Walk& walk) const {
    allow_next_kernel();
    const bool leader = elect_one();
    u32 stage = 0, parity = 0;
    while (walk.next()) {
      for (u32 unit = walk.k0; unit < walk.k1; ++unit) {
        if (leader) {
          barrier_wait(empty(stage), parity ^ 1);
          load(walk, unit, stage);
        }
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
  }

  DG_DEVICE void consume(Walk& walk) const {
    const u32 consumer = uniform(threadIdx.x / 128), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    u32 stage = 0, parity = 0;
    Sums sum, partial;
    Products::clear(sum);
    Products::clear(partial);
    // Hidden from the compiler, which would compute them again in each turn.
    const u32 weights = shared + kOffsetWeights + consumer * kConsumerBytes;
    const u32 mine = opaque(weights + warp * 1024 + lane * 16);
    const u32 exponents = opaque(weights + Products::Weights::exponents_offset(warp, lane));
    const u32 scales = opaque(shared + kOffsetScales + lane % 4 * 8);
    const u32 tokens = uniform(descriptor_low(shared)), barriers = uniform(full(0));
    while (walk.next()) {
      if constexpr (Products::kPromotes) Products::clear(sum);
#pragma unroll 1
      for (u32 unit = walk.k0; unit < walk.k1; ++unit) {
        barrier_wait(barriers + stage * 16, parity);
        const u32 weights_at = mine + stage * kWeightBytes, exponents_at = exponents + stage * kWeightBytes;
        const u32 scales_at = scales + stage * kScaleBytes;
        const u64 b = matrix_descriptor(tokens + stage * (kTokenBytes / 16));
        Products::block(sum, partial, weights_at, exponents_at, scales_at, b, unit - walk.k0);
        if (unit * 2 + 1 < arg.blocks)
          Products::block(sum, partial, weights_at + kPiece, exponents_at + kPiece, scales_at + kBlockScales, b + kBlockTokens / 16, 1);
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers + stage * 16 + 8);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      finish(walk, sum, consumer, thread, warp, lane);
    }
  }

  // The memory of a call: a flag for each consumer of each CTA, and then the sums that it leaves to the owner of its first tile.
  DG_DEVICE u64* flag(u32 cta, u32 consumer) const { return reinterpret_cast<u64*>(arg.workspace) + cta * kN + consumer; }
  DG_DEVICE float4* slot(u32 cta, u32 consumer, u32 thread) const {
    u8* sums = arg.workspace + ceil_div(gridDim.x * kN * kFlagBytes, 128) * 128;
    return reinterpret_cast<float4*>(sums) + (static_cast<u64>(cta) * kN + consumer) * (kT / 8) * 128 + thread;
  }

  DG_DEVICE void finish(const Walk& walk, Sums& sum, u32 consumer, u32 thread, u32 warp, u32 lane) const {
    if (walk.k0 > 0) {  // the tile is another CTA's
      float4* to = slot(blockIdx.x, consumer, thread);
#pragma unroll
      for (u32 c = 0; c < kT / 8; ++c) __stcg(to + c * 128, float4{sum[c * 4], sum[c * 4 + 1], sum[c * 4 + 2], sum[c * 4 + 3]});
      named_barrier_sync(kConsumerBarrier + consumer, 128);
      if (thread == 0)
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag(blockIdx.x, consumer)), "l"(static_cast<u64>(kReady)) : "memory");
      return;
    }
    if (walk.k1 < walk.units) add_tails(walk, sum, consumer, thread);
    const u32 piece = walk.column * kN + consumer;
    float f0 = 1.0f, f1 = 1.0f;
    if constexpr (!C::kAbsolute) {
      const float* factors = arg.factors + (static_cast<u64>(walk.group) * arg.pieces + min_of(piece, arg.pieces - 1)) * kPieceRows;
      f0 = __ldg(factors + warp * 16 + lane / 4), f1 = __ldg(factors + warp * 16 + lane / 4 + 8);
    }
    const u32 staging = shared + kOffsetStaging + consumer * kStaging;
    named_barrier_sync(kConsumerBarrier + consumer, 128);  // the last tile has been copied
#pragma unroll
    for (u32 c = 0; c < kT / 8; ++c) Products::stage(staging + c * 1024, &sum[c * 4], f0, f1, warp, lane);
    named_barrier_sync(kConsumerBarrier + consumer, 128);
    Products::template store<kT>(arg, staging, walk.row, walk.last, piece * kPieceRows, thread);
  }

  // Adds what CTAs after this one have of its last tile, in their order. Resets their flags, so that the next launch finds none set.
  DG_DEVICE void add_tails(const Walk& walk, Sums& sum, u32 consumer, u32 thread) const {
    const u32 tile_end = walk.unit + walk.units;
    u32 last = blockIdx.x + 1;
    while (last + 1 < gridDim.x && walk.begin_of(last + 1) < tile_end) ++last;
    for (u32 cta = blockIdx.x + 1 + thread; cta <= last; cta += 128) {
      u64 found;
      const WaitBound bound;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag(cta, consumer)) : "memory");
        bound.check();
      } while (found != kReady);
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag(cta, consumer)), "l"(0ull) : "memory");
    }
    named_barrier_sync(kConsumerBarrier + consumer, 128);
#pragma unroll 1
    for (u32 cta = blockIdx.x + 1; cta <= last; ++cta) {
      const float4* from = slot(cta, consumer, thread);
#pragma unroll
      for (u32 c = 0; c < kT / 8; ++c) {
        const float4 v = __ldcg(from + c * 128);
        sum[c * 4] += v.x, sum[c * 4 + 1] += v.y, sum[c * 4 + 2] += v.z, sum[c * 4 + 3] += v.w;
      }
    }
  }
};
