// D = A @ W^T of many rows, W in MXFP4. A decoding warpgroup turns each block of weights once for a whole tile into an operand in
// shared memory, and two consumers multiply it as any other: 256 tokens by 128 weights, one CTA an SM, whole tiles in order.
//
// Who decodes a block also loads its tokens, so that a ring and its barriers are all that roles share. Two teams of two warps take
// blocks in turn: one waits for its fence or its packed weights while the other decodes. With one team of four warps dense products in
// FP8 took 3 to 4% longer, but 32 groups of 512 rows by 4096 x 7168 took 9% less (H200).
#pragma once
#include "b16_mainloop.cuh"
#include "fp4_products.cuh"
#include "fp4_tiles.cuh"
#include "fp8_mainloop.cuh"
#include "scaling.cuh"

// Scaling by tokens alone: a thread has two in each m64 slice.
template <u32 kSlices, u32 kStageBytes>
struct RowTokensOnly {
  struct Factors {
    float token[kSlices][2];
  };
  enum : bool { kStartsFresh = true };
  enum : u32 { kPage = 1u << 30 };

  NoPages weights;
  const u32 tokens;  // address of this thread's first scale in stage 0

  DG_DEVICE explicit RowTokensOnly(u32 tokens) : tokens(opaque(tokens)) {}

  DG_DEVICE void begin(Factors&) const {}
  DG_DEVICE void before_arrival(Factors&, u32) const {}
  DG_DEVICE void arrive(Factors&, u32, u32) const {}
  DG_DEVICE void after_arrival(Factors& factors, u32 stage) const {
#pragma unroll
    for (u32 i = 0; i < 2 * kSlices; ++i)
      factors.token[i / 2][i % 2] = load_shared(tokens + stage * kStageBytes + i / 2 * 256 + i % 2 * 32);
  }

  template <bool kFresh, u32 kSlice, u32 kColumn, u32 kColumns>
  DG_DEVICE void promote(float* sum, const float* partial, const Factors& factors) const {
    const float low = settled(factors.token[kSlice][0]), high = settled(factors.token[kSlice][1]);
#pragma unroll
    for (u32 i = 0; i < kColumns / 2; ++i) add<kFresh>(sum[i], i & 2 ? high : low, partial[i]);
  }
};

template <class C, class Mma, class Arguments>
struct Fp4Large {
  using Products = Fp4Products<C, Mma>;
  using Tiles = Fp4Tiles<C, Arguments>;
  using Table = typename Tiles::Table;
  // A stage has 128 of K in FP8, or 64 in BF16: rows of 128 bytes.
  enum : u32 { kT = C::kT, kStages = C::kStages, kConsumers = 2, kSlices = 2, kBox = kSlices * 64, kSteps = C::kFp8 ? 1 : 2 };
  enum : u32 { kTeams = 2, kTeamWarps = 2, kGroups = 4, kPiece = piece_bytes(false) };
  enum : u32 { kTokenBytes = kT * 128, kWeightBytes = 128 * 128, kScaleBytes = C::kFp8 ? kT * 4 : 0 };
  // Whether a consumer that has no rows of a tile idles.
  enum : bool { kIdles = has_table(C::kGrouping) };
  enum : u32 { kOffsetWeights = kStages * kTokenBytes, kOffsetStaging = kOffsetWeights + kStages * kWeightBytes };
  enum : u32 { kOffsetScales = kOffsetStaging + kConsumers * 4 * 1024, kOffsetFactors = kOffsetScales + kStages * kScaleBytes };
  enum : u32 { kOffsetNotes = kOffsetFactors + kConsumers * 4 * 512, kOffsetTable = kOffsetNotes + kConsumers * 4 * 16, kOffsetPacked = kOffsetTable + Tiles::kBytes };
  // A warp has a piece of the block that it decodes next.
  enum : u32 { kOffsetBarriers = kOffsetPacked + kTeams * kTeamWarps * kPiece };
  static_assert(kOffsetBarriers + kStages * 16 == C::kSharedBytes && C::kThreads == 384 && kT == kConsumers * kBox && !C::kAbsolute);

