// Up to 8 tokens of codes on tensor cores before Hopper: layout "interleaved", mma.m16n8k16, no shared memory but the
// expanded codebook.
//
// y^T = w^T x^T: columns of the weight are the 16 rows of A, tokens the 8 columns of B. The warps of a CTA take turns
// along K in passes of 128 k. Lane 4g + t of a warp has the codes of columns g and g + 8 of each 16, in the 32 k of its
// chunk t: one 16-byte load each. The k of an MMA may be in any order, as long as both operands have the same: half h
// of word w of a chunk goes with words w of vectors 2h and 2h + 1 of the 32 x of that chunk.
//
//   k of a chunk       0 .. 7 | 8 .. 15 | 16 .. 23 | 24 .. 31        vectors of x, 16 bytes each
//   word w of codes    2w, +1   2w, +1    2w, +1     2w, +1          bytes 0, 1, 2, 3, pairs of codes
//   MMA                a0 a1, b0  a2 a3, b1 | a0 a1, b0  a2 a3, b1       half 0 | half 1
//
// So weights go from memory to the tensor cores through one look-up and one multiplication by the scale for each two.
// As soon as the registers of 16 columns are used, they are filled with the next pass.
#pragma once

#include "cute/arch/util.hpp"
#include "cutlass_ext/arch/warp_mma.h"
#include "cutlass_ext/epilogue/column.h"
#include "cutlass_ext/fragment/scale_mode.h"
#include "cutlass_ext/layout/interleaved.h"
#include "kernels/gemm/launch.h"
#include "kernels/gemm/splitk_reduce.h"

namespace weightonly {

/// Config: Element, Weight, kScaleMode, kColumnTiles (16 columns each), kWarps, kLeastGroup (see kernels/generate.py).
template <class Config>
struct DecodeSm80 {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = InterleavedLayout<Weight>;
  using Codebook = CodebookPairs<false>;
  using Math = PackedMath<Element>;
  static_assert(WeightFormat<Weight>::kIsCodebook && Config::kScaleMode == ScaleMode::kGroup);
  static constexpr int kTiles = Config::kColumnTiles;
  static constexpr int kColumns = 16 * kTiles;
  static constexpr int kTokens = 8;
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLeastGroup = Config::kLeastGroup;  // 16: groups of 16 alone
  static constexpr int kGroups = Layout::kChunkK / kLeastGroup;  // of a chunk
  static constexpr int kPassK = 128;
  static constexpr int kPassBytes = kPassK / kLineBlockK * kLineBlockBytes;  // of a line
  static constexpr int kReduceBytes = kWarps * kTokens * kColumns * int(sizeof(float));
  static constexpr int kSmemBytes = Codebook::kBytes > kReduceBytes ? Codebook::kBytes : kReduceBytes;

  /// Codes of columns g and g + 8 of 16 columns, with their scales.
  struct Packed {
    uint4 words[2];
    uint16_t scale[kGroups][2];
  };

  /// The addresses that this lane loads from; from pass to pass they grow by a constant.
  struct Source {
    char const* first;  // the chunk of its first column in the part's first k_block
    char const* weight;  // in the present pass
    char const* scales;
    char const* x;  // the 32 k of the lane's token; null if there is no such token
    int64_t line_bytes;
    int64_t scales_row_bytes;
    int k;  // of its chunk in the present pass

    CUTLASS_DEVICE Source(GemmParams const& p, int column0, int lane, int pass) {
      int const g = lane / 4, t = lane % 4;
      line_bytes = int64_t(p.k_padded) / kLineBlockK * kLineBlockBytes;
      int const column = column0 + g;
      first = static_cast<char const*>(p.weight) + column / Layout::kColumnsPerLine * line_bytes +
              column % Layout::kColumnsPerLine * Layout::kChunksPerColumn * kChunkBytes;
      weight = first + int64_t(pass) * kPassBytes + t / Layout::kChunksPerColumn * kLineBlockBytes +
               t % Layout::kChunksPerColumn * kChunkBytes;
      scales = static_cast<char const*>(p.scales) + column * int(sizeof(Element));
      scales_row_bytes = p.ld_scales * int(sizeof(Element));
      k = pass * kPassK + t * Layout::kChunkK;
      x = g < p.m ? static_cast<char const*>(p.x) + (g * p.ldx + k) * int(sizeof(Element)) : nullptr;
    }

    CUTLASS_DEVICE void advance() {
      weight += kWarps * kPassBytes;
      k += kWarps * kPassK;
      if (x != nullptr) x += kWarps * kPassK * int(sizeof(Element));
    }

    /// A chunk may lie beyond K in the last pass. Its x is zero, so the lane may load any codes: those of k 0.
    CUTLASS_DEVICE void fetch(Packed& packed, GemmParams const& p, int tile) const {
      char const* const chunk = k < p.k_padded ? weight : first;
      int64_t row[kGroups];
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        row[group] = p.group.of<kLeastGroup>(k + group * kLeastGroup) * scales_row_bytes;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const column = 16 * tile + 8 * half;
        // Each code is read once, so it is the first that the caches may drop.
        packed.words[half] =
            __ldcs(reinterpret_cast<uint4 const*>(chunk + column / Layout::kColumnsPerLine * line_bytes));
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          packed.scale[group][half] =
              *reinterpret_cast<uint16_t const*>(scales + row[group] + column * int(sizeof(Element)));
        }
      }
    }

