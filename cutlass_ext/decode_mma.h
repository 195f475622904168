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

template <class Element, class Weight, ScaleMode kScaleMode, int kRowTiles>
struct DecodeMma {
  using Layout = TiledLayout<Weight>;
  using Fragment = UnscaledFragment<Element, Weight>;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;
  static constexpr bool kCorrects = kHasZeros || Fragment::kBias != 0;  // whether the sums of x are needed

  /// C fragment of 8 tokens: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), g the column of w, t the token.
  using Sums = float[4];
  using Words = uint32_t[kRowTiles][Layout::kLaneWords];

  /// One piece in registers, less x. kGroups: of it, with scales of their own.
  template <int kGroups>
  struct Piece {
    using Ring = WeightRing<Element, Weight, kScaleMode, kRowTiles, kGroups, kDecodePieceBlocks<Weight>>;
    /// Whether its slot is free once it is loaded. The scales of more groups have no room in registers.
    static constexpr bool kFreesSlot = kGroups <= 2;
    static constexpr int kKept = kFreesSlot ? kGroups : 1;
    Words words[Ring::kPieceBlocks];
    typename Ring::ScaleOffsets scales;  // addresses
    uint32_t scale[kKept][kRowTiles];  // of two columns each
    uint32_t zero[kKept][kRowTiles];

    /// offsets: of the scales of the unit's columns.
    CUTLASS_DEVICE void load(uint32_t slot, typename Ring::ScaleOffsets const& offsets, int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < Ring::kPieceBlocks; ++block) Ring::read_block(words[block], slot, block, lane);
      scales = offsets.from(slot);
      if constexpr (kHasScales && kFreesSlot) {
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < kGroups; ++group) read_scales(group, group);
      }
    }

    CUTLASS_DEVICE void read_scales(int group, int place) {
      read_columns(scale[place], group * Ring::kScaleRowBytes);
      if constexpr (kHasZeros) read_columns(zero[place], (Ring::kStripeRows + group) * Ring::kScaleRowBytes);
    }

    CUTLASS_DEVICE void read_columns(uint32_t (&pairs)[kRowTiles], int row) const {
      if constexpr (Ring::kStripes == 1) {
        read_shared(pairs, scales.of[0] + row);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRowTiles; ++i)
          read_shared(reinterpret_cast<uint32_t (&)[1]>(pairs[i]), scales.of[i] + row);
      }
    }
  };

  /// x of one block of K: the B fragments of four k16 steps.
  struct Activations {
    uint32_t values[4][2];

    /// row: this lane's ldmatrix row (lanes 0-7 the tokens of the first 8 k, 8-15 the next 8, ...).
    CUTLASS_DEVICE void load(uint32_t row) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values[2 * half][0]), "=r"(values[2 * half][1]), "=r"(values[2 * half + 1][0]),
                       "=r"(values[2 * half + 1][1])
                     : "r"(row + half * 64)
                     : "memory");
      }
    }
  };

  CUTLASS_DEVICE static void clear(Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) sums[j] = 0.f;
  }

  CUTLASS_DEVICE static void clear(Sums (&sums)[kRowTiles]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) clear(sums[i]);
  }

  /// products += w * x over k16 steps kFirst .. kFirst + kCount of one block, sum_x += x.
  template <int kFirst, int kCount, class Table>
  CUTLASS_DEVICE static void multiply(Sums (&products)[kRowTiles], Sums& sum_x, Words const& words, Table const& table,
                                      Activations const& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        Fragment::load(words[i] + j * Fragment::kWords, table, a);
        MmaSm80::k16<Element>(products[i], a, x.values[j]);
      }
      if constexpr (kCorrects) {
        uint32_t const ones[4] = {Fragment::kOnes, Fragment::kOnes, Fragment::kOnes, Fragment::kOnes};
        MmaSm80::k16<Element>(sum_x, ones, x.values[j]);
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
        sums[i][e] = fmaf(s, correct(products[i][e], e, z, sum_x[e % 2]), sums[i][e]);
      }
    }
  }

  CUTLASS_DEVICE static float half_of(uint32_t pair, int i) {
    return float(Element::bitcast(uint16_t(pair >> (16 * i))));
  }

  /// sums += the products of one piece. Per channel the scale comes later, and `channel_sum_x` runs on.
  template <int kGroups, class Table>
  CUTLASS_DEVICE static void accumulate(Sums (&sums)[kRowTiles], Sums& channel_sum_x, Piece<kGroups>& piece,
                                        Table const& table, uint32_t x_row) {
    constexpr int kBlocks = Piece<kGroups>::Ring::kPieceBlocks;
    constexpr int kGroupBlocks = kGroups < kBlocks ? kBlocks / kGroups : 1;
    constexpr int kBlockGroups = kGroups < kBlocks ? 1 : kGroups / kBlocks;
    constexpr int kSteps = 4 / kBlockGroups;
    static_assert(kBlockGroups <= 2, "a group is 32 k at least");
    Sums products[kRowTiles], sum_x;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      Activations x;
      x.load(x_row + block * Layout::kBlockK * int(sizeof(Element)));
      if constexpr (!kHasScales) {
        multiply<0, 4>(sums, channel_sum_x, piece.words[block], table, x);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kBlockGroups; ++part) {
          if (block % kGroupBlocks == 0) {
            clear(products);
            clear(sum_x);
          }
          if (part == 0) {
            multiply<0, kSteps>(products, sum_x, piece.words[block], table, x);
          } else {
            multiply<4 - kSteps, kSteps>(products, sum_x, piece.words[block], table, x);
          }
          if ((block + 1) % kGroupBlocks == 0) {
            int const group = block / kGroupBlocks * kBlockGroups + part;
            if constexpr (!Piece<kGroups>::kFreesSlot) piece.read_scales(group, 0);
            int const place = Piece<kGroups>::kFreesSlot ? group : 0;
            scale_into(sums, products, sum_x, piece.scale[place], piece.zero[place]);
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
      for (int e = 0; e < 4; ++e) sums[i][e] = correct(sums[i][e], e, 0.f, sum_x[e % 2]);
    }
  }
};

}  // namespace weightonly
