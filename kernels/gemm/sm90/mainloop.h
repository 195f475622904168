// The main loop of gemm_sm90: what the consumer warpgroups do with the k_tiles that load.h brings.
//
// The weights are the A operand of wgmma and come out of registers. A warpgroup reads and converts its 64 columns of
// one k_block (64 k) while the tensor cores multiply the k_block before it:
//
//   time ->
//   producer warps   TMA      | k_tile 0  | k_tile 1  | k_tile 2  | ...      up to kStages ahead of the consumers
//   consumer warps   convert              | k_block 0 | k_block 1 | k_block 2 | ...
//   tensor cores     wgmma                            | k_block 0 | k_block 1 | ...
//
// So there are two fragments of weights, used in turn, and only the wgmmas of one k_block run while a fragment is
// written. A consumer waits on the `full` barrier of a stage before it reads a k_tile. It arrives at the `empty`
// barrier when the tensor cores have read all of the k_tile: after the first k_block of the next one has been issued.
//
// Group scales are applied in one of two ways. mma() multiplies the weights. mma_scaling_accumulators(), for few tokens
// and groups of at least a warpgroup's k_tile, multiplies the accumulators of each k_tile instead, while the tensor
// cores work on the next one.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/fragment/scaled.h"
#include "kernels/gemm/sm90/stage_reader.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly::sm90 {

template <class Traits>
struct Mainloop {
  using Smem = typename Traits::Smem;
  using Element = typename Traits::Element;
  using Weight = typename Traits::Weight;
  using Layout = typename Traits::Layout;
  using Codebook = typename Traits::Codebook;
  using TiledMma = typename Traits::TiledMma;
  using ShapeA = typename Traits::ShapeA;
  static constexpr ScaleMode kScaleMode = Traits::kScaleMode;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kWarpgroups = Traits::kWarpgroups;
  static constexpr int kWarpgroupsN = Traits::kWarpgroupsN;
  static constexpr int kWarpgroupKBlocks = Traits::kWarpgroupKBlocks;
  static constexpr int kScaleRowBytes = Traits::kScaleRowBytes;
  static constexpr int kDescriptorBytes = Traits::kDescriptorBytes;

  /// Whether group scales may multiply the accumulators. This pays where there are no more accumulators than weights,
  /// and it needs registers for the accumulators of two k_tiles beside those of the tile.
  static constexpr bool kMayScaleAccumulators =
      Traits::kHasScales && !Traits::kHasWidths && Traits::kTileM <= (Traits::kConsumerRegisters >= 160 ? 64 : 32);
  /// Whether descriptors of x are added to as 64-bit numbers, one instruction each. CuTe adds to the low half, of which
  /// ptxas makes three instructions; tiles of more tokens are faster that way.
  static constexpr bool kAdds64Bits = Traits::kTileM <= 64;
  /// Whether the weights of a k_tile's second k_block are read together with those of the first, before these are
  /// converted: one wait for shared memory instead of two. Sixteen warps, or more accumulators, are slower with it.
  static constexpr bool kReadsAhead = Traits::kTileM < 32 || (kWarpgroups == 2 && Traits::kTileM < 64);
  static constexpr bool kReadsAheadScalingAccumulators = Traits::kTileM < 32 || kWarpgroups == 2;
  /// Whether the loop over k_tiles is unrolled over all stages, whose addresses are then constants: 12% fewer
  /// instructions. With more stages ptxas spills registers; with more warpgroups it makes every wgmma wait for the one
  /// before. It begins with stage 0.
  static constexpr bool kUnrollsStages = kWarpgroups == 2 && kStages % 2 == 0 && kStages <= 6 && !Traits::kMayPersist;

  using Reader = StageReader<Traits>;
  using Words = typename Reader::Words;

