// Weights as the A operand of wgmma, dequantized in registers and rounded to Element: (q - zero) * scale, or
// codebook[q] * scale.
//
// With few tokens the kernel leaves the scale out here and multiplies the accumulators of each group instead, because
// there are fewer of them than weights.
#pragma once

#include "cutlass_ext/fragment/scale_mode.h"
#include "cutlass_ext/fragment/weight_format.h"

namespace weightonly {

/// The scales and zero points of a lane's two columns, which are rows g and g + 8 of the MMA. A register holds one of
/// them in both halves.
template <class Element, ScaleMode kScaleMode>
struct ScalePair {
  uint32_t scale[2];
  uint32_t zero[2];

  /// scales, zeros: those of the two columns, one in each half, as they lie in memory.
  CUTLASS_DEVICE ScalePair(uint32_t scales, uint32_t zeros)
      : scale{permute_bytes<0x1010>(scales, 0), permute_bytes<0x3232>(scales, 0)},
        zero{permute_bytes<0x1010>(zeros, 0), permute_bytes<0x3232>(zeros, 0)} {}

  /// Two weights of one column: (weights - zero) * scale. kMultiplies: whether to multiply by the scale here.
  template <bool kMultiplies>
  CUTLASS_DEVICE uint32_t apply(uint32_t weights, int row) const {
    using Math = PackedMath<Element>;
    if constexpr (kScaleMode == ScaleMode::kChannel) return weights;
    if constexpr (kScaleMode == ScaleMode::kGroupZeros) weights = Math::sub(weights, zero[row]);
    return kMultiplies ? Math::mul(weights, scale[row]) : weights;
  }
};

/// kMultiplies: whether the weights are multiplied by their scales here, and not the accumulators later.
template <class Element, class Weight, ScaleMode kScaleMode, bool kMultiplies>
struct ScaledFragment {
  using Exact = typename WeightFormat<Weight>::template Exact<Element>;
  static constexpr int kWords = Exact::kWords;  // of a lane, for one k16 step of the MMA

  /// a: the four A registers of a k16 step: (g, k), (g + 8, k), (g, k + 8), (g + 8, k + 8). Integers need no codebook.
  template <class Codebook>
  CUTLASS_DEVICE static void load(uint32_t const* words, Codebook const& codebook,
                                  ScalePair<Element, kScaleMode> const& scales, uint32_t* a) {
    Exact::load(words, codebook, a);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = scales.template apply<kMultiplies>(a[i], i % 2);
  }
};

}  // namespace weightonly