  using Barriers = PipelineBarriers<kStages, kConsumers * 4, 1>;
  using Scaling = RowTokensOnly<kSlices, kScaleBytes>;
  struct Shape {
    enum : u32 { kStages = C::kStages, kConsumers = 2, kPartials = 1, kStep = 1, kTurns = 2, kInTurn = 1 };
    enum : u32 { kRows = kT, kColumns = 128, kSlices = 2, kBytesLeft = kTokenBytes, kBytesRight = kWeightBytes };
    enum : bool { kPeeks = false, kFresh = true, kClears = false };
  };

  const Arguments& arg;
  u32 shared;

  DG_DEVICE Barriers barriers() const { return {shared + kOffsetBarriers}; }

  DG_DEVICE void run() {
    const u32 warp = threadIdx.x / 32, table = shared + kOffsetTable;
    if (warp == 8) {
      if (elect_one()) {
        tma_prefetch_map(arg.map_a);
        if constexpr (C::kFp8) tma_prefetch_map(arg.map_sfa);
        for (u32 stage = 0; stage < kStages; ++stage) {
          barrier_init(barriers().full(stage), 1 + kTeamWarps);
          barrier_init(barriers().empty(stage), kConsumers * 4);
        }
        barrier_init_fence();
      }
      __syncwarp();
    }
    wait_for_previous_kernel();
    if constexpr (has_table(C::kGrouping)) Table::build(arg, table, arg.m);
    if constexpr (Tiles::kUnits > 1) {
      if (warp == 0) Tiles::list(table, threadIdx.x);
    }
    __syncthreads();
    if constexpr (+C::kGrouping == kIndex) {
      if (warp == 9)
        zero_padding<Table, Tiles::kUnit, C::kSegments, 2>(table, arg.d, arg.d_stride, arg.m, arg.n, arg.aligned != 0, threadIdx.x % 32,
                                                           [](u32) {});
    }
    if (warp >= 8) {
      registers_shrink<C::kProducerRegisters>();
      decode();
    } else {
      registers_grow<C::kConsumerRegisters>();
      if constexpr (C::kFp8) consume_fp8(); else consume_bf16();
    }
  }

  // Where a team is: a tile and a block of K.
  struct Place {
    Tiles tile;
    u32 block;

    // Whether it is in another tile then.
    DG_DEVICE bool go_on(const Arguments& arg, u32 table) {
      block += kTeams;
      if (block < arg.blocks) return false;
#pragma unroll 1
      do {
        block -= arg.blocks;
        tile.advance(arg, table);
      } while (tile.valid() && block >= arg.blocks);
      return true;
    }
  };

  DG_DEVICE const u8* weights(const Place& at, u32 piece) const {
    const u32 index = min_of(at.tile.column / kPieceRows + piece, arg.pieces - 1);
    return arg.packed + ((static_cast<u64>(at.tile.group) * arg.pieces + index) * arg.blocks + at.block) * kPiece;
  }

  DG_DEVICE void load_tokens(const Place& at, u32 stage, u32 step) const {
    const u32 full = barriers().full(stage), to = shared + stage * kTokenBytes, x = (at.block * kSteps + step) * (C::kFp8 ? 128 : 64);
    const bool both = at.tile.row + kBox < at.tile.last;  // otherwise the second consumer has no rows
    barrier_arrive_expect(full, (both ? 2 : 1) * kBox * 128 + kScaleBytes);
    tma_load(to, arg.map_a, full, x, at.tile.row);
    if (both) tma_load(to + kBox * 128, arg.map_a, full, x, at.tile.row + kBox);
    if constexpr (C::kFp8) {
      // Scales of masked groups are matrices of m rows, one below the other.
      const u32 masked = +C::kGrouping == kMasked ? at.tile.group : 0;
      tma_load(shared + kOffsetScales + stage * kScaleBytes, arg.map_sfa, full, at.tile.row - masked * arg.m, masked * arg.blocks + at.block);
    }
  }

