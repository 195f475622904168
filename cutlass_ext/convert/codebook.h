// Weights that are 4-bit codes, each the index of a value in a codebook: NF4, FP4, or a codebook of the caller's.
//
// The layout "tiled" puts the codes of two neighbouring k into one byte. Shared memory holds the codebook expanded to
// pairs: one 32-bit word for each of the 256 bytes, so one load gives a register of two weights. Each lane has its own
// copy of the 256 words, in its own bank: the lanes of a warp look up different bytes, and would otherwise conflict.
//
//   row of byte b:  | lane 0 | lane 1 | ... | lane 31 |   each a word {codebook[b % 16], codebook[b / 16]}
//
// A row is 128 bytes. Where there is room, rows are 256 bytes apart instead. Half of that is empty, but then one byte
// permutation makes the address of a word: the code's byte above the lane's byte.
//
// The alternative without memory needs 23 instructions for eight weights, all at half rate: six byte permutations for
// the values of four codes, two to interleave their halves, three for the selectors. The lookup needs 12, or 8 with
// wide rows.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

/// The weight type of 4-bit codes.
struct Code4 {};

/// The expanded codebook in shared memory, as one lane sees it. kWideRows: rows are 256 bytes apart.
template <bool kWideRows>
struct CodebookPairs {
  static constexpr int kRowBytes = kWideRows ? 256 : 128;
  static constexpr int kBytes = 256 * kRowBytes;  // of shared memory, aligned to 128 bytes

  uint32_t base;
  uint32_t lane_bytes;

  /// pairs: the shared memory address of the expanded codebook.
  CUTLASS_DEVICE CodebookPairs(uint32_t pairs, int lane)
      : base(kWideRows ? pairs : 0), lane_bytes(lane * int(sizeof(uint32_t)) + (kWideRows ? 0 : pairs)) {}

  /// Loads one of the 16 values of a codebook in global memory, for `fill`. Call it early: the load may wait behind all
  /// earlier ones.
  CUTLASS_DEVICE static uint32_t fetch_code(void const* codebook) {
    return static_cast<uint16_t const*>(codebook)[threadIdx.x % 16];
  }

  /// Expands the codebook. Called by all `threads` that look up, before a barrier. code: what fetch_code gave this
  /// thread.
  CUTLASS_DEVICE static void fill(char* pairs, uint32_t code, int threads) {
    for (int i = threadIdx.x; i < 256 * 8; i += threads) {
      uint32_t const low = __shfl_sync(0xffffffff, code, i / 8 % 16), high = __shfl_sync(0xffffffff, code, i / 128);
      uint32_t const pair = low | high << 16;
      *reinterpret_cast<uint4*>(pairs + i / 8 * kRowBytes + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
  }

  /// The two weights of byte kByte of a word.
  template <int kByte>
  CUTLASS_DEVICE uint32_t look_up(uint32_t word) const {
    // Byte 4 of the permutation's input is the low byte of lane_bytes; byte 5 is zero.
    uint32_t const offset = kWideRows ? __byte_perm(word, lane_bytes, 0x5504 + 16 * kByte)
                                      : __byte_perm(word, 0, 0x4440 + kByte) * kRowBytes + lane_bytes;
    uint32_t pair;
    // Not volatile: the codebook does not change, so the compiler may move the load.
    asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(base + offset));
    return pair;
  }

  /// The eight weights of a word: the four registers of the A fragment of m16n8k16.
  CUTLASS_DEVICE void look_up_word(uint32_t word, uint32_t* a) const {
    a[0] = look_up<0>(word);
    a[1] = look_up<1>(word);
    a[2] = look_up<2>(word);
    a[3] = look_up<3>(word);
  }
};

}  // namespace weightonly
