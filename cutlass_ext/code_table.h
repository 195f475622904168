// Weights that are 4-bit codes of a table: NF4, FP4, or a table of one's own.
//
// Layout "tiled" puts the codes of two neighbours along k into a byte, so a register of two weights is one load from a
// table of 256 pairs. It lies in shared memory once for each lane: the lanes of a warp look up different bytes, and would
// otherwise meet in the same banks.
//
// Instead, six byte permutations make the values of four codes without memory, but then two more interleave their halves
// and three instructions make the selectors: 23 for a word of eight weights, all of them at half rate, against 12 here.
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

/// Bytes of shared memory that a CTA needs for it, aligned to 128.
template <class Weight>
inline constexpr int kPairTableBytes = kIsCode<Weight> ? 256 * 32 * int(sizeof(uint32_t)) : 0;

/// All threads of the CTA. codes: Element [16], in global memory. A __syncthreads must follow.
template <class Element>
CUTLASS_DEVICE void fill_pair_table(char* pairs, void const* codes, int threads) {
  auto const* const values = static_cast<uint16_t const*>(codes);
  for (int i = threadIdx.x; i < 256 * 8; i += threads) {
    uint32_t const pair = values[i / 8 % 16] | uint32_t(values[i / 128]) << 16;
    reinterpret_cast<uint4*>(pairs)[i] = make_uint4(pair, pair, pair, pair);
  }
}

/// The pair of byte kByte of a word. lane_pairs: the lane's column of the table, an address in shared memory.
template <int kByte>
CUTLASS_DEVICE uint32_t look_up_pair(uint32_t word, uint32_t lane_pairs) {
  uint32_t pair;
  // Not volatile: the table does not change, so the compiler may move it. The address takes a permute and a multiply-add.
  asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(__byte_perm(word, 0, 0x4440 + kByte) * 128 + lane_pairs));
  return pair;
}

/// The four registers of a word: those of the A fragment of m16n8k16.
CUTLASS_DEVICE void look_up_word(uint32_t word, uint32_t lane_pairs, uint32_t* a) {
  a[0] = look_up_pair<0>(word, lane_pairs);
  a[1] = look_up_pair<1>(word, lane_pairs);
  a[2] = look_up_pair<2>(word, lane_pairs);
  a[3] = look_up_pair<3>(word, lane_pairs);
}

}  // namespace weightonly

template <>
struct cutlass::sizeof_bits<weightonly::Code4> {
  static constexpr int value = 4;
};
