// The blocks of K that each CTA and each consumer multiplies.
#pragma once
#include "types.cuh"

// The blocks of K of the `rank`-th CTA of those that have a tile: `share`, and one more for each of the first `more`.
struct EvenOrder {
  u32 begin, length;

  DG_DEVICE EvenOrder(u32 share, u32 more, u32 rank) : begin(rank * share + min_of(rank, more)), length(share + (rank < more)) {}

  DG_DEVICE u32 step_block(u32 count) const { return begin + count; }
  DG_DEVICE u32 mine() const { return length; }
};

// The blocks of K of one CTA of a cluster along K. Consumers that split K take them in turn, and all take the same number: blocks
// past the end are loaded as zeros.
template <u32 kClusterK, u32 kConsumersK>
struct BlockOrder {
  u32 begin, end;  // this CTA's blocks of K
  u32 length;      // how many are multiplied, including those past the end
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

  // How many blocks this consumer takes, and the `count`-th of them. After the last comes some block past the end of K.
  DG_DEVICE u32 mine() const { return length / kConsumersK; }
  DG_DEVICE u32 block(u32 count) const {
    const u32 step = turn + count * kConsumersK;
    return step < length ? step_block(step) : blocks;
  }
};