  // Copies a piece for a warp. No other warp reads it, so that no barrier is needed.
  DG_DEVICE void copy(u32 to, const u8* from, u32 exponents_at) const {
#pragma unroll
    for (u32 i = 0; i < 2 * kGroups; ++i)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * 512), "l"(from + i * 512) : "memory");
    if (threadIdx.x % 4 > 0) return;  // four lanes have the same exponents
#pragma unroll
    for (u32 j = 0; j < kGroups; ++j)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + exponents_at + j * 32), "l"(from + exponents_at + j * 32) : "memory");
  }

  // A warp decodes one of the two pieces of its team's blocks.
  DG_DEVICE void decode() const {
    const u32 thread = threadIdx.x - 256, lane = thread % 32, team = uniform(thread / 32 / kTeamWarps), piece = uniform(thread / 32 % kTeamWarps);
    const u32 table = shared + kOffsetTable;
    if (thread == 0) allow_next_kernel();
    Place at{Tiles(arg, table), 0};
    if (team > 0 && at.tile.valid()) {
      at.block = team - kTeams;
      at.go_on(arg, table);
    }
    const u32 row = piece * 64 + lane / 4;
    const u32 to = opaque(shared + kOffsetWeights + row * 128 + lane / 4 * 16 + lane % 4 * 4);
    const u32 packed = opaque(shared + kOffsetPacked + thread / 32 * kPiece + lane * 16);
    const u32 exponents_at = Products::Weights::exponents_offset(0, lane) - lane * 16;
    Place ahead = at;
    const u8* from = nullptr;
    const auto turn = [&] {
      if (ahead.tile.valid()) from = weights(ahead, piece) + lane * 16;
    };
    const auto copy_next = [&] {
      if (ahead.tile.valid()) {
        copy(packed, from, exponents_at);
        from += kTeams * kPiece;
        if (ahead.go_on(arg, table)) turn();
      }
    };
    turn();
    copy_next();
    u32 stage = team * kSteps, parity = 0;
    while (at.tile.valid()) {
      copies_arrive();
#pragma unroll
      for (u32 step = 0; step < kSteps; ++step) {
        barrier_wait(barriers().empty(stage), parity ^ 1);
        if (piece == 0 && elect_one()) load_tokens(at, stage, step);
        __syncwarp();
        const u32 base = to + stage * kWeightBytes;
        typename Products::Weights now, next;
        read(now, packed, exponents_at);
#pragma unroll
        for (u32 j = 0; j < kGroups; ++j) {
          if (j + 1 < kGroups) read(next, packed + (j + 1) * 1024, exponents_at - (j + 1) * (1024 - 32));
          write(base + j * 2048, now, step);
          now = next;
        }
        __syncwarp();  // all lanes have read
        if (step + 1 == kSteps) copy_next();
        fence_shared_to_tma();  // and to the tensor cores
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers().full(stage));
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      stage += kSteps * (kTeams - 1);
      if (stage >= kStages) stage -= kStages, parity ^= 1;
      at.go_on(arg, table);
    }
  }

  static DG_DEVICE void read(typename Products::Weights& words, u32 codes, u32 exponents_at) {
    words.exponents[0] = load_word(codes + exponents_at);
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const Bytes16 found = load_shared_16(codes + h * 512);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) words.codes[h][i] = found.words[i];
    }
  }

  // Writes them decoded. In a row of 128 bytes of the operand each word goes to two or four units of 16 bytes, and the eight rows of an
  // instruction have units of their own, so that there are no bank conflicts.
  static DG_DEVICE void write(u32 to, const typename Products::Weights& words, u32 step) {
    u32 a[16];
    if constexpr (C::kFp8) {
      words.template decode<0, 4>(a);
    } else if (step == 0) {
      words.template decode<0, 2>(a);
    } else {
      words.template decode<2, 2>(a);
    }
#pragma unroll
    for (u32 i = 0; i < 16; ++i) store_word((to ^ i / 2 * 16) + i % 2 * 1024, a[i]);
  }

  // A consumer's rows of a tile.
  DG_DEVICE bool has_rows(const Tiles& tile, u32 first) const { return !kIdles || uniform(tile.row + first < tile.last) != 0; }

  // Starts loading the factors of a tile's rows of W, four by each thread of a warp, to shared memory of that warp, and notes there where
  // the tile is: beside the sums there are no registers for it.
  DG_DEVICE void load_factors(const Tiles& tile) const {
    const u32 thread = opaque(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const u32 first = tile.column + lane * 4;
    const float* from = arg.factors + static_cast<u64>(tile.group) * arg.pieces * kPieceRows + first;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared + kOffsetFactors + warp * 512 + lane * 16), "l"(from), "r"(first < arg.pieces * kPieceRows ? 16 : 0) : "memory");
    const u32 note = shared + kOffsetNotes + warp * 16;
    store_word(note, tile.row), store_word(note + 4, tile.last), store_word(note + 8, tile.column);
  }

  // 16 columns of a thread's final sums, times the factors of W's rows, which begin at this address.
  static DG_DEVICE void pack(u32 (&packed)[4], const float* sum, u32 factors) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      float even, odd;
      load_shared_pair(factors + i * 32, even, odd);
      packed[i * 2] = pack_bf16(sum[i * 4] * even, sum[i * 4 + 1] * odd);
      packed[i * 2 + 1] = pack_bf16(sum[i * 4 + 2] * even, sum[i * 4 + 3] * odd);
    }
  }
  DG_DEVICE u32 factors_at(u32 thread) const { return shared + kOffsetFactors + thread / 32 * 512 + thread % 4 * 8; }

  // Stores 64 rows by 32 columns, of which `take(packed, i)` gives the i-th 16 columns. A warp has 16 rows of its own, which it stages in
  // 1024 bytes, each row in four units of 16 bytes that are swizzled over pairs of rows.
  template <class Take>
  DG_DEVICE void put(u32 row, u32 last, u32 column, const Take& take) const {
    // Not known to be the same each time: addresses would be kept in registers beside the sums.
    const u32 thread = opaque(threadIdx.x), warp = thread / 32, lane = thread % 32, own = lane % 16;
    const u32 staging = shared + kOffsetStaging + warp * 1024;
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      u32 packed[4];
      take(packed, i, thread);
      store_matrix_x4(staging + own * 64 + ((i * 2 + lane / 16) ^ own / 2 % 4) * 16, packed[0], packed[1], packed[2], packed[3]);
    }
    __syncwarp();
    // Without branches that lanes take apart: behind them ptxas would not know that stages are the same in all lanes, and would move
    // descriptors to uniform registers before each product.
    const u32 x = column + lane % 4 * 8, columns = x < arg.n ? arg.n - x : 0;
