// The loads of decode_sm90: the first prefetch of a CTA, then each warp's k_tiles of weights, and x with the first
// ones.
#pragma once

#include "cutlass_ext/arch/prefetch_l2.h"
#include "kernels/gemm/sm90_decode/traits.h"

namespace weightonly::sm90_decode {

/// The loads of one warp, kStages k_tiles ahead of its products.
template <class Traits_, int kGroups_, bool kIsCluster_>
struct Loader {
  using Traits = Traits_;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kIsCluster = kIsCluster_;
  using Pipeline = typename Traits::template Pipeline<kGroups>;
  using WorkTile = sm90_decode::WorkTile<Traits::kWarpsK, kIsCluster>;
  using Element = typename Traits::Element;
  using Weight = typename Traits::Weight;
  using Layout = typename Traits::Layout;
  static constexpr int kRowTiles = Traits::kRowTiles;
  static constexpr int kWarpsK = Traits::kWarpsK;
  static constexpr int kTileK = Traits::kTileK;
  static constexpr int kTileXBytes = Traits::kTileXBytes;

  static constexpr int kXVectors = kTileK / 8;  // 16-byte loads of one token and one k_tile
  static constexpr int kXRows = 32 / kXVectors;  // tokens that one load of the warp brings

  Params const& p;
  WorkTile const& work;
  int n_tile, k_tile;  // next to load; k_tile counts from the start of K
  int left;  // k_tiles up to the end of K or of the n_tile; 0 when all are loaded
  int wrapped;  // k_tiles of the n_tile after those, from the start of K
  int x_left;  // k_tiles that also need their x: the first ones
  uint32_t x_target;  // where x of the next k_tile goes, for this lane
  uint32_t smem_x;  // x of the CTA
  typename Pipeline::Source source;

  CUTLASS_DEVICE Loader(Params const& p, WorkTile const& work, uint32_t smem_x) : p(p), work(work), smem_x(smem_x) {
    n_tile = work.first_n_tile;
    begin_n_tile(n_tile <= work.last_n_tile ? work.warp_k_tiles(p, n_tile) : 0);
    x_left = left + wrapped;
    if (kIsCluster && n_tile < work.last_n_tile) {
      // The next n_tile needs x of the k_tiles before this one's.
      int const end = min(work.first_k_tile, n_tile + 1 == work.last_n_tile ? work.end_k_tile : p.k_tiles);
      x_left += max(0, end - work.warp + kWarpsK - 1) / kWarpsK;
    }
    if (left == 0) begin_next_n_tile();
  }

  /// Prefetches what the work unit starts with into the L2 cache, before the CTA knows more of its work. The n_tiles of
  /// neighbouring CTAs may share a column panel: each prefetches as many of its bytes as it has columns of it.
  CUTLASS_DEVICE static void prefetch(Params const& p) {
    int const warp = threadIdx.x / 32;
    if (warp > (Traits::kHasZeros ? 2 : 1)) return;  // at once: every warp has work to start
    int const begin = kIsCluster ? blockIdx.x * p.work_unit_k_tiles : 0, n_tiles = kIsCluster ? p.n_tiles_in(begin) : 0;
    int const n_tile = blockIdx.y * p.n_tiles_per_cluster + n_tiles;
    if (kIsCluster && n_tile >= p.n_tiles) return;
    int k_tile = begin - n_tiles * p.k_tiles + int(__umulhi(blockIdx.y, p.rotation_multiplier));
    if (k_tile >= p.k_tiles) k_tile -= p.k_tiles;
    int const row_tile = Traits::first_row_tile(p, n_tile);
    int const panel = row_tile / Layout::kFragments, in_panel = row_tile % Layout::kFragments;
    if (threadIdx.x == 0) {
      // While the kernels in front run, there is time to prefetch the whole pipeline.
      constexpr int kPipelineBytes = Traits::kStages * kWarpsK * Pipeline::kWeightsBytes;
      int const all = p.pdl_mode == int(PdlMode::kPrefetch) ? kPipelineBytes : p.m == 1 ? 24 * 1024 : 16 * 1024;
      int const bytes = all / kRowTiles / 16 * 16;  // of an MMA tile
      int const tiles = min(kRowTiles, Layout::kFragments - in_panel);
      int const k_block = k_tile * Pipeline::kTileBlocks;
      prefetch_panel<Weight>(p, panel, k_block, in_panel * bytes, tiles * bytes);
      if (tiles < kRowTiles) prefetch_panel<Weight>(p, panel + 1, k_block, 0, (kRowTiles - tiles) * bytes);
    }
    constexpr int kPanels = Traits::kPanels, kStep = Pipeline::kGroupStep;
    if (Traits::kHasScales && warp == 1) prefetch_groups<Element, kPanels, kStep>(p, p.scales, panel, k_tile * kTileK);
    if (Traits::kHasZeros && warp == 2) prefetch_groups<Element, kPanels, kStep>(p, p.zeros, panel, k_tile * kTileK);
  }

