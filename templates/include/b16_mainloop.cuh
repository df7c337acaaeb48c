// The main loop of a consumer warpgroup for 16-bit operands: sums stay in the tensor cores' accumulators over all of K.
#pragma once
#include "barrier.cuh"
#include "pipeline.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// One block's products are always in flight, so that the tensor cores do not wait for the next stage. A block's stage is released
// after the products of the next block have been issued.
//
// Shape gives kStages; kStep (consumers that split K and take stages in turn); kSlices (m64 slices of the left operand); the bytes
// of a stage of the left and of the right operand; and kClears.
//
// With kClears (groups along K) both operands are MN-major, and the last block of a tile may have rows of the next group. The
// consumer overwrites them with zeros in both operands: zero times NaN would be NaN. A group without any K has one block, all of
// which is cleared.
template <class Shape, class Mma, class Barriers>
struct B16Mainloop {
  enum : u32 { kSlices = Shape::kSlices, kSliceBytes = 64 * 64 * 2 };
  using Sums = float[kSlices][Mma::kN / 2];

  const Barriers barriers;
  const u32 left, right;  // low words of the descriptors of this consumer's rows and of the columns, in stage 0
  const u32 lane;
  PipelineCursor<Shape::kStages> at;
  // With kClears: the blocks before the tile's last one, and how many rows of K exist in that one.
  u32 before_last, last_rows;
  u32 consumer, left_address, right_address;  // of this consumer's rows and of the columns, in stage 0

  DG_DEVICE B16Mainloop(const Barriers& barriers, u32 left, u32 right, u32 lane)
      : barriers(barriers), left(left), right(right), lane(lane) {
    asm volatile("mov.u32 %0, 0;" : "=r"(opaque_zero));
  }

  // Issues the products of a tile's first block, which overwrite the sums.
  DG_DEVICE void start(Sums& sum) {
    arrive();
    issue(sum, opaque_zero);
  }

  // Multiplies the remaining blocks of a tile that `start` began; the tile has `blocks` blocks, at least one. Then the sums are
  // final. `beside(Index<i>)` is called once for each i below kTimes, while products run: one call for each block, and the
  // remaining calls beside the last block.
  template <u32 kTimes, class Beside>
  DG_DEVICE void resume(Sums& sum, u32 blocks, const Beside& beside) {
    u32 left = blocks - 1;
    beside_blocks<0, kTimes>(sum, left, beside);
#pragma unroll 1
    while (left > 0) step(sum, left);
    wgmma_wait<0>();
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice) Mma::settle(sum[slice]);
    barriers.release(stage, lane);
  }

  // Releases stages without multiplying them. Call it when no products are in flight.
  DG_DEVICE void skip(u32 blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      stage = at.stage;
      barrier_wait(barriers.full(stage), at.parity);
      at.template advance<Shape::kStep>();
      barriers.release(stage, lane);
    }
  }

 private:
  u32 opaque_zero;  // zero, which the compiler must not know
  u32 stage;        // of the block whose products were issued last

  template <u32 kTime, u32 kTimes, class Beside>
  DG_DEVICE void beside_blocks(Sums& sum, u32& left, const Beside& beside) {
    if constexpr (kTime < kTimes) {
      beside(Index<kTime>());
      if (left > 0) step(sum, left);
      beside_blocks<kTime + 1, kTimes>(sum, left, beside);
    }
  }

  // Issues the next block's products and waits for those of the block before.
  DG_DEVICE void step(Sums& sum, u32& left) {
    const u32 previous = stage;
    arrive();
    issue(sum, 1);
    wgmma_wait<1>();
    barriers.release(previous, lane);
    --left;
  }

  // Waits for the next stage.
  DG_DEVICE void arrive() {
    stage = at.stage;
    barrier_wait(barriers.full(at.stage), at.parity);
    at.template advance<Shape::kStep>();
    if constexpr (Shape::kClears) {
      if (before_last-- == 0 && last_rows < 64) clear();
    }
  }

  // A box of 64 rows of an operand has 128 bytes for each k.
  DG_DEVICE void clear() const {
#pragma unroll
    for (u32 box = 0; box < kSlices; ++box) clear_box(left_address + stage * Shape::kBytesLeft + box * kSliceBytes);
#pragma unroll
    for (u32 box = 0; box < Shape::kBytesRight / kSliceBytes; ++box)
      clear_box(right_address + stage * Shape::kBytesRight + box * kSliceBytes);
    fence_shared_to_tma();  // and to the tensor cores
    named_barrier_sync(kConsumerBarrier + consumer, 128);
  }

  DG_DEVICE void clear_box(u32 box) const {
#pragma unroll 1
    for (u32 place = last_rows * 128 + threadIdx.x % 128 * 16; place < kSliceBytes; place += 128 * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(box + place), "r"(0u) : "memory");
  }

  DG_DEVICE void issue(Sums& sum, u32 keep) {
    const u32 a = left + stage * (Shape::kBytesLeft / 16), b = right + stage * (Shape::kBytesRight / 16);
    wgmma_fence();
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice)
      Mma::multiply(sum[slice], matrix_descriptor(a + slice * (kSliceBytes / 16)), matrix_descriptor(b), keep);
    wgmma_commit();
  }
};
