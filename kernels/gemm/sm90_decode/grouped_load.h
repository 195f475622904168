// The loads of grouped_decode_sm90: each warp's k_tiles, of weights, their scales and x.
#pragma once

#include "kernels/gemm/sm90_decode/grouped_traits.h"
#include "kernels/gemm/sm90_decode/grouped_work.h"

namespace weightonly::sm90_decode {

/// The loads of one warp, kStages k_tiles ahead of its products. They do not stop at the end of a tile.
template <class Traits_, int kGroups_>
struct GroupedLoader {
  using Traits = Traits_;
  static constexpr int kGroups = kGroups_;
  using Pipeline = typename Traits::Base::template Pipeline<kGroups>;
  using Element = typename Traits::Element;
  static constexpr int kWarpsK = Traits::kWarpsK;
  static constexpr int kTileK = Traits::kTileK;
  static constexpr int kXVectors = kTileK / 8;  // 16-byte loads of one row and one k_tile
  static constexpr int kXRows = 32 / kXVectors;  // rows that one load of the warp brings

  GroupedParams const& p;
  RowTilesSmem const& list;
  int row_tiles;  // of all CTAs
  int step;  // of the tile that is loaded
  int warp;  // the first k_tile of that tile that is this warp's
  int lane;
  int k_tile;  // next to load
  int left;  // k_tiles of the tile, from that one on
  int row_begin, rows;
  char const* x;  // of the lane's first row, and of k_tile
  typename Pipeline::Source source;

  CUTLASS_DEVICE GroupedLoader(GroupedParams const& p, RowTilesSmem const& list, int row_tiles)
      : p(p), list(list), row_tiles(row_tiles), step(0), warp(threadIdx.x / 32), lane(threadIdx.x % 32), left(0) {
    if (GroupedTile::exists(p, row_tiles, step)) begin_tile();
    find_k_tile();
  }

  /// Prefetches into the L2 cache what a tile begins with. Called by one thread, as soon as it knows the tile: the first
  /// loads are issued a microsecond later.
  CUTLASS_DEVICE static void prefetch(GroupedParams const& p, RowTile const& tile, int n_tile) {
    constexpr int kBytes = 32 * 1024 / Traits::kCtas;
    int const panel = tile.expert * (p.gemm.n_padded / kPanelColumns) + n_tile * Traits::kTileN / kPanelColumns;
    uint32_t const panel_bytes = Traits::Layout::panel_bytes(p.gemm.k_padded);
    char const* const address = static_cast<char const*>(p.gemm.weight) + int64_t(panel) * panel_bytes;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(min(uint32_t(kBytes), panel_bytes)));
  }

  /// A warp's first k_tile in the next tile.
  CUTLASS_DEVICE static int next_warp(GroupedParams const& p, int warp) { return (warp - p.k_tiles) & (kWarpsK - 1); }

  /// How many k_tiles of a tile are a warp's. first: its first one.
  CUTLASS_DEVICE static int k_tiles_of(GroupedParams const& p, int first) {
    return max(0, p.k_tiles - first + kWarpsK - 1) / kWarpsK;
  }

  /// Fills all stages for the first time. Where the kernel in front writes x alone, weights and scales come before it
  /// has ended: the first commit covers them all.
  CUTLASS_DEVICE void load_first(uint32_t first_stage, uint32_t last_stage, int stage_bytes) {
    if (p.is_in_layer) {
      GroupedLoader x_loader = *this;
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t stage = first_stage; stage <= last_stage; stage += stage_bytes) {
        if (left == 0) break;
        load_weights(stage);
        advance();
      }
      cudaGridDependencySynchronize();
      cudaTriggerProgrammaticLaunchCompletion();
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t stage = first_stage; stage <= last_stage; stage += stage_bytes) {
        if (x_loader.left > 0) {
          x_loader.load_x(stage + Pipeline::kStageBytes);
          x_loader.advance();
        }
        commit_copies();
      }
    } else {
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t stage = first_stage; stage <= last_stage; stage += stage_bytes) load_next(stage);
    }
  }

  /// Loads the next k_tile, if any, into a stage that all lanes have read, and commits once. x comes first: loads are
  /// served in order, and behind the weights of all warps x would be late.
  CUTLASS_DEVICE void load_next(uint32_t stage) {
    if (left > 0) {
      load_x(stage + Pipeline::kStageBytes);
      load_weights(stage);
      advance();
    }
    commit_copies();
  }

 private:
  CUTLASS_DEVICE void load_weights(uint32_t stage) const {
    Pipeline::load_scales(stage, source, p.gemm, lane);
    Pipeline::load_weights(stage, source, (k_tile + 1) * kTileK <= p.gemm.k_padded, lane);
  }

  CUTLASS_DEVICE void advance() {
    k_tile += kWarpsK;
    x += kWarpsK * Traits::kTileXBytes;
    source.advance(kWarpsK);
    if (--left == 0) find_k_tile();
  }

  CUTLASS_DEVICE void begin_tile() {
    left = k_tiles_of(p, warp);
    if (left == 0) return;
    GroupedTile const tile(p, list.tiles, step);
    k_tile = warp;
    row_begin = tile.row_begin;
    rows = tile.rows;
    x = row_of_x(min(lane / kXVectors, rows - 1)) + (k_tile * kTileK + lane % kXVectors * 8) * int(sizeof(Element));
    source = typename Pipeline::Source(p.gemm, tile.n_tile * Traits::kRowTiles, k_tile, lane);
    source.weight += tile.expert * p.expert_weight_bytes;
    if (Traits::kHasScales) source.scales += tile.expert * p.expert_scales * int(sizeof(Element));
    if (Traits::kHasZeros) source.zeros += tile.expert * p.expert_scales * int(sizeof(Element));
  }

  /// Goes on to the next tile that has k_tiles for this warp.
  CUTLASS_DEVICE void find_k_tile() {
    while (left == 0 && GroupedTile::exists(p, row_tiles, step + 1)) {
      ++step;
      warp = next_warp(p, warp);
      begin_tile();
    }
  }

  /// The first element of a row of the tile.
  CUTLASS_DEVICE char const* row_of_x(int row) const {
    int const number = p.places == nullptr ? row_begin + row : list.tokens[row_begin + row];
    return static_cast<char const*>(p.gemm.x) + number * p.gemm.ldx * int(sizeof(Element));
  }

  /// From K on x is zero, whatever the weights are there.
  CUTLASS_DEVICE void load_x(uint32_t target) const {
    int const row = lane / kXVectors;
    int const bytes = k_tile * kTileK + lane % kXVectors * 8 < p.gemm.k ? 16 : 0;
    target += row * Traits::kXRowBytes + lane % kXVectors * 16;
    if (row < rows) copy_async_or_zero(target, bytes > 0 ? x : p.gemm.x, bytes);
    if (rows <= kXRows) return;  // as most tiles
    char const* const begin = row_of_x(min(row, rows - 1));
    for (int i = kXRows; i + row < rows; i += kXRows) {
      char const* const from = row_of_x(i + row) + (x - begin);
      copy_async_or_zero(target + i * Traits::kXRowBytes, bytes > 0 ? from : p.gemm.x, bytes);
    }
  }
};

}  // namespace weightonly::sm90_decode
