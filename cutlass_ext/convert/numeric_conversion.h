// int8/int4 to fp16/bf16 without integer-to-float instructions, which run at a quarter of the rate of everything here.
//
// Input is what the preprocessing pass `add_bias_and_interleave` leaves in a 32-bit word: unsigned values u = q + bias
// (bias 8 or 128), ordered so that one mask takes the two neighbours of a half2:
//
//   int4, nibbles low to high:  e0 e2 e4 e6 | e1 e3 e5 e7        int8, bytes low to high:  e0 e2 | e1 e3
//   w & 0x000f000f        = e0 in the low half, e1 in the high   (next pair: mask 0x00f000f0, then shift by 8)
//
// Output is q itself, exactly, in the natural order e0, e1, e2, ... The interface is that of CUTLASS's
// NumericArrayConverter. The technique is FasterTransformer's (Kim et al., "Who Says Elephants Can't Run", 2022,
// arXiv:2211.10017); the conversion of int8 to bf16 is our own.
#pragma once

#include "cutlass/array.h"
#include "cutlass/integer_subbyte.h"
#include "cutlass_ext/convert/packed_math.h"

namespace weightonly {

/// Converts kCount biased, interleaved weights of type Source to Element.
template <class Element, class Source, int kCount>
struct FastInterleavedAndBiasedNumericArrayConverter;

namespace detail {

/// One 32-bit word of Source to registers of two Elements.
template <class Element, class Source>
struct ConvertWord;

template <>
struct ConvertWord<cutlass::half_t, cutlass::uint4b_t> {
  using Math = PackedMath<cutlass::half_t>;
  static constexpr int kElements = 8;

  CUTLASS_HOST_DEVICE static void apply(uint32_t word, uint32_t out[4]) {
    // 0x6400 is 1024, whose mantissa steps are 1: nibble bits dropped into it read as 1024 + u, or as 1024 + 16u when
    // they sit four bits higher. The second kind is brought back by fma(v, 1/16, -64 - 8): no shift needed for it.
    uint32_t const high = word >> 8;
    out[0] = Math::sub(and_or<0x000f000f, 0x64006400>(word), 0x64086408);                     // - 1032
    out[1] = Math::fma(and_or<0x00f000f0, 0x64006400>(word), 0x2c002c00, 0xd480d480);  // / 16 - 72
    out[2] = Math::sub(and_or<0x000f000f, 0x64006400>(high), 0x64086408);
    out[3] = Math::fma(and_or<0x00f000f0, 0x64006400>(high), 0x2c002c00, 0xd480d480);
  }
};

template <>
struct ConvertWord<cutlass::bfloat16_t, cutlass::uint4b_t> {
  using Math = PackedMath<cutlass::bfloat16_t>;
  static constexpr int kElements = 8;

  CUTLASS_HOST_DEVICE static void apply(uint32_t word, uint32_t out[4]) {
    // 0x4300 is 128, with mantissa steps of 1 and seven bits: room for one nibble only, so each pair is shifted down.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      out[i] = Math::sub(and_or<0x000f000f, 0x43004300>(word >> (4 * i)), 0x43084308);  // - 136
    }
  }
};

template <>
struct ConvertWord<cutlass::half_t, uint8_t> {
  using Math = PackedMath<cutlass::half_t>;
  static constexpr int kElements = 4;

  CUTLASS_HOST_DEVICE static void apply(uint32_t word, uint32_t out[2]) {
    // A byte fits the ten mantissa bits of 1024: two byte permutations set both halves of each register.
    out[0] = Math::sub(permute_bytes<0x5250>(word, 0x64646464), 0x64806480);  // - 1152
    out[1] = Math::sub(permute_bytes<0x5351>(word, 0x64646464), 0x64806480);
  }
};

template <>
struct ConvertWord<cutlass::bfloat16_t, uint8_t> {
  using Math = PackedMath<cutlass::bfloat16_t>;
  static constexpr int kElements = 4;

  CUTLASS_HOST_DEVICE static void apply(uint32_t word, uint32_t out[2]) {
    // bf16 has seven mantissa bits, a byte eight. The low seven read as 128 + (u & 127); the top bit t chooses what is
    // taken away: q = u - 128 = (128 + (u & 127)) - (t ? 128 : 256), and 256 differs from 128 in bit 7 alone.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const pair = word >> (8 * i);
      out[i] = Math::sub(and_or<0x007f007f, 0x43004300>(pair), and_or<0x00800080, 0x43004300>(~pair));
    }
  }
};

}  // namespace detail

template <class Element, class Source, int kCount>
struct FastInterleavedAndBiasedNumericArrayConverter {
  using Word = detail::ConvertWord<Element, Source>;
  using result_type = cutlass::Array<Element, kCount>;
  using source_type = cutlass::Array<Source, kCount>;

  static_assert(kCount % Word::kElements == 0, "weights are converted by whole 32-bit words");
  static constexpr int kWords = kCount / Word::kElements;

  CUTLASS_HOST_DEVICE static result_type convert(source_type const& source) {
    result_type result;
    auto const* words = reinterpret_cast<uint32_t const*>(&source);
    auto* registers = reinterpret_cast<uint32_t*>(&result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      Word::apply(words[i], registers + i * (Word::kElements / 2));
    }
    return result;
  }

  CUTLASS_HOST_DEVICE result_type operator()(source_type const& source) const { return convert(source); }
};

}  // namespace weightonly
