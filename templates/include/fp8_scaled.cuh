// D[m, n] = (C[m, n] +) A[m, k] @ B[n, k]^T for FP8 operands with any scaling, and bf16, fp16 or float32 output. The roles of warps
// and the main loop are those of the other FP8 kernels. Tiles are stored in parts, as in the 16-bit kernel.
//
// Constants supplies the block sizes, the scaling and the output, Mma the wgmma (see kernels/sm90_fp8_scaled.cu.jinja).
#pragma once
#include "finish.cuh"
#include "fp8_mainloop.cuh"
#include "gemm_kernel.cuh"
#include "part_store.cuh"
#include "scaling.cuh"
#include "tile_scales.cuh"

template <class Constants, class MmaType>
struct Fp8ScaledLayout {
  using Tile = Constants;
  using Mma = MmaType;
  enum : u32 { kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kBlockK = 128 };
  enum : u32 { kStages = Tile::kStages, kConsumers = Tile::kConsumers, kConsumersK = 1 };
  enum : u32 { kClusterM = Tile::kClusterM, kClusterN = Tile::kClusterN, kClusterK = 1 };
  enum : bool { kClusters = kClusterM * kClusterN > 1 };
  enum : u32 { kSlices = kBlockM / (64 * kConsumers), kScaling = Tile::kScaling };
  static_assert(kSlices * 64 * kConsumers == kBlockM && kBlockN % 16 == 0);
  // Whether a consumer idles while it has no rows of a tile, since a group ends before them.
  enum : bool { kIdles = has_table(Tile::kGrouping) && Tile::kGrouping != kAlongK && kConsumers > 1 };
  static_assert(!kIdles || Tile::kPartials == 1, "ptxas would serialise the products of two sets of partial sums");

  // With groups along K each group is a matrix of its own, and each has tensor maps, whose boxes have 64 rows. With other groups
  // boxes of A have some rows of a tile, so that most padding is not loaded.
  enum : bool { kMapsOfGroups = Tile::kGrouping == kAlongK };
  using A = OperandTile<kBlockM, false, kClusterN, kClusters, 1, Tile::kRowsOfA>;
  using Final = Epilogue<Output<Tile::kElement>>;
  enum : bool { kGated = Final::kGated, kInterleaved = Final::kInterleaved };  // B is gate's rows and up's
  using B = Choice<kGated, GatedTile<kBlockN, kClusterM, 1, Final::kTurn>, OperandTile<kBlockN, false, kClusterM, kClusters, 1, (kMapsOfGroups ? 64 : 0)>>;
  enum : u32 { kGrouping = Tile::kGrouping, kSegments = Tile::kSegments };
  using Table = GroupTable<kGrouping, kMapsOfGroups ? +kBlockK : +kBlockM, kSegments, (kConsumers + 1) * 128>;
  using Scheduler = typename SchedulerOf<Tile, Table>::Type;
  using Order = BlockOrder<1, 1>;
  using Barriers = PipelineBarriers<kStages, kConsumers * 4, kClusterM * kClusterN>;
  using Exchange = SplitKExchange<kBlockN, kSlices, 1, 1, kConsumers>;
  using Scales = TileScales<Fp8ScaledLayout>;
  enum : u32 { kColumns = kBlockN / B::kHalves };  // of D
  using Store = PartStore<Tile::kElement, kColumns, kSlices, kConsumers, Tile::kBuffers, min_of(Mma::kN, +kColumns)>;
  static_assert(kColumns % Store::kBoxColumns == 0 && Mma::kN % Store::kBoxColumns == 0, "a product's columns are whole parts");
  static_assert(!kGated || (Tile::kTmaStore && kSlices == 1 && kScaling == k1D2D), "other tiles have no gate");

