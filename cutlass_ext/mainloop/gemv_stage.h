// Activations for the CUDA-core GEMV: global -> registers -> one warp's shared memory, as fp32, in the order in which
// the packed weights come out of their words, and scaled so that a weight need not be converted at all.
//
// The trick. A nibble masked out of a 32-bit word at bit 4p is, read as an fp32 bit pattern, the denormal u * 16^p *
// 2^-149 (up to bit 23: denormals and the first normals form one linear scale). FFMA takes denormals at full speed, so
// x * 2^F * 16^-p times that is x * u * 2^(F - 149), exactly: one AND and one FFMA per weight, no conversion. F keeps
// the product in the normal range. fp16 has one F for all x. bf16 has the exponents of fp32, so each segment of k gets
// an F of its own, from its largest |x|.
#pragma once

#include "cutlass/array.h"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_ext/layout/interleaved.h"

namespace weightonly {

/// The bits of a word that its weights occupy. Weights above the 24 low bits are reached by one shift of the word.
/// e4m3_weight.h has those of floats.
template <class Weight>
struct WordPositions {
  using Layout = InterleavedLayout<Weight>;
  static constexpr int kCount = Layout::kWordElements;
  static constexpr int kUnitExponent = 149;  // weight() is u * 2^(bit - kUnitExponent)
  static constexpr int kDirect = Layout::kBits == 4 ? 6 : 3;  // those within bits 0-23
  static constexpr int kShift = 24;  // the rest, moved to bit 0

  CUTLASS_DEVICE static constexpr int bit(int position) {
    return (position < kDirect ? position : position - kDirect) * Layout::kBits;
  }

  CUTLASS_DEVICE static float weight(uint32_t word, int position) {
    uint32_t const source = position < kDirect ? word : word >> kShift;
    uint32_t const mask = ((1u << Layout::kBits) - 1) << bit(position);
    return __uint_as_float(source & mask);  // a denormal
  }
};

/// One warp's x for one pass: 256 k (4 k_blocks) of kTokens tokens. kLeastGroup: k of the smallest groups, 32 or 16.
template <class Element, class Weight, int kTokens, int kLeastGroup>
struct ActivationStage {
  using Layout = InterleavedLayout<Weight>;
  using Positions = WordPositions<Weight>;
  static constexpr int kPassK = 256;
  static constexpr int kLaneK = kPassK / 32;  // 8: one 16-byte load per lane and token
  static constexpr int kSegmentK = Layout::kChunkK;  // x that one 16-byte chunk of weights meets
  static constexpr int kLanesPerSegment = kSegmentK / kLaneK;  // 4 or 2
  static constexpr int kSums =
      kSegmentK > kLeastGroup ? kSegmentK / kLeastGroup : 1;  // of a segment, one for each group
  static constexpr int kLanesPerSum = kLanesPerSegment / kSums;
  static constexpr int kSegments = kPassK / kSegmentK;  // 8 or 16
  static constexpr int kSegmentPitch = kSegmentK + 4;  // floats; 16 extra bytes spread segments over banks
  static constexpr int kTokenFloats = kSegments * kSegmentPitch;
  static constexpr int kFloats = kTokens * kTokenFloats;
  static constexpr bool kDynamicScale = cutlass::platform::is_same<Element, cutlass::bfloat16_t>::value;
  static constexpr int kScaleExponent = 100;  // F, or F for |x| around 1

  cutlass::AlignedArray<Element, kLaneK> registers[kTokens];
  float sum[kTokens];  // sum_k x of this lane's part of a segment that is in one group, for the bias of the weights
  float unscale
      [kTokens];  // the inverse of the F of choose_scale, up to a constant; the same in all lanes unless kDynamicScale

  CUTLASS_DEVICE void fetch(Element const* x, int64_t ldx, int m, int k, int pass_k0, int lane) {
    int const column = pass_k0 + lane * kLaneK;
    CUTLASS_PRAGMA_UNROLL
    for (int token = 0; token < kTokens; ++token) {
      auto& raw = reinterpret_cast<uint4&>(registers[token]);
      raw = token < m && column < k ? __ldg(reinterpret_cast<uint4 const*>(x + token * ldx + column)) : uint4{};
    }
  }

  /// registers -> smem. The warp's previous reads of smem are done (the caller synchronizes the warp around this).
  CUTLASS_DEVICE void store(float* smem, int lane) {
    int const segment = lane / kLanesPerSegment;
    int const a = lane % kLanesPerSegment;
    CUTLASS_PRAGMA_UNROLL
    for (int token = 0; token < kTokens; ++token) {
      float const scale = choose_scale(token);
      float const factors[2] = {scale * position_factor(a), scale * position_factor(a + Positions::kCount / 2)};
      float* const target = smem + token * kTokenFloats + segment * kSegmentPitch;
      float total = 0.f;
      // k = 8a + 2b + c of the segment is element 2a + c of word b, and evens and odds are split within a word.
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < 4; ++b) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          float const value = float(registers[token][2 * b + c]);
          int const position = a + c * (Positions::kCount / 2);
          total += value;
          target[b * Positions::kCount + position] = value * factors[c];
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < kLanesPerSum; mask *= 2) total += __shfl_xor_sync(0xffffffff, total, mask);
      sum[token] = total;
    }
  }

 private:
  CUTLASS_DEVICE static float position_factor(int position) {
    return __int_as_float((127 - Positions::bit(position)) << 23);  // 2^-bit
  }

  CUTLASS_DEVICE float choose_scale(int token) {
    if constexpr (!kDynamicScale) {
      unscale[token] = 1.f;
      return __int_as_float((127 + kScaleExponent) << 23);
    } else {
      int exponent = 0;  // the largest biased exponent of the segment; bf16 keeps it in bits 7-14
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLaneK; ++i) {
        auto const bits = reinterpret_cast<uint16_t const*>(&registers[token])[i];
        exponent = max(exponent, (bits >> 7) & 0xff);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < kLanesPerSegment; mask *= 2) {
        exponent = max(exponent, __shfl_xor_sync(0xffffffff, exponent, mask));
      }
      // 2^(100 - e) and its inverse, both within fp32's exponents; tiny segments are left a little lower.
      int const e = min(max(exponent - 127, -26), 126);
      unscale[token] = __int_as_float((127 + e) << 23);
      return __int_as_float((127 + kScaleExponent - e) << 23);
    }
  }
};

}  // namespace weightonly
