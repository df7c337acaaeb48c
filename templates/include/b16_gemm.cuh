// D[m, n] = (C[m, n] +) A[m, k] @ B[n, k]^T for BF16 or FP16 operands, each K-major or MN-major. Warps have the same roles as in
// the FP8 kernel. There are no scales, so sums stay in the accumulators of wgmma.
//
// Rows of A are the M of wgmma. With kSwapped rows of B are: then tiles have any multiple of eight rows of A. D is stored transposed,
// by TMA, and nothing is added to it.
//
// Constants supplies the block sizes and Mma the wgmma of this kernel (see kernels/sm90_b16_gemm.cu.jinja).
#pragma once
#include "finish.cuh"
#include "gemm_kernel.cuh"
#include "b16_mainloop.cuh"
#include "part_store.cuh"
#include "parts_together.cuh"

template <class Constants, class MmaType>
struct B16GemmLayout {
  using Tile = Constants;
  using Mma = MmaType;
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 64, kStages = Tile::kStages, kConsumers = Tile::kConsumers };
  enum : u32 { kClusterM = Tile::kClusterM, kClusterN = Tile::kClusterN, kClusterK = Tile::kClusterK, kConsumersK = 1 };
  enum : bool { kClusters = kClusterM * kClusterN > 1 };
  enum : bool { kSwapped = Tile::kSwapped };
  // Rows and columns of a tile's sums. One consumer has some m64 slices of the rows, and stores the columns that its split of K owns.
  enum : u32 { kHeight = kSwapped ? +kBlockN : +kBlockM, kWidth = kSwapped ? +kBlockM : +kBlockN };
  using Final = Epilogue<Output<Tile::kElement>>;
  enum : bool { kGated = Final::kGated };  // B is gate's rows and up's
  enum : u32 { kSlices = kHeight / (64 * kConsumers), kColumns = kWidth / kClusterK / (kGated ? 2 : 1) };  // columns of D
  static_assert(kSlices * 64 * kConsumers == kHeight && kColumns % (kSwapped ? 8 : 16) == 0 && Mma::kN == kWidth);
  static_assert(!kGated || (Tile::kTmaStore && !kSwapped && kClusterK == 1 && !Tile::kMnMajorB), "other tiles have no gate");
  static_assert(!kSwapped || (Tile::kTmaStore && Tile::kAccumulate == kNothing && kClusterK == 1 && Tile::kGrouping == kUngrouped));

  enum : u32 { kGrouping = Tile::kGrouping, kSegments = Tile::kSegments };
  // Whether a consumer idles while it has no rows of a tile, since a group ends before them.
  enum : bool { kIdles = has_table(kGrouping) && kGrouping != kAlongK && kConsumers > 1 };
  // With groups along M boxes of A have some rows of a tile, so that most padding is not loaded.
  using A = OperandTile<kBlockM, Tile::kMnMajorA, kClusterN, kClusters, 2, Tile::kRowsOfA>;
  using B = Choice<kGated, GatedTile<kBlockN, kClusterM, 2, Final::kTurn>, OperandTile<kBlockN, Tile::kMnMajorB, kClusterM, kClusters>>;
  using Table = GroupTable<kGrouping, kGrouping == kAlongK ? 1 : +kBlockM, kSegments, (kConsumers + 1) * 128>;
  using Scheduler = typename SchedulerOf<Tile, Table>::Type;
  using Order = Choice<is_summed(kGrouping), EvenOrder, BlockOrder<kClusterK, 1>>;
  enum : bool { kInParts = kGrouping == kSummedInParts };
  static_assert(!kInParts || (!Tile::kTmaStore && kClusterM * kClusterN * kClusterK == 1));
  using Parts = PartsTogether<kSlices * kColumns / 2, kConsumers * 4>;
  using Barriers = PipelineBarriers<kStages, kConsumers * 4, kClusterM * kClusterN>;
  using Scales = NoScales;
  enum : bool { kMapsOfGroups = false };
  using Exchange = SplitKExchange<kWidth, kSlices, kClusterK, 1, kConsumers>;
  using Store = PartStore<Tile::kElement, kColumns, kSlices, kConsumers, Tile::kBuffers, kColumns, kSwapped>;
  // The operands whose rows are the rows and the columns of the sums.
  using Left = Choice<kSwapped, B, A>;
  using Right = Choice<kSwapped, A, B>;

  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries.
  enum : u32 { kOffsetA = 0, kOffsetB = kStages * A::kBytes };
  enum : u32 { kOffsetLeft = kSwapped ? +kOffsetB : +kOffsetA, kOffsetRight = kSwapped ? +kOffsetA : +kOffsetB };
  enum : u32 { kOffsetStaging = kOffsetB + kStages * B::kBytes };
  enum : u32 { kOffsetGroups = kOffsetStaging + (Tile::kTmaStore ? +Store::kBytes : 0) };
  enum : u32 { kOffsetSlots = kOffsetGroups + (has_table(kGrouping) ? +Table::kBytes : 0) };
  enum : u32 { kOffsetBarriers = kOffsetSlots + Exchange::kBytes };
  enum : u32 { kSharedBytes = kOffsetBarriers + Barriers::kBytes + (kClusterK > 1 ? Exchange::kBarrierBytes : 0) };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");
};

