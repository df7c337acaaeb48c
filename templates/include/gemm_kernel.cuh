// The frame of the GEMM kernels: the roles of warps, the prologue, and the loaders of both operands.
//
// Layout describes a kernel's tile and its shared memory: kGrouping (see groups.cuh), kBlockM, kBlockN, kBlockK, kStages, kConsumers, kClusterM/N/K,
// kConsumersK, Tile (constants of the template), A and B (OperandTile), kOffsetA, kOffsetB, kOffsetSlots, kOffsetBarriers, and the
// types Scheduler, Order, Barriers, Exchange and Scales (the loader of scale factors, or NoScales). Arguments are the kernel's
// parameters (see GemmFamily.constants).
#pragma once
#include "barrier.cuh"
#include "groups.cuh"
#include "operand.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"
#include "split_k_exchange.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

// For kernels without scale factors in shared memory.
struct NoScales {
  enum : bool { kLoads = false };
  // Whether their loader also sets the number of bytes that each full barrier expects of all loaders, and has maps that are prefetched.
  enum : bool { kExpects = false, kPrefetches = false };
  enum : u32 { kStageBytes = 0 };    // that arrive in each stage, whatever the tile
  template <class Kernel>
  static DG_DEVICE void load(const Kernel&, typename Kernel::Scheduler) {}
};

// The scheduler of a kernel with groups, or without.
template <class Tile, class Table, bool kGrouped = has_table(Tile::kGrouping)>
struct SchedulerOf {
  using Type = TileScheduler<Tile::kBlockM, Tile::kBlockN, Tile::kClusterM, Tile::kClusterN, Tile::kClusterK, Tile::kGrouping == kBatched>;
};
template <class Tile, class Table>
struct SchedulerOf<Tile, Table, true> {
  static_assert(Tile::kClusterM * Tile::kClusterN * Tile::kClusterK == 1);
  using Type = GroupedScheduler<Table, Tile::kGrouping, Tile::kBlockM, Tile::kBlockN, Tile::kSegments>;
};

template <class Layout, class Arguments>
struct GemmKernel {
  using Tile = typename Layout::Tile;
  using Scheduler = typename Layout::Scheduler;
  using Order = typename Layout::Order;
  using Barriers = typename Layout::Barriers;
  using Exchange = typename Layout::Exchange;
  using A = typename Layout::A;
  using B = typename Layout::B;
  using Scales = typename Layout::Scales;
  enum : u32 { kBlockK = Layout::kBlockK, kConsumers = Layout::kConsumers, kStages = Layout::kStages };
  enum : u32 { kClusterM = Layout::kClusterM, kClusterN = Layout::kClusterN, kClusterK = Layout::kClusterK };
  enum : u32 { kClusterSize = kClusterM * kClusterN * kClusterK };
  enum : bool { kSplits = kClusterK * Layout::kConsumersK > 1, kGrouped = has_table(Layout::kGrouping) };
  enum : bool { kByDepth = Layout::kGrouping == kAlongK, kByRows = kGrouped && !kByDepth };
  // Whether each product has a matrix D, and whether tensor maps of A and B have a third dimension, the product.
  enum : bool { kBatched = Layout::kGrouping == ::kBatched, kSummed = is_summed(Layout::kGrouping) };
  enum : bool { kHeads = Layout::kGrouping == ::kHeads };
  enum : bool { kManyD = kByDepth || kBatched, kManyAB = kBatched || kSummed };
  static_assert(kClusterK == 1 || kClusterM * kClusterN == 1);

  enum : u32 { kNowhere = 1 << 20 };  // a block of K outside of all operands

  const Arguments& arg;
  u32 shared;
  Barriers barriers;
  Exchange exchange;

  DG_DEVICE GemmKernel(const Arguments& arg, u32 shared) : arg(arg), shared(shared) {
    barriers.base = shared + Layout::kOffsetBarriers;
    exchange.slots = shared + Layout::kOffsetSlots;
    exchange.barriers = shared + Layout::kOffsetBarriers + Barriers::kBytes;
  }

