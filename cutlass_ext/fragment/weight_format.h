// What a kernel must know of a weight format: one specialization of WeightFormat each.
//
//   kBits, kBias          a weight's width; what is added to the integer q before it is stored
//   kIsCodebook           the stored integer is the index of a value in a codebook
//   Scale<Element>        a scale, or zero point, as it lies in memory; to_float(pair, i): of two neighbours
//   Exact<Element>        loads the A registers of m16n8k16 with q itself, or the codebook's value
//   Unscaled<Element>     loads them without arithmetic: numbers linear in q, of which an accumulator is corrected
//
// A fragment has kWords, the 32-bit words of a lane for one k16 step, and load(words, codebook, a), which makes the
// four A registers: rows (g, k), (g + 8, k), (g, k + 8), (g + 8, k + 8). `codebook` is unused where kIsCodebook is
// false.
//
// Unscaled: arithmetic on weights is what a kernel of few tokens has no time for. The integer u = q + kBias stays where
// it is, in the low bits of a 16-bit float, and its register is reinterpreted as two floats:
//
//   fp16, int4   w & 0x000f000f is u * 2^-24 in both halves (a denormal), w & 0x00f000f0 is u * 2^-20
//   fp16, int8   a byte alone in a half is u * 2^-24
//   bf16, int4   0x4300 | u is 128 + u (a smaller exponent would leave the products too small for fp32)
//   bf16, int8   the ordinary conversion: q itself
//   codebook     the value
//
// Tensor cores take denormals exactly and at full speed, and accumulate in fp32, where a factor of 2^24 loses nothing.
// The number v that the MMA sees is linear in u, so scale, bias and zero point are applied to the sum over a group of
// k:
//
//   sum_k x (q - z) s = s * (factor * sum_k x v - (kOffset + z) * sum_k x)
//
// kFactorLow and kFactorHigh are the factors of rows g and g + 8, kOffset what v has in excess of q. sum_k x of every
// token comes from the same MMA, with an A operand of ones: kOnes is a register of two.
#pragma once

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/integer_subbyte.h"
#include "cutlass/platform/platform.h"
#include "cutlass_ext/convert/codebook.h"
#include "cutlass_ext/convert/numeric_conversion.h"

namespace weightonly {

// The names of the heuristics, capitalized; codebook.h has Code4.
using Int4 = cutlass::uint4b_t;
using Int8 = uint8_t;

template <class Weight>
struct WeightFormat;

namespace detail {

template <class Element>
inline constexpr bool kIsHalf = cutlass::platform::is_same<Element, cutlass::half_t>::value;

/// Scales of the type of x.
template <class Element>
struct ElementScale {
  using Type = Element;

  CUTLASS_DEVICE static float to_float(uint32_t pair, int i) {
    return float(Element::bitcast(uint16_t(pair >> (16 * i))));
  }
};

/// q itself, by ConvertWord.
template <class Element, class Weight>
struct ConvertedFragment {
  using Word = ConvertWord<Element, Weight>;
  static constexpr int kWords = 8 / Word::kElements;

  template <class Codebook>
  CUTLASS_DEVICE static void load(uint32_t const* words, Codebook const&, uint32_t* a) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) Word::apply(words[i], a + i * (4 / kWords));
  }
};

}  // namespace detail

template <>
struct WeightFormat<Int4> {
  static constexpr int kBits = 4;
  static constexpr int kBias = 8;
  static constexpr bool kIsCodebook = false;

  template <class Element>
  using Scale = detail::ElementScale<Element>;

  template <class Element>
  using Exact = detail::ConvertedFragment<Element, cutlass::uint4b_t>;

  template <class Element>
  struct Unscaled {
    static constexpr bool kIsHalf = detail::kIsHalf<Element>;
    static constexpr int kWords = 1;
    static constexpr float kFactorLow = kIsHalf ? float(1 << 24) : 1.f;
    static constexpr float kFactorHigh = kIsHalf ? float(1 << 20) : 1.f;
    static constexpr int kOffset = kIsHalf ? kBias : 128 + kBias;
    static constexpr uint32_t kOnes = kIsHalf ? 0x3c003c00 : 0x3f803f80;

    template <class Codebook>
    CUTLASS_DEVICE static void load(uint32_t const* words, Codebook const&, uint32_t (&a)[4]) {
      if constexpr (kIsHalf) {
        uint32_t const high = words[0] >> 8;
        a[0] = words[0] & 0x000f000f;
        a[1] = words[0] & 0x00f000f0;
        a[2] = high & 0x000f000f;
        a[3] = high & 0x00f000f0;
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = and_or<0x000f000f, 0x43004300>(words[0] >> (4 * i));
      }
    }
  };
};

template <>
struct WeightFormat<Int8> {
  static constexpr int kBits = 8;
  static constexpr int kBias = 128;
  static constexpr bool kIsCodebook = false;

  template <class Element>
  using Scale = detail::ElementScale<Element>;

  template <class Element>
  using Exact = detail::ConvertedFragment<Element, uint8_t>;

  template <class Element>
  struct Unscaled {
    static constexpr bool kIsHalf = detail::kIsHalf<Element>;
    static constexpr int kWords = 2;
    static constexpr float kFactorLow = kIsHalf ? float(1 << 24) : 1.f;
    static constexpr float kFactorHigh = kFactorLow;
    static constexpr int kOffset = kIsHalf ? kBias : 0;
    static constexpr uint32_t kOnes = kIsHalf ? 0x3c003c00 : 0x3f803f80;

    template <class Codebook>
    CUTLASS_DEVICE static void load(uint32_t const* words, Codebook const&, uint32_t (&a)[4]) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        if constexpr (kIsHalf) {
          a[2 * i] = permute_bytes<0x4240>(words[i], 0);
          a[2 * i + 1] = permute_bytes<0x4341>(words[i], 0);
        } else {
          detail::ConvertWord<cutlass::bfloat16_t, uint8_t>::apply(words[i], a + 2 * i);
        }
      }
    }
  };
};

template <>
struct WeightFormat<Code4> {
  static constexpr int kBits = 4;
  static constexpr int kBias = 0;
  static constexpr bool kIsCodebook = true;

  template <class Element>
  using Scale = detail::ElementScale<Element>;

  template <class Element>
  struct Exact {
    static constexpr int kWords = 1;

    template <class Codebook>
    CUTLASS_DEVICE static void load(uint32_t const* words, Codebook const& codebook, uint32_t* a) {
      codebook.look_up_word(words[0], a);
    }
  };

  template <class Element>
  struct Unscaled : Exact<Element> {
    static constexpr float kFactorLow = 1.f;
    static constexpr float kFactorHigh = 1.f;
    static constexpr int kOffset = 0;
    static constexpr uint32_t kOnes = 0;  // sum_k x is not needed
  };
};

}  // namespace weightonly