    CUTLASS_DEVICE void fetch_x(uint4 (&vectors)[4], GemmParams const& p) const {
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 4; ++v) {
        bool const inside = x != nullptr && k + 8 * v < p.k;
        vectors[v] = inside ? __ldg(reinterpret_cast<uint4 const*>(x) + v) : uint4{};
      }
    }
  };

  /// accumulators: column g, tokens 2t and 2t + 1, then column g + 8.
  CUTLASS_DEVICE static void multiply(float (&accumulators)[4], Packed const& packed, uint4 const (&x)[4],
                                      Codebook const& codebook) {
    uint32_t scale[kGroups][2];
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) scale[group][half] = broadcast(packed.scale[group][half]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs[2][4];
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        codebook.look_up_word(reinterpret_cast<uint32_t const*>(&packed.words[half])[w], pairs[half]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) pairs[half][i] = Math::mul(pairs[half][i], scale[i * kGroups / 4][half]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        uint32_t const a[4] = {pairs[0][2 * h], pairs[1][2 * h], pairs[0][2 * h + 1], pairs[1][2 * h + 1]};
        uint32_t const b[2] = {reinterpret_cast<uint32_t const*>(&x[2 * h])[w],
                               reinterpret_cast<uint32_t const*>(&x[2 * h + 1])[w]};
        MmaSm80::k16<Element>(accumulators, a, b);
      }
    }
  }

  CUTLASS_DEVICE static void run(GemmParams const& p, char* smem) {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const column0 = blockIdx.x * kColumns;
    int const passes = (p.k_padded + kPassK - 1) / kPassK;
    int const passes_per_part = (passes + p.split_k - 1) / p.split_k;
    int const end = min(passes, int(blockIdx.y + 1) * passes_per_part);
    int pass = blockIdx.y * passes_per_part + warp;

    uint32_t const code = Codebook::fetch_code(p.zeros);  // a codebook is passed as the zero points
    Source source(p, column0, lane, pass);
    Packed packed[kTiles];
    uint4 x[4];
    if (pass < end) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) source.fetch(packed[tile], p, tile);
      source.fetch_x(x, p);
    }
    Codebook::fill(smem, code, kThreads);
    __syncthreads();
    Codebook const codebook(cute::cast_smem_ptr_to_uint(smem), lane);

    float accumulators[kTiles][4] = {};
    while (pass < end) {
      pass += kWarps;
      source.advance();
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply(accumulators[tile], packed[tile], x, codebook);
        if (pass < end) source.fetch(packed[tile], p, tile);
      }
      if (pass < end) source.fetch_x(x, p);
    }
    reduce_and_store(p, accumulators, reinterpret_cast<float*>(smem), lane, warp, column0);
  }

  CUTLASS_DEVICE static void reduce_and_store(GemmParams const& p, float const (&accumulators)[kTiles][4],
                                              float* partials, int lane, int warp, int column0) {
    __syncthreads();  // every warp is done with the codebook
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const token = 2 * (lane % 4) + i % 2;
        int const column = 16 * tile + 8 * (i / 2) + lane / 4;
        partials[(warp * kTokens + token) * kColumns + column] = accumulators[tile][i];  // [warp][token][column]
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * kColumns; i += kThreads) {
      int const token = i / kColumns;
      int const column = column0 + i % kColumns;
      if (token >= p.m) break;
      float sum = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int w = 0; w < kWarps; ++w) sum += partials[w * kTokens * kColumns + i];
      if (p.split_k > 1) {
        p.partials[(int64_t(blockIdx.y) * p.m + token) * p.n_padded + column] = sum;
      } else if (column < p.n) {
        auto const epilogue = ColumnEpilogue::load<Element>(p, column, false);
        static_cast<Element*>(p.y)[token * p.ldy + column] = Element(epilogue.apply(sum, p.activation));
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) decode_sm80_kernel(__grid_constant__ GemmParams const p) {
  extern __shared__ __align__(128) char smem[];
#if __CUDA_ARCH__ >= 900
  if (p.split_k > 1) cudaTriggerProgrammaticLaunchCompletion();  // the reduction waits for all of this grid
#endif
  Kernel::run(p, smem);
}

template <class Config>
cudaError_t launch_decode_sm80(GemmParams const& p, cudaStream_t stream) {
  using Kernel = DecodeSm80<Config>;
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = decode_sm80_kernel<Kernel>;
  if (cudaError_t const error = allow_shared_memory(kernel, Kernel::kSmemBytes, devices_done); error != cudaSuccess) {
    return error;
  }
  dim3 const grid(p.n_padded / Kernel::kColumns, p.split_k);
  kernel<<<grid, Kernel::kThreads, Kernel::kSmemBytes, stream>>>(p);
  if (cudaError_t const error = cudaGetLastError(); error != cudaSuccess) return error;
  if (p.split_k == 1) return cudaSuccess;
  return launch_splitk_reduce<typename Config::Element>(p, false, stream);
}

}  // namespace weightonly