  DG_DEVICE u32 k() const { return Tile::kShapeK ? Tile::kShapeK : arg.k; }
  DG_DEVICE u32 n() const { return Tile::kShapeN ? Tile::kShapeN : arg.n; }
  DG_DEVICE u32 m() const { return Tile::kShapeM ? Tile::kShapeM : arg.m; }
  // The CTA's tiles, from the first one on.
  DG_DEVICE Scheduler tiles() const {
    if constexpr (kByDepth) {
      return Scheduler(arg.raster, shared + Layout::kOffsetGroups, arg.groups);
    } else if constexpr (kGrouped) {
      return Scheduler(arg.raster, shared + Layout::kOffsetGroups, m());
    } else {
      return Scheduler(raster());
    }
  }
  DG_DEVICE const auto* raster() const {
    if constexpr (kSummed) {
      return &arg.raster->tiles;
    } else {
      return arg.raster;
    }
  }
  // The first row of D that a tile must not write.
  DG_DEVICE u32 end(const Scheduler& tile) const {
    if constexpr (kByRows) {
      return tile.end;
    } else {
      return m();
    }
  }
  // The first row of A, from the tile's on, that need not be multiplied.
  DG_DEVICE u32 used(const Scheduler& tile) const {
    if constexpr (kByRows) {
      return tile.used;
    } else {
      return m();
    }
  }
  // Called by the store warp after all tiles. See groups.cuh.
  template <u32 kBytes, class Also>
  DG_DEVICE void zero_padding(bool aligned, const Also& also) const {
    if constexpr (Layout::kGrouping == kIndex)
      ::zero_padding<typename Layout::Table, Layout::kBlockM, Layout::kSegments, kBytes>(
          shared + Layout::kOffsetGroups, arg.d, arg.d_stride, m(), columns(), aligned, threadIdx.x % 32, also);
  }
  // Columns of D, and the first one of a tile. Of a product with a gate they are half of the rows of B.
  DG_DEVICE u32 columns() const { return n() / B::kHalves; }
  DG_DEVICE u32 column(const Scheduler& tile) const { return tile.column / B::kHalves; }
  // The first row of B of a tile. Matrices B of groups lie one after the other; MN-major ones along K.
  DG_DEVICE u32 weights_row(const Scheduler& tile) const {
    if constexpr (kByRows && !Layout::B::kAlongRows) {
      return tile.group * B::rows(n()) + column(tile);
    } else {
      return column(tile);
    }
  }
  // The group whose matrix D a tile belongs to, if each group has one.
  DG_DEVICE u32 matrix(const Scheduler& tile) const {
    if constexpr (kManyD) {
      return tile.group;
    } else {
      return 0;
    }
  }
  // Where the matrix D or C of a group begins, in elements.
  template <class Group>
  DG_DEVICE i64 d_matrix(Group group) const {
    if constexpr (kManyD) {
      return static_cast<i64>(group) * arg.d_stride_g;
    } else {
      return 0;
    }
  }
  template <class Group>
  DG_DEVICE i64 c_matrix(Group group) const {
    if constexpr (kManyD) {
      return static_cast<i64>(group) * arg.c_stride_g;
    } else {
      return 0;
    }
  }
  // How many blocks of K the CTA multiplies for a tile. With groups along K it is at least one, see b16_mainloop.cuh.
  DG_DEVICE u32 steps(const Scheduler& tile, const Order& order) const {
    if constexpr (Layout::kMapsOfGroups) {
      return max_of(1u, tile.depth);  // in blocks of K
    } else if constexpr (kByDepth) {
      return max_of(1u, ceil_div(tile.depth, kBlockK));
    } else {
      return order.length;
    }
  }
  // Where a step's block of K begins in A, and in B.
  DG_DEVICE u32 tokens_k(const Scheduler& tile, const Order& order, u32 step) const {
    if constexpr (Layout::kMapsOfGroups) {
      return (tile.depth > 0 ? step : kNowhere) * kBlockK;  // each group's K begins at 0; without any, zeros are loaded
    } else if constexpr (kByDepth) {
      return tile.first_k + step * kBlockK;
    } else if constexpr (kSummed) {
      const u32 block = order.step_block(step);
      return (block - arg.raster->part.quotient(block) * arg.raster->part.value) * kBlockK;
    } else {
      return order.step_block(step) * kBlockK;
    }
  }
  // The product whose A and B a step's blocks belong to.
  DG_DEVICE u32 product(const Scheduler& tile, const Order& order, u32 step) const {
    if constexpr (kSummed) {
      return arg.raster->part.quotient(order.step_block(step));
    } else {
      return matrix(tile);
    }
  }
  DG_DEVICE u32 weights_k(const Scheduler& tile, const Order& order, u32 step) const {
    if constexpr (kByRows && Layout::B::kAlongRows) {
      return order.step_block(step) * kBlockK + tile.group * k();
    } else {
      return tokens_k(tile, order, step);
    }
  }
  DG_DEVICE u32 rank_k() const { return kClusterK > 1 ? cluster_rank() : 0; }
  DG_DEVICE Order order(u32 turn = 0) const {
    if constexpr (kSummed) {
      return Order(arg.raster->share, arg.raster->more, blockIdx.y * kClusterK + rank_k());
    } else {
      return Order(ceil_div(k(), kBlockK), rank_k(), turn);
    }
  }
  DG_DEVICE typename A::Source a(const Scheduler& tile) const {
    if constexpr (Layout::kMapsOfGroups) {
      return {arg.maps + tile.group * 2, arg.maps + tile.group * 2, m(), arg.last_rows};
    } else {
      // With labels, padding beside other rows of a consumer is written with its own product, so it must be loaded.
      constexpr bool kAll = Layout::kGrouping == kIndex && Layout::kBlockM > kConsumers * 64;
      return {arg.map_a, arg.map_a_last, kAll ? m() : used(tile), arg.last_rows};
    }
  }
  DG_DEVICE typename B::Source b(const Scheduler& tile) const {
    if constexpr (Layout::kMapsOfGroups) {
      return {arg.maps + tile.group * 2 + 1, arg.maps + tile.group * 2 + 1, n(), arg.last_columns};
    } else if constexpr (B::kSegmented) {
      return {arg.map_b, arg.map_b_last, n(), tile.columns()};
    } else {
      return {arg.map_b, arg.map_b_last, n(), arg.last_columns};
    }
  }
  // In a cluster each CTA along n loads a part of A for all of them, and each CTA along m a part of B. Ranks count along m first.
  DG_DEVICE u32 part_a() const { return kClusterN > 1 ? cluster_rank() / kClusterM : 0; }
  DG_DEVICE u32 part_b() const { return kClusterM > 1 ? cluster_rank() % kClusterM : 0; }
  // The CTAs of the cluster that share this CTA's tile of A, or of B, as bits.
  DG_DEVICE u16 sharing_a() const {
    constexpr u32 kRow = ((1u << kClusterM * kClusterN) - 1) / ((1u << kClusterM) - 1);
    return kRow << (kClusterM > 1 ? cluster_rank() % kClusterM : 0);
  }
  DG_DEVICE u16 sharing_b() const {
    constexpr u32 kColumn = (1u << kClusterM) - 1;
    return kColumn << (kClusterN > 1 ? cluster_rank() / kClusterM * kClusterM : 0);
  }

