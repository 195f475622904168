// Packed weights as the A operand of wgmma with E4M3, exact: a weight is its unit times what the MMA computes with, times a
// scale.
//
// The bytes 0 to 16 of E4M3 are linear: byte b is b * 2^-9. So twice an integer of 4 bits is a byte and a sign.
//
// The scales of E2M1 in groups of 32 are powers of two, and E4M3 has room for twelve of them: those of four groups, 128 k,
// become part of the operand, and one number multiplies the sum, which pays where there are many tokens. Where the scales of
// a column differ by more, or by something else, the sum is computed again, with the groups that were left out.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass_ext/arch/permute.h"

namespace weightonly {

inline constexpr float kUnitOfInt4 = 256.f, kUnitOfFolded = 1.f / 64;

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

/// The bytes of E4M3 that the magnitudes 0, 0.5, 1, 1.5 (low) and 2, 3, 4, 6 (high) of E2M1 are. With a scale of one:
/// 2^-5 times the number.
struct E2m1Bytes {
  uint32_t low = 0x14100800u, high = 0x24201c18u;

  /// Those of the numbers themselves.
  CUTLASS_HOST_DEVICE static constexpr E2m1Bytes of_numbers() { return {0x3c383000u, 0x4c484440u}; }
};

/// Tables of four groups of a column.
struct FoldedScales {
  static constexpr int kGroups = 4;
  static constexpr uint32_t kMostExponent = 11;  // 6 * 2^(11 - 5) is 384; E4M3 ends at 448
  E2m1Bytes bytes[kGroups];
  float base;  // what the sum is to be multiplied with, times the unit

  /// Takes from `scales`, fp32 as integers, the one with the largest magnitude and all that are 2^0 .. 2^-11 times that. They
  /// become 0; the others get tables of zeros.
  CUTLASS_DEVICE explicit FoldedScales(uint32_t (&scales)[kGroups]) {
    constexpr uint32_t kBytes = 0x01010101u, kExponentOne = 1u << 23;
    uint32_t most = 0;  // a negative one counts as larger, and then nothing positive is near it
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t scale : scales) most = max(most, scale);
    base = __uint_as_float(most);
    // Of numbers that are not normal the exponent does not say that they are 2^-1 times another.
    int const exponents = min(int(kMostExponent), max(0, int(most >> 23 & 0xff) - 1));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      uint32_t const distance = most - scales[i];
      bool const is_taken = distance <= exponents * kExponentOne && (distance & (kExponentOne - 1)) == 0;
      uint32_t const byte = (kMostExponent << 3) - (distance >> 20);  // the exponent, where E4M3 has it
      bytes[i].low = is_taken ? bytes[i].low + byte * (kBytes - 1) : 0;  // the byte of 0 stays 0
      bytes[i].high = is_taken ? bytes[i].high + byte * kBytes : 0;
      if (is_taken) scales[i] = 0;
    }
  }
};

/// What FoldedScales makes of both columns of a lane, where it takes all at once and they are near each other, as nearly
/// always: then a third of the instructions do.
struct NearScales {
  static constexpr int kGroups = FoldedScales::kGroups;
  static constexpr uint32_t kBoth = 0x00010001u;
  bool is_all;  // else nothing here holds
  uint32_t most;  // the largest scales
  uint32_t distances[kGroups];  // exponents less than those of the largest, where E4M3 has its exponent

  /// pairs: scales of column 0 in the low half and of column 1 in the high half, numbers of 16 bits with so many bits of
  /// mantissa. All are to be normal and positive, 2^0 .. 2^-7 times the largest; or 0, as those beyond the last column.
  CUTLASS_DEVICE NearScales(uint32_t const (&pairs)[kGroups], int mantissa) {
    uint32_t least = most = pairs[0];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kGroups; ++i) {
      most = __vmaxu2(most, pairs[i]);
      least = __vminu2(least, pairs[i]);
    }
    uint32_t others = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      others |= most - pairs[i];
      distances[i] = most - pairs[i] >> (mantissa - 3);
    }
    uint32_t const below_normal = least - (kBoth << mantissa) & 0x80008000u;  // negative ones are so, too
    is_all = (others & ~(kBoth * 7 << mantissa) | below_normal) == 0 || most == 0;
  }
  CUTLASS_DEVICE E2m1Bytes bytes(int group, int column) const {
    constexpr uint32_t kBytes = 0x01010101u, kLargest = FoldedScales::kMostExponent << 3;
    uint32_t const less = column == 0 ? distances[group] & 0xff : distances[group] >> 16;
    E2m1Bytes const one;
    return {one.low + kLargest * (kBytes - 1) - less * (kBytes - 1), one.high + kLargest * kBytes - less * kBytes};
  }
};

/// The same as load_fp8_fragment for E2M1. A word has magnitudes in the low three bits of its nibbles, in the order of k,
/// those of row g first; bits 7, 15, 23 and 31 are the signs of row g, the highest bits of the other nibbles those of
/// row g + 8. The registers of one of them, g + 8 kRow.
template <int kRow>
CUTLASS_DEVICE void load_e2m1_fragment(uint32_t const (&words)[2], E2m1Bytes bytes, uint32_t* a) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t magnitudes = words[i] & 0x77777777u;
    asm("" : "+r"(magnitudes));  // else each row has a mask of its own
    uint32_t const signs = words[i] << (4 * kRow) & 0x80808080u;
    a[2 * i + kRow] = permute_bytes(bytes.low, bytes.high, magnitudes >> (16 * kRow)) | signs;
  }
}

/// Both rows, with the same bytes.
CUTLASS_DEVICE void load_e2m1_fragment(uint32_t const (&words)[2], E2m1Bytes bytes, uint32_t* a) {
  load_e2m1_fragment<0>(words, bytes, a);
  load_e2m1_fragment<1>(words, bytes, a);
}

}  // namespace weightonly
