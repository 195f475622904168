// Mainloop for sm80 and up: a cp.async pipeline of kStages k_blocks, weights dequantized after the load from
// shared memory.
//
// What overlaps what: the copies of k_block b + kStages - 1 start while k_block b is multiplied. Within a k_block the
// loop goes in k16 steps t = 0..3; the fragments of step t + 1 are loaded from shared memory before the tensor cores
// get step t, and the weights of a whole ldmatrix row (two k16 steps of int4, one of int8) are converted at its first
// step.
//
//   step        0            1            2            3             0 of b + 1
//   convert   int4: 0,1                 int4: 2,3                   int4: 0,1
//   ldmatrix  x(1), copies  x(2), w(2,3)  x(3)        barrier, x(0), w(0,1) of b + 1
//   mma         0            1            2            3             0
#pragma once

#include "cutlass_ext/fragment/activation.h"
#include "cutlass_ext/mainloop/tile_copy.h"
#include "cutlass_ext/arch/warp_mma.h"
#include "cutlass_ext/fragment/sm80_weight.h"

namespace weightonly {

template <class Config>
struct MmaMultistage {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = InterleavedLayout<Weight>;
  static constexpr int kStages = Config::kStages;
  static constexpr int kWarpsN = Config::kBlockN / Config::kWarpN;
  static constexpr int kWarpsM = Config::kBlockM / Config::kWarpM;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kLines = Config::kBlockN / Layout::kColumnsPerLine;

  using CopyX = TileCopy<Config::kBlockM, kThreads>;
  using CopyWeight = TileCopy<kLines, kThreads>;
  using Scales = ScaleTile<Element, Config::kScaleMode, Config::kBlockN, Config::kLeastGroup>;
  using FragmentX = ActivationFragment<Config::kWarpM>;
  using FragmentWeight =
      WeightFragment<Element, Weight, Config::kScaleMode, Config::kBlockN, Config::kWarpN, Config::kLeastGroup>;
  static_assert(Scales::kRows * Scales::kVectorsPerRow <= kThreads, "scales are copied by one pass of the threads");

  static constexpr int kWeightOffsetBytes = CopyX::kTileBytes;
  static constexpr int kScalesOffsetBytes = kWeightOffsetBytes + CopyWeight::kTileBytes;
  static constexpr int kStageBytes = kScalesOffsetBytes + Scales::kBytes;
  using Codebook = typename FragmentWeight::Codebook;
  static constexpr bool kHasCodebook = WeightFormat<Weight>::kIsCodebook;
  static constexpr int kCodebookOffsetBytes = kStages * kStageBytes;
  static constexpr int kSmemBytes = kCodebookOffsetBytes + (kHasCodebook ? Codebook::kBytes : 0);
  static constexpr int kTilesM = FragmentX::kTilesM;
  static constexpr int kTilesN = FragmentWeight::kTilesN;
  static constexpr int kMmaSteps = FragmentWeight::kMmaSteps;
  static constexpr int kStepsPerBlock = 4;  // k16 steps in a k_block

  /// Adds the product of k_blocks [first_block, first_block + blocks) to accumulators. code_values: the codebook in
  /// global memory; not read for integers.
  CUTLASS_DEVICE static void run(float (&accumulators)[kTilesM][kTilesN][4], CopyX const& copy_x,
                                 CopyWeight const& copy_weight, Scales const& scales, void const* code_values,
                                 char* smem, int first_block, int blocks, int warp_m, int warp_n) {
    int const lane = threadIdx.x % 32;
    Codebook const codebook(cute::cast_smem_ptr_to_uint(smem + kCodebookOffsetBytes), lane);
    uint32_t code_value = 0;
    if constexpr (kHasCodebook) code_value = Codebook::fetch_code(code_values);
    FragmentX x[2];
    FragmentWeight weight(warp_n, lane);
    int const warp_x_bytes = warp_m * SwizzledTile::kRowBytes;

    // Past the last k_block nothing is copied, but the instructions stay: the loop body is one basic block, which the
    // compiler schedules as a whole.
    auto copy_block = [&](int block, int stage) {
      char* const target = smem + stage * kStageBytes;
      bool const enabled = block < blocks;
      copy_x.copy_async(target, first_block + block, enabled);
      copy_weight.copy_async(target + kWeightOffsetBytes, first_block + block, enabled);
      scales.copy_async(target + kScalesOffsetBytes, (first_block + block) * kLineBlockK, enabled);
    };
    auto load_weight = [&](char const* stage, int step) {
      weight.load_packed(stage + kWeightOffsetBytes, step);
      weight.load_scales(stage + kScalesOffsetBytes, step, scales.second_row_bytes);
    };

    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kStages - 1; ++block) {
      copy_block(block, block);
      cute::cp_async_fence();
    }
    if constexpr (kHasCodebook) Codebook::fill(smem + kCodebookOffsetBytes, code_value, kThreads);
    cute::cp_async_wait<kStages - 2>();
    __syncthreads();
    load_weight(smem, 0);
    x[0].load(smem + warp_x_bytes, 0, lane);

    int read_stage = 0;
    int write_stage = kStages - 1;
    for (int block = 0; block < blocks; ++block) {
      char const* read = smem + read_stage * kStageBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int t = 0; t < kStepsPerBlock; ++t) {
        if (t % kMmaSteps == 0) weight.dequantize(codebook);

        if (t == kStepsPerBlock - 1) {
          // This warp has read all of this k_block. After the barrier every warp has, and the next one has arrived.
          cute::cp_async_wait<kStages - 2>();
          __syncthreads();
          read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
          read = smem + read_stage * kStageBytes;
        }
        int const next = (t + 1) % kStepsPerBlock;
        if (next % kMmaSteps == 0) load_weight(read, next / kMmaSteps);
        x[(t + 1) % 2].load(read + warp_x_bytes, next, lane);

        if (t == 0) {
          // Overwrites the stage of block - 1, which every warp left at the barrier above.
          copy_block(block + kStages - 1, write_stage);
          cute::cp_async_fence();
          write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
        }

        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kTilesN; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kTilesM; ++i) {
            MmaSm80::k16<Element>(accumulators[i][j], x[t % 2].values[i], weight.values[t % kMmaSteps][j]);
          }
        }
      }
    }
    cute::cp_async_wait<0>();
    __syncthreads();
  }
};

}  // namespace weightonly
