// The products of a decode kernel for one warp: weights as the A operand of mma.sync m16n8k16 (m: columns of w), tokens as
// its N, fp32 sums. See unscaled_fragment.h for why the weights need no arithmetic.
#pragma once

#include "cutlass_ext/unscaled_fragment.h"
#include "cutlass_ext/warp_mma.h"
#include "cutlass_ext/weight_ring.h"

namespace weightonly {

/// A piece of decode: 128 k of int4, 64 of int8, the same bytes.
template <class Weight>
inline constexpr int kDecodePieceBlocks = 8 / TiledLayout<Weight>::kBits;

template <class Element, class Weight, ScaleMode kScaleMode, int kTokenTiles, int kRowTiles>
struct DecodeMma {
  using Layout = TiledLayout<Weight>;
  using Fragment = UnscaledFragment<Element, Weight>;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;
  static constexpr bool kCorrects = kHasZeros || Fragment::kBias != 0;  // whether the sums of x are needed

  /// C fragments of the token tiles: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), g the column of w, t the token.
  using Sums = float[kTokenTiles][4];
  using Words = uint32_t[kRowTiles][Layout::kLaneWords];

  /// x of one block of K: the B fragments of four k16 steps.
  struct Activations {
    uint32_t values[kTokenTiles][4][2];

    /// rows: this lane's ldmatrix row of each token tile (lanes 0-7 the tokens of the first 8 k, 8-15 the next 8, ...).
    CUTLASS_DEVICE void load(uint32_t const (&rows)[kTokenTiles], int offset_bytes) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          auto& v = values[tile];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[2 * half][0]), "=r"(v[2 * half][1]), "=r"(v[2 * half + 1][0]), "=r"(v[2 * half + 1][1])
                       : "r"(rows[tile] + offset_bytes + half * 64)
                       : "memory");
        }
      }
    }
  };

  CUTLASS_DEVICE static void clear(Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokenTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) sums[i][j] = 0.f;
    }
  }

  CUTLASS_DEVICE static void clear(Sums (&sums)[kRowTiles]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) clear(sums[i]);
  }

  /// products += w * x over k16 steps kFirst .. kFirst + kCount of one block, sum_x += x.
  template <int kFirst, int kCount>
  CUTLASS_DEVICE static void multiply(Sums (&products)[kRowTiles], Sums& sum_x, Words const& words,
                                      Activations const& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        Fragment::load(words[i] + j * Fragment::kWords, a);
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kTokenTiles; ++tile) MmaSm80::k16<Element>(products[i][tile], a, x.values[tile][j]);
      }
      if constexpr (kCorrects) {
        uint32_t const ones[4] = {Fragment::kOnes, Fragment::kOnes, Fragment::kOnes, Fragment::kOnes};
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kTokenTiles; ++tile) MmaSm80::k16<Element>(sum_x[tile], ones, x.values[tile][j]);
      }
    }
  }

  /// What the MMA summed as the sum over (q - zero) * x.
  CUTLASS_DEVICE static float correct(float product, int e, float zero, float sum_x) {
    float const factor = e < 2 ? Fragment::kFactorLow : Fragment::kFactorHigh;
    if constexpr (!kCorrects) return product * factor;
    // The digits cancel in this difference, so it comes before the multiplication by the scale.
    return fmaf(product, factor, -(float(Fragment::kBias) + zero) * sum_x);
  }

  /// sums += scale * (sum of (q - zero) * x)
  CUTLASS_DEVICE static void scale_into(Sums (&sums)[kRowTiles], Sums const (&products)[kRowTiles], Sums const& sum_x,
                                        uint32_t const (&scale)[kRowTiles], uint32_t const (&zero)[kRowTiles]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 4; ++e) {
        float const s = half_of(scale[i], e / 2);
        float const z = kHasZeros ? half_of(zero[i], e / 2) : 0.f;
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          sums[i][tile][e] = fmaf(s, correct(products[i][tile][e], e, z, sum_x[tile][e % 2]), sums[i][tile][e]);
        }
      }
    }
  }

  CUTLASS_DEVICE static float half_of(uint32_t pair, int i) {
    return float(Element::bitcast(uint16_t(pair >> (16 * i))));
  }

  /// sums += the products of one piece. Per channel the scale comes later, and `channel_sum_x` runs on.
  /// scale_offset: WeightRing's, of the warp's first tile.
  template <int kGroups>
  CUTLASS_DEVICE static void accumulate(Sums (&sums)[kRowTiles], Sums& channel_sum_x, uint32_t slot,
                                        uint32_t scale_offset, int lane, uint32_t const (&x_rows)[kTokenTiles],
                                        int x_offset_bytes) {
    using Ring = WeightRing<Element, Weight, kScaleMode, kRowTiles, kGroups, kDecodePieceBlocks<Weight>>;
    constexpr int kGroupBlocks = kGroups < Ring::kPieceBlocks ? Ring::kPieceBlocks / kGroups : 1;
    constexpr int kBlockGroups = kGroups < Ring::kPieceBlocks ? 1 : kGroups / Ring::kPieceBlocks;
    constexpr int kSteps = 4 / kBlockGroups;
    static_assert(kBlockGroups <= 2, "a group is 32 k at least");
    // Blocks with groups of their own share nothing; one at a time they need fewer registers.
    constexpr int kUnroll = kGroups > 1 && kGroupBlocks == 1 ? 1 : Ring::kPieceBlocks;
    Sums products[kRowTiles], sum_x;
#pragma unroll kUnroll
    for (int block = 0; block < Ring::kPieceBlocks; ++block) {
      Words words;
      Ring::read_block(words, slot, block, lane);
      Activations x;
      x.load(x_rows, x_offset_bytes + block * Layout::kBlockK * int(sizeof(Element)));
      if constexpr (!kHasScales) {
        multiply<0, 4>(sums, channel_sum_x, words, x);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kBlockGroups; ++part) {
          if (block % kGroupBlocks == 0) {
            clear(products);
            clear(sum_x);
          }
          if (part == 0) {
            multiply<0, kSteps>(products, sum_x, words, x);
          } else {
            multiply<4 - kSteps, kSteps>(products, sum_x, words, x);
          }
          if ((block + 1) % kGroupBlocks == 0) {
            int const group = block / kGroupBlocks * kBlockGroups + part;
            uint32_t scale[kRowTiles], zero[kRowTiles];
            uint32_t const scales = slot + scale_offset + group * Ring::kScaleRowBytes;
            read_shared(scale, scales);
            if constexpr (kHasZeros) read_shared(zero, scales + kGroups * Ring::kScaleRowBytes);
            scale_into(sums, products, sum_x, scale, zero);
          }
        }
      }
    }
  }

  /// Per channel: what `scale_into` would have done, but for the scale.
  CUTLASS_DEVICE static void correct_channel(Sums (&sums)[kRowTiles], Sums const& sum_x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 4; ++e) sums[i][tile][e] = correct(sums[i][tile][e], e, 0.f, sum_x[tile][e % 2]);
      }
    }
  }
};

}  // namespace weightonly
