// Grouped GEMMs: which rows of A and D belong to which matrix B, and the order of tiles. Sizes of groups are in device memory.
#pragma once
#include "barrier.cuh"
#include "raster.cuh"

// How groups are given (see GemmSpec). kIndex: a label for each row, of which negative ones are padding. kPsum: the end of each
// group's rows. kMasked: how many of a group's rows exist. kAlongK: how much of K is each group's; D has a matrix for each group.
//
// Other products have operands of equal size, one matrix for each. kBatched: so has D. kSummed: D is the sum of all products.
// kSummedInParts: CTAs have parts of the K of a tile, see parts_together.cuh.
//
// kHeads: one product, whose columns belong to heads of D, which have columns more in the middle (see HeadColumns).
enum Grouping : u32 { kUngrouped, kIndex, kPsum, kMasked, kAlongK, kBatched, kSummed, kHeads, kSummedInParts };

// Whether sizes of groups are on the device, and a CTA has a table of them.
DG_DEVICE constexpr bool has_table(u32 grouping) { return grouping >= kIndex && grouping <= kAlongK; }
// Whether D is the sum of products, whose K is one after the other.
DG_DEVICE constexpr bool is_summed(u32 grouping) { return grouping == kSummed || grouping == kSummedInParts; }

DG_DEVICE u32 load_word(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

DG_DEVICE void store_word(u32 address, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }

// A word of the groups' description. The previous kernel may have written it.
DG_DEVICE int load_label(const int* from) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The order of tiles. Tiles of a group come one after the other. A group is cut into strips of kStrip rows of tiles, and in a strip
// tiles run along m first. `strip` is the number of tiles in a whole strip.
//
// With `skips`, padding after a group's rows is neither loaded nor multiplied where consumers have nothing else of a tile. Such tiles
// take less time, so CTAs that share columns of B drift apart (see kernels/groups.py).
//
// While sizes of groups are being read, `ahead` blocks of B are prefetched of the tile that this CTA has first if all groups have as
// many rows of tiles. `pace` is 65536 divided by that number.
struct GroupRaster {
  u32 columns, skips, ahead, pace;  // `columns`: tiles in a row of tiles
  Divisor column, strip;
};
enum : u32 { kStrip = 16, kStripShift = 4 };

struct DoNothing {
  DG_DEVICE void operator()() const {}
};

// Where groups lie in A and D, in the shared memory of a CTA, as a list of segments: consecutive rows of one group that begin at a
// multiple of the tile's height. The words are
//   begin[kSegments + 1]: how many rows of tiles lie before a segment; past the last segment, how many there are in all;
//   row[kSegments]: a segment's first row;
//   last[kSegments]: for kIndex a segment's group, otherwise the first row that does not belong to it any more;
//   used[kSegments]: for kIndex the first row after the last one that is no padding.
// With kPsum and kMasked the g-th segment is the g-th group, and may be empty. With kAlongK only begin[] is used: where a group's part
// of K begins, in units of kBlockM elements.
template <u32 kGrouping, u32 kBlockM, u32 kSegments, u32 kThreads>
struct GroupTable {
  enum : u32 { kBegin = 0, kRow = (kSegments + 1) * 4, kLast = kRow + kSegments * 4, kUsed = kLast + kSegments * 4 };
  enum : u32 { kLabels = kUsed + (kGrouping == kIndex ? kSegments * 4 : 0) };
  enum : u32 { kChunk = 256 };  // rows of tiles whose labels are looked at together
  // Labels of a row of tiles that a lane reads, and rows of tiles that a warp reads before it waits: a label takes a microsecond from HBM.
  enum : u32 { kWarps = kThreads / 32, kEach = ceil_div(kBlockM, 32), kTogether = kThreads > 384 ? 1 : kEach <= 4 ? 8 : 4 };
  enum : u32 { kBytes = ceil_div(kLabels + (kGrouping == kIndex ? kChunk * 4 : 0), 128) * 128 };
  static_assert((kSegments & (kSegments - 1)) == 0 && kSegments >= 32);

  // Called by all threads of the CTA. `rows` is M, or for kMasked the rows of each group. For kIndex each warp calls `meanwhile` while
  // it waits for its first labels.
  template <class Arguments, class Meanwhile = DoNothing>
  static DG_DEVICE void build(const Arguments& arg, u32 shared, u32 rows, const Meanwhile& meanwhile = {}) {
    if constexpr (kGrouping == kIndex) {
      find_runs(arg, shared, rows, meanwhile);
    } else {
      for (u32 group = threadIdx.x; group < arg.groups; group += kThreads)
        store_word(shared + kLast + group * 4, static_cast<u32>(load_label(arg.layout + group)));
      __syncthreads();
      if (threadIdx.x < 32) list_groups(arg, shared, rows);  // for kAlongK `rows` does not matter
    }
    __syncthreads();
  }

  // The first row after those that are not padding.
  static DG_DEVICE u32 used_of(u32 shared, u32 segment) {
    return load_word(shared + (kGrouping == kIndex ? +kUsed : +kLast) + segment * 4);
  }
  static DG_DEVICE u32 group_of(u32 shared, u32 segment) {
    return kGrouping == kIndex ? load_word(shared + kLast + segment * 4) : segment;
  }

 private:
  // One warp.
  template <class Arguments>
  static DG_DEVICE void list_groups(const Arguments& arg, u32 shared, u32 rows) {
    const u32 lane = threadIdx.x;
    u32 total = 0;
    int before = 0;  // the end of the group before this warp's
#pragma unroll 1
    for (u32 first = 0; first < kSegments; first += 32) {
      const u32 group = first + lane;
      const int given = group < arg.groups ? static_cast<int>(load_word(shared + kLast + group * 4)) : before;
      int previous = __shfl_up_sync(0xffffffffu, given, 1);
      if (lane == 0) previous = before;
      before = __shfl_sync(0xffffffffu, given, 31);
      u32 row, end;
      if constexpr (kGrouping == kAlongK) {
        row = 0;
        end = static_cast<u32>(max_of(given, 0));
      } else if constexpr (kGrouping == kPsum) {
        row = ceil_div(static_cast<u32>(max_of(previous, 0)), arg.alignment) * arg.alignment;
        end = min_of(static_cast<u32>(max_of(given, 0)), rows);
      } else {
        row = group * rows;
        end = row + min_of(static_cast<u32>(max_of(given, 0)), rows);
      }
      const u32 count = group < arg.groups && row < end ? ceil_div(end - row, kBlockM) : 0;
      u32 sum = count;  // becomes the count of this lane and of those before it
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      store_word(shared + kBegin + group * 4, total + sum - count);
      store_word(shared + kRow + group * 4, row);
      store_word(shared + kLast + group * 4, end);
      total += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) store_word(shared + kBegin + kSegments * 4, total);
  }

  // A row of tiles has the largest label of its rows: padding may come first. Runs of rows of tiles with one label are segments,
  // and those of padding alone are left out.
  template <class Arguments, class Meanwhile>
  static DG_DEVICE void find_runs(const Arguments& arg, u32 shared, u32 rows, const Meanwhile& meanwhile) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = ceil_div(rows, kBlockM);
    u32 segments = 0, total = 0;
    int before = -1;  // the label of the row of tiles before this warp's
    if (warp >= tiles) meanwhile();
    for (u32 first = 0; first < tiles; first += kChunk) {
      const u32 count = min_of(kChunk, tiles - first);
#pragma unroll 1
      for (u32 at = warp; at < count; at += kTogether * kWarps) {
        int labels[kTogether][kEach];
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i) {
          if (at + i * kWarps < count) {
            const u32 from = (first + at + i * kWarps) * kBlockM + lane;
#pragma unroll
            for (u32 j = 0; j < kEach; ++j)
              labels[i][j] = j * 32 + lane < kBlockM && from + j * 32 < rows ? load_label(arg.layout + from + j * 32) : -1;
          }
        }
        if (first + at < kWarps) meanwhile();
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i) {
          if (at + i * kWarps < count) {
            u32 most = 0;  // of labels and, below them, how many rows there are up to theirs
#pragma unroll
            for (u32 j = 0; j < kEach; ++j) {
              const u32 label = static_cast<u32>(labels[i][j]);
              if (label < arg.groups) most = ::max_of(most, label << 16 | (j * 32 + lane + 1));
            }
            most = __reduce_max_sync(0xffffffffu, most);
            if (lane == 0) store_word(shared + kLabels + (at + i * kWarps) * 4, most > 0 ? most : ~0u);
          }
        }
      }
      __syncthreads();
      if (warp == 0) {
#pragma unroll 1
        for (u32 part = 0; part < count; part += 32) {
          const u32 tile = part + lane;
          const int word = tile < count ? static_cast<int>(load_word(shared + kLabels + tile * 4)) : -1;
          const int label = word < 0 ? -1 : word >> 16;
          int previous = __shfl_up_sync(0xffffffffu, label, 1);
          if (lane == 0) previous = before;
          before = __shfl_sync(0xffffffffu, label, 31);
          const u32 computed = __ballot_sync(0xffffffffu, label >= 0);
          const u32 starts = __ballot_sync(0xffffffffu, label >= 0 && label != previous);
          const u32 lower = (1u << lane) - 1, segment = segments + __popc(starts & lower);
          const int following = __shfl_down_sync(0xffffffffu, label, 1);
          if (label >= 0 && label != previous) {
            if (segment >= kSegments) __trap();  // rows of a group are scattered
            store_word(shared + kBegin + segment * 4, total + __popc(computed & lower));
            store_word(shared + kRow + segment * 4, (first + tile) * kBlockM);
            store_word(shared + kLast + segment * 4, static_cast<u32>(label));
          }
          if (label >= 0 && (lane == 31 || following != label)) {  // the run may go on in the next 32: then it is written again
            const u32 own = segments + __popc(starts & (lower | 1u << lane)) - 1;
            store_word(shared + kUsed + own * 4, (first + tile) * kBlockM + (static_cast<u32>(word) & 0xffff));
          }
          __syncwarp();
          segments += __popc(starts);
          total += __popc(computed);
        }
      }
      __syncthreads();
    }
    if (warp == 0)
      for (u32 segment = segments + lane; segment <= kSegments; segment += 32) store_word(shared + kBegin + segment * 4, total);
  }

  static DG_DEVICE int max_of(int x, int y) { return x < y ? y : x; }
};