template <class Constants, class MmaType, class Arguments>
struct B16Gemm {
  using Layout = B16GemmLayout<Constants, MmaType>;
  using Tile = Constants;
  using Mma = MmaType;
  using Kernel = GemmKernel<Layout, Arguments>;
  using Scheduler = typename Layout::Scheduler;
  using Store = typename Layout::Store;
  using Out = typename Store::Out;
  using Final = Epilogue<Out>;
  struct Shape {
    enum : u32 { kStages = Layout::kStages, kStep = 1, kSlices = Layout::kSlices };
    enum : bool { kClears = Kernel::kByDepth };
    enum : u32 { kBytesLeft = Layout::Left::kBytes, kBytesRight = Layout::Right::kBytes };
  };
  using Mainloop = B16Mainloop<Shape, Mma, typename Layout::Barriers>;
  using Sums = typename Mainloop::Sums;
  enum : u32 { kSlices = Layout::kSlices, kColumns = Layout::kColumns, kClusterK = Layout::kClusterK };
  enum : u32 { kRun = kColumns % 32 == 0 ? 32 : 16 };
  // Whether a finished tile stays in registers, as words of 16-bit elements, and is staged while the next tile's products run. One
  // buffer is then enough: a part has been stored before the next part is staged.
  enum : bool { kStoresLate = Tile::kTmaStore && Tile::kLate };
  enum : bool { kIdles = Layout::kIdles };
  enum : u32 { kInTurn = Tile::kInTurn };  // parts of K whose sums are added in order
  static_assert(kInTurn == 1 || (kClusterK == 1 && Layout::kGrouping == kUngrouped));
  static_assert(!kStoresLate || (Tile::kBuffers == 1 && Tile::kElement != kF32 && kClusterK == 1 && !Kernel::kByDepth));

  Kernel kernel;

  DG_DEVICE B16Gemm(const Arguments& arg, u32 shared) : kernel(arg, shared) {}

  DG_DEVICE void run() {
    kernel.run([&] { consume(); }, [&](const Scheduler& tile) {
      kernel.template zero_padding<Out::kBytes>(Tile::kTmaStore, [&](u32 row) {
        if constexpr (Tile::kElement == kE4m3) Final::scale_zeros(kernel, row, threadIdx.x % 32);
      });
      if constexpr (Tile::kTmaStore) store_tiles(tile);
      if constexpr (Layout::kInParts && Tile::kAccumulate == kReads) {  // so that C is in L2 when all parts have met
        wait_for_previous_kernel();
        typename Layout::Parts(kernel.arg.memory).each_pair([&](u32 warp, u32 i) {
          of_pair(tile.row, tile.column, warp, i, kernel.arg.c_stride, [&](u32 j, i64 place) {
            if (j == 0) prefetch_line(kernel.arg.c + place * Out::kBytes);
          });
        });
      }
    });
  }

 private:
  DG_DEVICE u32 staging() const { return kernel.shared + Layout::kOffsetStaging; }

