// The pipeline of weights of decode_sm90: what one warp has in flight, and where its stages have it.
//
// A warp multiplies one k_tile at a time: kRowTiles MMA tiles of 16 columns by kTileK of k, with the scales (and zero
// points) of their column panels for each group of k in it. The loads are cp.async of 16 bytes a lane. A lane loads its
// own weights, so the order of a thread's copies is all the synchronization that they need. Scales are read by other
// lanes, after a __syncwarp.
//
// Measured on an H200: loads straight into registers stream 6% faster, but the compiler has six scoreboards, shares one
// between several stages, and so waits for the newest. Bulk copies of these sizes have a microsecond more latency
// (bench/measurements/LOG.md).
#pragma once

#include "cutlass_ext/arch/cp_async.h"
#include "cutlass_ext/arch/ld_shared.h"
#include "cutlass_ext/fragment/scale_mode.h"
#include "cutlass_ext/fragment/weight_format.h"
#include "cutlass_ext/gemm_params.h"
#include "cutlass_ext/layout/tiled.h"

namespace weightonly {

/// kGroups: groups of k in a k_tile, each with its scales. kTileBlocks_: k_blocks of 64 k in a k_tile.
///
/// A "row tile" is 16 columns of w, which are the rows of one MMA; its number counts over all of N.
template <class Element, class Weight, ScaleMode kScaleMode, int kRowTiles, int kGroups, int kTileBlocks_>
struct WeightPipeline {
  using Layout = TiledLayout<Weight>;
  static constexpr int kTileBlocks = kTileBlocks_;
  static constexpr int kTileK = kTileBlocks * Layout::kBlockK;
  static constexpr int kGroupK = kTileK / kGroups;
  static constexpr int kGroupStep = kGroupK < 32 ? 16 : 32;  // in which GroupIndex counts
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;

  /// Column panels that kRowTiles neighbours may lie in.
  static constexpr int kPanels = Layout::kFragments % kRowTiles == 0 ? 1 : 2;
  static_assert(kRowTiles <= Layout::kFragments);

  // A stage: the k_blocks of a k_tile, each [row tile][load of a lane][lane][16 bytes]; then rows of 64 scales
  // [panel][group]; then rows of zero points [panel][group].
  static constexpr int kBlockBytes = kRowTiles * Layout::kFragmentBytes;
  static constexpr int kWeightsBytes = kTileBlocks * kBlockBytes;
  static constexpr int kTileStrideBytes = kTileBlocks * Layout::kBlockBytes;  // in memory, from one k_tile to the next
  using Scale = typename WeightFormat<Weight>::template Scale<Element>::Type;
  static constexpr int kScaleRowBytes = Layout::kPanelColumns * int(sizeof(Scale));
  static constexpr int kPanelRows = kPanels * kGroups;
  static constexpr int kScaleRows = kHasScales ? (kHasZeros ? 2 : 1) * kPanelRows : 0;
  static constexpr int kStageBytes = kWeightsBytes + kScaleRows * kScaleRowBytes;
  // Eight lanes copy a row, a warp four rows at once.
  static constexpr int kLoadGroups = kGroups < 4 ? kGroups : 4;  // a lane's rows are this far apart
  static_assert(kGroups <= 8);

  /// The global addresses that one lane loads from next, in one n_tile.
  struct Source {
    char const* weight;
    char const* scales;
    char const* zeros;
    uint32_t k;  // of the lane's first row of scales, as GroupIndex counts
    int tiles_in_panel;  // row tiles from the first one to the end of its panel
    uint32_t panel_gap;  // bytes between the last row tile of a panel and the first of the next

    Source() = default;

    CUTLASS_DEVICE Source(GemmParams const& p, int row_tile, int k_tile, int lane) {
      weight = first_weight(p, row_tile, k_tile, lane);
      int64_t const row = row_tile / Layout::kFragments * kScaleRowBytes + lane % 8 * 16;
      scales = static_cast<char const*>(p.scales) + row;
      zeros = static_cast<char const*>(p.zeros) + row;
      k = GroupIndex::counted<kGroupStep>(k_tile * kTileK + lane / 8 % kLoadGroups * kGroupK);
      tiles_in_panel = Layout::kFragments - row_tile % Layout::kFragments;
      panel_gap = Layout::panel_bytes(p.k_padded) - Layout::kBlockBytes;
    }

    /// Whether the n_tile ends in the next panel.
    CUTLASS_DEVICE bool crosses() const { return kPanels > 1 && tiles_in_panel < kRowTiles; }

    /// Bytes to add to the address of row tile i because it lies in the next panel.
    CUTLASS_DEVICE uint32_t gap_to(int i) const { return kPanels > 1 && i >= tiles_in_panel ? panel_gap : 0; }