  // Shared memory in this order. Swizzled parts begin on 1024-byte boundaries, and scales on the 128-byte boundaries of TMA.
  enum : u32 { kRowBytes = kScaling == kRowwise ? 0 : ceil_div(kBlockM * 4, 128) * 128 };
  enum : u32 { kColumnBytes = kScaling == k1D1D ? ceil_div(kBlockN * 4, 128) * 128 : 0 };
  enum : u32 { kOffsetA = 0, kOffsetB = kStages * A::kBytes, kOffsetStaging = kOffsetB + kStages * B::kBytes };
  enum : u32 { kOffsetRows = kOffsetStaging + (Tile::kTmaStore ? +Store::kBytes : 0) };
  enum : u32 { kOffsetColumns = kOffsetRows + kStages * kRowBytes };
  enum : u32 { kOffsetGroups = kOffsetColumns + 2 * kStages * kColumnBytes };
  enum : u32 { kOffsetBarriers = kOffsetGroups + (has_table(kGrouping) ? +Table::kBytes : 0), kOffsetSlots = kOffsetBarriers };
  enum : u32 { kSharedBytes = kOffsetBarriers + Barriers::kBytes };
  static_assert(kSharedBytes == Tile::kSharedBytes, "the host computed another shared memory size");
};

template <class Constants, class MmaType, class Arguments>
struct Fp8Scaled {
  using Layout = Fp8ScaledLayout<Constants, MmaType>;
  using Tile = Constants;
  using Mma = MmaType;
  using Kernel = GemmKernel<Layout, Arguments>;
  using Scheduler = typename Layout::Scheduler;
  using Store = typename Layout::Store;
  using Out = typename Store::Out;
  using Final = Epilogue<Out>;
  enum : u32 { kBlockM = Layout::kBlockM, kBlockN = Layout::kBlockN, kSlices = Layout::kSlices };
  enum : u32 { kConsumers = Layout::kConsumers, kScaling = Layout::kScaling, kBoxColumns = Store::kBoxColumns };
  struct Shape {
    enum : u32 { kStages = Layout::kStages, kConsumers = Layout::kConsumers, kPartials = Tile::kPartials };
    enum : u32 { kStep = 1, kTurns = Tile::kTurns, kInTurn = 1, kRows = kBlockM, kColumns = kBlockN, kSlices = Layout::kSlices };
    // See Fp8Gemm.
    enum : bool { kPeeks = Tile::kPartials == 2 && kBlockM * kBlockN < 128 * 128 };
    enum : bool { kFresh = Tile::kPartials == 1 && kConsumers > 1 };
  };

  // Scales of 128 x 128 blocks of B.
  using Halves = Choice<Layout::kInterleaved, InterleavedColumns<kBlockN>, GatedColumns<kBlockN>>;
  using Columns = Choice<Layout::kGated, Halves, BlockColumns<kBlockN>>;
  using Weights = BlockScales<Columns::kScales, typename Layout::Order>;

  template <u32 kKind, class = void>
  struct ScalingOf {
    using Type = RowScales<kSlices>;
  };
  // 1D1D: the columns whose scales of B are kept from one m64 slice to the next; wide tiles and consumers that read C have no
  // registers for it.
  enum : bool { kKeeps = kSlices > 1 && Mma::kN == kBlockN && kBlockN <= (Tile::kPartials == 1 ? 112 : 80) };
  enum : u32 { kKept = kKeeps && Tile::kAccumulate != kReads ? +kBlockN : 0 };
  template <class T>
  struct ScalingOf<k1D1D, T> {
    using Type = RowColumnScales<kSlices, Layout::kStages, Layout::kRowBytes, Layout::kColumnBytes, kKept>;
  };
  template <class T>
  struct ScalingOf<k1D2D, T> {
    using Type = RowTokens<Weights, Columns, kSlices, Layout::kRowBytes>;
  };
  using Scaling = typename ScalingOf<kScaling>::Type;
  enum : bool { kIdles = Layout::kIdles };
  using Mainloop = Fp8Mainloop<Shape, Mma, typename Layout::Barriers, Scaling>;
  using Sums = typename Mainloop::Sums;
  // B's scales of rows for one unit.
  using LateScales = ColumnScales<Mma::kN>;
  // Whether they are loaded when a tile begins, and not near its end. Wide tiles have no registers for that.
  enum : bool { kScalesEarly = Mainloop::kParts == 1 && Mma::kN <= 128 };

