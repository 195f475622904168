// The producers of gemm_sm90: one thread for each operand asks for its steps by TMA, as soon as their stages are empty.
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "kernels/gemm_sm90_params.h"

namespace weightonly {

/// Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Producers {
  using Place = typename Kernel::Place;
  using Smem = typename Kernel::Smem;
  using Layout = typename Kernel::Layout;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kStepBlocks = Kernel::kStepBlocks;
  static constexpr int kStepK = Kernel::kStepK;
  static constexpr int kXBytes = Kernel::kXBytes;
  static constexpr int kXBlockBytes = Kernel::kXBlockBytes;
  static constexpr int kWeightBytes = Kernel::kWeightBytes;
  static constexpr int kScaleRowBytes = Kernel::kScaleRowBytes;
  static constexpr int kScaleBytes = Kernel::kScaleBytes;

  /// Calls copy(step, stage, full barrier) for each step, as soon as its stage is empty, having announced `bytes`.
  template <class Copy>
  CUTLASS_DEVICE static void produce(Place const& place, Smem const& smem, int bytes, Copy const& copy) {
    int stage = 0, phase = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = place.first_step; step < place.end_step; ++step) {
      cute::wait_barrier(smem.empty()[stage], phase ^ 1);
      cute::set_barrier_transaction_bytes(smem.full()[stage], bytes);
      copy(step, stage, &smem.full()[stage]);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

  CUTLASS_DEVICE static void produce_weights(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    using Load = cute::SM90_TMA_LOAD_3D;
    constexpr int kUnits = kStepBlocks * Layout::kBlockBytes / kTensorMapUnitBytes;
    int const stripe = place.first_column / 64;
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.weight_map));
    if (p.overlap) {
      // Into the L2 and nothing nearer: allowed before the kernels in front of this one have ended, even if one of them
      // writes these bytes.
      for (int step = place.first_step; step < min(place.end_step, place.first_step + kStages); ++step) {
        Load::PREFETCH::copy(&p.weight_map, 0, step * kUnits, stripe);
      }
    }
    cudaGridDependencySynchronize();
    produce(place, smem, kWeightBytes, [&](int step, int stage, uint64_t* full) {
      Load::copy(&p.weight_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                 smem.weights() + stage * kWeightBytes, 0, step * kUnits, stripe);
    });
  }

  CUTLASS_DEVICE static void produce_x(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.x_map));
    cudaGridDependencySynchronize();
    int const bytes = kStepBlocks * p.x_box_rows * Layout::kBlockK * int(sizeof(typename Kernel::Element));
    produce(place, smem, bytes, [&](int step, int stage, uint64_t* full) {
      for (int block = 0; block < kStepBlocks; block += p.x_box_blocks) {
        int const k_block = step * kStepBlocks + block;
        cute::SM90_TMA_LOAD_3D::copy(&p.x_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                                     smem.x() + stage * kXBytes + block * kXBlockBytes,
                                     p.x_box_blocks == 1 ? k_block * Layout::kBlockK : 0, place.first_token,
                                     p.x_box_blocks == 1 ? 0 : k_block);
      }
    });
  }

  /// Scales, or zero points.
  CUTLASS_DEVICE static void produce_scales(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                            CUtensorMap const& map, int offset_bytes) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&map));
    cudaGridDependencySynchronize();
    int const rows = kStepK / p.group_k;
    produce(place, smem, rows * kScaleRowBytes, [&](int step, int stage, uint64_t* full) {
      for (int row = 0; row < rows; row += p.scale_box_rows) {
        int const k = step * kStepK + row * p.group_k;
        // Groups beyond K, out of the map's bounds, are zero: weights dequantized with another group's scale might overflow,
        // and Inf times 0 is NaN.
        cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                     smem.scales() + stage * kScaleBytes + offset_bytes + row * kScaleRowBytes,
                                     place.first_column, k < p.k ? p.group.of(k) : p.groups);
      }
    });
  }
};

}  // namespace weightonly
