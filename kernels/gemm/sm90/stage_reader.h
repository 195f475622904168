// What a consumer lane of gemm_sm90 reads from the stages of shared memory: its packed weights, their scales, and the
// descriptors of x.
#pragma once

#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/ld_shared.h"
#include "cutlass_ext/fragment/scaled.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly::sm90 {

/// Where one consumer lane reads, and how far it has come: its stage of the pipeline.
template <class Traits>
struct StageReader {
  using Smem = typename Traits::Smem;
  using Element = typename Traits::Element;
  using Weight = typename Traits::Weight;
  using Layout = typename Traits::Layout;
  using Codebook = typename Traits::Codebook;
  using Words = uint32_t[Layout::kLaneWords];  // a lane's packed weights of a k_block
  static constexpr ScaleMode kScaleMode = Traits::kScaleMode;

  uint32_t weights, scales, full;  // shared memory addresses, in stage 0
  uint32_t empty;  // the barrier of stage 0 in the CTA that this lane releases a stage to
  bool releases;
  uint32_t k_block_scale_bytes;  // from the scales of a k_block to those of the next
  Codebook codebook;
  // In descriptor units: from the stage to the warpgroup's first k_block of x, and from a k_block to the next. That
  // is p.x_rows rows. Where these are fewer than kTileM, the MMA reads other bytes as the missing rows, and nobody
  // stores what it computes of them.
  int first_x, k_block_x;
  int stage = 0, phase = 0;
  int width = 0;  // see Traits::with_mma

  CUTLASS_DEVICE StageReader(Params const& p, Smem const& smem)
      : codebook(cute::cast_smem_ptr_to_uint(smem.codebook()), threadIdx.x % 32) {
    // The broadcast tells the compiler that all lanes have the same value. So it keeps the descriptors of x, which
    // depend on it, in uniform registers.
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const warpgroup_n = warpgroup % Traits::kWarpgroupsN;
    int const first_k_block = warpgroup / Traits::kWarpgroupsN * Traits::kWarpgroupKBlocks;
    k_block_x = p.x_rows * (Traits::kXRowBytes / Traits::kDescriptorBytes);
    first_x = first_k_block * k_block_x;
    weights = cute::cast_smem_ptr_to_uint(smem.weights()) +
              (warpgroup_n * Traits::kKBlocks + first_k_block) * Layout::kBlockBytes + warp * Layout::kFragmentBytes +
              lane * 16;
    scales = cute::cast_smem_ptr_to_uint(smem.scales()) +
             (warpgroup_n * Traits::kWarpgroupN + lane / 4 * 8 + warp * 2) * int(sizeof(Element)) +
             first_k_block * Layout::kBlockK / p.scale_k * Traits::kScaleRowBytes;
    k_block_scale_bytes = p.scale_k <= Layout::kBlockK ? Layout::kBlockK / p.scale_k * Traits::kScaleRowBytes : 0;

    full = cute::cast_smem_ptr_to_uint(smem.full());
    // Lane 0 releases stages to the producers of this CTA; where two CTAs share x, lane 1 releases them to those of
    // the other.
    empty = cute::cast_smem_ptr_to_uint(smem.empty());
    releases = lane < p.multicast_ctas;
    if constexpr (Traits::kMayMulticastX) {
      empty = cute::set_block_rank(empty, rank_in_cluster() ^ (lane & (p.multicast_ctas - 1)));
    }
    // Keeps the compiler from computing them again for every k_tile.
    asm volatile("" : "+r"(weights), "+r"(scales), "+r"(full), "+r"(empty));
    if constexpr (WeightFormat<Weight>::kIsCodebook) {
      Codebook::fill(smem.codebook(), Codebook::fetch_code(p.zeros), Traits::kConsumers);
      named_barrier_sync<BarrierId::kConsumers, Traits::kConsumers>();
    }
  }

  /// Waits until the stage is full.
  CUTLASS_DEVICE void wait() const { mbarrier_wait(full + 8 * stage, phase); }

  /// Gives a stage back to the producers of all CTAs that share it.
  CUTLASS_DEVICE void release(int used_stage) const {
    uint32_t const barrier = empty + 8 * used_stage;
    if (releases) mbarrier_arrive<Traits::kMayMulticastX>(barrier);
  }

  CUTLASS_DEVICE void advance() {
    if (++stage == Traits::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  /// From x of stage 0 to the warpgroup's first k_block of this stage, in descriptor units.
  CUTLASS_DEVICE uint32_t x_units() const {
    return stage * (Traits::kXStageBytes / Traits::kDescriptorBytes) + first_x;
  }

  /// The lane's packed weights of a k_block.
  CUTLASS_DEVICE void read_words(Words& words, int k_block) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Layout::kLoads; ++i) {
      read_shared(reinterpret_cast<uint32_t (&)[4]>(words[4 * i]),
                  weights + stage * Traits::kWeightStageBytes + k_block * Layout::kBlockBytes + i * Layout::kLoadBytes);
    }
  }

  /// The scales and zero points of the lane's two columns. offset: bytes, to those of a group in the stage.
  CUTLASS_DEVICE ScalePair<Element, kScaleMode> read_scales(uint32_t offset) const {
    uint32_t scale[1] = {0}, zero[1] = {0};
    constexpr int kStageBytes = Traits::kScaleStageBytes;
    if constexpr (Traits::kHasScales) read_shared(scale, scales + stage * kStageBytes + offset);
    if constexpr (Traits::kHasZeros) read_shared(zero, scales + stage * kStageBytes + offset + Traits::kZerosOffset);
    return ScalePair<Element, kScaleMode>(scale[0], zero[0]);
  }
};

}  // namespace weightonly::sm90
