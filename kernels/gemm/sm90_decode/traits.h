// Types and sizes of a decode_sm90 kernel, and its shared memory.
#pragma once

#include "cutlass_ext/mainloop/decode_mma.h"
#include "kernels/gemm/sm90_decode/work.h"

namespace weightonly::sm90_decode {

/// Config: Element, Weight, kScaleMode, kRowTiles (of 16 columns), kWarpsK, kStages, kLeastGroup (16: groups of 16 alone).
template <class Config>
struct Traits {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr int kRowTiles = Config::kRowTiles;  // MMA tiles of 16 columns in an n_tile
  static constexpr int kWarpsK = Config::kWarpsK;  // warps, which share the k_tiles
  static constexpr int kStages = Config::kStages;  // k_tiles of a warp that are loaded ahead
  /// kGroups: groups of k in a k_tile.
  template <int kGroups>
  using Pipeline = WeightPipeline<Element, Weight, Config::kScaleMode, kRowTiles, kGroups, kDecodeTileBlocks<Weight>>;
  using Mma = DecodeMma<Config>;
  using Accumulator = typename Mma::Accumulator;
  using Codebook = CodebookPairs<true>;

  static constexpr bool kHasCodebook = WeightFormat<Weight>::kIsCodebook;
  static constexpr bool kHasScales = Pipeline<1>::kHasScales;  // of groups, applied in the mainloop
  static constexpr bool kHasZeros = Pipeline<1>::kHasZeros;
  static constexpr int kPanels = Pipeline<1>::kPanels;  // column panels that an n_tile may lie in
  static constexpr int kTileK = Pipeline<1>::kTileK;
  static constexpr int kTileXBytes = kTileK * int(sizeof(Element));  // x of one token and one k_tile
  static constexpr bool kHasGroupsOf16 = Config::kLeastGroup == 16;
  static constexpr int kMaxGroups = kHasScales ? kTileK / Config::kLeastGroup : 1;  // in a k_tile
  static constexpr int kThreads = 32 * kWarpsK;
  static constexpr int kTileN = 16 * kRowTiles;  // columns of an n_tile
  static constexpr int kPairs = kTileN / 2;  // of neighbouring columns: a thread reduces both
  static constexpr int kLaneColumns = 2 * kRowTiles;  // neighbouring columns whose accumulators a lane holds

  // Dynamic shared memory: two barriers, the expanded codebook, the pipeline, x [token][k], partials of other CTAs
  // [CTA][token][column], and two buffers of the warps' partials [warp][token][column].
  static constexpr int kBarrierBytes = 128;
  static constexpr int kCodebookBytes = kHasCodebook ? Codebook::kBytes : 0;

  CUTLASS_HOST_DEVICE static constexpr int pipeline_bytes(int groups) {
    return kStages * kWarpsK *
           (groups == 8   ? Pipeline<8>::kStageBytes
            : groups == 4 ? Pipeline<4>::kStageBytes
            : groups == 2 ? Pipeline<2>::kStageBytes
                          : Pipeline<1>::kStageBytes);
  }
  /// fp32 partials of an n_tile, of one warp or one CTA.
  CUTLASS_HOST_DEVICE static constexpr int partial_bytes(int m) { return m * kTileN * int(sizeof(float)); }
  CUTLASS_HOST_DEVICE static constexpr int warp_partials_bytes(int m) { return kWarpsK * partial_bytes(m); }
  /// x of one token. The 16 extra bytes put the rows that one ldmatrix reads into different banks.
  CUTLASS_HOST_DEVICE static constexpr int x_row_bytes(int k_tiles) { return k_tiles * kTileXBytes + 16; }
  /// groups: of a k_tile, 1, 2, 4 or 8. x_row_bytes: see above. heuristics/ has the same formula in Python.
  CUTLASS_HOST_DEVICE static constexpr int smem_bytes(int m, int split_k, int groups, int x_row_bytes) {
    return kBarrierBytes + kCodebookBytes + pipeline_bytes(groups) + m * x_row_bytes +
           (split_k - 1) * partial_bytes(m) + 2 * warp_partials_bytes(m);
  }

  /// The first MMA tile of an n_tile. Where n_tiles do not divide a column panel, the last n_tile ends with N, and may
  /// start inside the n_tile before it.
  CUTLASS_DEVICE static int first_row_tile(Params const& p, int n_tile) {
    int const first = n_tile * kRowTiles;
    return kPanels == 1 ? first : min(first, p.n_padded / 16 - kRowTiles);
  }
};

/// Addresses in a CTA's shared memory. groups: of a k_tile.
template <class Traits>
struct Smem {
  char* base;

  CUTLASS_DEVICE uint64_t& warps_barrier() const { return reinterpret_cast<uint64_t*>(base)[0]; }
  CUTLASS_DEVICE uint64_t& cluster_barrier() const { return reinterpret_cast<uint64_t*>(base)[1]; }
  CUTLASS_DEVICE char* codebook() const { return base + Traits::kBarrierBytes; }
  CUTLASS_DEVICE char* pipeline() const { return codebook() + Traits::kCodebookBytes; }
  CUTLASS_DEVICE char* x(int groups) const { return pipeline() + Traits::pipeline_bytes(groups); }
  CUTLASS_DEVICE float2* cluster_partials(Params const& p, int groups) const {
    return reinterpret_cast<float2*>(x(groups) + p.m * p.x_row_bytes);
  }
  CUTLASS_DEVICE float* warp_partials(Params const& p, int groups, int buffer) const {
    char* const first = x(groups) + p.m * p.x_row_bytes + (p.split_k - 1) * Traits::partial_bytes(p.m);
    return reinterpret_cast<float*>(first + buffer * Traits::warp_partials_bytes(p.m));
  }
};

}  // namespace weightonly::sm90_decode
