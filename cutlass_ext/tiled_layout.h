// The layout "tiled" (weightonly/layout.py), seen from a kernel.
//
// Stripes of 64 columns follow each other; in a stripe, blocks of 64 k follow each other; a block is four pieces, one per
// 16-row tile of an MMA whose A operand are the weights (m = columns of w, k = k). In a piece each lane's registers lie
// together, so that one 16-byte load per lane brings the A fragments of four (int4) or two (int8) k16 steps.
//
//   stripe:  | block k 0-63 | block k 64-127 | ...        block:  | piece 0 | piece 1 | piece 2 | piece 3 |
//   lane 4g + t of piece w holds columns 8g + 2w (MMA row g) and 8g + 2w + 1 (row g + 8), in the MMA's own order of k.
//
// Over the four pieces, lanes 4g..4g+3 hold the eight neighbouring columns 8g..8g+7: their scales are one 16-byte load.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/integer_subbyte.h"
#include "cutlass_ext/code_table.h"

namespace weightonly {

template <class Weight>
struct TiledLayout {
  static constexpr int kBits = cutlass::sizeof_bits<Weight>::value;
  static constexpr int kStripe = 64;  // columns
  static constexpr int kBlockK = 64;
  static constexpr int kPieces = 4;
  static constexpr int kLaneWords = kBits;  // 32-bit words of a lane in one piece: four k16 steps
  static constexpr int kLoads = kLaneWords / 4;  // of 16 bytes; the lanes' loads lie 512 bytes apart
  static constexpr int kPieceBytes = 32 * kLaneWords * 4;
  static constexpr int kBlockBytes = kPieces * kPieceBytes;

  CUTLASS_HOST_DEVICE static uint32_t stripe_bytes(int k_padded) {
    return uint32_t(k_padded) * (kBlockBytes / kBlockK);
  }

  /// Offset of a block, bytes.
  CUTLASS_HOST_DEVICE static int64_t block_offset(int stripe, int block, int k_blocks) {
    return (int64_t(stripe) * k_blocks + block) * kBlockBytes;
  }
};

}  // namespace weightonly