  // A consumer warpgroup: rows [64 * kSlices * consumer, + 64 * kSlices) of every tile's sums.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128);
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 first_row = consumer * 64 * kSlices, split = kernel.rank_k();
    const u32 blocks = uniform(kernel.order().mine());
    float sum[kSlices][Layout::kWidth / 2];
    u32 which = 0;  // the staging buffer that comes next
    Mainloop mainloop(kernel.barriers, uniform(Layout::Left::descriptor(kernel.shared + Layout::kOffsetLeft + first_row * 128)),
                      uniform(Layout::Right::descriptor(kernel.shared + Layout::kOffsetRight)), lane);
    if constexpr (Kernel::kByDepth) {
      mainloop.consumer = consumer;
      mainloop.left_address = kernel.shared + Layout::kOffsetA + first_row * 128;
      mainloop.right_address = kernel.shared + Layout::kOffsetB;
    }
    // The blocks of K of a tile, whose products are started next.
    const auto blocks_of = [&](const Scheduler& next) {
      if constexpr (Kernel::kByDepth) {
        const u32 count = kernel.steps(next, kernel.order());
        mainloop.before_last = count - 1;
        mainloop.last_rows = next.depth - (count - 1) * 64;
        return count;
      } else {
        return blocks;
      }
    };
    wait_for_previous_kernel();  // before D is overwritten
    if constexpr (Layout::kInParts) {
      if (threadIdx.x == 0) typename Layout::Parts(kernel.arg.memory).open();
    }
    Scheduler tile = kernel.tiles();
    if (!tile.valid()) return;
    u32 count = blocks_of(tile);
    mainloop.start(sum);
    // A consumer without rows of the tile multiplies only its first block: ptxas serialises products that are in flight where branches
    // meet. If more parts than stages are staged beside products, it multiplies a block for each part. Otherwise both consumers would
    // wait forever: it for the other one's parts, and the other one for stages that it has not released.
    const auto go_on = [&](auto times, const auto& beside) {
      constexpr u32 kTimes = decltype(times)::kValue;
      if constexpr (kInTurn > 1) {
        multiply_in_turn<kTimes>(mainloop, sum, count, beside);
      } else if constexpr (kIdles) {
        constexpr u32 kLeast = kTimes > Layout::kStages ? kTimes : 1;
        const bool busy = tile.row + first_row < kernel.used(tile);
        const u32 multiplied = busy ? count : min_of(count, kLeast);
        mainloop.template resume<kTimes>(sum, multiplied, beside);
        if (!busy) mainloop.skip(count - multiplied);
        if constexpr (Layout::kGrouping == kIndex) {  // padding is written
#pragma unroll
          for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
            for (u32 i = 0; i < Layout::kBlockN / 2; ++i) sum[slice][i] = busy ? sum[slice][i] : 0.0f;
        }
      } else {
        mainloop.template resume<kTimes>(sum, count, beside);
      }
    };
    if constexpr (kStoresLate) {
      u32 words[Store::kParts][Store::kWords];
      const auto stage = [&](auto part) {
        constexpr u32 kPart = decltype(part)::kValue;
        Store::stage(staging(), words[kPart], kPart, consumer, which, warp, lane);
      };
      go_on(Index<0>(), stage);
      for (;;) {
        complete(sum, tile.row, tile.column, kernel.end(tile), group_of(tile), 0, first_row, split, warp, lane);
        pack(words, sum, 0, tile.row + first_row, tile.column, kernel.end(tile), group_of(tile), warp, lane);
        tile.advance();
        if (!tile.valid()) return stage_all(words, consumer, which, warp, lane);
        mainloop.start(sum);
        go_on(Index<Store::kParts>(), stage);
      }
    } else {
      for (;;) {
        const u32 row = tile.row, column = tile.column, end = kernel.end(tile);
        const auto group = group_of(tile);
        const i64 matrix = kernel.matrix(tile);
        go_on(Index<0>(), Index<0>());
        tile.advance();
        const bool more = tile.valid();
        if constexpr (kClusterK > 1) kernel.exchange.exchange(sum, consumer, consumer, split, thread, more);
        if constexpr (Layout::kInParts) return add_parts(sum, row, column);
        complete(sum, row, column, end, group, matrix, first_row, split, warp, lane);
        if constexpr (Tile::kTmaStore) {
#pragma unroll
          for (u32 owner = 0; owner < kClusterK; ++owner)
            if (owner == split) stage_sums(sum, owner, row + first_row, column, end, group, consumer, which, warp, lane);
        } else {
          store_direct(sum, row + first_row, column, end, matrix, split, warp, lane);
        }
        if (!more) return;
        count = blocks_of(tile);
        mainloop.start(sum);
      }
    }
  }

  // Multiplies the parts of K of a tile that was started. The sums of each part begin at zero.
  template <u32 kTimes, class Beside>
  static DG_DEVICE void multiply_in_turn(Mainloop& mainloop, Sums& sum, u32 blocks, const Beside& beside) {
    Sums total;
    u32 end = blocks / kInTurn;
    mainloop.template resume<kTimes>(sum, end, beside);
#pragma unroll
    for (u32 part = 1; part < kInTurn; ++part) {
      each_sum([&](u32 slice, u32 i) { total[slice][i] = part == 1 ? sum[slice][i] : __fadd_rn(total[slice][i], sum[slice][i]); });
      const u32 next = blocks * (part + 1) / kInTurn;
      mainloop.start(sum);
      mainloop.template resume<0>(sum, next - end, Index<0>());
      end = next;
    }
    each_sum([&](u32 slice, u32 i) { sum[slice][i] = __fadd_rn(total[slice][i], sum[slice][i]); });
  }

  template <class Use>
  static DG_DEVICE void each_sum(const Use& use) {
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (u32 i = 0; i < Layout::kWidth / 2; ++i) use(slice, i);
  }

  // Adds C to the final sums that this consumer stores of the tile at (row, column), and applies the epilogue.
  template <class Group>
  DG_DEVICE void complete(Sums& sum, u32 row, u32 column, u32 end, Group group, i64 matrix, u32 first_row, u32 split, u32 warp,
                          u32 lane) const {
    if constexpr (Final::kScales) {
      each_slice(sum, split, [&](float* own, u32 slice, u32) {
        if constexpr (Layout::kSwapped) {
          Final::template scale_swapped<kColumns>(kernel, own, row, end, lane, AllChunks());
        } else {
          Final::template scale<kColumns>(kernel, own, row + first_row + slice * 64 + warp * 16 + lane / 4, end);
        }
      });
    }
    if constexpr (Tile::kAccumulate == kReads) add_c(sum, row + first_row, column, matrix, split, warp, lane);
    if constexpr (Final::kFinishes) {
      each_slice(sum, split, [&](float* own, u32 slice, u32 first) {
        const u32 place = first_row + slice * 64 + warp * 16 + lane / 4;
        if constexpr (Layout::kSwapped) {
          Final::template finish_swapped<kColumns>(kernel, own, row, column + place, end, lane, AllChunks());
        } else {
          Final::template finish<kColumns, Tile::kTmaStore, kRun>(kernel, own, row + place, end, group, lane,
                                                                  [&](u32 i) { return column + first + i; });
        }
      });
    }
    if constexpr (Layout::kGated) {
      each_slice(sum, split, [&](float* gate, u32 slice, u32) {
        Final::template finish<kColumns, kRun>(kernel, gate, gate + kColumns / 2, row + first_row + slice * 64 + warp * 16 + lane / 4, end,
                                               group, lane, kernel.columns(), [&](u32 i) { return column / 2 + i; });
      });
    }
  }

  // The group of a tile's bias; empty without groups.
  static DG_DEVICE auto group_of(const Scheduler& tile) {
    if constexpr (Kernel::kByRows) {
      return tile.group;
    } else {
      return Index<0>();
    }
  }

  struct AllChunks {
    DG_DEVICE bool operator()(u32) const { return true; }
  };

  // Calls `use(own, slice, first)` for the sums of each slice that this split owns; `first` is their first column of the tile.
  template <class Use>
  static DG_DEVICE void each_slice(Sums& sum, u32 split, const Use& use) {
#pragma unroll
    for (u32 owner = 0; owner < kClusterK; ++owner) {
      if (owner == split) {
#pragma unroll
        for (u32 slice = 0; slice < kSlices; ++slice) use(&sum[slice][owner * kColumns / 2], slice, owner * kColumns);
      }
    }
  }

  // The words of the columns that split `owner` stores. `row` is the consumer's first one, and `column` the tile's.
  template <class Group>
  DG_DEVICE void pack(u32 (&words)[Store::kParts][Store::kWords], const Sums& sum, u32 owner, u32 row, u32 column, u32 end, Group group,
                      u32 warp, u32 lane) const {
#pragma unroll
    for (u32 part = 0; part < Store::kParts; ++part) {
      const u32 first = owner * kColumns + part % Store::kBoxes * Store::kBoxColumns;
      const float* v = &sum[part / Store::kBoxes][first / 2];
      if constexpr (Tile::kElement == kE4m3) {
        const u32 y = row + part / Store::kBoxes * 64 + warp * 16 + lane / 4;
        Final::cast(kernel, v, words[part], y, end, (column / Layout::B::kHalves + first) / 128, group, lane);
      } else {
#pragma unroll
        for (u32 i = 0; i < Store::kWords; ++i) {
          if (i * Store::kBoxColumns >= Store::kWords * Store::columns_of(part)) continue;  // a short part
          if constexpr (Tile::kElement == kF32) {
            words[part][i] = __float_as_uint(v[i]);
          } else {
            words[part][i] = Out::apply(v[2 * i], v[2 * i + 1]);
          }
        }
      }
    }
  }

  DG_DEVICE void stage_all(const u32 (&words)[Store::kParts][Store::kWords], u32 consumer, u32& which, u32 warp, u32 lane) const {
#pragma unroll
    for (u32 part = 0; part < Store::kParts; ++part) Store::stage(staging(), words[part], part, consumer, which, warp, lane);
  }

  template <class Group>
  DG_DEVICE void stage_sums(const Sums& sum, u32 owner, u32 row, u32 column, u32 end, Group group, u32 consumer, u32& which, u32 warp,
                            u32 lane) const {
    u32 words[Store::kParts][Store::kWords];
    pack(words, sum, owner, row, column, end, group, warp, lane);
    stage_all(words, consumer, which, warp, lane);
  }

  DG_DEVICE void store_tiles(const Scheduler& tile) const {
    const auto& arg = kernel.arg;
    wait_for_previous_kernel();
    Store::template store_all<(Kernel::kByRows)>(
        staging(), tile,
        [&](const Scheduler& at, u32 consumer, u32& x, u32& y) {
          const u32 first_row = consumer * 64 * kSlices;
          x = kernel.column(at) + (Layout::kSwapped ? first_row : kernel.rank_k() * kColumns);
          y = at.row + (Layout::kSwapped ? 0 : first_row);
          return kernel.end(at);
        },
        [&](const Scheduler& at, u32 source, u32 x, u32 y, bool last) {
          if constexpr (Kernel::kByDepth && Tile::kAccumulate == kReduces) {
            if (at.depth > 0) tma_add_3d(arg.map_d, source, x, y, at.group);  // D stays as it is, -0 and subnormals too
          } else if constexpr (Kernel::kManyD) {
            tma_store_3d(arg.map_d, source, x, y, at.group);
          } else if constexpr (Tile::kAccumulate == kReduces) {
            tma_add(arg.map_d, source, x, y);
          } else if constexpr (Layout::kSwapped) {
            tma_store(last ? arg.map_d_last : arg.map_d, source, x, y, LatePolicy{(arg.evict_first & kEvictD) != 0});
          } else {
            tma_store(arg.map_d, source, x, y, LatePolicy{(arg.evict_first & kEvictD) != 0});
          }
        },
        [&](u32 source, u32 x, u32 y, u32 rows) {
          u8* to = arg.d + (y * arg.d_stride + x) * Out::kBytes;
          Store::copy_rows(source, to, arg.d_stride, rows, kernel.columns() - x, threadIdx.x % 32);
        },
        kernel.columns());
  }

  // Calls `use(sum, y, x)` for pairs of neighbours, of which the first is at (y, x), in rows before `end` and in the columns that
  // this split owns.
  template <class Array, class Use>
  DG_DEVICE void each_pair(Array& sum, u32 row, u32 column, u32 end, u32 split, u32 warp, u32 lane, const Use& use) const {
#pragma unroll
    for (u32 slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (u32 i = 0; i < Layout::kBlockN / 2; i += 2) {
        const u32 y = row + slice * 64 + warp * 16 + lane / 4 + (i & 2) * 4, x = column + i / 4 * 8 + lane % 4 * 2;
        if (y < end && x < kernel.n() && (kClusterK == 1 || i / (kColumns / 2) == split)) use(&sum[slice][i], y, x);
      }
    }
  }

  // Adds C to final sums. Rows of C begin at multiples of 16 bytes where those of D do.
  DG_DEVICE void add_c(Sums& sum, u32 row, u32 column, i64 matrix, u32 split, u32 warp, u32 lane) const {
    const auto& arg = kernel.arg;
    each_pair(sum, row, column, kernel.m(), split, warp, lane, [&](float* pair, u32 y, u32 x) {
      const i64 at = kernel.c_matrix(matrix) + y * arg.c_stride + x;
      float first, second = 0.0f;
      if constexpr (Tile::kTmaStore) {
        Out::load_pair(arg.c, at, first, second);
      } else {
        first = Out::load(arg.c, at);
        if (x + 1 < kernel.n()) second = Out::load(arg.c, at + 1);
      }
      pair[0] += first;
      pair[1] += second;
    });
  }

  // Calls `use(j, place)` for those of the sums i and i + 1 of this lane in a consumer's warp that are in D; `place` is its element there.
  template <class Use>
  DG_DEVICE void of_pair(u32 row, u32 column, u32 warp, u32 i, i64 stride, const Use& use) const {
    constexpr u32 kSums = Layout::kWidth / 2;  // of a slice
    const u32 lane = threadIdx.x % 32, at = i % kSums;
    const u32 y = row + (warp / 4 * kSlices + i / kSums) * 64 + warp % 4 * 16 + lane / 4 + (at & 2) * 4;
    const u32 x = column + at / 4 * 8 + lane % 4 * 2;
#pragma unroll
    for (u32 j = 0; j < 2; ++j)
      if (y < kernel.m() && x + j < kernel.n()) use(j, y * stride + x + j);
  }

  // Adds the sums of all parts, and C, and stores them.
  DG_DEVICE void add_parts(const Sums& sum, u32 row, u32 column) const {
    const auto& arg = kernel.arg;
    constexpr u32 kSums = Layout::kWidth / 2;  // of a slice
    static_assert(Layout::Parts::kSharedBytes <= Layout::kOffsetStaging);
    typename Layout::Parts(arg.memory).add(
        kernel.shared, [&](u32 i) { return sum[i / kSums][i % kSums]; },
        [&](u32 warp, u32 i, float* pair) {
          pair[0] = pair[1] = -0.0f;  // adding it changes nothing
          if constexpr (Tile::kAccumulate == kReads)
            of_pair(row, column, warp, i, arg.c_stride, [&](u32 j, i64 place) { pair[j] = Out::load(arg.c, place); });
        },
        [&](u32 warp, u32 i, const float* pair) {
          of_pair(row, column, warp, i, arg.d_stride, [&](u32 j, i64 place) { Out::store(arg.d, place, pair[j]); });
        });
  }

  // Element by element, for a D whose rows do not begin on 16-byte boundaries.
  DG_DEVICE void store_direct(const Sums& sum, u32 row, u32 column, u32 end, i64 matrix, u32 split, u32 warp, u32 lane) const {
    const auto& arg = kernel.arg;
    each_pair(sum, row, column, end, split, warp, lane, [&](const float* pair, u32 y, u32 x) {
      const i64 at = kernel.d_matrix(matrix) + y * arg.d_stride + x;
      Out::store(arg.d, at, pair[0]);
      if (x + 1 < kernel.n()) Out::store(arg.d, at + 1, pair[1]);
    });
  }
};
