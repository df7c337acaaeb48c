// D[m, n] = (C[m, n] +) A[m, k] @ B[n, k]^T with mma.sync, for few rows of A, which are columns of the sums. B is K-major, or MN-major
// with 16-bit elements. FP8 has scales as in mma_gemm.cuh.
//
// Each warp multiplies blocks of K of its own, for all sums of the tile. It copies them to a ring of its own, kStages - 1 blocks ahead, so
// that warps wait for each other only once: when their sums are added, in the order of the warps. K can be split over CTAs too, whose sums
// are added in order.
//
// Constants supplies sizes and kinds (see kernels/mma_decode.cu.jinja).
#pragma once
#include "barrier.cuh"
#include "mma_output.cuh"
#include "mma_scales.cuh"
#include "order.cuh"

// An operand's part of a block of K in a warp: kRows rows of it and 128 bytes of K of each. MN-major: 64 elements of K and 64 rows, which
// are transposed while they are read. In shared memory pieces of 16 bytes of a line are permuted by XOR with the line's number, so that
// the eight rows of an 8x8 matrix lie in different banks.
template <u32 kRows, bool kMnMajor, u32 kWarps>
struct MmaWarpOperand {
  enum : u32 { kLines = kMnMajor ? 64 : +kRows, kBytes = kLines * 128, kPasses = kLines / 4 };
  static_assert(!kMnMajor || kRows == 64);
  static_assert(kRows % 8 == 0);

  // The copies of one lane: 16 bytes of every fourth line.
  struct Copies {
    const u8* from;   // of the warp's next block
    i64 step, block;  // bytes from a line to the fourth one after it, and from a block of this warp to the next
    int lines, bytes;  // left after this lane's first line, and after its place in a line: those of K count down

    // From `row` on of the operand's `rows` rows, and from the element `first` of `k` on. Elements have kSize bytes.
    template <u32 kSize>
    DG_DEVICE void start(const u8* base, i64 stride, u32 row, u32 rows, u32 first, u32 k, u32 lane) {
      const u32 own = lane / 8, unit = lane % 8;
      const i64 line = stride * kSize;
      step = 4 * line;
      if constexpr (kMnMajor) {
        from = base + (first + own) * line + row * kSize + unit * 16;
        block = kWarps * 64 * line;
        lines = static_cast<int>(k - first) - static_cast<int>(own);
        bytes = static_cast<int>((rows - row) * kSize) - static_cast<int>(unit * 16);
      } else {
        from = base + (row + own) * line + first * kSize + unit * 16;
        block = kWarps * 128;
        lines = static_cast<int>(rows) - static_cast<int>(row + own);
        bytes = static_cast<int>((k - first) * kSize) - static_cast<int>(unit * 16);
      }
    }

    // Starts the copies of the next block. What lies outside of the operand becomes zeros, and is not read.
    template <class... Policy>
    DG_DEVICE void next(u32 stage, u32 lane, Policy... policy) {
      const u32 own = lane / 8, to = stage + own * 128 + ((lane % 8) ^ own) * 16;
      const u32 count = bytes < 0 ? 0 : bytes > 16 ? 16 : static_cast<u32>(bytes);
      const u8* line = from;
#pragma unroll
      for (u32 pass = 0; pass < kPasses; ++pass) {
        copy_async((pass % 2 ? to ^ 64 : to) + pass * 512, line, static_cast<int>(pass * 4) < lines ? count : 0, policy...);
        line += step;
      }
      from += block;
      if constexpr (kMnMajor) lines -= kWarps * 64;
      else bytes -= kWarps * 128;
    }
  };

  // Where a lane reads fragments of rows of the sums; then those of 16 more rows and of 32 more bytes of K.
  static DG_DEVICE u32 left(u32 lane) {
    const u32 inner = lane % 8, middle = lane / 8 % 2, outer = lane / 16;
    if constexpr (kMnMajor) return (outer * 8 + inner) * 128 + (middle ^ inner) * 16;
    else return (middle * 8 + inner) * 128 + (outer ^ inner) * 16;
  }
  static DG_DEVICE u32 left(u32 place, u32 tile, u32 step) {
    if constexpr (kMnMajor) return (place ^ (tile * 32)) + step * 16 * 128;
    else return (place ^ (step * 32)) + tile * 16 * 128;
  }

