// D[m, n] = A[m, k] @ B[n, k]^T for FP8 operands with float32 scale factors, 1 x 128 for A, 128 x 128 for B, where most of
// the time is the launch. TMA must have its maps fetched and its barriers made before a first load, and warps meet in
// between; a thread that copies needs an address. So there are no producers, and no ring: a CTA has one tile of 64 tokens,
// all of whose K fits into shared memory. Its warpgroups take blocks of K in turn: each copies its own, multiplies and
// promotes them; their sums are added up in shared memory. A CTA runs each of these instructions once or a few times, the first
// time at twice the cost: so there are few.
//
// Tile supplies the sizes and Mma the wgmma of this kernel (see kernels/sm90_fp8_small.cu.jinja).
#pragma once
#include "barrier.cuh"
#include "copy.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

struct Fp8SmallArguments {
  const u8 *a, *b;
  i64 a_stride, b_stride;
  u32 m, n, k;
  u32 b_late;  // a kernel that may still run writes B or its scales
  const float *scale_a, *scale_b;
  i64 scale_a_stride, scale_b_stride_n, scale_b_stride_k;
  u16* d;
  i64 d_stride;
};

template <class Tile, class Mma>
struct Fp8Small {
  enum : u32 { kBlockM = 64, kBlockN = Tile::kBlockN, kBlockK = 128 };
  enum : u32 { kShares = Tile::kShares, kStages = Tile::kStages };  // blocks of K that each share may have
  // Shared memory, in this order; operands are swizzled, and start on 1024-byte boundaries.
  enum : u32 { kBytesA = kBlockM * kBlockK, kStageBytes = kBytesA + kBlockN * kBlockK };
  enum : u32 { kScaleBytes = kBlockM * 4 + 16 };  // A's, and one of B
  enum : u32 { kOffsetScales = kShares * kStages * kStageBytes };
  enum : u32 { kOffsetSums = kOffsetScales + kShares * kStages * kScaleBytes };
  // Eight more than there are columns: four rows of a warp's accumulators then lie in different banks.
  enum : u32 { kSumsRow = kBlockN + 8, kSumsBytes = kBlockM * kSumsRow * 4 };
  enum : u32 { kSharedBytes = kOffsetSums + kShares * kSumsBytes };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");

  enum : u32 { kStep = kShares * kBlockK };  // from one of a share's blocks of K to the next

  const Fp8SmallArguments& arg;
  const u32 share, thread;
  const u32 row, column;  // of D, where the tile begins
  const u32 blocks;       // of K, that this share has
  const u32 sums;         // addresses: of all shares' sums,
  const u32 stages, scales;  // and of this one's stages, and of their scales

