// The producer warps of gemm_sm90: one thread for each operand issues its TMA loads, each as soon as its stage is
// empty.
//
// The order of the first loads matters. What a CTA issues at once arrives together, and late: with M = 16 the first
// k_tile came after 4400 to 5200 cycles, because the memory delivered all stages, and the scales behind them if those
// were issued last. So the loads of the first k_tiles are issued before all others (issue_first), then the scales of
// the others, and their weights and x at a pace little above what the memory delivers (load).
#pragma once

#include <type_traits>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass_ext/arch/prefetch_l2.h"
#include "kernels/gemm/sm90/k_order.h"
#include "kernels/gemm/sm90/tile_scheduler.h"

namespace weightonly::sm90 {

template <class Traits>
struct Load {
  using Smem = typename Traits::Smem;
  using Layout = typename Traits::Layout;
  using Element = typename Traits::Element;
  using Weight = typename Traits::Weight;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kKBlocks = Traits::kKBlocks;
  static constexpr int kScaleRowBytes = Traits::kScaleRowBytes;
  static constexpr int kGroupStep = cutlass::const_min(32, Traits::kLeastGroup);  // of GroupIndex

  /// k_tiles that issue_first issues: some 16 KB of weights.
  static constexpr int kFirstKTiles =
      cutlass::const_min(kStages, cutlass::const_max(1, 16 * 1024 / Traits::kWeightStageBytes));
  /// Cycles from one k_tile to the next while the stages are filled for the first time: twice an SM's share of the
  /// memory bandwidth.
  static constexpr int kFillCycles = Traits::kWeightStageBytes / 32;

  // A loader loads one operand: load() issues what this CTA loads of a k_tile, stage_bytes is what then arrives in a
  // stage. kIsPaced: the loads that fill the stages for the first time keep a pace of kFillCycles.

  struct WeightLoader {
    Params const& p;
    Smem const& smem;
    static constexpr int stage_bytes = Traits::kWeightStageBytes;
    static constexpr bool kIsX = false;
    static constexpr bool kIsPaced = true;
    static constexpr bool is_multicast = false;

    /// One box: a k_tile of all column panels of the CTA.
    template <class Work>
    CUTLASS_DEVICE void load(Work const& work, int k_tile, int stage, uint64_t* full) const {
      constexpr int kLines = kKBlocks * Layout::kBlockBytes / kTensorMapLineBytes;  // of a panel
      cute::SM90_TMA_LOAD_3D::copy(&p.weight_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   smem.weights() + stage * stage_bytes, 0, k_tile * kLines, work.panel(p));
    }
  };

  struct XLoader {
    Params const& p;
    Smem const& smem;
    bool is_multicast;
    int stage_bytes;
    int k_block_begin, k_block_end;  // what this CTA loads of a k_tile
    int row_begin;

    static constexpr bool kIsX = true;
    static constexpr bool kIsPaced = true;

    CUTLASS_DEVICE XLoader(Params const& p, Smem const& smem) : p(p), smem(smem) {
      is_multicast = multicasts_x<Traits>(p);
      stage_bytes = Traits::kXBlocks * p.x_rows * Traits::kXRowBytes;
      // With multicast each of the two CTAs loads one half for both: half of the k_blocks, or of a single k_block half
      // of the rows.
      constexpr int kXBlocks = Traits::kXBlocks, kHalf = cutlass::const_max(1, kXBlocks / 2);
      int const rank = is_multicast ? rank_in_cluster() : 0;
      k_block_begin = kXBlocks == 1 ? 0 : rank * kHalf;
      k_block_end = is_multicast ? k_block_begin + kHalf : kXBlocks;
      row_begin = kXBlocks == 1 ? rank * p.x_box_rows : 0;
    }

