// Geometry of the "interleaved" weight layout (weightonly/layout/interleaved.py holds the passes that produce it).
//
// A *line* is I neighbouring columns of w [K, N], stored along K in k_blocks of 64 k. A k_block of a line is 128
// bytes, eight chunks of 16 bytes, whatever the weight's width:
//
//   int4 (I = 4):  | col 0: k 0-31 | col 0: k 32-63 | col 1: k 0-31 | ... | col 3: k 32-63 |     a chunk = 32 k
//   int8 (I = 2):  | col 0: k 0-15 | k 16-31 | k 32-47 | k 48-63 | col 1: k 0-15 | ...    |     a chunk = 16 k
//
// Within a chunk the rows are permuted so that thread t of a quad finds, in the 4 bytes that ldmatrix hands it, the
// rows 2t, 2t+1, 2t+8, 2t+9 (and + 16 for int4) that mma.m16n8k16 wants from it in its B operand.
#pragma once

#include <cstdint>

#include "cutlass_ext/fragment/weight_format.h"

namespace weightonly {

inline constexpr int kLineBlockK = 64;        // k of a k_block
inline constexpr int kLineBlockBytes = 128;   // of a k_block of a line
inline constexpr int kChunkBytes = 16;        // of one load of a thread, and of one row of an ldmatrix matrix
inline constexpr int kChunksPerLineBlock = kLineBlockBytes / kChunkBytes;

template <class Weight>
struct InterleavedLayout {
  static constexpr int kBits = WeightFormat<Weight>::kBits;
  static constexpr int kBias = WeightFormat<Weight>::kBias;                         // stored value = q + kBias
  static constexpr int kColumnsPerLine = 16 / kBits;                          // I: 4 for int4, 2 for int8
  static constexpr int kChunkK = kChunkBytes * 8 / kBits;                     // 32 for int4, 16 for int8
  static constexpr int kChunksPerColumn = kLineBlockK / kChunkK;              // in one k_block: 2 or 4
  static constexpr int kWordElements = 32 / kBits;                            // 8 or 4
  static_assert(kColumnsPerLine * kChunksPerColumn == kChunksPerLineBlock);
};

}  // namespace weightonly
