// In which order a CTA goes through the blocks of K.
#pragma once
#include "types.cuh"

// The blocks of K of one CTA of a cluster along K, in steps of a stage, which its consumers take in turn. All consumers
// take as many: what is missing lies past the end of K, where loads read zeros.
template <u32 kStageBlocks, u32 kClusterK, u32 kConsumersK>
struct BlockOrder {
  u32 begin, end;  // steps of this CTA that exist
  u32 length;      // those that are taken
  u32 blocks, turn;

  DG_DEVICE BlockOrder(u32 blocks, u32 rank, u32 turn) : blocks(blocks), turn(turn) {
    const u32 steps = ceil_div(blocks, kStageBlocks);
    begin = steps * rank / kClusterK;  // CTAs differ by one at most
    end = steps * (rank + 1) / kClusterK;
    length = ceil_div(end - begin, kConsumersK) * kConsumersK;
  }

  // The blocks of a piece of a tile's K.
  static DG_DEVICE BlockOrder piece(u32 begin, u32 end, u32 blocks) {
    BlockOrder order(blocks, 0, 0);
    order.begin = begin;
    order.end = end;
    order.length = end - begin;
    return order;
  }

  // The first block of the CTA's `count`-th step.
  DG_DEVICE u32 step_block(u32 count) const {
    const u32 step = begin + count;
    return (kConsumersK == 1 || step < end ? step : ceil_div(blocks, kStageBlocks)) * kStageBlocks;
  }

  // How many blocks this consumer takes, and its `count`-th; any block past the end after the last.
  DG_DEVICE u32 mine() const { return length / kConsumersK * kStageBlocks; }
  DG_DEVICE u32 block(u32 count) const {
    const u32 step = turn + count / kStageBlocks * kConsumersK;
    return step < length ? step_block(step) + count % kStageBlocks : blocks;
  }
};
