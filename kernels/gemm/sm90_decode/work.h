// Which part of the work each CTA and each warp of decode_sm90 computes.
//
// The output is cut into n_tiles of kTileN columns, and K into k_tiles. A cluster of `split_k` CTAs takes consecutive
// n_tiles. Their k_tiles, one n_tile after another, are cut into work units of the same length, one for each CTA. So a
// CTA computes whole n_tiles, except for the first and the last of its work unit, which it may share with its
// neighbours. Three n_tiles, two CTAs:
//
//   K ->
//   n_tile 0   | CTA 0: warp 0 | warp 1 | warp 0 | warp 1 |
//   n_tile 1   | CTA 0: warp 0 | warp 1 | CTA 1: 0 | 1    |     CTA 1 sends its partials of n_tile 1 to CTA 0
//   n_tile 2   | CTA 1: warp 0 | warp 1 | warp 0 | warp 1 |
//
// The warps of a CTA take the k_tiles in turn. The loads of a warp do not stop at the end of an n_tile. x stays in
// shared memory. A warp meets the same k in every n_tile, so it loads its own k of x with the first k_tiles that need
// them.
//
// Each cluster starts at a k_tile of its own and wraps around at the end of K. Without this rotation all SMs request
// the same lines of x from the L2 cache at once, which cost up to 8% (M = 8). The k_tiles below are counted from that
// start, except for Loader::k_tile.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_ext/gemm_params.h"

namespace weightonly::sm90_decode {

/// GemmParams, and what the host computes so that threads need no divisions.
struct Params : GemmParams {
  int32_t n_tiles;
  int32_t n_tiles_per_cluster;
  int32_t k_tiles;  // of K
  int32_t work_unit_k_tiles;  // of one CTA, over all its n_tiles; the last CTA may have fewer
  uint32_t k_tiles_multiplier;  // i / k_tiles = i * k_tiles_multiplier / 2^32, for every i that occurs
  uint32_t rotation_multiplier;  // cluster i starts at k_tile i * rotation_multiplier / 2^32
  int32_t x_row_bytes;  // of one token in shared memory
  int32_t groups_per_k_tile;

#if defined(__CUDACC__)
  /// i / k_tiles: the whole n_tiles in i k_tiles.
  __device__ int n_tiles_in(int i) const { return k_tiles == 1 ? i : int(__umulhi(uint32_t(i), k_tiles_multiplier)); }
#endif
};

/// The work unit of this CTA, and this warp's part of it. kIsCluster: split_k > 1.
template <int kWarpsK, bool kIsCluster>
struct WorkTile {
  static_assert((kWarpsK & (kWarpsK - 1)) == 0, "a mask finds a warp's k_tiles");

  int warp, lane;
  int rank;  // of this CTA in the cluster
  int first_n_tile, last_n_tile;  // an empty work unit has last_n_tile < first_n_tile
  int first_k_tile;  // of first_n_tile
  int end_k_tile;  // of last_n_tile
  int end;  // of the work unit, counted in the cluster's k_tiles
  int rotation;  // the k_tile of K that the cluster starts at
  int owner;  // the CTA that reduces first_n_tile: this one, or the one that it sends its partials to
  int senders;  // CTAs that send their partials of last_n_tile to this one

  CUTLASS_DEVICE WorkTile(Params const& p) {
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    rank = owner = blockIdx.x;
    senders = 0;
    rotation = int(__umulhi(blockIdx.y, p.rotation_multiplier));
    int const n_tile = blockIdx.y * p.n_tiles_per_cluster;  // the cluster's first
    int const n_tiles = min(p.n_tiles - n_tile, p.n_tiles_per_cluster);
    if constexpr (!kIsCluster) {
      first_n_tile = n_tile;
      last_n_tile = n_tile + n_tiles - 1;
      first_k_tile = 0;
      end = end_k_tile = p.k_tiles;
      return;
    }
    int const all = n_tiles * p.k_tiles;
    int const begin = min(all, rank * p.work_unit_k_tiles);
    end = min(all, begin + p.work_unit_k_tiles);
    first_n_tile = p.n_tiles_in(begin);
    last_n_tile = begin < end ? p.n_tiles_in(end - 1) : first_n_tile - 1;
    first_k_tile = begin - first_n_tile * p.k_tiles;
    end_k_tile = end - last_n_tile * p.k_tiles;
    first_n_tile += n_tile;
    last_n_tile += n_tile;
  }

  /// Sets owner and senders. Separate from the constructor because the first loads need neither.
  CUTLASS_DEVICE void find_owner_and_senders(Params const& p) {
    if constexpr (kIsCluster) {
      int const begin_of_first = end - end_k_tile - (last_n_tile - first_n_tile) * p.k_tiles;
      while (owner * p.work_unit_k_tiles > begin_of_first) --owner;
      if (owner == rank || first_n_tile < last_n_tile) {
        int const end_of_last = end - end_k_tile + p.k_tiles;
        for (int other = end; other < end_of_last; other += p.work_unit_k_tiles) ++senders;
      }
    }
  }

  CUTLASS_DEVICE bool sends() const { return kIsCluster && owner != rank; }

  /// This warp's first k_tile of an n_tile.
  CUTLASS_DEVICE int warp_first_k_tile(int n_tile) const {
    return kIsCluster && n_tile == first_n_tile ? first_k_tile + ((warp - first_k_tile) & (kWarpsK - 1)) : warp;
  }

  /// How many k_tiles of an n_tile this warp has.
  CUTLASS_DEVICE int warp_k_tiles(Params const& p, int n_tile) const {
    int const end = kIsCluster && n_tile == last_n_tile ? end_k_tile : p.k_tiles;
    return max(0, end - warp_first_k_tile(n_tile) + kWarpsK - 1) / kWarpsK;
  }

  /// Where shared memory has x of an n_tile's k_tile 0, in k_tiles. It has all of x, or that of a work unit shorter
  /// than K.
  CUTLASS_DEVICE int x_base(Params const& p, int n_tile) const {
    if (!kIsCluster || p.work_unit_k_tiles >= p.k_tiles) return 0;
    return (n_tile == first_n_tile ? 0 : p.k_tiles) - first_k_tile;
  }
};

}  // namespace weightonly::sm90_decode