  // The group of a tile's matrix D, or of its bias; empty where all tiles are in one, or where only the store warp needs it. As a number
  // that is always 0 it cost a lambda capture too many: NVVM then kept the main loop in local memory, and ptxas serialised the products
  // (128x256, 1D2D, one staging buffer).
  template <bool kEach, class = void>
  struct MatrixOf {
    using Type = Index<0>;
  };
  template <class T>
  struct MatrixOf<true, T> {
    using Type = u32;
  };
  enum : bool { kNeedsGroup = Kernel::kByRows && Final::kNeedsGroup };
  enum : bool { kCastsMasked = Tile::kElement == kE4m3 && Layout::kGrouping == kMasked };
  enum : bool { kNeedsMatrix = Kernel::kByDepth || (Kernel::kBatched && !Tile::kTmaStore) || kNeedsGroup || kCastsMasked };
  using Matrix = typename MatrixOf<kNeedsMatrix>::Type;

  Kernel kernel;

  DG_DEVICE Fp8Scaled(const Arguments& arg, u32 shared) : kernel(arg, shared) {}

  DG_DEVICE void run() {
    kernel.run([&] { consume(); }, [&](const Scheduler& tile) {
      kernel.template zero_padding<Out::kBytes>(Tile::kTmaStore, [&](u32 row) {
        if constexpr (Tile::kElement == kE4m3) Final::scale_zeros(kernel, row, threadIdx.x % 32);
      });
      if constexpr (Tile::kTmaStore) store_tiles(tile);
    });
  }

 private:
  // One consumer's place: its number, its warp, lane, and first row of every tile.
  struct Place {
    u32 consumer, warp, lane, first_row;
  };

  DG_DEVICE u32 staging() const { return kernel.shared + Layout::kOffsetStaging; }

  // The blocks of K of a tile; with groups along K those of its group.
  DG_DEVICE typename Layout::Order blocks_of(const Scheduler& tile) const {
    if constexpr (Kernel::kByDepth) {
      return {tile.depth, 0, 0};
    } else {
      return kernel.order();
    }
  }

  DG_DEVICE typename Weights::Part part(const Scheduler& tile) const {
    typename Weights::Part found{{}, blocks_of(tile)};
#pragma unroll
    for (u32 scale = 0; scale < Columns::kScales; ++scale)
      found.row[scale] = !Layout::kGated        ? (tile.column + Columns::scale_begin(scale)) / 128
                         : Layout::kInterleaved ? tile.column / 128 + scale
                                                : (tile.column + scale * kernel.n()) / 256;
    return found;
  }

  DG_DEVICE Scaling scaling(const Scheduler& tile, const Place& at) const {
    const u32 rows = kernel.shared + Layout::kOffsetRows + (at.first_row + at.warp * 16 + at.lane / 4) * 4;
    if constexpr (kScaling == k1D1D) {
      return Scaling(rows, kernel.shared + Layout::kOffsetColumns + at.lane % 4 * 8);
    } else if constexpr (kScaling == k1D2D) {
      const auto& arg = kernel.arg;
      return Scaling(Weights(arg.scale_b, arg.scale_b_stride_n, arg.scale_b_stride_k, ceil_div(kernel.n(), 128), at.lane,
                             part(tile)), rows);
    } else {
      return Scaling(kernel.arg.scale_a, kernel.arg.scale_a_stride, kernel.m());
    }
  }

