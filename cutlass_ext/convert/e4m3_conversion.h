// E4M3 to fp16 and bf16 without conversion instructions, which sm80 does not have.
//
// A byte is s eeee mmm. Its seven low bits, where a 16-bit float has its exponent and mantissa, are the same number times
// a power of two, as the biases differ; subnormal ones, too, as both have the number 0 at 0. So a shift and two masks
// leave q * kFactor, exactly, and one multiplication q itself:
//
//   byte      s eeee mmm                  fp16   s0eeeemm m0000000   q * 2^-8
//                                         bf16   s0000eee emmm0000   q * 2^-120
//
// Input is what `pack_codes` leaves in a word, bytes low to high e0 e2 | e1 e3. NaN (0x7f and 0xff) is refused when
// weights are packed: here it reads as +-480.
#pragma once

#include "cutlass_ext/convert/numeric_conversion.h"

namespace weightonly {

/// A weight of 8 bits, E4M3.
struct Fp8 {
  uint8_t code;
};

namespace detail {

/// Pairs of E4M3 as pairs of Elements.
template <class Element>
struct E4m3Pair;

template <>
struct E4m3Pair<cutlass::half_t> {
  static constexpr int kShift = 1;
  static constexpr float kUnscale = 256.f;  // 1 / kFactor
  static constexpr uint32_t kUnscales = 0x5c005c00;  // the same, in both halves
};

template <>
struct E4m3Pair<cutlass::bfloat16_t> {
  static constexpr int kShift = 4;
  static constexpr float kUnscale = 0x1p120f;
  static constexpr uint32_t kUnscales = 0x7b807b80;
};

/// q * kFactor of a word: e0 and e1 in the first register, e2 and e3 in the second.
template <class Element>
CUTLASS_HOST_DEVICE void shift_e4m3(uint32_t word, uint32_t out[2]) {
  constexpr int kShift = E4m3Pair<Element>::kShift;
  constexpr uint32_t kNumber = 0x7f007f00u >> kShift, kSign = 0x80008000u;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const high = i == 0 ? word << 8 : word;  // the pair in the high bytes of both halves
    out[i] = (high >> kShift & kNumber) | (high & kSign);
  }
}

template <class Element>
struct ConvertWord<Element, Fp8> {
  static constexpr int kElements = 4;

  CUTLASS_HOST_DEVICE static void apply(uint32_t word, uint32_t out[2]) {
    shift_e4m3<Element>(word, out);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) out[i] = PackedMath<Element>::mul(out[i], E4m3Pair<Element>::kUnscales);
  }
};

}  // namespace detail
}  // namespace weightonly
