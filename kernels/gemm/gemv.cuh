// CUDA-core GEMV on interleaved weights for 1 to 8 tokens: 16-byte weight loads, one AND and one FFMA per weight and
// token (cutlass_ext/mainloop/gemv_stage.h), fp32 accumulators throughout.
//
// Partition. A CTA computes kLines lines (kLines * I columns) and, with split-K, a part of K. Its warps take turns
// along K in passes of 256 k: in one pass a lane holds one chunk of each line, so a warp reads 512 contiguous bytes per
// line.
//
//   K ->     pass 0    pass 1    ...  pass W-1  pass W                  one pass, one line: 4 blocks of 128 bytes
//   line 0 | warp 0  | warp 1  | ... | warp W-1 | warp 0 | ...        | lanes 0-7 | 8-15 | 16-23 | 24-31 |
//   line 1 | warp 0  | warp 1  | ...                                  8 chunks: I columns x (64 / chunk) parts of k
//
// A warp takes its lines four at a time, so that x is staged once per pass for all of them, and refills the registers
// of four lines with the next pass's weights as soon as it has used them: loads are always in flight. No barrier stands
// between warps until the end, when their partials are summed in shared memory, in the order of the warps.
#pragma once

#include "cutlass_ext/mainloop/gemv_stage.h"
#include "cutlass_ext/epilogue/column.h"
#include "cutlass_ext/fragment/scale_mode.h"
#include "kernels/gemm/launch.h"
#include "kernels/gemm/splitk_reduce.h"

namespace weightonly {

/// Config: Element, Weight, kScaleMode, kTokens, kLines, kWarps, kLeastGroup (16: groups of 16 alone).
template <class Config>
struct Gemv {
  using Element = typename Config::Element;
  using Layout = InterleavedLayout<typename Config::Weight>;
  using Positions = WordPositions<typename Config::Weight>;
  static constexpr int kTokens = Config::kTokens;
  static constexpr int kLines = Config::kLines;
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kLeastGroup = Config::kLeastGroup;
  using Stage = ActivationStage<Element, typename Config::Weight, kTokens, kLeastGroup>;
  static constexpr int kGroups = Stage::kSums;  // in a chunk

  static constexpr bool kHasScales = Config::kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = Config::kScaleMode == ScaleMode::kGroupZeros;
  static constexpr bool kCorrects = kHasZeros || Layout::kBias != 0;  // whether sum_k x is needed
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBatchLines = kLines < 4 ? kLines : 4;  // lines whose weights are used, and refilled, together
  static constexpr int kBatches = kLines / kBatchLines;
  static constexpr int kColumns = kLines * Layout::kColumnsPerLine;
  static constexpr int kPassBytes = Stage::kPassK / kLineBlockK * kLineBlockBytes;  // of one line: 512
  static constexpr int kReduceFloats = kWarps * kTokens * kColumns;
  static constexpr int kSmemFloats = kWarps * Stage::kFloats > kReduceFloats ? kWarps * Stage::kFloats : kReduceFloats;
  static constexpr int kSmemBytes = kSmemFloats * int(sizeof(float));
  static_assert(kTokens * kColumns <= kThreads, "the last sum is done by one pass of the threads");

  /// What a lane needs of the packed operand for one pass over one batch of lines.
  struct Packed {
    uint4 words[kBatchLines];
    Element scale[kGroups][kBatchLines];
    Element zero[kGroups][kBatchLines];
  };

  /// Which chunk of a line's k_blocks this lane reads in a pass.
  struct LaneChunk {
    int lane, block, chunk, column, k;  // k_block of the pass, chunk of the column, column of the line, k in the pass
    CUTLASS_DEVICE LaneChunk() {
      lane = threadIdx.x % 32;
      block = lane / kChunksPerLineBlock;
      chunk = lane % Layout::kChunksPerColumn;
      column = lane % kChunksPerLineBlock / Layout::kChunksPerColumn;
      k = block * kLineBlockK + chunk * Layout::kChunkK;
    }
    CUTLASS_DEVICE int segment() const { return block * Layout::kChunksPerColumn + chunk; }
  };

  /// The addresses that this lane loads from; from pass to pass they grow by a constant.
  struct Source {
    char const* first;  // the first chunk of line 0
    char const* weight;  // its chunk of line 0 in the present pass
    int64_t line_bytes;
    char const* scales;
    char const* zeros;
    int64_t scales_row_bytes;
    int k;  // of its chunk in the present pass