  // Starts loading B's scales of 128 x 128 blocks for a tile. Those of each group are a matrix of their own, or along K some columns.
  DG_DEVICE void fetch_blocks(Weights& weights, const Scheduler& tile) const {
    const auto& arg = kernel.arg;
    if constexpr (Kernel::kByRows || Kernel::kBatched) weights.base = arg.scale_b + tile.group * arg.scale_b_stride_g;
    if constexpr (Kernel::kByDepth) weights.base = arg.scale_b + tile.first_k * arg.scale_b_stride_k;
    weights.go_on(part(tile));
  }

  // Whether this consumer has rows of the tile that are no padding.
  DG_DEVICE bool has_rows(const Scheduler& tile, const Place& at) const {
    return !kIdles || tile.row + at.first_row < kernel.used(tile);
  }

  // Starts loading A's scales for a tile.
  DG_DEVICE void fetch(Scaling& scaling, const Scheduler& tile, const Place& at) const {
    if constexpr (kScaling == kRowwise) scaling.fetch(tile.row + at.first_row + at.warp * 16 + at.lane / 4);
  }

  // Starts loading B's scales for a unit that begins with this column.
  DG_DEVICE void load_late(LateScales& late, u32 column, const Place& at) const {
    if constexpr (kScaling == kRowwise)
      late.load(kernel.arg.scale_b, kernel.arg.scale_b_stride, kernel.n(), [&](u32 i) { return column + i + at.lane; });
  }

  // A consumer warpgroup: rows [64 * kSlices * consumer, + 64 * kSlices) of every tile.
  DG_DEVICE void consume() {
    const u32 consumer = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    const Place at{consumer, thread / 32, thread % 32, consumer * 64 * kSlices};
    const u32 blocks = uniform(kernel.order().mine());
    float sum[kSlices][kBlockN / 2];
    u32 which = 0;  // the staging buffer that comes next
    LateScales late;
    Scheduler tile = kernel.tiles();
    Mainloop mainloop(kernel.barriers, scaling(tile, at), uniform(descriptor_low(kernel.shared + at.first_row * 128)),
                      uniform(descriptor_low(kernel.shared + Layout::kOffsetB)), consumer, at.lane);
    wait_for_previous_kernel();  // before scales and C are read, and D is overwritten
    if constexpr (kScaling == k1D2D) {
      if (tile.valid()) fetch_blocks(mainloop.scaling.weights, tile);
    }
    mainloop.turns.begin();
    bool busy = has_rows(tile, at);
    if (tile.valid()) {
      if (!kIdles || busy) mainloop.start();
      fetch(mainloop.scaling, tile, at);
    }
    // A CTA's last tile has a copy of `finish` of its own, see Fp8Gemm::consume.
    for (bool more = tile.valid(); more;) {
      const u32 row = tile.row, column = tile.column, end = kernel.end(tile);
      const Matrix matrix = matrix_of(tile);
      const u32 count = Kernel::kByDepth ? kernel.steps(tile, kernel.order()) : blocks;
      const auto finished = [&](auto unit) { finish<decltype(unit)::kValue>(sum, row, column, end, matrix, at, which, late); };
      const auto look_ahead = [&] {
        if constexpr (!kScalesEarly) load_late(late, column, at);
        tile.advance();
        if constexpr (kScaling == k1D2D) {
          if (tile.valid()) fetch_blocks(mainloop.scaling.weights, tile);
        }
      };
      if constexpr (kScalesEarly) load_late(late, column, at);
      if (!kIdles || busy) {
        mainloop.resume(sum, count, look_ahead, finished);
      } else {
        mainloop.idle(sum, count, look_ahead, finished);
      }
      more = tile.valid();
      if (Tile::kTmaStore && !more) {
        finish<Mainloop::kUnits - 1>(sum, row, column, end, matrix, at, which, late);
        break;
      }
      if (more) {
        busy = has_rows(tile, at);
        if (!kIdles || busy) mainloop.start();
        fetch(mainloop.scaling, tile, at);
      }
      finish<Mainloop::kUnits - 1>(sum, row, column, end, matrix, at, which, late);
    }
    // For ptxas: without this barrier it assumes that products are in flight after the loop, and serialises all of them.
    named_barrier_sync(kConsumerBarrier + consumer, 128);
    mainloop.turns.end();
  }