  // The kernel. `consume` is called by all threads of the consumers, `store` by the store warp.
  template <class Consume, class Store>
  DG_DEVICE void run(const Consume& consume, const Store& store) {
    const u32 warp = threadIdx.x / 32;
    if constexpr (kGrouped) {
      if (warp == kConsumers * 4 + 3) init_barriers();
      if (threadIdx.x == 0) {
        prefetch_maps();
        if constexpr (Scales::kLoads) tma_prefetch_map(arg.map_scale_a);
      }
      const auto prefetch = [&] {
        if constexpr (kByRows && !B::kAlongRows)
          if (warp == kConsumers * 4) prefetch_ahead();
      };
      // There are many labels, which would wait for these blocks of B.
      if constexpr (Layout::kGrouping != kIndex) prefetch();
      wait_for_previous_kernel();
      Layout::Table::build(arg, shared + Layout::kOffsetGroups, m(), prefetch);  // ends with a barrier of the CTA
    }
    if (threadIdx.x >= kConsumers * 128) {
      Scheduler first;  // the first tile
      if constexpr (kGrouped) {
        if (warp < kConsumers * 4 + 3) first = tiles();
      } else {
        if (warp == kConsumers * 4 + 3) {
          init_barriers();
        } else {
          first = Scheduler::early(raster());
          if (warp == kConsumers * 4) prefetch_weights(first);
        }
        prologue_sync<kClusterSize>();
      }
      if constexpr (Tile::kProducerRegisters > 0) registers_shrink<Tile::kProducerRegisters>();
      if (warp == kConsumers * 4 && elect_one()) load_weights(first);
      if (warp == kConsumers * 4 + 1 && elect_one()) load_tokens(first);
      if (Scales::kLoads && warp == kConsumers * 4 + 2) Scales::load(*this, first);
      if (warp == kConsumers * 4 + 3) store(tiles());
      __syncwarp();
    } else {
      if constexpr (!kGrouped) {
        if (threadIdx.x == 0) prefetch_maps();
        prologue_sync<kClusterSize>();
      }
      if constexpr (Tile::kConsumerRegisters > 0) registers_grow<Tile::kConsumerRegisters>();
      consume();
    }
  }

