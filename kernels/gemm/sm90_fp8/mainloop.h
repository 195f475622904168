// The main loop of gemm_sm90_fp8.
//
// Tensor cores keep some 14 bits of a sum. So a warpgroup multiplies 128 k, or a smaller group, into `partial`, and adds
// that to its accumulators, times the scales of the group. While the tensor cores multiply it converts the weights of
// the next panel; while it adds, they work for the other warpgroup.
//
//   warpgroup 0     convert | mma   convert | add | mma   convert | add | ...
//   warpgroup 1             convert | add | mma   convert | add | mma   ...
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/ld_shared.h"
#include "cutlass_ext/fragment/fp8_weight.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90_fp8/traits.h"

namespace weightonly::sm90_fp8 {

template <class Traits>
struct Mainloop {
  using Smem = typename Traits::Smem;
  using Params = sm90::Params;
  using Element = typename Traits::Element;
  using Layout = typename Traits::Layout;
  using TiledMma = typename Traits::TiledMma;
  static constexpr int kPanels = Traits::kPanels;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kSteps = Traits::kWarpgroupK / 32;
  static constexpr bool kTakesTurns = Traits::kThreadWarpgroups == 2;
  static constexpr int kFirstTurn = 10;
  using Partial = decltype(cute::partition_fragment_C(TiledMma{}, typename Traits::ShapeC{}));  // (V,1,1)
  using Fragment = decltype(cute::make_tensor<typename Traits::XElement>(
      cute::partition_shape_A(TiledMma{}, typename Traits::ShapeA{})));  // (V,1,4): MMA, m64, k32
  using Words = uint32_t[Traits::kWarpgroupKBlocks * Layout::kLaneWords];

  struct Reader {
    uint32_t weights, scales, full, empty;  // shared memory addresses, in stage 0
    bool releases;
    int first_x;  // to the warpgroup's x, in descriptor units
    int stage = 0, phase = 0;

    CUTLASS_DEVICE Reader(Params const& p, Smem const& smem) {
      int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
      int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
      int const panel = warpgroup * kPanels % Traits::kWarpgroupsN;
      int const k_part = warpgroup * kPanels / Traits::kWarpgroupsN;
      first_x = k_part * p.x_rows * (Traits::kXRowBytes / Traits::kDescriptorBytes);
      weights = cute::cast_smem_ptr_to_uint(smem.weights()) +
                (panel * Traits::kKBlocks + k_part * Traits::kWarpgroupKBlocks) * Layout::kBlockBytes +
                warp * Layout::kFragmentBytes + lane * 16;
      scales = cute::cast_smem_ptr_to_uint(smem.scales()) +
               (panel * Traits::kWarpgroupN + lane / 4 * 8 + warp * 2) * int(sizeof(Element)) +
               k_part * Traits::kWarpgroupK / p.scale_k * Traits::kScaleRowBytes;
      full = cute::cast_smem_ptr_to_uint(smem.full());
      empty = cute::cast_smem_ptr_to_uint(smem.empty());
      releases = lane < p.multicast_ctas;
      if constexpr (Traits::kMayMulticastX) {
        empty = cute::set_block_rank(empty, sm90::rank_in_cluster() ^ (lane & (p.multicast_ctas - 1)));
      }
      asm volatile("" : "+r"(weights), "+r"(scales), "+r"(full), "+r"(empty));
    }