    CUTLASS_DEVICE void advance(int k_tiles) {
      weight += k_tiles * kTileStrideBytes;
      k += k_tiles * GroupIndex::kCounts<kTileK, kGroupStep>;
    }
  };

  /// Few instructions, as a kernel starts with this address.
  CUTLASS_DEVICE static char const* first_weight(GemmParams const& p, uint32_t row_tile, uint32_t k_tile,
                                                 uint32_t lane) {
    uint32_t const offset =
        k_tile * kTileStrideBytes + row_tile % Layout::kFragments * Layout::kFragmentBytes + lane * 16;
    return static_cast<char const*>(p.weight) +
           uint64_t(row_tile / Layout::kFragments) * Layout::panel_bytes(p.k_padded) + offset;
  }

  /// Where a stage has the scales of group 0 for a lane's columns of each row tile. In one panel they are neighbours,
  /// and the first offset is enough.
  struct ScaleOffsets {
    uint32_t of[kPanels == 1 ? 1 : kRowTiles];

    ScaleOffsets() = default;
    CUTLASS_DEVICE ScaleOffsets(int row_tile, int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < int(sizeof(of) / sizeof(of[0])); ++i) {
        int const in_panel = row_tile % Layout::kFragments + i;  // of the first panel
        int const panel = in_panel / Layout::kFragments;
        of[i] = kWeightsBytes + panel * (kGroups * kScaleRowBytes) + lane / 4 * 16 + in_panel % Layout::kFragments * 4;
      }
    }

    /// The addresses in a stage.
    CUTLASS_DEVICE ScaleOffsets from(uint32_t stage) const {
      ScaleOffsets sum = *this;
      for (uint32_t& offset : sum.of) offset += stage;
      return sum;
    }
  };

  /// is_whole: false for the last k_tile when K ends inside it. Its second half is not loaded: whatever the stage holds
  /// there meets zeros of x and scales of zero.
  CUTLASS_DEVICE static void load_weights(uint32_t stage, Source const& source, bool is_whole, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kTileBlocks; ++block) {
      if (block > 0 && !is_whole) break;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Layout::kLoads; ++j) {
          copy_async(stage + block * kBlockBytes + lane * 16 + (i * Layout::kLoads + j) * Layout::kLoadBytes,
                     source.weight + source.gap_to(i) +
                         (block * Layout::kBlockBytes + i * Layout::kFragmentBytes + j * Layout::kLoadBytes));
        }
      }
    }
  }

  CUTLASS_DEVICE static void load_scales(uint32_t stage, Source const& source, GemmParams const& p, int lane) {
    if constexpr (!kHasScales) return;
    if (lane / 8 >= kPanelRows) return;
    CUTLASS_PRAGMA_UNROLL
    for (int first_group = 0; first_group < kGroups; first_group += kLoadGroups) {
      load_groups(stage, source, p, lane, first_group);
    }
  }

  /// The scales of kLoadGroups groups, in all panels.
  CUTLASS_DEVICE static void load_groups(uint32_t stage, Source const& source, GemmParams const& p, int lane,
                                         int first_group) {
    // Groups from K on get zeros: a weight dequantized with another group's scale might overflow, and Inf times 0 is
    // NaN.
    uint32_t const k = source.k + first_group * GroupIndex::kCounts<kGroupK, kGroupStep>;
    bool const is_group = kGroups == 1 || GroupIndex::first_k<kGroupStep>(k) < p.k;
    uint32_t const group = p.group.of_counted(k);
    uint64_t const offset = uint64_t(group) * (uint32_t(p.ld_scales) * uint32_t(sizeof(Scale)));
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kPanels * kLoadGroups; first += 4) {
      int const in_panels = first + lane / 8, panel = kPanels == 1 ? 0 : in_panels / kLoadGroups;
      int const row = in_panels + first_group + panel * (kGroups - kLoadGroups);
      if (panel > 0 && !source.crosses()) return;
      uint32_t const target = stage + kWeightsBytes + row * kScaleRowBytes + lane % 8 * 16;
      copy_async_or_zero(target, source.scales + offset + panel * kScaleRowBytes, is_group ? 16 : 0);
      if constexpr (kHasZeros) {
        copy_async_or_zero(target + kPanelRows * kScaleRowBytes, source.zeros + offset + panel * kScaleRowBytes,
                           is_group ? 16 : 0);
      }
    }
  }

  /// A lane's packed weights of one k_block, from shared memory.
  CUTLASS_DEVICE static void read_block(uint32_t (&words)[kRowTiles][Layout::kLaneWords], uint32_t stage, int block,
                                        int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Layout::kLoads; ++j) {
        read_shared(reinterpret_cast<uint32_t (&)[4]>(words[i][4 * j]),
                    stage + block * kBlockBytes + lane * 16 + (i * Layout::kLoads + j) * Layout::kLoadBytes);
      }
    }
  }
};

}  // namespace weightonly
