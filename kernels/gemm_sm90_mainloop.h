// The main loop of gemm_sm90: a consumer warpgroup converts its weights of a block into registers while the tensor cores multiply
// the block before.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_ext/read_shared.h"
#include "cutlass_ext/scaled_fragment.h"
#include "kernels/gemm_sm90_params.h"

namespace weightonly {

/// Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Mainloop {
  using Place = typename Kernel::Place;
  using Smem = typename Kernel::Smem;
  using Element = typename Kernel::Element;
  using Weight = typename Kernel::Weight;
  using Layout = typename Kernel::Layout;
  using Table = typename Kernel::Table;
  using TiledMma = typename Kernel::TiledMma;
  static constexpr ScaleMode kScaleMode = Kernel::kScaleMode;
  static constexpr bool kHasScales = Kernel::kHasScales;
  static constexpr bool kHasZeros = Kernel::kHasZeros;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kWarpgroupsN = Kernel::kWarpgroupsN;
  static constexpr int kWarpgroupBlocks = Kernel::kWarpgroupBlocks;
  static constexpr int kStepBlocks = Kernel::kStepBlocks;
  static constexpr int kWeightBytes = Kernel::kWeightBytes;
  static constexpr int kScaleRowBytes = Kernel::kScaleRowBytes;
  static constexpr int kMaxScaleRows = Kernel::kMaxScaleRows;
  static constexpr int kScaleBytes = Kernel::kScaleBytes;
  // A scale multiplies the sums of its group, of 128 at least, where they are no more than the weights and registers hold those
  // of two groups beside those of the tile.
  static constexpr bool kMayScaleSums = kHasScales && Kernel::kTokens <= (Kernel::kConsumerRegisters >= 160 ? 64 : 32);

  // Whether descriptors of x are added to as numbers of 64 bits: one instruction each. ptxas makes three of CuTe's way, the low half
  // alone, which more tokens are quicker by.
  static constexpr bool kAddsWide = Kernel::kTokens <= 64;
  using Words = uint32_t[Layout::kLaneWords];  // a lane's packed weights of a block
  // Whether those of the second block are read with those of the first, before they are converted: one wait for shared memory, not
  // two. Sixteen warps, and more sums, are slower by it.
  static constexpr bool kReadsAhead = Kernel::kTokens < 32 || (Kernel::kWarpgroups == 2 && Kernel::kTokens < 64);
  static constexpr bool kReadsAheadOfSums = Kernel::kTokens < 32 || Kernel::kWarpgroups == 2;
  // Whether the steps of all stages stand one after another in the code, which so has their addresses: 12% fewer instructions. For want
  // of registers ptxas spills some with more stages, or, with more warps, makes every wgmma wait for the one before.
  static constexpr bool kUnrollsStages = Kernel::kWarpgroups == 2 && kStages % 2 == 0 && kStages <= 6;

  /// What a consumer lane reads of the steps, one stage after another.
  struct Reader {
    uint32_t weights, scales, barriers;  // of stage 0
    uint32_t empty;  // the barrier of stage 0 in the CTA that this lane tells when it gives a stage back
    bool tells;
    uint32_t block_bytes;  // of scales, from a block to the next
    Table table;  // of codes
    // 16-byte units of x: in a stage before the warpgroup's first block, and of a block. Blocks lie as far apart as they have rows; beyond
    // them the MMA reads what it finds, for tokens that do not exist.
    int first_x, block_x;
    int stage = 0, phase = 0;

