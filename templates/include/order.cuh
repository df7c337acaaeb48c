// In which order a CTA goes through the blocks of K.
#pragma once
#include "types.cuh"

// The blocks of K of one CTA of a cluster along K, which its consumers take in turn. All consumers take as many: what is
// missing lies past the end of K, where loads read zeros.
template <u32 kClusterK, u32 kConsumersK>
struct BlockOrder {
  u32 begin, end;  // blocks of this CTA that exist
  u32 length;      // those that are taken
  u32 blocks, turn;

  DG_DEVICE BlockOrder(u32 blocks, u32 rank, u32 turn) : blocks(blocks), turn(turn) {
    begin = blocks * rank / kClusterK;  // CTAs differ by one at most
    end = blocks * (rank + 1) / kClusterK;
    length = ceil_div(end - begin, kConsumersK) * kConsumersK;
  }

  // The CTA's `count`-th block.
  DG_DEVICE u32 step_block(u32 count) const {
    const u32 block = begin + count;
    return kConsumersK == 1 || block < end ? block : blocks;
  }

  // How many blocks this consumer takes, and its `count`-th; any block past the end after the last.
  DG_DEVICE u32 mine() const { return length / kConsumersK; }
  DG_DEVICE u32 block(u32 count) const {
    const u32 step = turn + count * kConsumersK;
    return step < length ? step_block(step) : blocks;
  }
};