    template <class Work>
    CUTLASS_DEVICE void load(Work const& work, int k_tile, int stage, uint64_t* full) const {
      auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
      for (int i = k_block_begin; i < k_block_end; i += p.x_box_k_blocks) {
        // Coordinates as map_k_blocks has them.
        int const k_block = k_tile * Traits::kXBlocks + i;
        int const k = p.x_box_k_blocks == 1 ? k_block * Traits::kXBlockK : 0;
        int const box = p.x_box_k_blocks == 1 ? 0 : k_block;
        char* const target = smem.x() + stage * Traits::kXStageBytes + (i * p.x_rows + row_begin) * Traits::kXRowBytes;
        int const token = work.token_begin + row_begin;
        if (is_multicast) {
          constexpr uint16_t kBothCtas = 3;
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&p.x_map, full, kBothCtas, hint, target, k, token, box);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&p.x_map, full, hint, target, k, token, box);
        }
      }
    }
  };

  /// Loads scales or zero points of groups.
  struct ScaleLoader {
    Params const& p;
    char* target;  // in stage 0
    CUtensorMap const& map;
    int rows, stage_bytes;
    static constexpr bool kIsX = false;
    static constexpr bool kIsPaced = false;
    static constexpr bool is_multicast = false;

    CUTLASS_DEVICE ScaleLoader(Params const& p, char* target, CUtensorMap const& map)
        : p(p), target(target), map(map), rows(p.scale_rows), stage_bytes(rows * kScaleRowBytes) {}

    CUTLASS_DEVICE static ScaleLoader scales(Params const& p, Smem const& smem) {
      return ScaleLoader(p, smem.scales(), p.scale_map);
    }
    CUTLASS_DEVICE static ScaleLoader zeros(Params const& p, Smem const& smem) {
      return ScaleLoader(p, smem.scales() + Traits::kZerosOffset, p.zero_map);
    }

    template <class Work>
    CUTLASS_DEVICE void load(Work const& work, int k_tile, int stage, uint64_t* full) const {
      for (int row = 0; row < rows; row += p.scale_box_rows) {
        int const k = k_tile * Traits::kTileK + row * p.scale_k;
        // A row beyond K lies outside the tensor map, and arrives as zeros. The scales of another group in its place
        // could make a weight overflow, and Inf times a zero of x is NaN.
        auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
        char* const place = target + stage * Traits::kScaleStageBytes + row * kScaleRowBytes;
        int const group = k < p.k ? p.group.of<kGroupStep>(k) : p.groups;
        cute::SM90_TMA_LOAD_2D::copy(&map, full, hint, place, work.column_begin, group);
      }
    }
  };

  /// Prefetches the CTA's first weights and scales into the L2. Called by some of the consumers, before anything else.
  /// With one tile along M the grid index alone gives the tile's columns. With more, the first loads are not what
  /// bounds the kernel, and nothing is prefetched.
  CUTLASS_DEVICE static void prefetch_first(Params const& p) {
    constexpr int kPanels = Traits::kWarpgroupsN;
    constexpr int kKTileBytes = kKBlocks * Layout::kBlockBytes;  // of a panel
    int const warp = threadIdx.x / 32;
    if (warp > (Traits::kHasZeros ? 2 : 1) || p.scheduler.m_tiles > 1) return;
    constexpr int kBytes = (Traits::kTileM <= 16 ? 24 : 16) * 1024 / kPanels / 128 * 128;  // of a panel
    int const panel = cluster_index() * kPanels;
    int const k_tile = rank_in_cluster() * p.k_tiles_per_cta;
    if (threadIdx.x < kPanels) {
      // While kernels in front of this one still run there is time for all stages.
      int const bytes = p.pdl_mode == int(PdlMode::kPrefetch) ? kStages * kKTileBytes : kBytes;
      prefetch_panel<Weight>(p, panel + threadIdx.x, k_tile * kKBlocks, 0, min(bytes, p.k_tiles_per_cta * kKTileBytes));
    }
    constexpr int kTileK = Traits::kTileK;
    if (Traits::kHasScales && warp == 1)
      prefetch_groups<Element, kPanels, kGroupStep>(p, p.scales, panel, k_tile * kTileK);
    if (Traits::kHasZeros && warp == 2)
      prefetch_groups<Element, kPanels, kGroupStep>(p, p.zeros, panel, k_tile * kTileK);
  }

  /// Issues the loads of the first k_tiles. Called by one thread of each producer warp, when this CTA's barriers are
  /// initialized.
  template <class Work>
  CUTLASS_DEVICE static void issue_first(Params const& p, Work const& work, Smem const& smem, int warp) {
    with_loader(p, smem, warp, [&](auto const& loader) {
      wait_for_kernels_in_front<std::decay_t<decltype(loader)>>(p);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < first_k_tiles(work, loader); ++i) issue(loader, work, smem, work.k_tile_begin + i, i);
    });
  }

  /// Issues all other loads, of all tiles, each as soon as its stage is empty. Called by the same threads, when the
  /// barriers of the CTA that shares x are initialized, too.
  template <class TileScheduler>
  CUTLASS_DEVICE static void load(Params const& p, typename TileScheduler::Tile const& first, Smem const& smem,
                                  int warp) {
    with_loader(p, smem, warp, [&](auto const& loader) {
      using Loader = std::decay_t<decltype(loader)>;
      int issued = first_k_tiles(first, loader);  // of this tile
      int stage = issued % kStages, phase = 1 ^ issued / kStages;
      int to_fill = Loader::kIsPaced ? kStages - issued : 0;  // stages that were never filled
      uint32_t next_cycle = clock() + (issued > 0 ? kFillCycles : 0);
      TileScheduler::for_each(p, first, [&](auto const& work) {
        auto const load_k_tile = [&](int k_tile) __attribute__((always_inline)) {
          cute::wait_barrier(smem.empty()[stage], phase);
          if (to_fill > 0) {
            --to_fill;
            while (int(clock() - next_cycle) < 0) continue;
            next_cycle += kFillCycles;
          }
          issue(loader, work, smem, k_tile, stage);
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        };
        if constexpr (Traits::kMayFollow) {
          KOrder<Traits> const order(p, work);
          if (order.follows) {
            CUTLASS_PRAGMA_NO_UNROLL
            for (int part = 0; part < order.parts(); ++part) order.for_each_k_tile(part, load_k_tile);
            return;
          }
        }
        CUTLASS_PRAGMA_NO_UNROLL
        for (int k_tile = work.k_tile_begin + issued; k_tile < work.k_tile_end; ++k_tile) load_k_tile(k_tile);
        issued = 0;
      });
    });
  }

  CUTLASS_DEVICE static uint32_t clock() {
    uint32_t cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
    return cycles;
  }

 private:
  /// Issues the loads of one k_tile into a stage, whose `full` barrier then waits for their bytes.
  template <class Loader, class Work>
  CUTLASS_DEVICE static void issue(Loader const& loader, Work const& work, Smem const& smem, int k_tile, int stage) {
    cute::set_barrier_transaction_bytes(smem.full()[stage], loader.stage_bytes);
    loader.load(work, k_tile, stage, &smem.full()[stage]);
  }

  /// Kernels in front of this one may still be writing x, and, unless the caller says otherwise, the weights.
  template <class Loader>
  CUTLASS_DEVICE static void wait_for_kernels_in_front(Params const& p) {
    if (Loader::kIsX || p.pdl_mode != int(PdlMode::kConstantWeights)) cudaGridDependencySynchronize();
  }

  /// k_tiles of an operand that issue_first issues. A multicast has to wait until both CTAs have initialized their
  /// barriers. Another order has other first k_tiles.
  template <class Loader>
  CUTLASS_DEVICE static int first_k_tiles(WorkTile const& work, Loader const& loader) {
    if (Traits::kMayFollow && KOrder<Traits>(loader.p, work).follows) return 0;
    return loader.is_multicast ? 0 : min(kFirstKTiles, work.k_tile_end - work.k_tile_begin);
  }

  /// Calls visit(loader) with the loader of a producer warp.
  template <class Visit>
  CUTLASS_DEVICE static void with_loader(Params const& p, Smem const& smem, int warp, Visit const& visit) {
    if (warp == 0) {
      visit(WeightLoader{p, smem});
    } else if (warp == 1) {
      visit(XLoader(p, smem));
    } else if (Traits::kHasScales && warp == 2) {
      visit(ScaleLoader::scales(p, smem));
    } else if (Traits::kHasZeros && warp == 3) {
      visit(ScaleLoader::zeros(p, smem));
    }
  }
};

}  // namespace weightonly::sm90
