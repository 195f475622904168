// The products of a decode kernel for one warp, by mma.sync m16n8k16: weights are the A operand (m: columns of w),
// tokens are the columns of B, accumulators are fp32. fragment/weight_format.h says why the weights need no conversion.
#pragma once

#include "cutlass_ext/arch/warp_mma.h"
#include "cutlass_ext/fragment/weight_format.h"
#include "cutlass_ext/mainloop/weight_pipeline.h"

namespace weightonly {

/// k_blocks in a k_tile of decode: 128 k of int4 and 64 of int8 are the same bytes.
template <class Weight>
inline constexpr int kDecodeTileBlocks = 8 / TiledLayout<Weight>::kBits;

/// Config: Element, Weight, kScaleMode, kRowTiles (of 16 columns), kWarpsK.
template <class Config>
struct DecodeMma {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  static constexpr ScaleMode kScaleMode = Config::kScaleMode;
  static constexpr int kRowTiles = Config::kRowTiles;
  using Layout = TiledLayout<Weight>;
  using Fragment = typename WeightFormat<Weight>::template Unscaled<Element>;
  using Scale = typename WeightFormat<Weight>::template Scale<Element>;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;
  static constexpr bool kCorrects = kHasZeros || Fragment::kOffset != 0;  // whether sum_k x is needed

  /// The C registers of an MMA: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1), g the column of w, t the token.
  using Accumulator = float[4];
  using Words = uint32_t[kRowTiles][Layout::kLaneWords];

  /// The weights and scales of one k_tile in registers. kGroups: groups of k in it, each with its scales.
  template <int kGroups>
  struct KTile {
    using Pipeline = WeightPipeline<Element, Weight, kScaleMode, kRowTiles, kGroups, kDecodeTileBlocks<Weight>>;
    /// Whether load() reads everything, so that the stage may be overwritten. Registers have no room for the scales of
    /// four groups: those are read when they are needed.
    static constexpr bool kFreesStage = kGroups <= 2;
    static constexpr int kKept = kFreesStage ? kGroups : 1;
    /// Whether weights are read block by block, too, and a barrier keeps ptxas from reading scales ahead. Else it would
    /// spill registers of sixteen warps, with eight groups.
    static constexpr bool kReadsBlocks = kGroups > 4 && Config::kWarpsK > 8;
    Words words[kReadsBlocks ? 1 : Pipeline::kTileBlocks];
    typename Pipeline::ScaleOffsets scales;  // addresses
    uint32_t scale[kKept][kRowTiles];  // a pair of columns each
    uint32_t zero[kKept][kRowTiles];

    /// offsets: of the scales of the n_tile's columns.
    CUTLASS_DEVICE void load(uint32_t stage, typename Pipeline::ScaleOffsets const& offsets, int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; !kReadsBlocks && block < Pipeline::kTileBlocks; ++block) {
        Pipeline::read_block(words[block], stage, block, lane);
      }
      scales = offsets.from(stage);
      if constexpr (kHasScales && kFreesStage) {
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < kGroups; ++group) read_scales(group, group);
      }
    }

    /// kept: where in `scale` and `zero` the group goes.
    CUTLASS_DEVICE void read_scales(int group, int kept) {
      read_columns(scale[kept], group * Pipeline::kScaleRowBytes);
      if constexpr (kHasZeros) read_columns(zero[kept], (Pipeline::kPanelRows + group) * Pipeline::kScaleRowBytes);
    }