  // Completes a unit's sums and stores them, or stages them for the store warp. It works part by part, because a whole unit's
  // elements of C or scales do not fit in registers.
  template <u32 kUnit>
  DG_DEVICE void finish(Sums& sums, u32 row, u32 column, u32 end, Matrix matrix, const Place& at, u32& which, LateScales& late) const {
    if constexpr (!Layout::kGated) {
      finish_unit<kUnit>(sums, row, column, end, matrix, at, which, late);
    } else if constexpr (kUnit + 1 == Mainloop::kUnits) {  // gate's sums are held until up's are final
      finish_gated(sums[0], row + at.first_row + at.warp * 16 + at.lane / 4, column / 2, end, matrix, at, which);
    }
  }

  template <u32 kUnit>
  DG_DEVICE void finish_unit(Sums& sums, u32 row, u32 column, u32 end, Matrix matrix, const Place& at, u32& which, LateScales& late) const {
    constexpr u32 kSlice = kUnit / Mainloop::kParts, kColumn = kUnit % Mainloop::kParts * Mma::kN;
    const u32 y = row + at.first_row + kSlice * 64 + at.warp * 16 + at.lane / 4;
#pragma unroll
    for (u32 box = 0; box < Mma::kN; box += kBoxColumns) {
      float* sum = &sums[kSlice][(kColumn + box) / 2];
      const u32 x = column + kColumn + box + at.lane % 4 * 2;
      if constexpr (kScaling == kRowwise) late.template apply<kBoxColumns>(sum, box, at.lane);
      if constexpr (Final::kScales) Final::template scale<kBoxColumns>(kernel, sum, y, end);
      if constexpr (Tile::kAccumulate == kReads) add_c(sum, y, x, matrix);
      if constexpr (Final::kFinishes)
        Final::template finish<kBoxColumns, Tile::kTmaStore, min_of(kBoxColumns, 32)>(kernel, sum, y, end, matrix, at.lane,
                                                             [&](u32 i) { return column + kColumn + box + i; });
      if constexpr (Tile::kTmaStore) {
        u32 words[Store::kWords];
        to_words(sum, words, y, end, column + kColumn + box, matrix, at.lane);
        Store::stage(staging(), words, 0, at.consumer, which, at.warp, at.lane);
      } else {
        each_pair(sum, y, x, end, [&](const float* pair, u32 y, u32 x) {
          if constexpr (Kernel::kHeads) {
            const auto& heads = *kernel.arg.heads;
            Out::store(kernel.arg.d, y * kernel.arg.d_stride + heads.place(x), pair[0]);
            if (x + 1 < kernel.n()) Out::store(kernel.arg.d, y * kernel.arg.d_stride + heads.place(x + 1), pair[1]);
          } else {
            const i64 index = kernel.d_matrix(matrix) + y * kernel.arg.d_stride + x;
            Out::store(kernel.arg.d, index, pair[0]);
            if (x + 1 < kernel.n()) Out::store(kernel.arg.d, index + 1, pair[1]);
          }
        });
      }
    }
    if constexpr (Mainloop::kParts > 1 && kUnit + 1 < Mainloop::kUnits)
      load_late(late, column + (kUnit + 1) % Mainloop::kParts * Mma::kN, at);
  }

  // All sums of a tile with a gate. `row` is this thread's first one, and `column` the tile's, in D.
  DG_DEVICE void finish_gated(float* sums, u32 row, u32 column, u32 end, Matrix matrix, const Place& at, u32& which) const {
#pragma unroll
    for (u32 box = 0; box < Layout::kColumns; box += kBoxColumns) {
      float *gate = sums + box / 2, *up = gate + Layout::kColumns / 2;
      // Always true. The branch is for ptxas, which would otherwise move it above the product that has just been issued.
      if (column < kernel.columns())
        Final::template finish<kBoxColumns, min_of(kBoxColumns, 32)>(kernel, gate, up, row, end, matrix, at.lane, kernel.columns(),
                                                                     [&](u32 i) { return column + box + i; });
      u32 words[Store::kWords];
      to_words(gate, words, row, end, column + box, matrix, at.lane);
      Store::stage(staging(), words, 0, at.consumer, which, at.warp, at.lane);
    }
  }

