// The nearest of a codebook's 16 values, in a few instructions and without shared memory. The range -1 to 1 is cut into
// 32 cells. Each lane of a warp holds the answer for one cell, and shuffles look it up.
//
// The 15 midpoints of neighbours in the sorted codebook are thresholds, and a number's rank is how many of them lie
// below it. The cell of x is ceil(15.5 x), -15 to 16, and never falls as x grows. So thresholds of lower cells are
// below x, those of higher cells are not, and only those in x's own cell are compared with it. A threshold at the upper
// end of its cell, such as 0, is below no number of that cell, and needs no comparison. NF4 and FP4 are left with at
// most one in each cell.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#if defined(__CUDACC__)
#include "cutlass_ext/arch/permute.h"
#include "kernels/convert/blocks_4bit.h"
#endif

namespace weightonly {

/// The answers of all cells for one codebook, made on the host. Lane l holds cell l; from lane 17 on it holds cell l -
/// 32.
struct CodebookSearch {
  static constexpr int kMaxPasses = 15;

  float thresholds[kMaxPasses][32];  // of each cell, in any order; infinite where a cell has fewer
  uint8_t below[32];  // thresholds in lower cells
  uint32_t codes[4];  // the code of each rank, a byte each
  int32_t passes;  // the most thresholds of any cell
  int32_t sorted;  // 0 or 1: ranks are codes

  static constexpr float kScale = 15.5f;

  static CodebookSearch make(float const codebook[16]) {
    CodebookSearch search = {};
    int order[16];
    std::iota(order, order + 16, 0);
    std::stable_sort(order, order + 16, [&](int a, int b) { return codebook[a] < codebook[b]; });
    search.sorted = std::is_sorted(order, order + 16);
    for (int rank = 0; rank < 16; ++rank) search.codes[rank / 4] |= uint32_t(order[rank]) << (8 * (rank % 4));
    for (auto& of_pass : search.thresholds) std::fill(of_pass, of_pass + 32, std::numeric_limits<float>::infinity());
    int counts[32] = {};
    for (int rank = 0; rank < 15; ++rank) {
      // The sum in fp32, as bitsandbytes has it; + 0 makes a -0 a 0, whose difference to 0 has no sign.
      float const threshold = (codebook[order[rank]] + codebook[order[rank + 1]]) / 2 + 0.f;
      bool const ends_cell = cell(std::nextafter(threshold, std::numeric_limits<float>::infinity())) > cell(threshold);
      for (int lane = 0; lane < 32; ++lane) {
        int const own = lane <= 16 ? lane : lane - 32;
        if (cell(threshold) < own) ++search.below[lane];
        if (cell(threshold) == own && !ends_cell) search.thresholds[counts[lane]++][lane] = threshold;
      }
    }
    search.passes = *std::max_element(counts, counts + 32);
    return search;
  }

  /// x was divided by the absmax of its block, so |x| exceeds 1 by a rounding at most.
  static int cell(float x) { return int(std::ceil(double(std::clamp(x, -1.03f, 1.03f)) * kScale)); }
};

#if defined(__CUDACC__)

/// One lane's part of a CodebookSearch in registers; thresholds after the first stay in memory.
class CodebookSearcher {
 public:
  __device__ explicit CodebookSearcher(CodebookSearch const& search)
      : search_(search), lane_(threadIdx.x % 32), below_(search.below[lane_]), first_(search.thresholds[0][lane_]) {}

  /// The codes of kElements numbers, at the bits that code_shift says. |x| exceeds 1 by a rounding at most; the code of
  /// a NaN may be any. All lanes of the warp call it together.
  template <int kElements>
  __device__ uint32_t codes(float const x[kElements]) const {
    // Added to 1.5 * 2^23 and rounded up, a number leaves its ceiling in the low bits; a shuffle reads the low five.
    constexpr float kMagic = 12582912.f;
    unsigned cells[kElements], ranks[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      cells[i] = __float_as_uint(__fmaf_ru(x[i], CodebookSearch::kScale, kMagic));
      ranks[i] = __shfl_sync(kAll, below_, cells[i]) + is_below(__shfl_sync(kAll, first_, cells[i]), x[i]);
    }
#pragma unroll 1
    for (int pass = 1; pass < search_.passes; ++pass) {
      float const threshold = search_.thresholds[pass][lane_];
#pragma unroll
      for (int i = 0; i < kElements; ++i) ranks[i] += is_below(__shfl_sync(kAll, threshold, cells[i]), x[i]);
    }
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) word += ranks[i] << code_shift(i);
    return search_.sorted ? word : codes_of_ranks(word);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  /// 1 if threshold < x: the sign of their difference, which is exact in fp32 where they are close.
  __device__ static unsigned is_below(float threshold, float x) { return __float_as_uint(threshold - x) >> 31; }

  /// Each nibble of the word looked up in search_.codes.
  __device__ uint32_t codes_of_ranks(uint32_t ranks) const {
    // Three bits of a nibble tell PRMT the byte; the fourth makes it repeat the sign of that byte, which is 0 here. So
    // each of two lookups, for the ranks below 8 and for those from 8 on, gives 0 where the other gives the code.
    uint32_t const others = ranks ^ 0x88888888u;
    uint32_t halves[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t const bytes = permute_bytes(search_.codes[0], search_.codes[1], ranks >> (16 * i)) |
                             permute_bytes(search_.codes[2], search_.codes[3], others >> (16 * i));
      halves[i] = bytes | bytes >> 4;  // bytes 0 and 2 hold two codes each
    }
    return permute_bytes(halves[0], halves[1], 0x6420);
  }

  CodebookSearch const& search_;
  int lane_;
  unsigned below_;
  float first_;
};

#endif

}  // namespace weightonly