 private:
  // One thread initialises the mbarriers: those of the ring and, with split K, of the exchange. It is one of the warp that loads nothing,
  // since the loaders compute their first tile meanwhile.
  DG_DEVICE void init_barriers() const {
    if (elect_one()) {
      barriers.init();
      if constexpr (kSplits) exchange.init(rank_k());
      barrier_init_fence();
    }
    __syncwarp();
  }

  // Prefetches the tensor maps of the first loads, in a thread of a consumer, which is idle then.
  DG_DEVICE void prefetch_maps() const {
    if constexpr (!Layout::kMapsOfGroups) {
      tma_prefetch_map(arg.map_b);
      tma_prefetch_map(arg.map_a);
      if constexpr (Scales::kPrefetches) tma_prefetch_map(arg.map_scale_a);
      if (arg.last_columns < Layout::kBlockN) tma_prefetch_map(arg.map_b_last);
      if (arg.last_rows < Layout::kBlockM) {
        tma_prefetch_map(arg.map_a_last);
        if constexpr (Scales::kPrefetches) tma_prefetch_map(arg.map_scale_a_last);
      }
    }
  }

  // Prefetches this CTA's first blocks of B into L2. Unlike their loads, this need not wait for the previous kernel.
  DG_DEVICE void prefetch_weights(const Scheduler& first) const {
    const Order order = this->order();
    if (arg.early_stages < kStages && first.valid() && elect_one()) {
      const u32 count = min_of(order.length, prefetched(B::kBytes, kClusterK > 1 || arg.early_stages > 0));
      B::with_boxes(b(first), column(first), part_b(), [&](const auto& each_box, auto...) {
#pragma unroll 1
        for (u32 step = 0; step < count; ++step)
          if constexpr (kManyAB) {
            each_box(weights_k(first, order, step), [&](const TensorMap* map, u32, u32 x, u32 y) {
              tma_prefetch_3d(map, x, y, product(first, order, step));
            });
          } else {
            each_box(order.step_block(step) * kBlockK, [&](const TensorMap* map, u32, u32 x, u32 y) { tma_prefetch(map, x, y); });
          }
      });
    }
    __syncwarp();
  }

  // Prefetches blocks of B of the tile that is probably this CTA's first (see GroupRaster).
  DG_DEVICE void prefetch_ahead() const {
    const u32 guess = blockIdx.x * arg.raster->pace >> 16;
    const u32 group = arg.raster->column.quotient(guess), tile = guess - group * arg.raster->columns;
    if (arg.raster->ahead > 0 && group < arg.groups && elect_one()) {
#pragma unroll 1
      for (u32 step = 0; step < arg.raster->ahead; ++step)
        B::prefetch(arg.map_b, step * kBlockK, group * B::rows(n()) + tile * (Layout::kBlockN / B::kHalves));
    }
    __syncwarp();
  }

