// Which output tile a CTA computes, and which k_tiles of it.
//
// The grid is clusters along x and the CTAs of a cluster along y. The CTAs of a cluster either share the K of one
// output tile (split_k), or are two neighbours along N that share x. Cluster i computes tile i; a persistent kernel has
// fewer clusters than tiles, and cluster i continues with tiles i + gridDim.x, i + 2 gridDim.x, ...
//
// The scheduler alone decides this; the other parts see a WorkTile. That of grouped GEMM is another class with the same
// members (grouped_scheduler.h).
#pragma once

#include "cutlass_ext/layout/tiled.h"
#include "kernels/gemm/sm90/arguments.h"

namespace weightonly::sm90 {

/// What a CTA computes at a time: an output tile, and the k_tiles of it that are this CTA's.
struct WorkTile {
  int split_rank;  // which of the CTAs that share the tile's K this is
  int k_tile_begin, k_tile_end;
  int column_begin;  // the first column of w
  int token_begin;  // the first row of x
  int skipped_tokens;  // leading tokens, which another tile stores: the last tile along M overlaps the one before

  /// The first of its column panels, in the packed weight.
  CUTLASS_DEVICE int panel(Params const&) const { return column_begin / kPanelColumns; }

  /// Where its rows of x end.
  CUTLASS_DEVICE int token_end(Params const& p) const { return p.m; }

  /// Its scales and biases are those of these parameters.
  CUTLASS_DEVICE GemmParams const& operands(Params const& p) const { return p; }
};

CUTLASS_DEVICE int cluster_index() {
  return blockIdx.x;
}
CUTLASS_DEVICE int cluster_count() {
  return gridDim.x;
}
CUTLASS_DEVICE int rank_in_cluster() {
  return blockIdx.y;
}

/// The scheduler of one GEMM.
///
/// Tiles are ordered by a tile swizzle: kSwizzleM rows of tiles, column by column. So CTAs that run at the same time
/// share weights as well as x in the L2. With kSwizzleM = 2:
///
///   tile:         N ->
///   m_tile 0    | 0 | 2 | 4 |
///   m_tile 1    | 1 | 3 | 5 |
///   m_tile 2    | 6 | 7 | 8 |    the last swizzle has what is left
template <class Traits>
struct TileScheduler {
  static constexpr int kSwizzleM = 4;

  /// m_tiles, n_tiles: tiles along M and N; two that share x count once.
  static SchedulerParams make_params(int m_tiles, int n_tiles) {
    SchedulerParams s;
    int const swizzle_m = min(m_tiles, kSwizzleM);
    s.tiles = n_tiles * m_tiles;
    s.m_tiles = m_tiles;
    s.full_swizzles = m_tiles / swizzle_m;
    s.swizzle_m = cutlass::FastDivmod(swizzle_m);
    s.last_swizzle_m = cutlass::FastDivmod(max(1, m_tiles % swizzle_m));
    s.swizzle_tiles = cutlass::FastDivmod(swizzle_m * n_tiles);
    return s;
  }

  /// Clusters of the grid: one for each tile, or, for a persistent kernel, as many as p.clusters CTAs make.
  static int clusters(Params const& p, bool is_persistent) {
    return is_persistent ? min(p.scheduler.tiles, max(1, p.clusters / p.multicast_ctas)) : p.scheduler.tiles;
  }

  /// The work tile of an index in the order of the swizzle.
  struct Tile : WorkTile {
    CUTLASS_DEVICE Tile(Params const& p, int index) {
      bool const may_split = Traits::kMaySplitK && (!Traits::kMayMulticastX || p.split_k > 1);
      split_rank = may_split ? rank_in_cluster() : 0;
      k_tile_begin = split_rank * p.k_tiles_per_cta;
      k_tile_end = min(p.k_tiles, k_tile_begin + p.k_tiles_per_cta);
      int n_tile = index, m_tile = 0;
      if (p.scheduler.m_tiles > 1) {
        int swizzle, in_swizzle, in_column;
        p.scheduler.swizzle_tiles(swizzle, in_swizzle, index);
        bool const is_full = swizzle < p.scheduler.full_swizzles;
        (is_full ? p.scheduler.swizzle_m : p.scheduler.last_swizzle_m)(n_tile, in_column, in_swizzle);
        m_tile = swizzle * p.scheduler.swizzle_m.divisor + in_column;
      }
      if (multicasts_x<Traits>(p)) n_tile = 2 * n_tile + rank_in_cluster();
      column_begin = n_tile * Traits::kTileN;
      // The last tile along M overlaps the one before it instead of reaching beyond M, where TMA is slower.
      token_begin = min(m_tile * Traits::kTileM, max(0, p.m - Traits::kTileM));
      skipped_tokens = m_tile * Traits::kTileM - token_begin;
    }
  };

  /// The index of this CTA's first tile.
  CUTLASS_DEVICE static int first_index() { return cluster_index(); }

  /// Calls visit(tile) for each tile of this CTA, which are `first` and those after it.
  template <class Visit>
  CUTLASS_DEVICE static void for_each(Params const& p, Tile const& first, Visit const& visit) {
    Tile tile = first;
    int index = first_index();
    while (true) {
      visit(tile);
      index += cluster_count();
      if (!Traits::kMayPersist || index >= p.scheduler.tiles) break;
      tile = Tile(p, index);
    }
  }
};

}  // namespace weightonly::sm90