  // The same of columns of the sums: matrices x4 are of 16 rows and 32 bytes of K, or with eight rows of 64 bytes.
  static DG_DEVICE u32 right(u32 lane) {
    const u32 inner = lane % 8, outer = kRows == 8 ? 0 : lane / 16, unit = kRows == 8 ? lane / 8 : lane / 8 % 2;
    return (outer * 8 + inner) * 128 + (unit ^ inner) * 16;
  }
};

template <class Constants>
struct MmaDecodeLayout {
  using Tile = Constants;
  enum : u32 { kTokens = Tile::kBlockM, kRows = Tile::kBlockN, kStages = Tile::kStages, kWarps = Tile::kWarps, kGrouping = kUngrouped };
  enum : bool { kScaled = Tile::kMma >= kMmaE4m3 };
  enum : u32 { kSize = kScaled ? 1 : 2, kBlockK = 128 / kSize, kSteps = 4 };
  enum : u32 { kTilesM = kRows / 16, kTilesN = kTokens / 8, kTiles = kTilesM * kTilesN };
  static_assert(kTokens == 8 || kTokens % 16 == 0);
  using Sums = float[kTilesM][kTilesN * 4];
  using A = MmaWarpOperand<kTokens, false, kWarps>;
  using B = MmaWarpOperand<kRows, Tile::kMnMajorB, kWarps>;

  // A warp's ring has stages of weights and tokens. At the end all rings together take the sums of all warps.
  enum : u32 { kStageBytes = A::kBytes + B::kBytes, kRingBytes = kStages * kStageBytes, kSharedBytes = kWarps * kRingBytes };
  static_assert(kStages >= 2 && kTiles * 512 <= kRingBytes);
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  // Tiles of 16x8 sums that a warp adds up and stores, and how many sums of a lane meet those of other parts; zeros are among them.
  enum : u32 { kOwned = ceil_div(kTiles, kWarps), kOwners = kTiles / kOwned, kMet = max_of(kOwned * 4, 8) };
  using Out = MmaSwappedOutput<Tile::kElement, Tile::kAccumulate, 1, 1>;
  using Scales = MmaScalesOf<Tile, kTilesM, kTilesN, true, false>;
  using Parts = PartsInOrder<kMet, 32>;
};

template <class Constants, class Arguments>
struct MmaDecode {
  using Layout = MmaDecodeLayout<Constants>;
  using Tile = Constants;
  using A = typename Layout::A;
  using B = typename Layout::B;
  using Sums = typename Layout::Sums;
  enum : u32 { kTilesM = Layout::kTilesM, kTilesN = Layout::kTilesN, kSteps = Layout::kSteps, kStages = Layout::kStages };
  enum : u32 { kWarps = Layout::kWarps, kOwned = Layout::kOwned };
  enum : bool { kGrouped = false, kScaled = Layout::kScaled };
  using Left = u32[kTilesM][4];
  using Right = u32[kSteps][kTilesN][2];

  const Arguments& arg;
  u32 shared;

  DG_DEVICE u32 m() const { return Tile::kShapeM ? +Tile::kShapeM : arg.m; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? +Tile::kShapeN : arg.n; }
  DG_DEVICE u32 k() const { return Tile::kShapeK ? +Tile::kShapeK : arg.k; }
  DG_DEVICE u32 columns() const { return n(); }

  DG_DEVICE void run() const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * Layout::kRows;
    const EvenOrder order(arg.share, arg.more, blockIdx.y);
    const u32 first = order.begin + warp, blocks = warp < order.length ? ceil_div(order.length - warp, kWarps) : 0;
    prefetch(column, order);
    typename B::Copies weights;
    typename A::Copies tokens;
    weights.template start<Layout::kSize>(arg.b, arg.b_stride, column, n(), first * Layout::kBlockK, k(), lane);
    tokens.template start<Layout::kSize>(arg.a, arg.a_stride, 0, m(), first * Layout::kBlockK, k(), lane);
    wait_for_previous_kernel();
    allow_next_kernel();
    const u32 ring = shared + warp * Layout::kRingBytes, last = ring + (kStages - 1) * Layout::kStageBytes;
    u32 to = ring, left = blocks;
    const auto copy = [&] {
      if (left > 0) {
        weights.next(to, lane, kEvictFirst);  // L2 keeps what others need again
        tokens.next(to + B::kBytes, lane);
        --left;
      }
      commit_copies();
      to = to == last ? ring : to + Layout::kStageBytes;
    };
#pragma unroll 1
    for (u32 stage = 0; stage + 1 < kStages; ++stage) copy();
    const typename Layout::Parts parts(arg.memory, Layout::kOwners, warp, lane);
    if (gridDim.y > 1 && warp < Layout::kOwners) parts.open(lane);

