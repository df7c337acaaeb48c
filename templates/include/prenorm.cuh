// d = a @ b^T by TF32 products, a (M, K) bf16, b (N, K) float32 with few rows, and the sum of squares of each row of a.
//
// Reading a takes all the time, so K is split among the CTAs of a cluster, and among groups of warps of a CTA, until all SMs read.
// A bf16 number is a TF32 number; b is rounded to nearest even, as torch does. Products are mma.sync: a warp has 16 rows of a, of
// which it needs the elements as float32 anyway, for the squares.
//
// K has kCluster * kInTurn parts, of which a CTA has kInTurn, one after the other, and a group of warps takes each kGroups-th block of a
// part. First a group's sums of parts are added in order, and then the groups' sums: so tiles with as many parts and groups give the
// same bits. Parts begin at multiples of four blocks, so that a group keeps its stages of the ring.
#pragma once
#include "pipeline.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

DG_DEVICE u32 rounded_to_tf32(u32 x) {
  u32 rounded;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
  return rounded;
}

// sum += a * b: 16 rows by 8 of K times 8 of K by 8 columns, TF32.
DG_DEVICE void multiply_tf32(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DG_DEVICE float load_shared_of(u32 address, u32 rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote_address(address, rank)) : "memory");
  return value;
}

DG_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// C: kRows of a in a CTA, kColumns of b's rows, kWarps, kStages, kCluster, kInTurn.
template <class C, class Arguments>
struct Prenorm {
  enum : u32 { kWarps = C::kWarps, kHigh = C::kRows / 16, kGroups = kWarps / kHigh, kTiles = C::kColumns / 8 };
  enum : u32 { kBlockK = 64, kBytesA = C::kRows * 128, kHalfB = C::kColumns * 128, kStageBytes = kBytesA + 2 * kHalfB };
  // Parts of K begin at multiples of kUnit blocks. In a cluster the sums of each part are kept apart.
  enum : u32 { kUnit = 4, kParts = C::kCluster * C::kInTurn, kKept = C::kCluster == 1 ? 1 : +C::kInTurn };
  // One more column for the squares.
  enum : u32 { kWidth = C::kColumns + 1, kPartialBytes = kKept * kGroups * C::kRows * kWidth * 4 };
  using Barriers = PipelineBarriers<C::kStages, kHigh, 1>;
  enum : u32 { kOffsetPartials = C::kStages * kStageBytes, kOffsetBarriers = kOffsetPartials + kPartialBytes };
  enum : u32 { kBytes = kOffsetBarriers + Barriers::kBytes };
  static_assert(kHigh * kGroups == kWarps && kBytes == C::kSharedBytes && C::kStages % kGroups == 0 && kUnit % kGroups == 0);
  static_assert(kStageBytes % 1024 == 0 && C::kColumns % 8 == 0 && C::kColumns <= 32);

  const Arguments& arg;
  u32 shared;
  Barriers barriers;

  DG_DEVICE Prenorm(const Arguments& arg, u32 shared) : arg(arg), shared(shared) { barriers.base = shared + kOffsetBarriers; }

  DG_DEVICE void produce(u32 first, u32 last) const {
    ProducerCursor cursor;
    barriers.fill(cursor, last - first, [&](u32 step, u32 stage) {
      const u32 full = barriers.full(stage), to = shared + stage * kStageBytes, k = (first + step) * kBlockK;
      barrier_arrive_expect(full, kStageBytes);
      tma_load(to, arg.map_a, full, k, blockIdx.x / C::kCluster * C::kRows, evict_first());
      tma_load(to + kBytesA, arg.map_b, full, k, 0);
      tma_load(to + kBytesA + kHalfB, arg.map_b, full, k + kBlockK / 2, 0);
    });
  }

  // A warp's row g (0 to 7) is this row of its eight in shared memory. So two neighbouring rows of the same phase of a 16-byte load
  // are swizzled to different halves of their lines.
  static DG_DEVICE u32 placed(u32 g) { return (g & 2) | (g & 1) << 2 | g >> 2; }

  // The sums of a lane: of products, and of squares.
  struct Sums {
    float d[kTiles][4] = {}, squares[2] = {};
  };