#pragma unroll
    for (u32 first = 0; first < 16; first += 8) {
      const u32 r = first + lane / 4, y = row + warp % 4 * 16 + r, some = y < last ? columns : 0;
      const Bytes16 v = load_shared_16(staging + r * 64 + (lane % 4 ^ r / 2 % 4) * 16);
      u16* to = reinterpret_cast<u16*>(arg.d) + static_cast<u64>(y) * arg.d_stride + x;
      if (arg.aligned) {
        asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}"
                     ::"l"(to), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]), "r"(some) : "memory");
      } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
          asm volatile("{\n .reg .pred p;\n setp.gt.u32 p, %2, %3;\n @p st.global.u16 [%0], %1;\n}"
                       ::"l"(to + i), "h"(static_cast<u16>(v.words[i / 2] >> (16 * (i % 2)))), "r"(some), "r"(i) : "memory");
      }
    }
  }

  // A warp's copies are there for all of its lanes.
  static DG_DEVICE void copies_arrive() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }

  DG_DEVICE void consume_fp8() const {
    using Mainloop = Fp8Mainloop<Shape, Mma, Barriers, Scaling>;
    const u32 consumer = uniform(threadIdx.x / 128), lane = opaque(threadIdx.x) % 32, first = consumer * kBox;
    typename Mainloop::Sums sum;
    Tiles tile(arg, shared + kOffsetTable);
    const Scaling scaling(shared + kOffsetScales + (first + threadIdx.x % 128 / 32 * 16 + lane / 4) * 4);
    Mainloop mainloop(barriers(), scaling, uniform(descriptor_low(shared + first * 128)),
                      uniform(descriptor_low(shared + kOffsetWeights)), consumer, lane);
    mainloop.turns.begin();
    bool busy = has_rows(tile, first);
    if (tile.valid() && (!kIdles || busy)) mainloop.start();
    // A CTA's last tile has a copy of `finish` of its own, see Fp8Gemm::consume.
    for (bool more = tile.valid(); more;) {
      load_factors(tile);
      const auto finished = [&](auto unit) {
        constexpr u32 kSlice = decltype(unit)::kValue;
        copies_arrive();
        const u32 note = shared + kOffsetNotes + opaque(threadIdx.x) / 32 * 16;
        const u32 row = load_word(note) + first + kSlice * 64, last = load_word(note + 4), column = load_word(note + 8);
#pragma unroll
        for (u32 box = 0; box < 4; ++box)
          put(row, last, column + box * 32, [&](u32 (&packed)[4], u32 i, u32 thread) {
            pack(packed, sum[kSlice] + box * 16 + i * 8, factors_at(thread) + box * 128 + i * 64);
          });
      };
      const auto look_ahead = [&] { tile.advance(arg, shared + kOffsetTable); };
      if (!kIdles || busy) {
        mainloop.resume(sum, arg.blocks, look_ahead, finished);
      } else {
        mainloop.idle(sum, arg.blocks, look_ahead, typename Mainloop::Nothing());
        mainloop.at.stage = uniform(mainloop.at.stage), mainloop.at.parity = uniform(mainloop.at.parity);
      }
      more = tile.valid();
      if (!more) {
        finished(Index<kSlices - 1>());
        break;
      }
      busy = has_rows(tile, first);
      if (!kIdles || busy) mainloop.start();
      finished(Index<kSlices - 1>());
    }
    // For ptxas: without this barrier it assumes that products are in flight after the loop, and serialises all of them.
    named_barrier_sync(kConsumerBarrier + consumer, 128);
    mainloop.turns.end();
  }

  DG_DEVICE void consume_bf16() const {
    using Mainloop = B16Mainloop<Shape, Mma, Barriers>;
    const u32 consumer = uniform(threadIdx.x / 128), lane = opaque(threadIdx.x) % 32, first = consumer * kBox;
    typename Mainloop::Sums sum;
    Mainloop mainloop(barriers(), uniform(descriptor_low(shared + first * 128)), uniform(descriptor_low(shared + kOffsetWeights)), lane);
    const u32 blocks = arg.blocks * kSteps;
    // A tile's results are stored while the next tile's products run.
    u32 packed[kSlices * 8][4] = {}, row = 0, last = 0, column = 0;
    const auto put_one = [&](auto part) {
      constexpr u32 kPart = decltype(part)::kValue;
      put(row + kPart / 4 * 64, last, column + kPart % 4 * 32, [&](u32 (&out)[4], u32 i, u32) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) out[j] = packed[kPart * 2 + i][j];
      });
    };
    for (Tiles tile(arg, shared + kOffsetTable); tile.valid(); tile.advance(arg, shared + kOffsetTable)) {
      if (tile.row + first >= tile.last) {
        mainloop.skip(blocks);
        continue;
      }
      mainloop.start(sum);
      load_factors(tile);
      mainloop.template resume<kSlices * 4>(sum, blocks, put_one);
      row = tile.row + first, last = tile.last, column = tile.column;
      copies_arrive();
#pragma unroll
      for (u32 i = 0; i < kSlices * 8; ++i) pack(packed[i], sum[i / 8] + i % 8 * 8, factors_at(threadIdx.x) + i % 8 * 64);
      __syncwarp();
    }
    put_all<0>(put_one);
  }

  template <u32 kPart, class PutOne>
  static DG_DEVICE void put_all(const PutOne& put_one) {
    put_one(Index<kPart>());
    if constexpr (kPart + 1 < kSlices * 4) put_all<kPart + 1>(put_one);
  }
};