    Sums sum;
    clear(sum);
    u32 stage = ring;
    const auto multiply_next = [&](Sums& into, const auto& factors) {
      wait_for_copies<kStages - 2>();
      __syncwarp();  // the block has come, and all lanes have read the one before
      copy();
      multiply(into, stage + B::left(lane), stage + B::kBytes + A::right(lane), factors);
      stage = stage == last ? ring : stage + Layout::kStageBytes;
    };
    if constexpr (kScaled) {
      typename Layout::Scales scales(*this, 0, column, m(), Index<0>(), first, 0, lane);
      if (blocks > 0) scales.load(*this, kWarps);
#pragma unroll 1
      for (u32 block = 0; block < blocks; ++block) {
        Sums partial;
        clear(partial);
        auto factors = scales.take();
        if constexpr (Tile::kMma == kMmaWidened) factors.multiply(widened());
        if (block + 1 < blocks) scales.load(*this, kWarps);
        multiply_next(partial, factors);
        factors.promote(sum, partial);
      }
    } else {
#pragma unroll 1
      for (u32 block = 0; block < blocks; ++block) multiply_next(sum, MmaOnes());
    }
    wait_for_copies<0>();
    finish(sum, parts, column, warp, lane);
  }

 private:
  static DG_DEVICE void clear(Sums& sum) {
#pragma unroll
    for (u32 i = 0; i < kTilesM; ++i)
#pragma unroll
      for (u32 j = 0; j < kTilesN * 4; ++j) sum[i][j] = 0.0f;
  }

  // Fetches the first blocks of weights into L2, which need not wait for the previous kernel, whoever has written them.
  DG_DEVICE void prefetch(u32 column, const EvenOrder& order) const {
    if constexpr (kCapability >= 900 && !Tile::kMnMajorB) {
      constexpr u32 kEach = Layout::kRows / kWarps;  // a lane issues it after the other
      const u32 row = column + threadIdx.x / 32 * kEach + threadIdx.x % 32, from = order.begin * 128, end = k() * Layout::kSize & ~15u;
      const u32 bytes = min_of(min_of(order.length, kWarps * (kStages - 1)) * 128, end > from ? end - from : 0);
      if (threadIdx.x % 32 < kEach && row < n() && bytes > 0)
        prefetch_bytes(arg.b + row * (arg.b_stride * Layout::kSize) + from, bytes);
    }
    if constexpr (kCapability >= 900 && kScaled && !Tile::kExponents) {
      if (threadIdx.x < order.length)
        prefetch_line(arg.scale_b + column / 128 * arg.scale_b_stride_n + (order.begin + threadIdx.x) * arg.scale_b_stride_k);
    }
  }

  static DG_DEVICE void read(Left& x, u32 place, u32 step) {
#pragma unroll
    for (u32 i = 0; i < kTilesM; ++i)
      load_matrices<Tile::kMnMajorB>(B::left(place, i, step), x[i][0], x[i][1], x[i][2], x[i][3]);
  }

  static DG_DEVICE void read(Right& x, u32 place) {
    if constexpr (kTilesN == 1) {
#pragma unroll
      for (u32 step = 0; step < kSteps; step += 2)
        load_matrices<false>(place ^ (step * 32), x[step][0][0], x[step][0][1], x[step + 1][0][0], x[step + 1][0][1]);
    } else {
#pragma unroll
      for (u32 step = 0; step < kSteps; ++step)
#pragma unroll
        for (u32 j = 0; j < kTilesN; j += 2)
          load_matrices<false>((place ^ (step * 32)) + j * 1024, x[step][j][0], x[step][j][1], x[step][j + 1][0], x[step][j + 1][1]);
    }
  }

  // Multiplies a block of K.
  template <class Factors>
  static DG_DEVICE void multiply(Sums& sum, u32 weights, u32 tokens, const Factors& factors) {
    Right right;
    Left left[2];
    read(right, tokens);
    read(left[0], weights, 0);
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) read(left[(step + 1) % 2], weights, step + 1);
      add(sum, left[step % 2], right[step], factors);
    }
  }

  template <class Factors>
  static DG_DEVICE void add(Sums& sum, const Left& x, const u32 (&y)[kTilesN][2], const Factors& factors) {
    if constexpr (Tile::kMma == kMmaWidened) {
      // A word has four bytes of K, in the same order in both operands.
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        u32 right[kTilesN][2];
#pragma unroll
        for (u32 j = 0; j < kTilesN; ++j) widen(y[j][half], right[j][0], right[j][1]);
#pragma unroll
        for (u32 i = 0; i < kTilesM; ++i) {
          u32 left[4];
          widen(x[i][2 * half], left[0], left[2]);
          widen(x[i][2 * half + 1], left[1], left[3]);
#pragma unroll
          for (u32 j = 0; j < kTilesN; ++j) multiply_add<kMmaF16>(&sum[i][j * 4], left, right[j]);
        }
      }
    } else {
#pragma unroll
      for (u32 j = 0; j < kTilesN; ++j)
#pragma unroll
        for (u32 i = 0; i < kTilesM; ++i) multiply_add<Tile::kMma>(&sum[i][j * 4], x[i], y[j], factors.of_left(i), factors.of_right(j));
    }
  }

  // Four bytes of E4M3 as FP16. Without an instruction that does it, they are divided by 256: exponents are one bit longer, and scales
  // multiply products by 256 * 256.
  static DG_DEVICE float widened() { return kCapability >= 890 ? 1.0f : 65536.0f; }
  static DG_DEVICE void widen(u32 x, u32& low, u32& high) {
    if constexpr (kCapability >= 890) {
      widen_fp8(x, low, high);
    } else {
      low = widen_pair(permute_bytes(x, 0x9180));
      high = widen_pair(permute_bytes(x, 0xb3a2));
    }
  }
  // Of two bytes as 16-bit integers with a sign. NaN has the bits of 480 / 256, and 448 is the largest number. So 480 * 144 alone is
  // infinite, and NaN times zero. Integers would need a branch.
  static DG_DEVICE u32 widen_pair(u32 x) {
    const u32 small = (x << 7) & 0xbf80bf80, zero = 0;
    return multiply_add_halves(multiply_halves(small, 0x78807880), zero, small);
  }

  // Adds the sums of all warps, and then of all parts of K, and stores them.
  DG_DEVICE void finish(Sums& sum, const typename Layout::Parts& parts, u32 column, u32 warp, u32 lane) const {
    constexpr u32 kTiles = Layout::kTiles;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kTiles; ++i) store_shared_sums(shared + ((warp * kTiles + i) * 32 + lane) * 16, &sum[i / kTilesN][i % kTilesN * 4]);
    __syncthreads();
    if (warp >= Layout::kOwners) return;
    float own[Layout::kMet] = {};
#pragma unroll
    for (u32 i = 0; i < kOwned; ++i) {
      float each[kWarps][4];
#pragma unroll
      for (u32 from = 0; from < kWarps; ++from)
        load_shared_sums(shared + ((from * kTiles + warp * kOwned + i) * 32 + lane) * 16, each[from]);
#pragma unroll
      for (u32 x = 0; x < 4; ++x) {
        own[i * 4 + x] = each[0][x];
#pragma unroll
        for (u32 from = 1; from < kWarps; ++from) own[i * 4 + x] = __fadd_rn(own[i * 4 + x], each[from][x]);
      }
    }
    if (gridDim.y > 1) {
      if (!parts.close(own, lane)) return;
      parts.add(own, 0);
    }
#pragma unroll
    for (u32 i = 0; i < kOwned; ++i) {
      const u32 tile = warp * kOwned + i;
      Layout::Out::store(*this, reinterpret_cast<float(&)[1][4]>(own[i * 4]), tile % kTilesN * 8, column + tile / kTilesN * 16, m(),
                         Index<0>(), lane);
    }
  }

  static DG_DEVICE void store_shared_sums(u32 address, const float* x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
  }
  static DG_DEVICE void load_shared_sums(u32 address, float (&x)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address) : "memory");
  }
};