// Rows of tiles that are padding alone, between the segments of kIndex: writes zeros to them. All CTAs share the work, one warp of
// each. `also(row)` is called for each of them.
template <class Table, u32 kBlockM, u32 kSegments, u32 kBytes, class Also>
DG_DEVICE void zero_padding(u32 shared, u8* d, i64 stride, u32 rows, u32 columns, bool aligned, u32 lane, const Also& also) {
  const u32 total = load_word(shared + Table::kBegin + kSegments * 4);
  u32 from = 0, before = 0;  // the first row after the segment before, and the rows of tiles up to there
#pragma unroll 1
  for (u32 segment = 0; from < rows; ++segment) {
    const bool past = before == total;
    const u32 to = past ? rows : min_of(load_word(shared + Table::kRow + segment * 4), rows);
#pragma unroll 1
    for (u32 row = from + blockIdx.x; row < to; row += gridDim.x) {
      u8* line = d + row * stride * kBytes;
      if (aligned) {
        for (u32 x = lane * 16; x < columns * kBytes; x += 32 * 16) store_16(line + x, Bytes16{});
      } else {
        for (u32 x = lane * 2; x < columns * kBytes; x += 32 * 2) *reinterpret_cast<u16*>(line + x) = 0;
      }
      also(row);
    }
    if (past) return;
    const u32 after = load_word(shared + Table::kBegin + (segment + 1) * 4);
    from = to + (after - before) * kBlockM;
    before = after;
  }
}