  DG_DEVICE Fp8Small(const Fp8SmallArguments& arg, u32 shared)
      : arg(arg), share(uniform(threadIdx.x / 128)), thread(threadIdx.x % 128), row(blockIdx.y * kBlockM),
        column(blockIdx.x * kBlockN), blocks((ceil_div(k(), kBlockK) + kShares - 1 - share) / kShares),
        sums(shared + kOffsetSums), stages(shared + share * kStages * kStageBytes),
        scales(shared + kOffsetScales + share * kStages * kScaleBytes) {}

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }

  DG_DEVICE void run() const {
    if (thread < kHalf) {
      wait_for_previous_kernel();
      allow_next_kernel();
      copy_rows<kBlockM>(arg.a, arg.a_stride, row, m(), stages, [](u32) { copies_commit(); });
    } else {
      if (arg.b_late) {
        prefetch_weights();
        wait_for_previous_kernel();
      }
      copy_rows<kBlockN>(arg.b, arg.b_stride, column, n(), stages + kBytesA, [](u32) {});
      wait_for_previous_kernel();
      allow_next_kernel();
      copy_scales();
    }
    float sum[kBlockN / 2];
    multiply(sum);
    hand_over(sum);
  }

  // Half of a warpgroup copies tokens, 16 bytes of each eighth row, half of it weights and all scales: a warp has fewer
  // addresses to find. A group of copies for each block of K: what was asked for before is there when its last one is.
  enum : u32 { kHalf = 64, kRows = kHalf / 8 };

  // Rows past the edge are left as they are: they make rows or columns of the tile that are not stored. What lies past K
  // must be zero.
  template <u32 kCount, class Behind>
  DG_DEVICE void copy_rows(const u8* operand, i64 stride, u32 begin, u32 end, u32 stage, const Behind& behind) const {
    const u32 first = thread % kHalf / 8, unit = thread % 8;
    const u32 to = stage + first * kBlockK + (unit ^ first) * 16;  // rows eight apart are swizzled alike
    const u32 x = share * kBlockK + unit * 16, left = k() - min_of(k(), x);  // 16 bytes are whole or missing
    const u8* from[kCount / kRows];
#pragma unroll
    for (u32 i = 0; i < kCount / kRows; ++i) from[i] = operand + (begin + first) * stride + x + i * kRows * stride;
#pragma unroll
    for (u32 step = 0; step < kStages; ++step) {
      if (step >= blocks) break;
#pragma unroll
      for (u32 i = 0; i < kCount / kRows; ++i)
        copy_16(begin + first + i * kRows < end, to + step * kStageBytes + i * kRows * kBlockK, from[i] + step * kStep,
                left > step * kStep);
      behind(step);
    }
  }

  // A thread for each token; one of them has the weights' as well.
  DG_DEVICE void copy_scales() const {
    const u32 token = thread - kHalf;
    const float* of_weights = arg.scale_b + column / 128 * arg.scale_b_stride_n + share * arg.scale_b_stride_k;
    const float* of_token = arg.scale_a + row + token + share * arg.scale_a_stride;
#pragma unroll
    for (u32 step = 0; step < kStages; ++step) {
      if (step >= blocks) break;
      copy_4(row + token < m(), scales + step * kScaleBytes + token * 4, of_token);
      copy_4(token == 0, scales + step * kScaleBytes + kBlockM * 4, of_weights);
      of_token += arg.scale_a_stride * kShares;
      of_weights += arg.scale_b_stride_k * kShares;
      copies_commit();
    }
  }

  // The way from HBM into L2 need not wait for the previous kernel. Up to eight blocks, a lane of eight for each.
  DG_DEVICE void prefetch_weights() const {
    static_assert(kStages <= 8);
    const u32 step = thread % 8;
    if (step < blocks) {
#pragma unroll
      for (u32 rows = thread % kHalf / 8; rows < kBlockN; rows += kRows)
        if (column + rows < n()) prefetch_line(arg.b + (column + rows) * arg.b_stride + share * kBlockK + step * kStep);
    }
  }

  DG_DEVICE void multiply(float (&sum)[kBlockN / 2]) const {
    float partial[kBlockN / 2];
#pragma unroll
    for (u32 i = 0; i < kBlockN / 2; ++i) sum[i] = partial[i] = 0.0f;
    const u32 rounds = ceil_div(ceil_div(k(), kBlockK), kShares);
    u32 low = uniform(descriptor_low(stages)), scale = scales;
#pragma unroll 1
    for (u32 step = 0; step < rounds; ++step, low += kStageBytes / 16, scale += kScaleBytes) {
      wait_for_copies(step + 1 < blocks ? blocks - 1 - step : 0);
      fence_shared_to_tma();
      __syncthreads();  // all shares in step: checkers of races count meetings of all, not of some
      if (step >= blocks) break;
      const float weight = load_shared(scale + kBlockM * 4);
      const u32 token = scale + (thread / 32 * 16 + thread % 32 / 4) * 4;
      const float upper = load_shared(token) * weight, lower = load_shared(token + 32) * weight;
      wgmma_fence();
      Mma::multiply(partial, matrix_descriptor(low), matrix_descriptor(low + kBytesA / 16), 0);
      wgmma_commit();
      wgmma_wait<0>();
      Mma::settle(partial);
#pragma unroll
      for (u32 i = 0; i < kBlockN / 2; ++i) sum[i] += partial[i] * (i % 4 < 2 ? upper : lower);
    }
  }

  // Until the next block is there, and perhaps some of `after` blocks behind it.
  static DG_DEVICE void wait_for_copies(u32 after) {
    if (after >= 2) {
      copies_wait<2>();
    } else if (after == 1) {
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
  }

  // All sums meet in shared memory, and are added in the order of the shares; each thread stores four columns of a row.
  DG_DEVICE void hand_over(const float (&sum)[kBlockN / 2]) const {
    constexpr u32 kPieces = kBlockN / 4, kThreads = 128 * kShares;
    const u32 mine = sums + share * kSumsBytes + ((thread / 32 * 16 + thread % 32 / 4) * kSumsRow + thread % 4 * 2) * 4;
#pragma unroll
    for (u32 i = 0; i < kBlockN / 2; i += 2)
      store_shared_pair(mine + ((i % 4 / 2) * 8 * kSumsRow + i / 4 * 8) * 4, sum[i], sum[i + 1]);
    __syncthreads();
#pragma unroll
    for (u32 piece = threadIdx.x; piece < kBlockM * kPieces; piece += kThreads) {
      const u32 y = piece / kPieces, x = piece % kPieces * 4;
      float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (u32 s = 0; s < kShares; ++s) add_shared(sums + s * kSumsBytes + (y * kSumsRow + x) * 4, total);
      if (row + y < m()) store(arg.d + (row + y) * arg.d_stride + column + x, column + x, total);
    }
  }

  DG_DEVICE void store(u16* to, u32 x, const float (&v)[4]) const {
    const u32 low = pack_bf16(v[0], v[1]), high = pack_bf16(v[2], v[3]);
    if (Tile::kWholeRows && x + 4 <= n()) {
      store_8(to, low, high);
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        if (x + i < n()) to[i] = static_cast<u16>((i < 2 ? low : high) >> i % 2 * 16);
    }
  }
};
