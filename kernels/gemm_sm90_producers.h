// The producers of gemm_sm90: one thread for each operand asks for its steps by TMA, as soon as their stages are empty.
//
// What a CTA asks for at once arrives at the same time, late: the first step after 4400 to 5200 cycles (M = 16), while the
// memory brings all stages, and its scales, were they asked for last, behind them. So what the first step needs is asked for
// before all else, scales of the others next, and their weights and x one after another, hardly faster than they arrive.
#pragma once

#include <type_traits>

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
  static constexpr int kRowBytes = Layout::kBlockK * int(sizeof(typename Kernel::Element));  // of x, of a block
  static constexpr bool kHasScales = Kernel::kHasScales;
  static constexpr bool kHasZeros = Kernel::kHasZeros;

  /// Steps that are asked for before all else: some 16 KB of weights.
  static constexpr int kFirstSteps = cutlass::const_min(kStages, cutlass::const_max(1, 16 * 1024 / kWeightBytes));
  /// From one step to the next while the stages are filled for the first time: twice an SM's share of the memory.
  static constexpr int kFillCycles = kWeightBytes / 32;

  using LoadWeights = cute::SM90_TMA_LOAD_3D;
  static constexpr int kUnits =
      kStepBlocks * Layout::kBlockBytes / kTensorMapUnitBytes;  // of the weights' map, in a step

  struct Weights {
    GemmSm90Params const& p;
    Smem const& smem;
    static constexpr int bytes = kWeightBytes;  // of a step
    static constexpr bool kIsX = false;
    static constexpr bool kIsPaced = true;
    static constexpr bool is_shared = false;

    CUTLASS_DEVICE void copy(Place const& place, int step, int stage, uint64_t* full) const {
      LoadWeights::copy(&p.weight_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                        smem.weights() + stage * kWeightBytes, 0, step * kUnits, place.first_column / 64);
    }
  };

  struct X {
    GemmSm90Params const& p;
    Smem const& smem;
    bool is_shared;
    int bytes;
    int first_block, end_block, first_row;
    static constexpr bool kIsX = true;
    static constexpr bool kIsPaced = true;

    CUTLASS_DEVICE X(GemmSm90Params const& p, Smem const& smem) : p(p), smem(smem) {
      is_shared = Kernel::shares_x(p);
      bytes = kStepBlocks * p.x_rows * kRowBytes;
      // Of what two CTAs share each asks for a half, for both: some of the blocks, or of the only one some of the rows.
      constexpr int kHalf = cutlass::const_max(1, kStepBlocks / 2);
      int const second = is_shared ? Kernel::rank_in_cluster() : 0;
      first_block = kStepBlocks == 1 ? 0 : second * kHalf;
      end_block = is_shared ? first_block + kHalf : kStepBlocks;
      first_row = kStepBlocks == 1 ? second * p.x_box_rows : 0;
    }

    CUTLASS_DEVICE void copy(Place const& place, int step, int stage, uint64_t* full) const {
      auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
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
    }
  };

  /// Scales, or zero points.
  struct Groups {
    GemmSm90Params const& p;
    char* target;  // of stage 0
    CUtensorMap const& map;
    int rows, bytes;  // of a step
    static constexpr bool kIsX = false;
    static constexpr bool kIsPaced = false;
    static constexpr bool is_shared = false;

    CUTLASS_DEVICE Groups(GemmSm90Params const& p, char* target, CUtensorMap const& map)
        : p(p), target(target), map(map), rows(p.scale_rows), bytes(rows * kScaleRowBytes) {}

    CUTLASS_DEVICE static Groups scales(GemmSm90Params const& p, Smem const& smem) {
      return Groups(p, smem.scales(), p.scale_map);
    }
    CUTLASS_DEVICE static Groups zeros(GemmSm90Params const& p, Smem const& smem) {
      return Groups(p, smem.scales() + Kernel::kMaxScaleRows * kScaleRowBytes, p.zero_map);
    }

    CUTLASS_DEVICE void copy(Place const& place, int step, int stage, uint64_t* full) const {
      for (int row = 0; row < rows; row += p.scale_box_rows) {
        int const k = step * kStepK + row * p.group_k;
        // Groups beyond K, out of the map's bounds, are zero: weights dequantized with another group's scale might overflow,
        // and Inf times 0 is NaN.
        cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                     target + stage * kScaleBytes + row * kScaleRowBytes, place.first_column,
                                     k < p.k ? p.group.of(k) : p.groups);
      }
    }
  };

  template <class Operand>
  CUTLASS_DEVICE static void ask(Operand const& operand, Place const& place, Smem const& smem, int step, int stage) {
    cute::set_barrier_transaction_bytes(smem.full()[stage], operand.bytes);
    operand.copy(place, step, stage, &smem.full()[stage]);
  }

  /// What the kernels before this one may be writing waits for their end.
  template <class Operand>
  CUTLASS_DEVICE static void wait_for_kernels_before(GemmSm90Params const& p) {
    if (Operand::kIsX || p.overlap != int(Overlap::kConstantWeights)) cudaGridDependencySynchronize();
  }

  /// Steps of an operand that `begin` asks for. x for two CTAs has to wait until both have their barriers.
  template <class Operand>
  CUTLASS_DEVICE static int first_steps(Place const& place, Operand const& operand) {
    return operand.is_shared ? 0 : min(kFirstSteps, place.end_step - place.first_step);
  }

  CUTLASS_DEVICE static uint32_t clock() {
    uint32_t cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
    return cycles;
  }

  /// Calls visit(operand) with what a warp asks for.
  template <class Visit>
  CUTLASS_DEVICE static void with_operand(GemmSm90Params const& p, Smem const& smem, int warp, Visit const& visit) {
    if (warp == 0) {
      visit(Weights{p, smem});
    } else if (warp == 1) {
      visit(X(p, smem));
    } else if (kHasScales && warp == 2) {
      visit(Groups::scales(p, smem));
    } else if (kHasZeros && warp == 3) {
      visit(Groups::zeros(p, smem));
    }
  }

  /// By one thread of each of the producers' warps, when this CTA has its barriers.
  CUTLASS_DEVICE static void begin(GemmSm90Params const& p, Place const& place, Smem const& smem, int warp) {
    with_operand(p, smem, warp, [&](auto const& operand) {
      wait_for_kernels_before<std::decay_t<decltype(operand)>>(p);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < first_steps(place, operand); ++i) ask(operand, place, smem, place.first_step + i, i);
    });
  }

  /// By the same threads, when the CTA that shares x has its barriers, too: the other steps, of all tiles, each as soon as its
  /// stage is empty.
  CUTLASS_DEVICE static void go_on(GemmSm90Params const& p, Place const& first, Smem const& smem, int warp) {
    with_operand(p, smem, warp, [&](auto const& operand) {
      using Operand = std::decay_t<decltype(operand)>;
      int begun = first_steps(first, operand);
      int stage = begun % kStages, phase = 1 ^ begun / kStages;
      int to_fill = Operand::kIsPaced ? kStages - begun : 0;
      uint32_t next = clock() + (begun > 0 ? kFillCycles : 0);
      Kernel::for_each_tile(p, first, [&](Place const& place) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = place.first_step + begun; step < place.end_step; ++step) {
          cute::wait_barrier(smem.empty()[stage], phase);
          if (to_fill > 0) {
            --to_fill;
            while (int(clock() - next) < 0) continue;
            next += kFillCycles;
          }
          ask(operand, place, smem, step, stage);
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
        begun = 0;
      });
    });
  }
};

}  // namespace weightonly