  // Two threads, each in its own warp, load B and A into the stages in order. A third one loads scales, if there are any (see
  // Layout::Scales). Loads of constant weights do not wait for the previous kernel.
  DG_DEVICE void load_weights(Scheduler tile) const {
    ProducerCursor cursor;
    const Order order = this->order();
    const u16 sharing = sharing_b();
    for (; tile.valid(); tile.advance()) {
      const auto from = b(tile);
      if constexpr (Layout::kMapsOfGroups) tma_acquire_map(from.map);
      B::with_boxes(from, weights_row(tile), part_b(), [&](const auto& each_box, auto... rarely) {
        const auto fill = [&](auto... policy) {
          if (arg.early_stages == 0) wait_for_previous_kernel();
          barriers.fill(cursor, steps(tile, order), [&](u32 step, u32 stage) {
            barriers.take_part(stage);
            load<(kClusterM > 1)>(each_box, sharing, Layout::kOffsetB + stage * B::kBytes, stage, weights_k(tile, order, step),
                                  product(tile, order, step), policy...);
          }, EarlyLoads<(B::kBytes), (A::kBytes)>(arg.early_stages));
        };
        if constexpr (kByRows) {
          with_policy(arg.evict_first & (tile.index < gridDim.x ? kEvictB | kEvictStartB : +kEvictB), fill, rarely...);
        } else {
          with_policy(arg.evict_first & kEvictB, fill, rarely...);
        }
      });
    }
    if constexpr (kClusterM * kClusterN > 1) barriers.drain(cursor);
  }

  // Unless scales do, this loader also sets the number of bytes that each full barrier expects of all loaders.
  DG_DEVICE void load_tokens(Scheduler tile) const {
    ProducerCursor cursor;
    const Order order = this->order();
    const u16 sharing = sharing_a();
    const bool late = !kGrouped && starts_next_late(m(), k(), Layout::kBlockM);
    for (; tile.valid(); tile.advance()) {
      const auto from = a(tile);
      if constexpr (Layout::kMapsOfGroups) tma_acquire_map(from.map);
      u32 bytes;
      if constexpr (!Scales::kExpects) bytes = A::bytes(from, tile.row) + B::bytes(b(tile), weights_row(tile)) + Scales::kStageBytes;
      A::with_boxes(from, tile.row, part_a(), [&](const auto& each_box) {
        wait_for_previous_kernel();
        if (!late) allow_next_kernel();
        barriers.fill(cursor, steps(tile, order), [&](u32 step, u32 stage) {
          if constexpr (Scales::kExpects) {
            barriers.take_part(stage);
          } else {
            barrier_arrive_expect(barriers.full(stage), bytes);
          }
          load<(kClusterN > 1)>(each_box, sharing, Layout::kOffsetA + stage * A::kBytes, stage, tokens_k(tile, order, step),
                                product(tile, order, step));
        });
      });
    }
    if (late) allow_next_kernel();
  }

  template <bool kMulticast, class EachBox, class... Policy>
  DG_DEVICE void load(const EachBox& each_box, u16 sharing, u32 offset, u32 stage, u32 k, u32 z, Policy... policy) const {
    each_box(k, [&](const TensorMap* map, u32 place, u32 x, u32 y, auto... eight) {
      if constexpr (sizeof...(eight) > 0) {  // rows that alternate: see GatedTile
        tma_load_3d(shared + offset + place, map, barriers.full(stage), x, y, eight..., policy...);
      } else if constexpr (kManyAB && kMulticast) {
        tma_load_multicast_3d(shared + offset + place, map, barriers.full(stage), x, y, z, sharing, policy...);
      } else if constexpr (kManyAB) {
        tma_load_3d(shared + offset + place, map, barriers.full(stage), x, y, z, policy...);
      } else if constexpr (kMulticast) {
        tma_load_multicast(shared + offset + place, map, barriers.full(stage), x, y, sharing, policy...);
      } else {
        tma_load(shared + offset + place, map, barriers.full(stage), x, y, policy...);
      }
    });
  }
};
