// Weights as the A operand of wgmma, dequantized in registers: (q - zero) * scale, or table[q] * scale, rounded to Element.
//
// For few tokens the scale is left to the sums of a group, which are then fewer than the weights.
#pragma once

#include "cutlass_ext/numeric_conversion.h"
#include "cutlass_ext/scale_mode.h"
#include "cutlass_ext/tiled_layout.h"

namespace weightonly {

/// The scale and zero point of a lane's two columns, MMA rows g and g + 8, each in both halves of a register.
template <class Element, ScaleMode kScaleMode>
struct ScalePair {
  uint32_t scale[2];
  uint32_t zero[2];

  /// scales, zeros: the two columns as they lie in memory.
  CUTLASS_DEVICE ScalePair(uint32_t scales, uint32_t zeros)
      : scale{permute_bytes<0x1010>(scales, 0), permute_bytes<0x3232>(scales, 0)},
        zero{permute_bytes<0x1010>(zeros, 0), permute_bytes<0x3232>(zeros, 0)} {}

  /// kScales: else the sums are multiplied by the scale, later.
  template <bool kScales>
  CUTLASS_DEVICE uint32_t apply(uint32_t weights, int row) const {
    using Math = PackedMath<Element>;
    if constexpr (kScaleMode == ScaleMode::kChannel) return weights;
    if constexpr (kScaleMode == ScaleMode::kGroupZeros) weights = Math::sub(weights, zero[row]);
    return kScales ? Math::mul(weights, scale[row]) : weights;
  }
};

template <class Element, class Weight, ScaleMode kScaleMode, bool kScales>
struct ScaledFragment {
  using Word = detail::ConvertWord<Element, Weight>;
  static constexpr int kWords = 8 / Word::kElements;  // of a lane for one k16 step

  /// a: the four A registers: (g, k), (g + 8, k), (g, k + 8), (g + 8, k + 8). The table is that of codes.
  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const&, ScalePair<Element, kScaleMode> const& scales,
                                  uint32_t* a) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) Word::apply(words[i], a + i * (4 / kWords));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = scales.template apply<kScales>(a[i], i % 2);
  }
};

template <class Element, ScaleMode kScaleMode, bool kScales>
struct ScaledFragment<Element, Code4, kScaleMode, kScales> {
  static constexpr int kWords = 1;

  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const& table,
                                  ScalePair<Element, kScaleMode> const& scales, uint32_t* a) {
    table.look_up_word(words[0], a);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = scales.template apply<kScales>(a[i], i % 2);
  }
};

}  // namespace weightonly
