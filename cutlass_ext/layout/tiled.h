// Geometry of the "tiled" weight layout (weightonly/layout/tiled.py holds the passes that produce it).
//
// A column panel is 64 columns of w over all of K. Panels follow each other in memory; in a panel, k_blocks of 64 k
// follow each other. A k_block of a panel is four warp fragments, one for each tile of 16 columns. The weights are the
// A operand of the MMA: its rows (m) are columns of w. In a fragment the registers of a lane are neighbours, so that
// one 16-byte load per lane brings the A registers of four (int4) or two (int8) k16 steps.
//
//   panel:   | k_block 0: k 0-63 | k_block 1: k 64-127 | ...
//   k_block: | fragment 0 | fragment 1 | fragment 2 | fragment 3 |
//   lane 4g + t of fragment f holds columns 8g + 2f (MMA row g) and 8g + 2f + 1 (row g + 8), in the MMA's order of k.
//
// In the four fragments together, lanes 4g to 4g + 3 hold columns 8g to 8g + 7: one 16-byte load brings their scales.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass_ext/fragment/weight_format.h"

namespace weightonly {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelBlockK = 64;  // k of a k_block
inline constexpr int kPanelFragments = 4;  // tiles of 16 columns

template <class Weight>
struct TiledLayout {
  static constexpr int kBits = WeightFormat<Weight>::kBits;
  static constexpr int kPanelColumns = weightonly::kPanelColumns;
  static constexpr int kBlockK = kPanelBlockK;
  static constexpr int kFragments = kPanelFragments;
  static constexpr int kLaneWords = kBits;  // 32-bit words of a lane in one fragment: four k16 steps
  static constexpr int kLoads = kLaneWords / 4;  // 16-byte loads of a lane in one fragment
  static constexpr int kLoadBytes = 32 * 16;  // one load of all lanes
  static constexpr int kFragmentBytes = kLoads * kLoadBytes;
  static constexpr int kBlockBytes = kFragments * kFragmentBytes;

  CUTLASS_HOST_DEVICE static uint32_t panel_bytes(int k_padded) { return uint32_t(k_padded) * (kBlockBytes / kBlockK); }

  /// Offset of a k_block of a panel, bytes.
  CUTLASS_HOST_DEVICE static int64_t block_offset(int panel, int k_block, int k_blocks) {
    return (int64_t(panel) * k_blocks + k_block) * kBlockBytes;
  }
};

}  // namespace weightonly