    CUTLASS_DEVICE void wait() const { mbarrier_wait(full + 8 * stage, phase); }
    CUTLASS_DEVICE void release(int used_stage) const {
      if (releases) mbarrier_arrive<Traits::kMayMulticastX>(empty + 8 * used_stage);
    }
    CUTLASS_DEVICE void advance() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    CUTLASS_DEVICE uint32_t x_units() const {
      return stage * (Traits::kXStageBytes / Traits::kDescriptorBytes) + first_x;
    }
    CUTLASS_DEVICE void read_words(Words& words, int panel) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kWarpgroupKBlocks; ++i) {
        read_shared(reinterpret_cast<uint32_t (&)[4]>(words[4 * i]),
                    weights + stage * Traits::kWeightStageBytes + (panel * Traits::kKBlocks + i) * Layout::kBlockBytes);
      }
    }
    /// Of the lane's two columns, times the unit of weights.
    CUTLASS_DEVICE float2 read_scales(int panel, int row) const {
      if constexpr (!Traits::kHasScales) return {kFp8WeightUnit, kFp8WeightUnit};
      uint32_t pair[1];
      read_shared(pair, scales + stage * Traits::kScaleStageBytes + row * Traits::kScaleRowBytes +
                            panel * Traits::kWarpgroupN * int(sizeof(Element)));
      return {float(Element::bitcast(uint16_t(pair[0]))) * kFp8WeightUnit,
              float(Element::bitcast(uint16_t(pair[0] >> 16))) * kFp8WeightUnit};
    }
  };

  /// The first turn is that of warpgroup 0. Called once, and end_turns after all tiles.
  CUTLASS_DEVICE static void begin_turns(int warpgroup) {
    if (kTakesTurns && warpgroup == 1) turn_barrier_arrive(kFirstTurn);
  }

  /// Takes the last turn that warpgroup 1 gave: no barrier is left with arrivals.
  CUTLASS_DEVICE static void end_turns(int warpgroup) {
    if (kTakesTurns && warpgroup == 0) turn_barrier_sync(kFirstTurn);
  }

  /// accum[i] = w x of panel i: all k_tiles of a work tile. x: the B fragment of stage 0.
  template <class XFragment>
  CUTLASS_DEVICE static void run(Params const& p, sm90::WorkTile const& work, Reader& reader, XFragment const& x,
                                 Partial (&accum)[kPanels]) {
    if constexpr (Traits::kHasScales && Traits::kLeastGroup == 32) {
      if (p.scale_k < 128) return mma<4>(p, work, reader, x, accum);
    }
    mma<1>(p, work, reader, x, accum);
  }

 private:
  CUTLASS_DEVICE static void turn_barrier_sync(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
  CUTLASS_DEVICE static void turn_barrier_arrive(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

  CUTLASS_DEVICE static void convert(Words const& words, Fragment& w) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      load_fp8_fragment(reinterpret_cast<uint32_t const(&)[2]>(words[2 * i]),
                        reinterpret_cast<uint32_t*>(&w(0)) + 4 * i);
    }
  }

  /// Issues partial = w x of the k32 steps from `begin` to `end`.
  template <class XFragment>
  CUTLASS_DEVICE static void issue(Fragment& w, XFragment const& x, cute::GmmaDescriptor x_stage, int begin, int end,
                                   Partial& partial) {
    using namespace cute;
    TiledMma tiled_mma;
    warpgroup_fence_operand(partial);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = begin; i < end; ++i) {
      if (kTakesTurns && end - begin == kSteps && i == begin + kSteps / 2) warpgroup_commit_batch();
      tiled_mma.accumulate_ = i == begin ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      GmmaDescriptor descriptor = x_stage;
      descriptor.reg32_[0] += 32 / Traits::kDescriptorBytes * i;
      gemm(tiled_mma, w(_, _, i), make_tensor(GMMA::DescriptorIterator{descriptor}, x(_, _, 0).layout()), partial);
    }
    warpgroup_commit_batch();
  }

  CUTLASS_DEVICE static void add(float2 scales, Partial& partial, Partial& accum) {
    cute::warpgroup_fence_operand(partial);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum); ++i) accum(i) += (i / 2 % 2 == 0 ? scales.x : scales.y) * partial(i);
  }

  /// kGroups: parts of 128 k that are multiplied by scales, 1 or 4: groups of 64 are two of four.
  template <int kGroups, class XFragment>
  CUTLASS_DEVICE static void mma(Params const& p, sm90::WorkTile const& work, Reader& reader, XFragment const& x,
                                 Partial (&accum)[kPanels]) {
    using namespace cute;
    Fragment w;
    Partial partial;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPanels; ++i) clear(accum[i]);
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
    int left = work.k_tile_end - work.k_tile_begin;
    if (left <= 0) return;
    auto const multiply = [&](int panel) __attribute__((always_inline)) {
      GmmaDescriptor x_stage = x.data().desc_;
      x_stage.reg32_[0] += reader.x_units();
      Words words;
      int const used = reader.stage;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        constexpr int kGroupSteps = kSteps / kGroups;
        if (kTakesTurns && group == 0) turn_barrier_sync(kFirstTurn + warpgroup);
        issue(w, x, x_stage, group * kGroupSteps, (group + 1) * kGroupSteps, partial);
        float2 const scales = reader.read_scales(panel, kGroups == 1 ? 0 : p.scale_k == 64 ? group / 2 : group);
        if (group == kGroups - 1) {
          if (panel < kPanels - 1) {
            reader.read_words(words, panel + 1);
          } else {
            reader.advance();
            if (--left > 0) {
              reader.wait();
              reader.read_words(words, 0);
            }
          }
        }
        if (kTakesTurns && group == kGroups - 1) {
          warpgroup_wait<kGroups == 1 ? 1 : 0>();
          turn_barrier_arrive(kFirstTurn + 1 - warpgroup);
        }
        warpgroup_wait<0>();
        if (group == kGroups - 1) {
          if (panel == kPanels - 1) reader.release(used);
          convert(words, w);
        }
        add(scales, partial, accum[panel]);
      }
    };
    reader.wait();
    Words words;
    reader.read_words(words, 0);
    convert(words, w);
    CUTLASS_PRAGMA_NO_UNROLL
    while (true) {
      CUTLASS_PRAGMA_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) multiply(panel);
      if (left <= 0) return;
    }
  }
};

}  // namespace weightonly::sm90_fp8
