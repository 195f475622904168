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
  static constexpr int kWeightBytes = Kernel::kWeightBytes;
  static constexpr int kScaleRowBytes = Kernel::kScaleRowBytes;
  static constexpr int kScaleBytes = Kernel::kScaleBytes;

  /// Calls copy(place, step, stage, full barrier) for each step of each tile, as soon as its stage is empty, having announced
  /// `bytes`. The first `begun` have been asked for.
  template <class Copy>
  CUTLASS_DEVICE static void produce(GemmSm90Params const& p, Place const& first, Smem const& smem, int begun,
                                     int bytes, Copy const& copy) {
    int stage = begun % kStages, phase = begun / kStages;
    Kernel::for_each_tile(p, first, [&](Place const& place) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = place.first_step + begun; step < place.end_step; ++step) {
        cute::wait_barrier(smem.empty()[stage], phase ^ 1);
        cute::set_barrier_transaction_bytes(smem.full()[stage], bytes);
        copy(place, step, stage, &smem.full()[stage]);
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      begun = 0;
    });
  }

  using LoadWeights = cute::SM90_TMA_LOAD_3D;
  static constexpr int kUnits =
      kStepBlocks * Layout::kBlockBytes / kTensorMapUnitBytes;  // of the weights' map, in a step

  CUTLASS_DEVICE static void copy_weights(GemmSm90Params const& p, Place const& place, Smem const& smem, int step,
                                          int stage, uint64_t* full) {
    LoadWeights::copy(&p.weight_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                      smem.weights() + stage * kWeightBytes, 0, step * kUnits, place.first_column / 64);
  }

  /// Steps whose weights are asked for before all else: some 16 KB. More would delay x.
  CUTLASS_DEVICE static int begun_weights(Place const& place) {
    return min(cutlass::const_min(kStages, cutlass::const_max(1, 16 * 1024 / kWeightBytes)),
               place.end_step - place.first_step);
  }

  CUTLASS_DEVICE static void begin_weights(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    if (p.overlap) {
      // Into the L2 and nothing nearer: allowed before the kernels in front of this one have ended, even if one of them
      // writes these bytes.
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = place.first_step; step < min(place.end_step, place.first_step + kStages); ++step) {
        LoadWeights::PREFETCH::copy(&p.weight_map, 0, step * kUnits, place.first_column / 64);
      }
    }
    cudaGridDependencySynchronize();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < begun_weights(place); ++i) {
      cute::set_barrier_transaction_bytes(smem.full()[i], kWeightBytes);
      copy_weights(p, place, smem, place.first_step + i, i, &smem.full()[i]);
    }
  }

  CUTLASS_DEVICE static void produce_weights(GemmSm90Params const& p, Place const& first, Smem const& smem) {
    produce(p, first, smem, begun_weights(first), kWeightBytes,
            [&](Place const& place, int step, int stage, uint64_t* full) {
              copy_weights(p, place, smem, step, stage, full);
            });
  }

  CUTLASS_DEVICE static void produce_x(GemmSm90Params const& p, Place const& first, Smem const& smem) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.x_map));
    cudaGridDependencySynchronize();
    constexpr int kRowBytes = Layout::kBlockK * int(sizeof(typename Kernel::Element));
    auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    bool const is_shared = Kernel::shares_x(p);
    // Of what two CTAs share each asks for a half, for both: some of the blocks, or of the only one some of the rows.
    constexpr int kHalf = cutlass::const_max(1, kStepBlocks / 2);
    int const second = is_shared ? cute::block_rank_in_cluster() : 0;
    int const first_block = kStepBlocks == 1 ? 0 : second * kHalf;
    int const end_block = is_shared ? first_block + kHalf : kStepBlocks;
    int const first_row = kStepBlocks == 1 ? second * p.x_box_rows : 0;
    int const step_bytes = kStepBlocks * p.x_rows * kRowBytes;  // of both halves
    produce(p, first, smem, 0, step_bytes, [&](Place const& place, int step, int stage, uint64_t* full) {
      for (int block = first_block; block < end_block; block += p.x_box_blocks) {
        int const k_block = step * kStepBlocks + block;
        int const k = p.x_box_blocks == 1 ? k_block * Layout::kBlockK : 0;
        int const box = p.x_box_blocks == 1 ? 0 : k_block;
        char* const target = smem.x() + stage * kXBytes + (block * p.x_rows + first_row) * kRowBytes;
        int const token = place.first_token + first_row;
        if (is_shared) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&p.x_map, full, uint16_t(3), hint, target, k, token, box);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&p.x_map, full, hint, target, k, token, box);
        }
      }
    });
  }

  /// Scales, or zero points.
  CUTLASS_DEVICE static void produce_scales(GemmSm90Params const& p, Place const& first, Smem const& smem,
                                            CUtensorMap const& map, int offset_bytes) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&map));
    cudaGridDependencySynchronize();
    int const rows = kStepK / p.group_k;
    produce(p, first, smem, 0, rows * kScaleRowBytes, [&](Place const& place, int step, int stage, uint64_t* full) {
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