  /// accum = w x: all k_tiles of a work tile, of one warpgroup. x: the B fragment of stage 0.
  template <class XFragment, class Accumulators>
  CUTLASS_DEVICE static void run(Params const& p, WorkTile const& work, Reader& reader, XFragment const& x,
                                 Accumulators& accum) {
    if constexpr (Traits::kLeastGroup == 16) {
      mma<4>(work, reader, x, accum);
    } else if constexpr (Traits::kScalesPartials) {
      mma_scaling_partials(work, reader, x, accum);
    } else if (Traits::kHasScales && p.scale_k == 32) {
      mma<2>(work, reader, x, accum);
    } else if constexpr (kMayScaleAccumulators) {
      if (p.scale_k > Layout::kBlockK) {
        mma_scaling_accumulators(work, reader, x, accum);
      } else {
        mma<1>(work, reader, x, accum);
      }
    } else {
      mma<1>(work, reader, x, accum);
    }
  }

 private:
  /// The descriptor of what lies `units` of 16 bytes behind.
  CUTLASS_DEVICE static cute::GmmaDescriptor advanced(cute::GmmaDescriptor descriptor, uint32_t units) {
    if constexpr (kAdds64Bits) {
      descriptor.desc_ += units;
    } else {
      descriptor.reg32_[0] += units;
    }
    return descriptor;
  }

