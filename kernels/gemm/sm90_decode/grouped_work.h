// Which tiles a CTA of grouped_decode_sm90 computes.
//
// Decode gives an expert a few rows. So an output tile is up to 8 rows of one expert by kTileN columns, over all of K.
// Tiles are numbered expert by expert and column by column. CTA i computes tiles i, i + gridDim.x, ... Those of 32
// columns are so many that each SM gets nearly the same number, and no two CTAs have to share one.
//
// The host does not know the rows of an expert. Each CTA lists the tiles along M in its shared memory when it starts
// (row_tiles.h). The grid does not depend on them, so a CUDA graph serves every routing.
//
// A gated product has gate columns and as many up columns. A CTA computes the two tiles of a result one after the
// other.
//
// The warps of a CTA take its k_tiles in turn, from one tile to the next: with K = 768 a tile has six k_tiles, and
// eight warps that each began anew would leave two idle. Three tiles of six k_tiles, four warps:
//
//   tile 0   | warp 0 | 1 | 2 | 3 | 0 | 1 |
//   tile 1   | warp 2 | 3 | 0 | 1 | 2 | 3 |
//   tile 2   | warp 0 | 1 | 2 | 3 | 0 | 1 |
#pragma once

#include "cutlass/fast_math.h"
#include "cutlass_ext/grouped_params.h"

namespace weightonly::sm90_decode {

/// The arguments of the kernel: a call's, and what the host computes so that threads need no divisions.
struct GroupedParams : GroupedGemmParams {
  int32_t k_tiles;  // of K
  cutlass::FastDivmod n_tiles;  // that have a result: of a gated product those of its gates
  int64_t expert_weight_bytes;  // from the weight of one expert to that of the next
  int64_t expert_scales;        // elements, likewise
  int32_t pdl_mode;             // that of gemm, for launch_clusters

  /// The operands of one expert.
  CUTLASS_DEVICE GemmParams of_expert(int expert) const {
    GemmParams one = gemm;
    one.scales = static_cast<uint16_t const*>(gemm.scales) + expert * expert_scales;
    if (gemm.bias != nullptr) one.bias = static_cast<uint16_t const*>(gemm.bias) + int64_t(expert) * gemm.n;
    return one;
  }
};

/// An output tile.
struct GroupedTile : RowTile {
  int n_tile;

  /// step: counts the tiles of this CTA. Reads the list of tiles along M in shared memory.
  CUTLASS_DEVICE GroupedTile(GroupedParams const& p, RowTile const* row_tiles, int step) {
    int row_tile;
    p.n_tiles(row_tile, n_tile, number(p, step));
    if (p.is_gated && step % 2 == 1) n_tile += p.n_tiles.divisor;
    static_cast<RowTile&>(*this) = row_tiles[row_tile];
  }

  /// Whether there is such a tile. row_tiles: their number.
  CUTLASS_DEVICE static bool exists(GroupedParams const& p, int row_tiles, int step) {
    return number(p, step) < row_tiles * p.n_tiles.divisor;
  }

 private:
  CUTLASS_DEVICE static int number(GroupedParams const& p, int step) {
    return int(blockIdx.x) + (p.is_gated ? step / 2 : step) * int(gridDim.x);
  }
};

}  // namespace weightonly::sm90_decode