  // The sums of a group's blocks before `last`, `block` being the first.
  DG_DEVICE Sums multiply(PipelineCursor<C::kStages>& cursor, u32 warp, u32 lane, u32 block, u32 last) const {
    Sums sum;
    const u32 g = lane / 4, t = lane % 4, row = warp % kHigh * 16 + placed(g), swizzle = placed(g);
    for (; block < last; block += kGroups) {
      const u32 at = shared + cursor.stage * kStageBytes;
      barrier_wait(barriers.full(cursor.stage), cursor.parity);
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        // A lane has eight neighbours of K, of which each product takes two.
        Bytes16 a[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) a[i] = load_shared_16(at + (row + 8 * i) * 128 + ((half * 4 + t) ^ swizzle) * 16);
        u32 x[2][8];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
#pragma unroll
          for (u32 j = 0; j < 8; ++j) {
            x[i][j] = j % 2 ? a[i].words[j / 2] & 0xFFFF0000 : a[i].words[j / 2] << 16;
            sum.squares[i] = fmaf(__uint_as_float(x[i][j]), __uint_as_float(x[i][j]), sum.squares[i]);
          }
        }
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile) {
          const u32 line = at + kBytesA + half * kHalfB + (tile * 8 + g) * 128;
          const Bytes16 low = load_shared_16(line + (2 * t ^ g) * 16), high = load_shared_16(line + ((2 * t + 1) ^ g) * 16);
#pragma unroll
          for (u32 j = 0; j < 4; ++j) {
            const u32* b = (j < 2 ? low.words : high.words) + j % 2 * 2;
            multiply_tf32(sum.d[tile], x[0][2 * j], x[1][2 * j], x[0][2 * j + 1], x[1][2 * j + 1], rounded_to_tf32(b[0]),
                          rounded_to_tf32(b[1]));
          }
        }
      }
      __syncwarp();
      barriers.release(cursor.stage, lane);
      cursor.template advance<kGroups>();
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      sum.squares[i] += __shfl_xor_sync(0xFFFFFFFF, sum.squares[i], 1);
      sum.squares[i] += __shfl_xor_sync(0xFFFFFFFF, sum.squares[i], 2);
    }
    return sum;
  }

  // The first of the split's `blocks` that part `part` has.
  static DG_DEVICE u32 begin(u32 part, u32 blocks) { return min_of(blocks, ceil_div(blocks, +kUnit) * part / kParts * kUnit); }

  DG_DEVICE void consume(u32 warp, u32 lane, u32 rank, u32 blocks) const {
    const u32 group = warp / kHigh, t = lane % 4, row = warp % kHigh * 16 + placed(lane / 4);
    PipelineCursor<C::kStages> cursor;
    cursor.stage = group;
#pragma unroll 1
    for (u32 turn = 0; turn < C::kInTurn; ++turn) {
      const u32 part = rank * C::kInTurn + turn;
      const Sums sum = multiply(cursor, warp, lane, begin(part, blocks) + group, begin(part + 1, blocks));
      const u32 to = partial(C::kCluster == 1 ? 0 : turn, group) + row * kWidth * 4;
      const bool add = C::kCluster == 1 && turn > 0;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 line = to + 8 * i * kWidth * 4;
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile) {
          store_shared(line + (tile * 8 + 2 * t) * 4, sum.d[tile][2 * i], add);
          store_shared(line + (tile * 8 + 2 * t + 1) * 4, sum.d[tile][2 * i + 1], add);
        }
        if (t == 0) store_shared(line + C::kColumns * 4, sum.squares[i], add);
      }
    }
  }

  // The sums of a group's rows, of the part of one turn.
  DG_DEVICE u32 partial(u32 turn, u32 group) const {
    return shared + kOffsetPartials + (turn * kGroups + group) * C::kRows * kWidth * 4;
  }

  static DG_DEVICE void store_shared(u32 address, float value, bool add) {
    if (add) value = load_shared(address) + value;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
  }

  // Each CTA of a cluster adds up the partial sums of its share of rows.
  DG_DEVICE void add_up(u32 rank) const {
    constexpr u32 kShare = C::kRows / C::kCluster;
    float* d = arg.d + blockIdx.y * arg.d_split;
    float* squares = arg.sqr_sum + blockIdx.y * arg.sqr_split;
    for (u32 i = threadIdx.x; i < kShare * kWidth; i += blockDim.x) {
      const u32 local = rank * kShare + i / kWidth, column = i % kWidth;
      const u32 row = blockIdx.x / C::kCluster * C::kRows + local;
      if (row >= arg.m) continue;
      float sum = 0.0f;
#pragma unroll
      for (u32 group = 0; group < kGroups; ++group) {
        float parts = 0.0f;
#pragma unroll
        for (u32 part = 0; part < C::kCluster * kKept; ++part) {
          const u32 at = partial(part % kKept, group) + (local * kWidth + column) * 4;
          parts += load_shared_of(at, part / kKept);
        }
        sum += parts;
      }
      if (column == C::kColumns) {
        squares[row] = sum;
      } else if (column < arg.n) {
        d[row * arg.d_stride + column] = sum;
      }
    }
  }

  DG_DEVICE void run() const {
    const u32 warp = uniform(threadIdx.x / 32), rank = C::kCluster > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
      tma_prefetch_map(arg.map_a);
      tma_prefetch_map(arg.map_b);
      barriers.init();
      barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_kernel();
    allow_next_kernel();
    const u32 split = static_cast<u64>(arg.blocks) * blockIdx.y / gridDim.y;
    const u32 blocks = static_cast<u64>(arg.blocks) * (blockIdx.y + 1) / gridDim.y - split;
    if (warp == kWarps) {
      if (elect_one()) produce(split + begin(rank * C::kInTurn, blocks), split + begin((rank + 1) * C::kInTurn, blocks));
      __syncwarp();
    } else {
      consume(warp, threadIdx.x % 32, rank, blocks);
    }
    if constexpr (C::kCluster > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    add_up(rank);
    if constexpr (C::kCluster > 1) cluster_sync();  // others read this CTA's partial sums
  }
};
