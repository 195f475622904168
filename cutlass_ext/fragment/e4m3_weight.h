// What a kernel must know of weights in E4M3: weight_format.h for Fp8. Units of this format alone include it, so that it
// is none of the text of all others.
#pragma once

#include "cutlass_ext/convert/e4m3_conversion.h"
#include "cutlass_ext/fragment/weight_format.h"

namespace weightonly {

template <>
struct WeightFormat<Fp8> {
  static constexpr int kBits = 8;
  static constexpr int kBias = 0;
  static constexpr bool kIsCodebook = false;

  template <class Element>
  using Scale = detail::ElementScale<Element>;

  template <class Element>
  using Exact = detail::ConvertedFragment<Element, Fp8>;

  /// fp16: q * 2^-8, without the multiplication. bf16: q; its products with q * 2^-120 would be too small for fp32.
  template <class Element>
  struct Unscaled : Exact<Element> {
    static constexpr bool kIsHalf = detail::kIsHalf<Element>;
    static constexpr float kFactorLow = kIsHalf ? detail::E4m3Pair<cutlass::half_t>::kUnscale : 1.f;
    static constexpr float kFactorHigh = kFactorLow;
    static constexpr int kOffset = 0;
    static constexpr uint32_t kOnes = 0;  // sum_k x is not needed

    template <class Codebook>
    CUTLASS_DEVICE static void load(uint32_t const* words, Codebook const& codebook, uint32_t (&a)[4]) {
      if constexpr (kIsHalf) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) detail::shift_e4m3<Element>(words[i], a + 2 * i);
      } else {
        Exact<Element>::load(words, codebook, a);
      }
    }
  };
};

template <class Weight>
struct WordPositions;

/// As gemv_stage.h has them. A byte becomes fp32 as it becomes bf16: q * 2^-120.
template <>
struct WordPositions<Fp8> {
  static constexpr int kCount = 4;
  static constexpr int kUnitExponent = 120;

  CUTLASS_DEVICE static constexpr int bit(int) { return 0; }  // no weight is left where it lies

  CUTLASS_DEVICE static float weight(uint32_t word, int position) {
    // The arithmetic shift leaves the sign where it is.
    return __uint_as_float(uint32_t(int32_t(word << (24 - 8 * position)) >> 4) & 0x87f00000u);
  }
};

}  // namespace weightonly