  /// Prefetches the channel scales of one n_tile into the L2 cache: the epilogue reads them.
  CUTLASS_DEVICE static void prefetch_scales(Params const& p, int n_tile, int last_n_tile) {
    if (n_tile > last_n_tile) return;
    auto const prefetch = [&](int row_tile) {
      prefetch_line(static_cast<char const*>(p.scales) + row_tile / Layout::kFragments * Pipeline::kScaleRowBytes);
    };
    prefetch(Traits::first_row_tile(p, n_tile));
    if (Traits::kPanels > 1) prefetch(Traits::first_row_tile(p, n_tile) + kRowTiles - 1);
  }

  CUTLASS_DEVICE static bool is_whole(Params const& p, int k_tile) { return (k_tile + 1) * kTileK <= p.k_padded; }

  /// count: this warp's k_tiles of it.
  CUTLASS_DEVICE void begin_n_tile(int count) {
    int const first = work.warp_first_k_tile(n_tile);
    k_tile = first + work.rotation;
    if (k_tile >= p.k_tiles) k_tile -= p.k_tiles;
    left = min(count, int(uint32_t(p.k_tiles - k_tile + kWarpsK - 1) / kWarpsK));
    wrapped = count - left;
    x_target = smem_x + work.lane / kXVectors * p.x_row_bytes + work.lane % kXVectors * 16 +
               (first + work.x_base(p, n_tile)) * kTileXBytes;
    source = typename Pipeline::Source(p, Traits::first_row_tile(p, n_tile), k_tile, work.lane);
  }

  /// Goes on to the next n_tile that has k_tiles for this warp.
  CUTLASS_DEVICE void begin_next_n_tile() {
    while (left == 0 && n_tile < work.last_n_tile) {
      ++n_tile;
      begin_n_tile(work.warp_k_tiles(p, n_tile));
    }
  }

  CUTLASS_DEVICE void advance() {
    k_tile += kWarpsK;
    x_target += kWarpsK * kTileXBytes;
    source.advance(kWarpsK);
    if (--left > 0) return;
    if (wrapped > 0) {
      k_tile -= p.k_tiles;
      left = wrapped;
      wrapped = 0;
      source = typename Pipeline::Source(p, Traits::first_row_tile(p, n_tile), k_tile, work.lane);
    } else {
      begin_next_n_tile();
    }
  }

  /// Fills all stages for the first time. x is loaded when the kernels in front of this one have ended, as they may be
  /// writing it; so are the weights, unless PdlMode::kConstantWeights says that no kernel writes them. Returns this
  /// lane's value of the codebook.
  CUTLASS_DEVICE uint32_t load_first(uint32_t first_stage, uint32_t last_stage) {
    constexpr int kStageBytes = Pipeline::kStageBytes;
    uint32_t codebook_value = 0;
    auto const wait = [&] {
      cudaGridDependencySynchronize();
      if constexpr (Traits::kHasCodebook) codebook_value = Traits::Codebook::fetch_code(p.zeros);
    };
    if (p.pdl_mode == int(PdlMode::kConstantWeights)) {
      Loader x_loader = *this;
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t stage = first_stage; stage <= last_stage; stage += kStageBytes) load_next_weights(stage);
      wait();
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t stage = first_stage; stage <= last_stage; stage += kStageBytes) x_loader.load_next_x();
    } else {
      wait();
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t stage = first_stage; stage <= last_stage; stage += kStageBytes) load_next(stage);
    }
    return codebook_value;
  }

  /// Loads the next k_tile, if any, into a stage that all lanes have read, and commits once. x comes first: loads are
  /// served in order, and behind the weights of all warps x would be late.
  CUTLASS_DEVICE void load_next(uint32_t stage) {
    if (left > 0) {
      if (x_left > 0) {
        --x_left;
        load_x();
      }
      load_weights(stage);
      advance();
    }
    commit_copies();
  }

  /// load_next in two parts: weights and scales without a commit, and, by a copy of the loader as it was before, x with
  /// one. The first commit covers all the weights.
  CUTLASS_DEVICE void load_next_weights(uint32_t stage) {
    if (left <= 0) return;
    if (x_left > 0) --x_left;
    load_weights(stage);
    advance();
  }
  CUTLASS_DEVICE void load_next_x() {
    if (left > 0) {
      if (x_left > 0) {
        --x_left;
        load_x();
      }
      advance();
    }
    commit_copies();
  }

  CUTLASS_DEVICE void load_weights(uint32_t stage) const {
    Pipeline::load_scales(stage, source, p, work.lane);
    Pipeline::load_weights(stage, source, is_whole(p, k_tile), work.lane);
  }

  /// Loads x of one k_tile. From K on it is zero, whatever the weights are there.
  CUTLASS_DEVICE void load_x() const {
    int const k = k_tile * kTileK + work.lane % kXVectors * 8;
    int const bytes = k < p.k ? 16 : 0;
    int token = work.lane / kXVectors;
    auto const* source = static_cast<Element const*>(p.x) + token * p.ldx + (bytes > 0 ? k : 0);
    uint32_t target = x_target;
    if (token < p.m) copy_async_or_zero(target, source, bytes);
    CUTLASS_PRAGMA_NO_UNROLL
    while ((token += kXRows) < p.m) {
      target += kXRows * p.x_row_bytes;
      source += kXRows * p.ldx;
      copy_async_or_zero(target, source, bytes);
    }
  }
};

}  // namespace weightonly::sm90_decode