  /// Converts a k_block of weights into w. kGroups: groups in a k_block. scales(group): their scales. kScalesWeights:
  /// whether these multiply the weights.
  template <int kGroups, bool kScalesWeights, class AFragment, class Scales>
  CUTLASS_DEVICE static void convert(Reader const& reader, Words const& words, AFragment& w, Scales const& scales) {
    using Fragment = ScaledFragment<Element, Weight, kScaleMode, kScalesWeights>;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      auto const pair = scales(group);
      CUTLASS_PRAGMA_UNROLL
      for (int k16 = 4 / kGroups * group; k16 < 4 / kGroups * (group + 1); ++k16) {
        Fragment::load(words + k16 * Fragment::kWords, reader.codebook, pair,
                       reinterpret_cast<uint32_t*>(&w(0)) + 4 * k16);
      }
    }
  }

  /// Issues accum += w x of a k_block, or accum = w x if kClears. It does not wait for the tensor cores. x: any B
  /// fragment, of which only the layout counts. x_k_block: the descriptor of x of this k_block.
  template <bool kClears, class AFragment, class XFragment, class Accumulators>
  CUTLASS_DEVICE static void issue(Reader const& reader, AFragment& w, XFragment const& x,
                                   cute::GmmaDescriptor x_k_block, Accumulators& accum) {
    using namespace cute;
    warpgroup_fence_operand(accum);
    Traits::with_mma(reader.width, accum, [&](auto tiled_mma, auto& accum) {
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k16 = 0; k16 < 4; ++k16) {
        tiled_mma.accumulate_ = kClears && k16 == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        constexpr int kK16Units = 16 * int(sizeof(Element)) / kDescriptorBytes;  // of x
        GMMA::DescriptorIterator const x_k16{advanced(x_k_block, kK16Units * k16)};
        gemm(tiled_mma, w(_, _, k16), make_tensor(x_k16, x(_, _, 0).layout()), accum);  // (V,1) x (V,1) => (V,1,1)
      }
      warpgroup_commit_batch();
    });
  }

  template <int kGroups, bool kScalesWeights, bool kClears, class AFragment, class XFragment, class Accumulators,
            class Scales>
  CUTLASS_DEVICE static void mma_k_block(Reader const& reader, Words const& words, AFragment& w, XFragment const& x,
                                         cute::GmmaDescriptor x_k_block, Accumulators& accum, Scales const& scales) {
    convert<kGroups, kScalesWeights>(reader, words, w, scales);
    issue<kClears>(reader, w, x, x_k_block, accum);
  }

  /// Waits for all wgmmas but those of the last k_block.
  template <class Accumulators>
  CUTLASS_DEVICE static void wait_for_previous_k_block(Accumulators& accum) {
    cute::warpgroup_wait<1>();
    cute::warpgroup_fence_operand(accum);
  }

  /// accum = w x, the weights multiplied by their scales. kGroups: groups in a k_block, 1, 2 or 4.
  template <int kGroups, class XFragment, class Accumulators>
  CUTLASS_DEVICE static void mma(WorkTile const& work, Reader& reader, XFragment const& x, Accumulators& accum) {
    using namespace cute;
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, ShapeA{}));  // (V,1,4): MMA, m64, k16
    Tensor w1 = make_fragment_like(w0);  // (V,1,4)
    auto const multiply = [&](auto& w, Words const& words, GmmaDescriptor x_stage,
                              int k_block) __attribute__((always_inline)) {
      GmmaDescriptor const x_k_block = advanced(x_stage, k_block * reader.k_block_x);
      mma_k_block<kGroups, true, false>(reader, words, w, x, x_k_block, accum, [&](int group) {
        return reader.read_scales(k_block * reader.k_block_scale_bytes + group * kScaleRowBytes);
      });
      wait_for_previous_k_block(accum);
    };
    int previous_stage = 0;
    bool is_first = true;
    auto const multiply_k_tile = [&](auto& w, auto& w_second) __attribute__((always_inline)) {
      reader.wait();
      Words words;
      [[maybe_unused]] Words second_words;
      reader.read_words(words, 0);
      if constexpr (kWarpgroupKBlocks == 2 && kReadsAhead) reader.read_words(second_words, 1);
      GmmaDescriptor const x_stage = advanced(x.data().desc_, reader.x_units());
      multiply(w, words, x_stage, 0);
      if (!is_first) reader.release(previous_stage);
      if constexpr (kWarpgroupKBlocks == 2) {
        if constexpr (!kReadsAhead) reader.read_words(second_words, 1);
        multiply(w_second, second_words, x_stage, 1);
      }
      is_first = false;
      previous_stage = reader.stage;
      reader.advance();
    };
    clear(accum);
    int k_tile = work.k_tile_begin;
    CUTLASS_PRAGMA_NO_UNROLL
    while (k_tile < work.k_tile_end) {
      multiply_k_tile(w0, w1);
      ++k_tile;
      if constexpr (kWarpgroupKBlocks == 1) {
        if (k_tile == work.k_tile_end) break;
        multiply_k_tile(w1, w0);
        ++k_tile;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accum);
    if constexpr (Traits::kMayPersist || Traits::kMayFollow) reader.release(previous_stage);
  }

  /// accum += scales * partial, the accumulators of one k_tile.
  template <class Accumulators, class Partial>
  CUTLASS_DEVICE static void add_scaled(Accumulators& accum, float const (&scales)[2], Partial& partial) {
    cute::warpgroup_fence_operand(partial);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum); ++i) accum(i) += scales[i / 2 % 2] * partial(i);
  }

  CUTLASS_DEVICE static void set_scales(float (&scales)[2], ScalePair<Element, kScaleMode> const& pair) {
    for (int h = 0; h < 2; ++h) scales[h] = float(Element::bitcast(uint16_t(pair.scale[h])));
  }

  /// The same where all k of a k_tile have one scale, which multiplies its accumulators: they are added when the first
  /// weights of the next k_tile are converted, so that they need no second copy.
  template <class XFragment, class Accumulators>
  CUTLASS_DEVICE static void mma_scaling_partials(WorkTile const& work, Reader& reader, XFragment const& x,
                                                  Accumulators& accum) {
    using namespace cute;
    static_assert(kWarpgroupKBlocks == 2 && Traits::kMayPersist);
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, ShapeA{}));  // (V,1,4): MMA, m64, k16
    Tensor w1 = make_fragment_like(w0);  // (V,1,4)
    Tensor partial = make_fragment_like(accum);  // (V,1,1): of one k_tile
    float scales[2] = {0.f, 0.f};  // of the k_tile before
    int previous_stage = 0;
    clear(accum);
    clear(partial);
    auto const add_previous = [&](bool is_first) {
      warpgroup_wait<0>();
      if (!is_first) reader.release(previous_stage);
      add_scaled(accum, scales, partial);
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k_tile = work.k_tile_begin; k_tile < work.k_tile_end; ++k_tile) {
      reader.wait();
      Words words;
      reader.read_words(words, 0);
      auto const pair = reader.read_scales(0);
      auto const same = [&](int) { return pair; };
      GmmaDescriptor const x_stage = advanced(x.data().desc_, reader.x_units());
      warpgroup_wait<1>();  // the tensor cores have read w0
      convert<1, false>(reader, words, w0, same);
      reader.read_words(words, 1);
      add_previous(k_tile == work.k_tile_begin);
      // Not by the first wgmma: where widths branch ptxas would give its accumulators other registers in each.
      clear(partial);
      issue<false>(reader, w0, x, x_stage, partial);
      set_scales(scales, pair);
      convert<1, false>(reader, words, w1, same);
      issue<false>(reader, w1, x, advanced(x_stage, reader.k_block_x), partial);
      previous_stage = reader.stage;
      reader.advance();
    }
    add_previous(false);
  }

  /// The same where all k of a warpgroup's k_tile have one scale, which multiplies the accumulators of the k_tile.
  /// (With
  /// groups of 64 k each k_block would need accumulators of its own. Then nvcc 13.0 makes every wgmma wait for the one
  /// before.)
  template <class XFragment, class Accumulators>
  CUTLASS_DEVICE static void mma_scaling_accumulators(WorkTile const& work, Reader& reader, XFragment const& x,
                                                      Accumulators& accum) {
    using namespace cute;
    static_assert(kWarpgroupKBlocks == 2);
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, ShapeA{}));  // (V,1,4): MMA, m64, k16
    Tensor w1 = make_fragment_like(w0);  // (V,1,4)
    Tensor even = make_fragment_like(accum);  // (V,1,1): of k_tiles 0, 2, ...
    Tensor odd = make_fragment_like(accum);  // (V,1,1): of k_tiles 1, 3, ...
    float scales[2] = {0.f, 0.f};  // of the k_tile before
    clear(accum);
    clear(odd);
    auto const multiply_k_tile = [&](auto& partial, auto& previous, int previous_stage, bool is_first) {
      reader.wait();
      Words words, second_words;
      reader.read_words(words, 0);
      if constexpr (kReadsAheadScalingAccumulators) reader.read_words(second_words, 1);
      auto const pair = reader.read_scales(0);
      auto const same = [&](int) { return pair; };
      GmmaDescriptor const x_stage = advanced(x.data().desc_, reader.x_units());
      mma_k_block<1, false, true>(reader, words, w0, x, x_stage, partial, same);
      wait_for_previous_k_block(partial);
      if (!is_first) reader.release(previous_stage);
      if constexpr (!kReadsAheadScalingAccumulators) reader.read_words(second_words, 1);
      mma_k_block<1, false, false>(reader, second_words, w1, x, advanced(x_stage, reader.k_block_x), partial, same);
      add_scaled(accum, scales, previous);
      set_scales(scales, pair);
      wait_for_previous_k_block(partial);
    };
    auto const finish = [&](auto& last) {
      warpgroup_wait<0>();
      if constexpr (Traits::kMayPersist) {
        reader.release(reader.stage);
        reader.advance();
      }
      add_scaled(accum, scales, last);
    };
    int left = work.k_tile_end - work.k_tile_begin;
    bool is_first = true;
    if constexpr (kUnrollsStages) {
      CUTLASS_PRAGMA_NO_UNROLL
      while (true) {
        CUTLASS_PRAGMA_UNROLL
        for (int stage = 0; stage < kStages; ++stage) {
          reader.stage = stage;  // a variable of the loop: nvcc does not unroll it with reader.stage alone
          int const previous_stage = (stage + kStages - 1) % kStages;
          if (stage % 2 == 0) {
            multiply_k_tile(even, odd, previous_stage, stage == 0 && is_first);
          } else {
            multiply_k_tile(odd, even, previous_stage, false);
          }
          if (--left > 0) continue;
          stage % 2 == 0 ? finish(even) : finish(odd);
          return;
        }
        is_first = false;
        reader.phase ^= 1;
      }
    } else {
      int previous_stage = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      while (true) {
        multiply_k_tile(even, odd, previous_stage, is_first);
        if (--left == 0) return finish(even);
        is_first = false;
        previous_stage = reader.stage;
        reader.advance();
        multiply_k_tile(odd, even, previous_stage, false);
        if (--left == 0) return finish(odd);
        previous_stage = reader.stage;
        reader.advance();
      }
    }
  }
};

}  // namespace weightonly::sm90
