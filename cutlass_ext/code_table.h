// Weights that are 4-bit codes of a table: NF4, FP4, or a table of one's own.
//
// Layout "tiled" puts the codes of two neighbours along k into a byte, so a register of two weights is one load from a
// table of 256 pairs. It lies in shared memory once for each lane: the lanes of a warp look up different bytes, and would
// otherwise meet in the same banks.
//
// Where there is room for it the pairs of a byte are 256 bytes apart instead of 128. Half of that is empty, but then the
// address of a pair is one permutation of bytes: the code's above the lane's.
//
// Instead, six byte permutations make the values of four codes without memory, but then two more interleave their halves
// and three instructions make the selectors: 23 for a word of eight weights, all of them at half rate, against 12 here, or 8.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_size.h"

namespace weightonly {

/// The type of a code.
struct Code4 {};

/// Whether weights are looked up.
template <class Weight>
inline constexpr bool kIsCode = false;
template <>
inline constexpr bool kIsCode<Code4> = true;

/// kIsWide: with rows of 256 bytes.
template <bool kIsWide>
struct PairTable {
  static constexpr int kRowBytes = kIsWide ? 256 : 128;
  static constexpr int kBytes = 256 * kRowBytes;  // of shared memory, aligned to 128

  uint32_t base;
  uint32_t lane_bytes;

  /// pairs: an address in shared memory.
  CUTLASS_DEVICE PairTable(uint32_t pairs, int lane)
      : base(kIsWide ? pairs : 0), lane_bytes(lane * int(sizeof(uint32_t)) + (kIsWide ? 0 : pairs)) {}

  /// What a lane keeps of the 16 Elements of a table in global memory. Early: they may come behind all that was asked for before.
  CUTLASS_DEVICE static uint32_t fetch_code(void const* codes) {
    return static_cast<uint16_t const*>(codes)[threadIdx.x % 16];
  }

  /// All threads of the CTA that look up, before a barrier, with their fetch_code.
  CUTLASS_DEVICE static void fill(char* pairs, uint32_t code, int threads) {
    for (int i = threadIdx.x; i < 256 * 8; i += threads) {
      uint32_t const low = __shfl_sync(0xffffffff, code, i / 8 % 16), high = __shfl_sync(0xffffffff, code, i / 128);
      uint32_t const pair = low | high << 16;
      *reinterpret_cast<uint4*>(pairs + i / 8 * kRowBytes + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
  }

  /// The pair of byte kByte of a word.
  template <int kByte>
  CUTLASS_DEVICE uint32_t look_up(uint32_t word) const {
    // Byte 4 is the low one of lane_bytes, byte 5 is zero.
    uint32_t const offset = kIsWide ? __byte_perm(word, lane_bytes, 0x5504 + 16 * kByte)
                                    : __byte_perm(word, 0, 0x4440 + kByte) * kRowBytes + lane_bytes;
    uint32_t pair;
    // Not volatile: the table does not change, so the compiler may move it.
    asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(base + offset));
    return pair;
  }

  /// The four registers of a word: those of the A fragment of m16n8k16.
  CUTLASS_DEVICE void look_up_word(uint32_t word, uint32_t* a) const {
    a[0] = look_up<0>(word);
    a[1] = look_up<1>(word);
    a[2] = look_up<2>(word);
    a[3] = look_up<3>(word);
  }
};

}  // namespace weightonly

template <>
struct cutlass::sizeof_bits<weightonly::Code4> {
  static constexpr int value = 4;
};
