// The producer warps of grouped_sm90: one thread for each operand issues its TMA loads, each as soon as its stage is
// empty, tile after tile. load.h, which is that of single products, says why the first loads keep a pace.
#pragma once

#include <type_traits>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "kernels/gemm/sm90/grouped_scheduler.h"
#include "kernels/gemm/sm90/load.h"

namespace weightonly::sm90 {

template <class Traits>
struct GroupedLoad {
  using Smem = typename Traits::Smem;
  using Layout = typename Traits::Layout;
  using Tiles = GroupedTiles<Traits>;
  static constexpr int kKBlocks = Traits::kKBlocks;

  /// Weights: a box for each half of the columns, a k_tile of its panels.
  struct WeightLoader {
    GroupedParams const& p;
    Smem const& smem;
    static constexpr bool kIsX = false;
    static constexpr int kHalfBytes = Traits::kHalfPanels * kKBlocks * Layout::kBlockBytes;

    CUTLASS_DEVICE int stage_bytes(Tiles const& tile) const { return tile.has_second() ? 2 * kHalfBytes : kHalfBytes; }

    CUTLASS_DEVICE void load(Tiles const& tile, int k_tile, int stage, uint64_t* full) const {
      constexpr int kLines = kKBlocks * Layout::kBlockBytes / kTensorMapLineBytes;  // of a panel
      int const first_panel = tile.expert * (p.n_padded / kPanelColumns);
      char* const target = smem.weights() + stage * Traits::kWeightStageBytes;
      auto const load_half = [&](char* target, int column) {
        cute::SM90_TMA_LOAD_3D::copy(&p.weight_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), target, 0,
                                     k_tile * kLines, first_panel + column / kPanelColumns);
      };
      load_half(target, tile.column_begin);
      if (tile.has_second()) load_half(target + kHalfBytes, tile.second_column);
    }
  };

  /// Where two CTAs share x, each loads one half for both: of the k_blocks, or of a single k_block half of the rows.
  struct XLoader {
    GroupedParams const& p;
    Smem const& smem;
    int rank = multicasts_x<Traits>(p) ? rank_in_cluster() : 0;
    static constexpr bool kIsX = true;

    CUTLASS_DEVICE int rows(Tiles const& tile) const { return (tile.width + 1) * Traits::kWidthStep; }
    CUTLASS_DEVICE int stage_bytes(Tiles const& tile) const {
      return Traits::kXBlocks * rows(tile) * Traits::kXRowBytes;
    }

    CUTLASS_DEVICE void load(Tiles const& tile, int k_tile, int stage, uint64_t* full) const {
      int const ctas = Traits::kMayMulticastX ? p.multicast_ctas : 1;
      bool const halves_rows = Traits::kXBlocks == 1 && ctas > 1;
      int const row_begin = halves_rows ? rank * (rows(tile) / 2) : 0;
      int const blocks = halves_rows ? 1 : Traits::kXBlocks / ctas;
      int const first = halves_rows ? 0 : rank * blocks;
      for (int i = first; i < first + blocks; i += p.x_box_k_blocks) {
        // Coordinates as map_k_blocks has them.
        int const k_block = k_tile * Traits::kXBlocks + i;
        int const k = p.x_box_k_blocks == 1 ? k_block * Traits::kXBlockK : 0;
        int const box = p.x_box_k_blocks == 1 ? 0 : k_block;
        char* const target =
            smem.x() + stage * Traits::kXStageBytes + (i * rows(tile) + row_begin) * Traits::kXRowBytes;
        auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
        int const token = tile.token_begin + row_begin;
        if (multicasts_x<Traits>(p)) {
          constexpr uint16_t kBothCtas = 3;
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&p.x_maps[tile.width], full, kBothCtas, hint, target, k, token, box);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&p.x_maps[tile.width], full, hint, target, k, token, box);
        }
      }
    }
  };

  /// Scales or zero points of groups: a box for each half of the columns, of all rows where k_tiles have whole groups.
  struct ScaleLoader {
    GroupedParams const& p;
    char* target;  // in stage 0
    CUtensorMap const& map;
    static constexpr bool kIsX = false;

    CUTLASS_DEVICE int stage_bytes(Tiles const& tile) const {
      return p.scale_rows * Traits::kScaleRowBytes * (tile.has_second() ? 2 : 1);
    }

    CUTLASS_DEVICE void load(Tiles const& tile, int k_tile, int stage, uint64_t* full) const {
      for (int row = 0; row < p.scale_rows; row += p.scale_box_rows) {
        int const k = k_tile * Traits::kTileK + row * p.scale_k;
        // A row beyond K lies outside the tensor map, and arrives as zeros. The scales of another group in its place
        // could make a weight overflow, and Inf times a zero of x is NaN.
        int const group = k < p.k ? p.group.of<Traits::kLeastGroup>(k) : p.groups;
        char* const place = target + stage * Traits::kScaleStageBytes + row * Traits::kScaleRowBytes;
        auto const load_half = [&](char* place, int column) {
          cute::SM90_TMA_LOAD_3D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), place, column,
                                       group, tile.expert);
        };
        load_half(place, tile.column_begin);
        if (tile.has_second()) load_half(place + Traits::kHalfScaleBytes, tile.second_column);
      }
    }
  };

  /// Issues all loads of one operand. Called by one thread of each producer warp, when the barriers are initialized and
  /// the tiles are counted.
  CUTLASS_DEVICE static void run(GroupedParams const& p, GroupedSchedule const& schedule, Smem const& smem, int warp) {
    Tiles tiles(p, schedule, warp == 0 ? smem.records() : nullptr);
    if (warp == 0) {
      load(p, tiles, WeightLoader{p, smem}, smem);
    } else if (warp == 1) {
      load(p, tiles, XLoader{p, smem}, smem);
    } else if (Traits::kHasScales && warp == 2) {
      load(p, tiles, ScaleLoader{p, smem.scales(), p.scale_map}, smem);
    } else if (Traits::kHasZeros && warp == 3) {
      load(p, tiles, ScaleLoader{p, smem.scales() + Traits::kZerosOffset, p.zero_map}, smem);
    }
  }

 private:
  template <class Loader>
  CUTLASS_DEVICE static void load(GroupedParams const& p, Tiles& tile, Loader const& loader, Smem const& smem) {
    using Pace = Load<Traits>;
    if (Loader::kIsX && p.is_in_layer) {
      cudaGridDependencySynchronize();
      cudaTriggerProgrammaticLaunchCompletion();
    }
    int stage = 0, phase = 1;
    int issued = 0;  // k_tiles, up to kStages
    uint32_t next_cycle = Pace::clock() + Pace::kFillCycles;
    for (; tile.exists(); tile.advance()) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
        cute::wait_barrier(smem.empty()[stage], phase);
        if (issued < Traits::kStages) {
          if (issued >= Pace::kFirstKTiles) {
            while (int(Pace::clock() - next_cycle) < 0) continue;
            next_cycle += Pace::kFillCycles;
          }
          ++issued;
        }
        cute::set_barrier_transaction_bytes(smem.full()[stage], loader.stage_bytes(tile));
        loader.load(tile, k_tile, stage, &smem.full()[stage]);
        if (++stage == Traits::kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }
};

}  // namespace weightonly::sm90
