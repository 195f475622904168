// Mainloop for sm75: two shared-memory stages filled through registers, since there is no cp.async before sm80.
//
// The global loads of k_block b + 1 are issued before k_block b is multiplied, and stored to the other stage after it:
// the tensor cores hide their latency. Fragments and dequantization are those of the multistage loop.
#pragma once

#include "cutlass_ext/fragment/activation.h"
#include "cutlass_ext/mainloop/tile_copy.h"
#include "cutlass_ext/arch/warp_mma.h"
#include "cutlass_ext/fragment/sm80_weight.h"

namespace weightonly {

template <class Config>
struct MmaPipelined {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = InterleavedLayout<Weight>;
  static constexpr int kStages = 2;
  static constexpr int kWarpsN = Config::kBlockN / Config::kWarpN;
  static constexpr int kWarpsM = Config::kBlockM / Config::kWarpM;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kLines = Config::kBlockN / Layout::kColumnsPerLine;
  static_assert(Config::kStages == kStages);

  using CopyX = TileCopy<Config::kBlockM, kThreads>;
  using CopyWeight = TileCopy<kLines, kThreads>;
  static constexpr int kLeastGroup = 32;
  using Scales = ScaleTile<Element, Config::kScaleMode, Config::kBlockN, kLeastGroup>;
  using FragmentX = ActivationFragment<Config::kWarpM>;
  using FragmentWeight =
      WeightFragment<Element, Weight, Config::kScaleMode, Config::kBlockN, Config::kWarpN, kLeastGroup>;

  static constexpr int kWeightOffsetBytes = CopyX::kTileBytes;
  static constexpr int kScalesOffsetBytes = kWeightOffsetBytes + CopyWeight::kTileBytes;
  static constexpr int kStageBytes = kScalesOffsetBytes + Scales::kBytes;
  using Codebook = typename FragmentWeight::Codebook;
  static constexpr bool kHasCodebook = WeightFormat<Weight>::kIsCodebook;
  static constexpr int kCodebookOffsetBytes = kStages * kStageBytes;
  static constexpr int kSmemBytes = kCodebookOffsetBytes + (kHasCodebook ? Codebook::kBytes : 0);
  static constexpr int kTilesM = FragmentX::kTilesM;
  static constexpr int kTilesN = FragmentWeight::kTilesN;

  /// Adds the product of k_blocks [first_block, first_block + blocks) to accumulators. code_values: the codebook in
  /// global memory; not read for integers.
  CUTLASS_DEVICE static void run(float (&accumulators)[kTilesM][kTilesN][4], CopyX const& copy_x,
                                 CopyWeight const& copy_weight, Scales const& scales, void const* code_values,
                                 char* smem, int first_block, int blocks, int warp_m, int warp_n) {
    int const lane = threadIdx.x % 32;
    Codebook const codebook(cute::cast_smem_ptr_to_uint(smem + kCodebookOffsetBytes), lane);
    FragmentX x;
    FragmentWeight weight(warp_n, lane);
    uint4 next_x[CopyX::kCopies];
    uint4 next_weight[CopyWeight::kCopies];

    auto fetch = [&](int block) {
      copy_x.fetch(next_x, first_block + block);
      copy_weight.fetch(next_weight, first_block + block);
    };
    auto store = [&](int block) {
      char* const target = smem + block % kStages * kStageBytes;
      copy_x.store(target, next_x);
      copy_weight.store(target + kWeightOffsetBytes, next_weight);
      scales.copy_async(target + kScalesOffsetBytes, (first_block + block) * kLineBlockK,
                        true);  // a plain copy on sm75
    };

    if constexpr (kHasCodebook) {
      Codebook::fill(smem + kCodebookOffsetBytes, Codebook::fetch_code(code_values), kThreads);
    }
    if (blocks > 0) {
      fetch(0);
      store(0);
    }
    __syncthreads();
    for (int block = 0; block < blocks; ++block) {
      if (block + 1 < blocks) fetch(block + 1);
      char const* const read = smem + block % kStages * kStageBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < FragmentWeight::kSteps; ++step) {
        weight.load_packed(read + kWeightOffsetBytes, step);
        weight.load_scales(read + kScalesOffsetBytes, step, scales.second_row_bytes);
        weight.dequantize(codebook);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < FragmentWeight::kMmaSteps; ++half) {
          x.load(read + warp_m * SwizzledTile::kRowBytes, step * FragmentWeight::kMmaSteps + half, lane);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kTilesN; ++j) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kTilesM; ++i) {
              MmaSm75::k16<Element>(accumulators[i][j], x.values[i], weight.values[half][j]);
            }
          }
        }
      }
      // The other stage was read in the iteration before, which ended with the barrier below.
      if (block + 1 < blocks) store(block + 1);
      __syncthreads();
    }
  }
};

}  // namespace weightonly