    CUTLASS_DEVICE Reader(GemmSm90Params const& p, Smem const& smem)
        : table(cute::cast_smem_ptr_to_uint(smem.pairs()), threadIdx.x % 32) {
      // Broadcast: the compiler then knows it to be the same in all lanes, and keeps the descriptors of x, which depend on
      // it, in uniform registers.
      int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
      int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
      int const warpgroup_n = warpgroup % kWarpgroupsN;
      int const first_block = warpgroup / kWarpgroupsN * kWarpgroupBlocks;
      block_x = p.x_rows * (Layout::kBlockK * int(sizeof(Element)) / 16);
      first_x = first_block * block_x;
      weights = cute::cast_smem_ptr_to_uint(smem.weights()) +
                (warpgroup_n * kStepBlocks + first_block) * Layout::kBlockBytes + warp * Layout::kPieceBytes +
                lane * 16;
      scales = cute::cast_smem_ptr_to_uint(smem.scales()) +
               (warpgroup_n * 64 + lane / 4 * 8 + warp * 2) * int(sizeof(Element)) +
               first_block * Layout::kBlockK / p.group_k * kScaleRowBytes;
      block_bytes = p.group_k <= 64 ? 64 / p.group_k * kScaleRowBytes : 0;

      barriers = cute::cast_smem_ptr_to_uint(smem.full());
      // One lane tells the producers of this CTA; where two share x, another one those of the other.
      empty = cute::cast_smem_ptr_to_uint(smem.empty());
      tells = lane < p.x_ctas;
      if constexpr (Kernel::kMayShareX) {
        empty = cute::set_block_rank(empty, Kernel::rank_in_cluster() ^ (lane & (p.x_ctas - 1)));
      }
      // Without this the compiler computes them anew in every step.
      asm volatile("" : "+r"(weights), "+r"(scales), "+r"(barriers), "+r"(empty));
      if constexpr (kIsCode<Weight>) {
        Table::fill(smem.pairs(), Table::fetch_code(p.zeros), Kernel::kConsumers);
        asm volatile("bar.sync 1, %0;" ::"n"(Kernel::kConsumers) : "memory");
      }
    }

    CUTLASS_DEVICE void wait() const {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "again:\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
          "@!done bra again;\n"
          "}\n" ::"r"(barriers + 8 * stage),
          "r"(phase)
          : "memory");
    }

    /// Gives a stage back to the producers.
    CUTLASS_DEVICE void release(int used_stage) const {
      uint32_t const barrier = empty + 8 * used_stage;
      if constexpr (Kernel::kMayShareX) {
        if (tells) asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
      } else {
        if (tells) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
      }
    }