  // A part's elements as words; FP8 also stores its scales. (row, column) is the place in D of this thread's first row of the part.
  DG_DEVICE void to_words(const float* sum, u32 (&words)[Store::kWords], u32 row, u32 end, u32 column, Matrix matrix, u32 lane) const {
    if constexpr (Tile::kElement == kE4m3) {
      Final::cast(kernel, sum, words, row, end, column / 128, matrix, lane);
    } else {
#pragma unroll
      for (u32 i = 0; i < Store::kWords; ++i) {
        if constexpr (Tile::kElement == kF32) {
          words[i] = __float_as_uint(sum[i]);
        } else {
          words[i] = Out::apply(sum[2 * i], sum[2 * i + 1]);
        }
      }
    }
  }

  // Calls `use(sum, y, x)` for each pair of sums of a part that are neighbours in D; (y, x) is the place of the first of the two.
  // This thread's first sum belongs to (row, column).
  template <class Sum, class Use>
  DG_DEVICE void each_pair(Sum* sum, u32 row, u32 column, u32 end, const Use& use) const {
#pragma unroll
    for (u32 i = 0; i < kBoxColumns / 2; i += 2) {
      const u32 y = row + (i & 2) * 4, x = column + i / 4 * 8;
      if (y < end && x < kernel.n()) use(sum + i, y, x);
    }
  }

  static DG_DEVICE Matrix matrix_of(const Scheduler& tile) {
    if constexpr (kNeedsMatrix) {
      return tile.group;
    } else {
      return {};
    }
  }

  // Adds C to final sums. Rows of C begin at multiples of 16 bytes where those of D do.
  DG_DEVICE void add_c(float* sum, u32 row, u32 column, Matrix matrix) const {
    each_pair(sum, row, column, kernel.m(), [&](float* pair, u32 y, u32 x) {
      const i64 index = kernel.c_matrix(matrix) + y * kernel.arg.c_stride + x;
      float first, second = 0.0f;
      if constexpr (Tile::kTmaStore) {
        Out::load_pair(kernel.arg.c, index, first, second);
      } else {
        first = Out::load(kernel.arg.c, index);
        if (x + 1 < kernel.n()) second = Out::load(kernel.arg.c, index + 1);
      }
      pair[0] += first;
      pair[1] += second;
    });
  }

  DG_DEVICE void store_tiles(const Scheduler& tile) const {
    const auto& arg = kernel.arg;
    wait_for_previous_kernel();
    Store::template store_all<(Kernel::kByRows)>(
        staging(), tile,
        [&](const Scheduler& at, u32 consumer, u32& x, u32& y) {
          x = kernel.column(at);
          y = at.row + consumer * 64 * kSlices;
          return kernel.end(at);
        },
        [&](const Scheduler& at, u32 source, u32 x, u32 y, bool) {
          if constexpr (Kernel::kByDepth && Tile::kAccumulate == kReduces) {
            if (at.depth > 0) tma_add_3d(arg.map_d, source, x, y, at.group);  // D stays as it is, -0 and subnormals too
          } else if constexpr (Kernel::kManyD) {
            tma_store_3d(arg.map_d, source, x, y, at.group);
          } else if constexpr (Kernel::kHeads) {
            tma_store(arg.map_d, source, arg.heads->place(x), y, LatePolicy{(arg.evict_first & kEvictD) != 0});
          } else if constexpr (Tile::kAccumulate == kReduces) {
            tma_add(arg.map_d, source, x, y);
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
};