    CUTLASS_DEVICE Source(GemmParams const& p, LaneChunk const& lane_chunk, int line0, int pass) {
      line_bytes = int64_t(p.k_padded) * (kLineBlockBytes / kLineBlockK);
      first = static_cast<char const*>(p.weight) + line0 * line_bytes;
      weight = first + int64_t(pass) * kPassBytes + lane_chunk.lane * kChunkBytes;
      k = pass * Stage::kPassK + lane_chunk.k;
      int const column = line0 * Layout::kColumnsPerLine + lane_chunk.column;
      scales = static_cast<char const*>(p.scales) + column * int(sizeof(Element));
      zeros = static_cast<char const*>(p.zeros) + column * int(sizeof(Element));
      scales_row_bytes = p.ld_scales * int(sizeof(Element));
    }

    CUTLASS_DEVICE void advance() {
      weight += kWarps * kPassBytes;
      k += kWarps * Stage::kPassK;
    }
  };

  CUTLASS_DEVICE static void fetch(Packed& packed, Source const& source, GemmParams const& p, int batch) {
    // In the last pass a lane's k may lie beyond K. Its x is zero there, so it may load any weights: those of line 0.
    char const* const weight = source.k < p.k_padded ? source.weight : source.first;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatchLines; ++i) {
      // Each weight is read once, so it is the first that the caches may drop.
      int const line = batch * kBatchLines + i;
      packed.words[i] = __ldcs(reinterpret_cast<uint4 const*>(weight + line * source.line_bytes));
    }
    if constexpr (kHasScales) {
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        int64_t const row = p.group.of<kLeastGroup>(source.k + group * kLeastGroup) * source.scales_row_bytes;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatchLines; ++i) {
          int64_t const offset = row + (batch * kBatchLines + i) * Layout::kColumnsPerLine * int(sizeof(Element));
          packed.scale[group][i] = *reinterpret_cast<Element const*>(source.scales + offset);
          if constexpr (kHasZeros) packed.zero[group][i] = *reinterpret_cast<Element const*>(source.zeros + offset);
        }
      }
    }
  }

  /// accumulators += scale * (sum_k x * u - (bias + zero) * sum_k x) over the lane's chunks.
  CUTLASS_DEVICE static void accumulate(float (&accumulators)[kBatchLines][kTokens], Packed const& packed,
                                        Stage const& stage, float const* smem_x, LaneChunk const& lane_chunk) {
    float products[kGroups][kBatchLines][kTokens];
    float const* const segment = smem_x + lane_chunk.segment() * Stage::kSegmentPitch;
    constexpr int kQuads = Positions::kCount / 4;
    CUTLASS_PRAGMA_UNROLL
    for (int b = 0; b < 4; ++b) {
      CUTLASS_PRAGMA_UNROLL
      for (int quad = 0; quad < kQuads; ++quad) {
        float4 x[kTokens];
        CUTLASS_PRAGMA_UNROLL
        for (int token = 0; token < kTokens; ++token) {
          x[token] = *reinterpret_cast<float4 const*>(segment + token * Stage::kTokenFloats + b * Positions::kCount +
                                                      4 * quad);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatchLines; ++i) {
          uint32_t const word = reinterpret_cast<uint32_t const*>(&packed.words[i])[b];
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < 4; ++e) {
            int const position = 4 * quad + e;
            float const weight = Positions::weight(word, position);
            CUTLASS_PRAGMA_UNROLL
            for (int token = 0; token < kTokens; ++token) {
              float const value = reinterpret_cast<float const*>(&x[token])[e];
              // As ActivationStage::store places them: the first half of a word has even k, 8 k apart.
              constexpr int kHalf = Positions::kCount / 2;
              int const group = position % kHalf * kGroups / kHalf;
              bool const first = b == 0 && position == group * kHalf / kGroups;
              float& product = products[group][i][token];
              product = first ? value * weight : fmaf(value, weight, product);
            }
          }
        }
      }
    }

    constexpr float kUnscale = float(uint64_t(1) << (Positions::kUnitExponent - Stage::kScaleExponent));
    CUTLASS_PRAGMA_UNROLL
    for (int of_group = 0; of_group < kGroups * kTokens; ++of_group) {
      int const group = of_group / kTokens, token = of_group % kTokens;
      int const source_lane = lane_chunk.segment() * Stage::kLanesPerSegment + group * Stage::kLanesPerSum;
      float const sum_x = __shfl_sync(0xffffffff, stage.sum[token], source_lane);
      float unscale = kUnscale;
      if constexpr (Stage::kDynamicScale) unscale = __shfl_sync(0xffffffff, stage.unscale[token], source_lane);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatchLines; ++i) {
        float offset = float(Layout::kBias);
        if constexpr (kHasZeros) offset += float(packed.zero[group][i]);
        // bf16 has two factors. Their product may be outside of the range of fp32, and so may the sum times the second.
        float const product = Stage::kDynamicScale ? products[group][i][token] * kUnscale : products[group][i][token];
        float const value = kCorrects ? fmaf(product, unscale, -offset * sum_x) : product * unscale;
        accumulators[i][token] = kHasScales ? fmaf(float(packed.scale[group][i]), value, accumulators[i][token])
                                            : accumulators[i][token] + value;
      }
    }
  }

  CUTLASS_DEVICE static void run(GemmParams const& p, float* smem) {
    LaneChunk const lane_chunk;
    int const warp = threadIdx.x / 32;
    int const line0 = blockIdx.x * kLines;
    int const passes = (p.k_padded + Stage::kPassK - 1) / Stage::kPassK;
    int const passes_per_part = (passes + p.split_k - 1) / p.split_k;
    int const end = min(passes, int(blockIdx.y + 1) * passes_per_part);
    int pass = blockIdx.y * passes_per_part + warp;

    auto const* const x = static_cast<Element const*>(p.x);
    float* const smem_x = smem + warp * Stage::kFloats;

    float accumulators[kBatches][kBatchLines][kTokens] = {};
    Packed packed[kBatches];
    Stage stage;
    Source source(p, lane_chunk, line0, pass);
    if (pass < end) {
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatches; ++batch) fetch(packed[batch], source, p, batch);
      stage.fetch(x, p.ldx, p.m, p.k, pass * Stage::kPassK, lane_chunk.lane);
    }
    while (pass < end) {
      __syncwarp();
      stage.store(smem_x, lane_chunk.lane);
      __syncwarp();
      pass += kWarps;
      source.advance();
      if (pass < end) stage.fetch(x, p.ldx, p.m, p.k, pass * Stage::kPassK, lane_chunk.lane);
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatches; ++batch) {
        accumulate(accumulators[batch], packed[batch], stage, smem_x, lane_chunk);
        if (pass < end) fetch(packed[batch], source, p, batch);
      }
    }
    reduce_and_store(p, accumulators, smem, lane_chunk, warp, line0 * Layout::kColumnsPerLine);
  }

  CUTLASS_DEVICE static void reduce_and_store(GemmParams const& p,
                                              float (&accumulators)[kBatches][kBatchLines][kTokens], float* smem,
                                              LaneChunk const& lane_chunk, int warp, int n0) {
    __syncthreads();  // every warp is done with its x
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLines; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int token = 0; token < kTokens; ++token) {
        float sum = accumulators[i / kBatchLines][i % kBatchLines][token];
        CUTLASS_PRAGMA_UNROLL
        for (int mask = 1; mask < Layout::kChunksPerColumn; mask *= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
        sum += __shfl_xor_sync(0xffffffff, sum, 8);
        sum += __shfl_xor_sync(0xffffffff, sum, 16);
        if (lane_chunk.lane < kChunksPerLineBlock && lane_chunk.chunk == 0) {
          smem[(warp * kTokens + token) * kColumns + i * Layout::kColumnsPerLine + lane_chunk.column] = sum;
        }
      }
    }
    __syncthreads();
    int const token = threadIdx.x / kColumns;
    int const column = n0 + threadIdx.x % kColumns;
    if (token >= kTokens || token >= p.m) return;
    float sum = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kWarps; ++w) sum += smem[w * kTokens * kColumns + threadIdx.x];
    if (p.split_k > 1) {
      p.partials[(int64_t(blockIdx.y) * p.m + token) * p.n_padded + column] = sum;
    } else if (column < p.n) {
      auto const epilogue = ColumnEpilogue::load<Element>(p, column, !kHasScales);
      static_cast<Element*>(p.y)[token * p.ldy + column] = Element(epilogue.apply(sum, p.activation));
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) gemv_kernel(__grid_constant__ GemmParams const p) {
  extern __shared__ __align__(16) float smem_floats[];
#if __CUDA_ARCH__ >= 900
  if (p.split_k > 1) cudaTriggerProgrammaticLaunchCompletion();  // the reduction waits for all of this grid
#endif
  Kernel::run(p, smem_floats);
}

template <class Config>
cudaError_t launch_gemv(GemmParams const& p, cudaStream_t stream) {
  using Kernel = Gemv<Config>;
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = gemv_kernel<Kernel>;
  if (cudaError_t const error = allow_shared_memory(kernel, Kernel::kSmemBytes, devices_done); error != cudaSuccess) {
    return error;
  }
  dim3 const grid(p.n_padded / Kernel::kColumns, p.split_k);
  kernel<<<grid, Kernel::kThreads, Kernel::kSmemBytes, stream>>>(p);
  if (cudaError_t const error = cudaGetLastError(); error != cudaSuccess) return error;
  if (p.split_k == 1) return cudaSuccess;
  return launch_splitk_reduce<typename Config::Element>(p, !Kernel::kHasScales, stream);
}

}  // namespace weightonly