    CUTLASS_DEVICE void read_columns(uint32_t (&pairs)[kRowTiles], int row) const {
      if constexpr (Pipeline::kPanels == 1) {
        read_shared(pairs, scales.of[0] + row);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRowTiles; ++i)
          read_shared(reinterpret_cast<uint32_t (&)[1]>(pairs[i]), scales.of[i] + row);
      }
    }
  };

  /// x of one k_block: the B registers of four k16 steps.
  struct Activations {
    uint32_t values[4][2];

    /// row: this lane's row for ldmatrix (lanes 0-7: the tokens at the first 8 k, 8-15: at the next 8, ...).
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

  /// Loads x of a k_block when `accumulate` asks for it. row: as Activations::load has it, of the k_tile.
  CUTLASS_DEVICE static auto loads_x(uint32_t row) {
    return [row](int block) {
      Activations x;
      x.load(row + block * Layout::kBlockK * int(sizeof(Element)));
      return x;
    };
  }

  CUTLASS_DEVICE static void clear(Accumulator& accumulator) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) accumulator[j] = 0.f;
  }

  CUTLASS_DEVICE static void clear(Accumulator (&accumulators)[kRowTiles]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) clear(accumulators[i]);
  }

  /// products += w * x over k16 steps kFirst to kFirst + kCount - 1 of one k_block, sum_x += x.
  template <int kFirst, int kCount, class Codebook>
  CUTLASS_DEVICE static void multiply(Accumulator (&products)[kRowTiles], Accumulator& sum_x, Words const& words,
                                      Codebook const& codebook, Activations const& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        Fragment::load(words[i] + j * Fragment::kWords, codebook, a);
        MmaSm80::k16<Element>(products[i], a, x.values[j]);
      }
      if constexpr (kCorrects) {
        uint32_t const ones[4] = {Fragment::kOnes, Fragment::kOnes, Fragment::kOnes, Fragment::kOnes};
        MmaSm80::k16<Element>(sum_x, ones, x.values[j]);
      }
    }
  }

  /// sum_k x (q - zero), from what the MMA summed. e: of the accumulator's four.
  CUTLASS_DEVICE static float correct(float product, int e, float zero, float sum_x) {
    float const factor = e < 2 ? Fragment::kFactorLow : Fragment::kFactorHigh;
    if constexpr (!kCorrects) return product * factor;
    // Leading digits cancel in this difference, so it comes before the multiplication by the scale.
    return fmaf(product, factor, -(float(Fragment::kOffset) + zero) * sum_x);
  }

  /// accumulators += scale * sum_k x (q - zero), over one group.
  CUTLASS_DEVICE static void scale_into(Accumulator (&accumulators)[kRowTiles],
                                        Accumulator const (&products)[kRowTiles], Accumulator const& sum_x,
                                        uint32_t const (&scale)[kRowTiles], uint32_t const (&zero)[kRowTiles]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 4; ++e) {
        float const s = Scale::to_float(scale[i], e / 2);
        float const z = kHasZeros ? Scale::to_float(zero[i], e / 2) : 0.f;
        accumulators[i][e] = fmaf(s, correct(products[i][e], e, z, sum_x[e % 2]), accumulators[i][e]);
      }
    }
  }

  /// accumulators += the products of one k_tile. Per channel the scale comes later (correct_channel), and
  /// `channel_sum_x` grows over all of K. x_of(block): Activations. stage: of the k_tile.
  template <int kGroups, class Codebook, class XOf>
  CUTLASS_DEVICE static void accumulate(Accumulator (&accumulators)[kRowTiles], Accumulator& channel_sum_x,
                                        KTile<kGroups>& k_tile, Codebook const& codebook, XOf const& x_of,
                                        uint32_t stage) {
    constexpr int kBlocks = KTile<kGroups>::Pipeline::kTileBlocks;
    constexpr int kGroupBlocks = kGroups < kBlocks ? kBlocks / kGroups : 1;
    constexpr int kBlockGroups = kGroups < kBlocks ? 1 : kGroups / kBlocks;
    constexpr int kSteps = 4 / kBlockGroups;
    constexpr bool kReadsBlocks = KTile<kGroups>::kReadsBlocks;
    static_assert(kBlockGroups <= 4, "a group is 16 k at least");
    Accumulator products[kRowTiles], sum_x;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if constexpr (kReadsBlocks) __syncwarp();
      Activations const x = x_of(block);
      if constexpr (kReadsBlocks) {
        KTile<kGroups>::Pipeline::read_block(k_tile.words[0], stage, block, threadIdx.x % 32);
      }
      int const kept_block = kReadsBlocks ? 0 : block;
      if constexpr (!kHasScales) {
        multiply<0, 4>(accumulators, channel_sum_x, k_tile.words[kept_block], codebook, x);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int block_group = 0; block_group < kBlockGroups; ++block_group) {
          if (kReadsBlocks && block_group > 0) __syncwarp();
          if (block % kGroupBlocks == 0) {
            clear(products);
            clear(sum_x);
          }
          if (block_group == 0) {
            multiply<0, kSteps>(products, sum_x, k_tile.words[kept_block], codebook, x);
          } else if (block_group == kBlockGroups - 1) {
            multiply<4 - kSteps, kSteps>(products, sum_x, k_tile.words[kept_block], codebook, x);
          } else if constexpr (kBlockGroups == 4) {
            if (block_group == 1) {
              multiply<1, 1>(products, sum_x, k_tile.words[kept_block], codebook, x);
            } else {
              multiply<2, 1>(products, sum_x, k_tile.words[kept_block], codebook, x);
            }
          }
          if ((block + 1) % kGroupBlocks == 0) {
            int const group = block / kGroupBlocks * kBlockGroups + block_group;
            if constexpr (!KTile<kGroups>::kFreesStage) k_tile.read_scales(group, 0);
            int const kept = KTile<kGroups>::kFreesStage ? group : 0;
            scale_into(accumulators, products, sum_x, k_tile.scale[kept], k_tile.zero[kept]);
          }
        }
      }
    }
  }

  /// Per channel: sum_k x q from what the MMA summed; the epilogue multiplies it by the scale.
  CUTLASS_DEVICE static void correct_channel(Accumulator (&accumulators)[kRowTiles], Accumulator const& sum_x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 4; ++e) accumulators[i][e] = correct(accumulators[i][e], e, 0.f, sum_x[e % 2]);
    }
  }
};

}  // namespace weightonly
