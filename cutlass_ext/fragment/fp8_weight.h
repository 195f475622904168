// Packed weights as the A operand of wgmma with E4M3: exact, without scales.
//
// The bytes 0 to 16 of E4M3 are linear: byte b is b * 2^-9. So twice an integer of 4 bits is a byte and a sign. A weight is
// kFp8WeightUnit times what the MMA computes with.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

inline constexpr float kFp8WeightUnit = 256.f;

/// Four integers of 4 bits, one in the low half of each byte, as E4M3 of 2q * 2^-9. An integer is stored as 2q, or -2q - 1
/// if it is negative: then the byte is one more, and the sign.
CUTLASS_DEVICE uint32_t e4m3_of_int4(uint32_t halves) {
  return halves + (halves & 0x01010101u) * 0x81u;
}

/// The A registers of a lane for one k32 step. words[i]: columns of rows g and g + 8 in the low and the high halves of
/// bytes, whose order is that of k, from 16 i on.
CUTLASS_DEVICE void load_fp8_fragment(uint32_t const (&words)[2], uint32_t* a) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = e4m3_of_int4(words[i] & 0x0f0f0f0fu);
    a[2 * i + 1] = e4m3_of_int4(words[i] >> 4 & 0x0f0f0f0fu);
  }
}

}  // namespace weightonly