    CUTLASS_DEVICE void advance() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }

    /// The descriptor of x of the warpgroup's first block. x: the fragments of stage 0.
    template <class XFragments>
    CUTLASS_DEVICE cute::GmmaDescriptor x_of_stage(XFragments const& x) const {
      return advanced(x.data().desc_, stage * (Kernel::kXBytes / 16) + first_x);
    }

    /// Its packed weights of a block.
    CUTLASS_DEVICE void read_words(Words& words, int block) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Layout::kLoads; ++i) {
        read_shared(reinterpret_cast<uint32_t (&)[4]>(words[4 * i]),
                    weights + stage * kWeightBytes + block * Layout::kBlockBytes + i * 512);
      }
    }

    /// The lane's two scales, and zero points, at an offset into those of this stage.
    CUTLASS_DEVICE void read_scales(uint32_t (&scale)[1], uint32_t (&zero)[1], uint32_t offset) const {
      if constexpr (kHasScales) read_shared(scale, scales + stage * kScaleBytes + offset);
      if constexpr (kHasZeros)
        read_shared(zero, scales + stage * kScaleBytes + offset + kMaxScaleRows * kScaleRowBytes);
    }
  };

  /// A descriptor of what lies some units of 16 bytes further.
  CUTLASS_DEVICE static cute::GmmaDescriptor advanced(cute::GmmaDescriptor descriptor, uint32_t units) {
    if constexpr (kAddsWide) {
      descriptor.desc_ += units;
    } else {
      descriptor.reg32_[0] += units;
    }
    return descriptor;
  }

  /// The scales, and zero points, of a lane's columns for the group that starts at an offset into those of the stage.
  CUTLASS_DEVICE static ScalePair<Element, kScaleMode> scale_pair(Reader const& reader, uint32_t offset) {
    uint32_t scale[1] = {0}, zero[1] = {0};
    reader.read_scales(scale, zero, offset);
    return ScalePair<Element, kScaleMode>(scale[0], zero[0]);
  }

  /// sums += a block of w x, in place of what they were if kIsFirst, is asked of the tensor cores. x: the fragments of any block, x_block
  /// the descriptor of this one's. kGroups: of the block; pairs(group): their scales; kScales: whether weights are multiplied by them.
  template <int kGroups, bool kScales, bool kIsFirst, class Fragment, class XFragments, class Sums, class Pairs>
  CUTLASS_DEVICE static void multiply_block(Reader const& reader, Words const& words, Fragment& w, XFragments const& x,
                                            cute::GmmaDescriptor x_block, Sums& sums, Pairs const& pairs) {
    using namespace cute;
    using Scaled = ScaledFragment<Element, Weight, kScaleMode, kScales>;
    TiledMma mma;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      auto const pair = pairs(group);
      CUTLASS_PRAGMA_UNROLL
      for (int k16 = 4 / kGroups * group; k16 < 4 / kGroups * (group + 1); ++k16) {
        Scaled::load(words + k16 * Scaled::kWords, reader.table, pair, reinterpret_cast<uint32_t*>(&w(0)) + 4 * k16);
      }
    }
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k16 = 0; k16 < 4; ++k16) {
      mma.accumulate_ = kIsFirst && k16 == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      constexpr int kUnits = 16 * int(sizeof(Element)) / 16;  // of 16 k
      GMMA::DescriptorIterator const x_k16{advanced(x_block, kUnits * k16)};
      gemm(mma, w(_, _, k16), make_tensor(x_k16, x(_, _, 0).layout()), sums);
    }
    warpgroup_commit_batch();
  }

  /// When it returns the tensor cores have read all blocks but the last one, which is multiplied into these sums.
  template <class Sums>
  CUTLASS_DEVICE static void wait_for_block_before(Sums& sums) {
    cute::warpgroup_wait<1>();
    cute::warpgroup_fence_operand(sums);
  }

  /// sums = w x. While one block is converted, the tensor cores read the one before it. kGroups: of a block, 1 or 2.
  template <int kGroups, class XFragments, class Sums>
  CUTLASS_DEVICE static void multiply(Place const& place, Reader& reader, XFragments const& x, Sums& sums) {
    using namespace cute;
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, Shape<_64, _64>{}));  // (MMA, 1, k16)
    Tensor w1 = make_fragment_like(w0);  // (MMA, 1, k16)
    auto const block = [&](auto& w, Words const& words, GmmaDescriptor x_stage, int block) {
      GmmaDescriptor const x_block = advanced(x_stage, block * reader.block_x);
      multiply_block<kGroups, true, false>(reader, words, w, x, x_block, sums, [&](int group) {
        return scale_pair(reader, block * reader.block_bytes + group * kScaleRowBytes);
      });
      wait_for_block_before(sums);
    };
    int previous_stage = 0;
    bool is_first = true;
    auto const step = [&](auto& w, auto& w_second) {
      reader.wait();
      Words words;
      [[maybe_unused]] Words second_words;
      reader.read_words(words, 0);
      if constexpr (kWarpgroupBlocks == 2 && kReadsAhead) reader.read_words(second_words, 1);
      GmmaDescriptor const x_stage = reader.x_of_stage(x);
      block(w, words, x_stage, 0);
      if (!is_first) reader.release(previous_stage);
      if constexpr (kWarpgroupBlocks == 2) {
        if constexpr (!kReadsAhead) reader.read_words(second_words, 1);
        block(w_second, second_words, x_stage, 1);
      }
      is_first = false;
      previous_stage = reader.stage;
      reader.advance();
    };
    clear(sums);
    int i = place.first_step;
    CUTLASS_PRAGMA_NO_UNROLL
    while (i < place.end_step) {
      step(w0, w1);
      ++i;
      if constexpr (kWarpgroupBlocks == 1) {
        if (i == place.end_step) break;
        step(w1, w0);
        ++i;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    if constexpr (Kernel::kMayLoop) reader.release(previous_stage);
  }

  /// sums += scales * part, the columns' sums of one group.
  template <class Sums, class Part>
  CUTLASS_DEVICE static void add_scaled(Sums& sums, float const (&scales)[2], Part& part) {
    cute::warpgroup_fence_operand(part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums); ++i) sums(i) += scales[i / 2 % 2] * part(i);
  }

  CUTLASS_DEVICE static void set_scales(float (&scales)[2], ScalePair<Element, kScaleMode> const& pair) {
    for (int h = 0; h < 2; ++h) scales[h] = float(Element::bitcast(uint16_t(pair.scale[h])));
  }

  /// The same where all k of a warpgroup's step have one scale: it multiplies the sums of the step, while the tensor cores work
  /// on the next one. (With groups of one block, and sums of blocks, nvcc 13.0 makes every wgmma wait for the one before.)
  template <class XFragments, class Sums>
  CUTLASS_DEVICE static void multiply_scaling_sums(Place const& place, Reader& reader, XFragments const& x,
                                                   Sums& sums) {
    using namespace cute;
    static_assert(kWarpgroupBlocks == 2);
    static_assert(!Kernel::kMayLoop, "begins with stage 0");
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, Shape<_64, _64>{}));  // (MMA, 1, k16)
    Tensor w1 = make_fragment_like(w0);  // (MMA, 1, k16)
    Tensor even = make_fragment_like(sums), odd = make_fragment_like(sums);  // (MMA, 1, 1), of a step
    float scales[2] = {0.f, 0.f};  // of the step before
    clear(sums);
    clear(odd);
    auto const step = [&](auto& mine, auto& before, int previous_stage, bool is_first) {
      reader.wait();
      Words words, second_words;
      reader.read_words(words, 0);
      if constexpr (kReadsAheadOfSums) reader.read_words(second_words, 1);
      auto const pair = scale_pair(reader, 0);
      auto const same = [&](int) { return pair; };
      GmmaDescriptor const x_stage = reader.x_of_stage(x);
      multiply_block<1, false, true>(reader, words, w0, x, x_stage, mine, same);
      wait_for_block_before(mine);
      if (!is_first) reader.release(previous_stage);
      if constexpr (!kReadsAheadOfSums) reader.read_words(second_words, 1);
      multiply_block<1, false, false>(reader, second_words, w1, x, advanced(x_stage, reader.block_x), mine, same);
      add_scaled(sums, scales, before);
      set_scales(scales, pair);
      wait_for_block_before(mine);
    };
    auto const finish = [&](auto& last) {
      warpgroup_wait<0>();
      add_scaled(sums, scales, last);
    };
    int left = place.end_step - place.first_step;
    bool is_first = true;
    if constexpr (kUnrollsStages) {
      CUTLASS_PRAGMA_NO_UNROLL
      while (true) {
        CUTLASS_PRAGMA_UNROLL
        for (int stage = 0; stage < kStages; ++stage) {
          reader.stage = stage;  // the loop's own: else nvcc does not unroll it
          int const previous_stage = (stage + kStages - 1) % kStages;
          if (stage % 2 == 0) {
            step(even, odd, previous_stage, stage == 0 && is_first);
          } else {
            step(odd, even, previous_stage, false);
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
        step(even, odd, previous_stage, is_first);
        if (--left == 0) return finish(even);
        is_first = false;
        previous_stage = reader.stage;
        reader.advance();
        step(odd, even, previous_stage, false);
        if (--left == 0) return finish(odd);
        previous_stage = reader.stage;
        reader.advance();
      }
    }
  }

  /// sums = w x, of one warpgroup.
  template <class XFragments, class Sums>
  CUTLASS_DEVICE static void run(GemmSm90Params const& p, Place const& place, Reader& reader, XFragments const& x,
                                 Sums& sums) {
    if (kHasScales && p.group_k == 32) {
      multiply<2>(place, reader, x, sums);
    } else if constexpr (kMayScaleSums) {
      if (p.group_k > 64) {
        multiply_scaling_sums(place, reader, x, sums);
      } else {
        multiply<1>(place, reader, x, sums);
      }
    } else {
      multiply<1>(place, reader, x, sums);
    }
  }
};

}  // namespace weightonly
