// From packed weights in shared memory to the B operand of the tensor core, for one warp and one step along K.
//
// A step is the k in one ldmatrix row: 32 of int4 or 16 of int8, which are two k16 steps of the MMA or one.
#pragma once

#include "cute/arch/copy_sm75.hpp"
#include "cutlass_ext/layout/interleaved.h"
#include "cutlass_ext/convert/numeric_conversion.h"
#include "cutlass_ext/mainloop/scale_tile.h"
#include "cutlass_ext/layout/swizzle.h"

namespace weightonly {

template <class Element, class Weight, ScaleMode kScaleMode, int kBlockN, int kWarpN, int kLeastGroup>
struct WeightFragment {
  using Layout = InterleavedLayout<Weight>;
  using Scales = ScaleTile<Element, kScaleMode, kBlockN, kLeastGroup>;
  using Math = PackedMath<Element>;
  using Codebook = CodebookPairs<false>;  // of codes alone

  static constexpr int kStepK = Layout::kChunkK;
  static constexpr int kSteps = kLineBlockK / kStepK;         // per k_block: 2 (int4) or 4 (int8)
  static constexpr int kMmaSteps = kStepK / 16;               // k16 steps per step
  static constexpr int kGroups = kStepK > kLeastGroup ? kStepK / kLeastGroup : 1;  // in a step
  static constexpr int kTilesN = kWarpN / 8;                  // n8 tiles of the warp
  static constexpr int kLoads = kTilesN / 4;                  // an ldmatrix.x4 covers four of them
  static_assert(kWarpN % 32 == 0);

  uint32_t packed[kTilesN];                   // one word per n8 tile
  uint32_t scale[kGroups][kTilesN];           // column lane / 4 of each n8 tile, in both halves
  uint32_t zero[kGroups][kTilesN];
  uint32_t values[kMmaSteps][kTilesN][2];     // B operand: rows 2t, 2t+1 and 2t+8, 2t+9 of column lane / 4

  int line_offset_bytes;  // of this lane's ldmatrix row, chunk 0
  int chunk;              // of this lane's column within its line
  int swizzle;
  int column;             // this lane's column of the first n8 tile, within the CTA's tile

  CUTLASS_DEVICE WeightFragment(int warp_n, int lane) {
    int const n = warp_n + lane;  // lane l addresses row l % 8 of matrix l / 8, i.e. column l of 32
    int const line = n / Layout::kColumnsPerLine;
    line_offset_bytes = line * SwizzledTile::kRowBytes;
    chunk = (n % Layout::kColumnsPerLine) * Layout::kChunksPerColumn;
    swizzle = line % SwizzledTile::kChunks;
    column = warp_n + lane / 4;
  }

  CUTLASS_DEVICE void load_packed(char const* smem_weight, int step) {
    constexpr int kLinesPerLoad = 32 / Layout::kColumnsPerLine;  // a multiple of 8: the swizzle stays the same
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      char const* const row = smem_weight + line_offset_bytes + i * kLinesPerLoad * SwizzledTile::kRowBytes;
      char const* const source = row + (((chunk + step) ^ swizzle) << 4);
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(source), packed[4 * i], packed[4 * i + 1],
                                    packed[4 * i + 2], packed[4 * i + 3]);
    }
  }

  /// Loads the scales of the step's groups. It loads them again for the second half of a k_block even if that is the
  /// same group: a branch would cost more, as it cuts the loop body in two for the compiler's scheduler.
  CUTLASS_DEVICE void load_scales(char const* smem_scales, int step, int second_row_bytes) {
    if constexpr (Scales::kHasScales) {
      if (kLeastGroup == 32 && step % (kSteps / 2) != 0) return;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        int const offset_bytes = kLeastGroup == 16 ? (step * kGroups + group) * Scales::kRowBytes
                                 : step == 0       ? 0
                                                   : second_row_bytes;
        auto const* row = reinterpret_cast<uint16_t const*>(smem_scales + offset_bytes) + column;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kTilesN; ++j) {
          scale[group][j] = broadcast(row[8 * j]);
          if constexpr (Scales::kHasZeros) zero[group][j] = broadcast(row[Scales::kZerosOffsetBytes / 2 + 8 * j]);
        }
      }
    }
  }

  /// packed -> values. q is exact, q - z is rounded once (exact for integer z), and the product with the scale once:
  /// the weight is the one that `dequantize` writes. Integers need no codebook.
  CUTLASS_DEVICE void dequantize(Codebook const& codebook) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTilesN; ++j) {
      uint32_t pairs[2 * kMmaSteps];
      if constexpr (WeightFormat<Weight>::kIsCodebook) {
        codebook.look_up_word(packed[j], pairs);
      } else {
        detail::ConvertWord<Element, Weight>::apply(packed[j], pairs);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kMmaSteps; ++i) {
        int const group = i / 2 * kGroups / kMmaSteps;
        if constexpr (Scales::kHasZeros) pairs[i] = Math::sub(pairs[i], zero[group][j]);
        if constexpr (Scales::kHasScales) pairs[i] = Math::mul(pairs[i], scale[group][j]);
        values[i / 2][j][i % 2] = pairs[i];
      }
    }
  }
};

}  // namespace weightonly