// The order of tiles of kAlongK: those of one group after the other, each group's in the same order.
struct DepthRaster {
  Divisor group;  // the tiles of a group
  Raster tiles;
};

// The tiles of a CTA, like TileScheduler. `row` and `column` are in D, `group` is the tile's. Rows from `used` on are not multiplied, and
// rows from `end` on are not stored.
template <class Table, u32 kGrouping, u32 kBlockM, u32 kBlockN, u32 kSegments>
struct GroupedScheduler {
  const GroupRaster* raster;
  u32 shared, rows, count, index;
  u32 row, column, group, used, end;

  GroupedScheduler() = default;

  DG_DEVICE GroupedScheduler(const GroupRaster* raster, u32 shared, u32 rows)
      : raster(raster), shared(shared), rows(rows), count(load_word(shared + Table::kBegin + kSegments * 4) * raster->columns),
        index(blockIdx.x) {
    if (valid()) locate();
  }

  DG_DEVICE bool valid() const { return index < count; }

  DG_DEVICE void advance() {
    index += gridDim.x;
    if (valid()) locate();
  }

 private:
  DG_DEVICE void locate() {
    // The last segment that begins at this row of tiles or before. Steps are unrolled, since ptxas would serialise products in
    // flight because of a loop.
    const u32 target = raster->column.quotient(index);
    u32 segment = 0;
#pragma unroll
    for (u32 step = kSegments / 2; step > 0; step /= 2)
      if (load_word(shared + Table::kBegin + (segment + step) * 4) <= target) segment += step;
    const u32 before = load_word(shared + Table::kBegin + segment * 4);
    const u32 height = load_word(shared + Table::kBegin + (segment + 1) * 4) - before;
    const u32 in_segment = index - before * raster->columns, strip = raster->strip.quotient(in_segment);
    const u32 in_strip = in_segment - strip * raster->strip.value, above = strip * kStrip, left = height - above;
    // Fewer rows of tiles than a whole strip: numbers are small, so that the quotient of floats is never off by one.
    const u32 x = left >= kStrip ? in_strip >> kStripShift
                                 : static_cast<u32>(__fdividef(static_cast<float>(in_strip) + 0.5f, static_cast<float>(left)));
    row = load_word(shared + Table::kRow + segment * 4) + (above + in_strip - x * min_of(left, kStrip)) * kBlockM;
    column = x * kBlockN;
    group = Table::group_of(shared, segment);
    const u32 last = Table::used_of(shared, segment);
    used = raster->skips ? last : row + kBlockM;
    end = kGrouping == kIndex ? rows : last;
  }
};

// For kAlongK: `row` and `column` are in the group's matrix D, and its part of K has `depth` of the table's units from `first_k` on.
template <class Table, u32 kBlockM, u32 kBlockN, u32 kSegments>
struct GroupedScheduler<Table, kAlongK, kBlockM, kBlockN, kSegments> {
  const DepthRaster* raster;
  u32 shared, count, index;
  u32 row, column, group, first_k, depth;

  GroupedScheduler() = default;

  DG_DEVICE GroupedScheduler(const DepthRaster* raster, u32 shared, u32 groups)
      : raster(raster), shared(shared), count(raster->group.value * groups), index(blockIdx.x) {
    if (valid()) locate();
  }

  DG_DEVICE bool valid() const { return index < count; }

  DG_DEVICE void advance() {
    index += gridDim.x;
    if (valid()) locate();
  }

 private:
  DG_DEVICE void locate() {
    group = raster->group.quotient(index);
    raster->tiles.locate(index - group * raster->group.value, row, column);
    row *= kBlockM;
    column *= kBlockN;
    first_k = load_word(shared + Table::kBegin + group * 4);
    depth = load_word(shared + Table::kBegin + (group + 1) * 4) - first_k;
  }
};
