// Reads weights and does nothing else: no GEMM that reads them is faster. floor.py defines the sizes READ_FLOOR_*.
#include "pipeline.cuh"
#include "tma.cuh"

// Copies `bytes` contiguous bytes into shared memory, without a tensor map.
DG_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

enum : u32 { kStages = READ_FLOOR_STAGES, kConsumers = READ_FLOOR_CONSUMERS };
enum : u32 { kBarrierBytes = READ_FLOOR_BARRIER_BYTES };  // of shared memory, before the ring
using Barriers = PipelineBarriers<kStages, kConsumers / 32, 1>;
static_assert(Barriers::kBytes <= kBarrierBytes);

// CTAs take pieces of `piece` bytes in turn: a multiple of 128, at most a stage. `bytes` is a multiple of 16. Shared memory has
// room for kStages pieces, or for all pieces of a CTA if it has fewer.
extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)
    read_floor(const u8* weights, u64 bytes, u32 piece, float* out) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 ring = shared_address(memory) + kBarrierBytes;
  Barriers barriers;
  barriers.base = shared_address(memory);
  if (threadIdx.x == 0) {
    barriers.init();
    barrier_init_fence();
  }
  __syncthreads();
  allow_next_kernel();
  const u64 pieces = (bytes + piece - 1) / piece;
  const u32 count = blockIdx.x < pieces ? static_cast<u32>((pieces - blockIdx.x - 1) / gridDim.x) + 1 : 0;
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      ProducerCursor cursor;
      barriers.fill(cursor, count, [&](u32 step, u32 stage) {
        const u64 from = (blockIdx.x + static_cast<u64>(step) * gridDim.x) * piece;
        const u32 size = bytes - from < piece ? static_cast<u32>(bytes - from) : piece;
        barrier_arrive_expect(barriers.full(stage), size);
        bulk_load(ring + stage * piece, weights + from, size, barriers.full(stage));
      });
    }
  } else {
    PipelineCursor<kStages> at;
    const u32 mine = ring + threadIdx.x * 16 % piece, lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (u32 step = 0; step < count; ++step) {
      barrier_wait(barriers.full(at.stage), at.parity);
      sum += load_shared(mine + at.stage * piece);
      __syncwarp();
      barriers.release(at.stage, lane);
      at.advance();
    }
    wait_for_previous_kernel();
    if (sum == 123456.0f) out[threadIdx.x] = sum;  // keeps the loads: the compiler cannot know the sum
  }
}
