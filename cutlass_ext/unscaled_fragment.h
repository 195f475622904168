// Weights as the A operand of an MMA without arithmetic on them: what a kernel does that is bound by instructions.
//
// The integer u = q + bias stays where it is, in the low bits of a 16-bit float, and is left for a number:
//
//   fp16, int4   w & 0x000f000f is u * 2^-24 in both halves (a denormal), w & 0x00f000f0 is u * 2^-20
//   fp16, int8   a byte alone in a half is u * 2^-24
//   bf16, int4   0x4300 | u is 128 + u (bf16 has no room for u beside smaller exponents: fp32 would underflow)
//   bf16, int8   the ordinary converter: q itself
//   a code       looked up: the number of the table
//
// Tensor cores take denormals exactly and at full speed, and sum in fp32, where a factor 2^24 loses nothing. What is left
// is linear in u, so scale, bias and zero point are applied to the sums over a group of k:
//
//   sum_k x (q - z) s = s * (factor * sum_k x v - (bias + z) * sum_k x)          v: the value that the MMA sees
//
// `sum_k x` of every token comes from the same MMA with an A operand of ones.
#pragma once

#include "cutlass_ext/numeric_conversion.h"
#include "cutlass_ext/tiled_layout.h"

namespace weightonly {

/// kWords: 32-bit words of a lane for one k16 step. load() makes the four A registers of m16n8k16 out of them; the table is that
/// of codes.
/// kFactorLow, kFactorHigh: of rows g and g + 8. kOnes: a register of two ones.
template <class Element, class Weight>
struct UnscaledFragment;

template <>
struct UnscaledFragment<cutlass::half_t, cutlass::uint4b_t> {
  static constexpr int kWords = 1;
  static constexpr float kFactorLow = float(1 << 24);
  static constexpr float kFactorHigh = float(1 << 20);
  static constexpr int kBias = 8;
  static constexpr uint32_t kOnes = 0x3c003c00;

  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const&, uint32_t (&a)[4]) {
    uint32_t const high = words[0] >> 8;
    a[0] = words[0] & 0x000f000f;
    a[1] = words[0] & 0x00f000f0;
    a[2] = high & 0x000f000f;
    a[3] = high & 0x00f000f0;
  }
};

template <>
struct UnscaledFragment<cutlass::bfloat16_t, cutlass::uint4b_t> {
  static constexpr int kWords = 1;
  static constexpr float kFactorLow = 1.f;
  static constexpr float kFactorHigh = 1.f;
  static constexpr int kBias = 128 + 8;
  static constexpr uint32_t kOnes = 0x3f803f80;

  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const&, uint32_t (&a)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = and_or<0x000f000f, 0x43004300>(words[0] >> (4 * i));
  }
};

template <>
struct UnscaledFragment<cutlass::half_t, uint8_t> {
  static constexpr int kWords = 2;
  static constexpr float kFactorLow = float(1 << 24);
  static constexpr float kFactorHigh = float(1 << 24);
  static constexpr int kBias = 128;
  static constexpr uint32_t kOnes = 0x3c003c00;

  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const&, uint32_t (&a)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = permute_bytes<0x4240>(words[i], 0);
      a[2 * i + 1] = permute_bytes<0x4341>(words[i], 0);
    }
  }
};

template <>
struct UnscaledFragment<cutlass::bfloat16_t, uint8_t> {
  static constexpr int kWords = 2;
  static constexpr float kFactorLow = 1.f;
  static constexpr float kFactorHigh = 1.f;
  static constexpr int kBias = 0;
  static constexpr uint32_t kOnes = 0x3f803f80;

  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const&, uint32_t (&a)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) detail::ConvertWord<cutlass::bfloat16_t, uint8_t>::apply(words[i], a + 2 * i);
  }
};

template <class Element>
struct UnscaledFragment<Element, Code4> {
  static constexpr int kWords = 1;
  static constexpr float kFactorLow = 1.f;
  static constexpr float kFactorHigh = 1.f;
  static constexpr int kBias = 0;
  static constexpr uint32_t kOnes = 0;  // the sums of x are not needed

  template <class Table>
  CUTLASS_DEVICE static void load(uint32_t const* words, Table const& table, uint32_t (&a)[4]) {
    table.look_up_word(words[0], a);
  }
};

}  // namespace weightonly
