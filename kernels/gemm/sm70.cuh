// Volta GEMM on row-major weights: dequantized right after the global load, so that shared memory holds fp16 on both
// sides and the inner loop is a plain fp16 one on mma.m8n8k4. fp16 only.
//
// Row-major layout: row k holds n_padded weights, biased, and permuted within each 32-bit word (8 or 4 columns). The
// source also compiles for compute_75, whose PTX any newer GPU runs: the tests use that.
//
// m8n8k4 is four independent 8x8x4 products, one per quad pair (lanes 4q..4q+3 and 16 + 4q..). Laid out 2 x 2 they
// cover 16 x 16 of the warp's tile:
//
//            n 0-7    n 8-15
//   m 0-7     QP 0     QP 1
//   m 8-15    QP 2     QP 3
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/arch/mma_sm70.h"
#include "cutlass_ext/epilogue/column.h"
#include "cutlass_ext/layout/interleaved.h"
#include "cutlass_ext/convert/numeric_conversion.h"
#include "cutlass_ext/fragment/scale_mode.h"
#include "kernels/gemm/launch.h"
#include "kernels/gemm/splitk_reduce.h"

namespace weightonly {

/// Config: Element (half_t), Weight, kScaleMode, kBlockM, kBlockN, kWarpM, kWarpN.
template <class Config>
struct GemmSm70 {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Math = PackedMath<Element>;
  using Convert = detail::ConvertWord<Element, Weight>;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kBlockK = 32;
  static constexpr int kWarpsN = kBlockN / Config::kWarpN;
  static constexpr int kThreads = 32 * (kBlockM / Config::kWarpM) * kWarpsN;
  static constexpr int kTilesM = Config::kWarpM / 16;
  static constexpr int kTilesN = Config::kWarpN / 16;
  static constexpr bool kHasScales = Config::kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = Config::kScaleMode == ScaleMode::kGroupZeros;

  // Shared memory, in elements. Pitches are odd multiples of 8 bytes: the four rows of a quad lie in different banks.
  static constexpr int kPitchX = kBlockK + 4;
  static constexpr int kPitchW = kBlockN + 4;
  static constexpr int kSmemX = kBlockM * kPitchX;
  static constexpr int kSmemBytes = (kSmemX + kBlockK * kPitchW) * int(sizeof(Element));

  static constexpr int kWordN = Convert::kElements;                           // columns per 32-bit word
  static constexpr int kWords = kBlockK * kBlockN / kWordN / kThreads;        // words per thread and k block
  static constexpr int kVectorsX = (kBlockM * kBlockK / 8 + kThreads - 1) / kThreads;
  static_assert(kBlockK * kBlockN % (kWordN * kThreads) == 0);
  static constexpr int kWordsPerRow = kBlockN / kWordN;

  struct Fetched {
    uint4 x[kVectorsX];
    uint32_t packed[kWords];
    uint32_t scale[kWords][kWordN / 2];
    uint32_t zero[kWords][kWordN / 2];
  };

  CUTLASS_DEVICE static void fetch_row(uint32_t (&pairs)[kWordN / 2], void const* rows, int64_t row_begin, int column,
                                       int n) {
    auto const* const row = static_cast<uint16_t const*>(rows) + row_begin;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWordN / 2; ++i) {
      uint32_t const low = column + 2 * i < n ? row[column + 2 * i] : 0;
      uint32_t const high = column + 2 * i + 1 < n ? row[column + 2 * i + 1] : 0;
      pairs[i] = low | high << 16;
    }
  }

  CUTLASS_DEVICE static void fetch(Fetched& f, GemmParams const& p, int m0, int n0, int k0) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorsX; ++i) {
      int const vector = threadIdx.x + i * kThreads;
      int const row = m0 + vector / (kBlockK / 8);
      int const k = k0 + vector % (kBlockK / 8) * 8;
      bool const inside = vector < kBlockM * kBlockK / 8 && row < p.m && k < p.k;
      f.x[i] = inside ? *reinterpret_cast<uint4 const*>(static_cast<Element const*>(p.x) + row * p.ldx + k) : uint4{};
    }
    int64_t const group_row = p.group.of(k0) * p.ld_scales;  // a block of 32 lies in one group
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      int const word = threadIdx.x + i * kThreads;
      int const k = k0 + word / kWordsPerRow;
      int const column = n0 + word % kWordsPerRow * kWordN;
      int64_t const index = (int64_t(k) * p.n_padded + column) / kWordN;
      f.packed[i] = column < p.n_padded ? static_cast<uint32_t const*>(p.weight)[index] : 0;
      if constexpr (kHasScales) fetch_row(f.scale[i], p.scales, group_row, column, p.n);
      if constexpr (kHasZeros) fetch_row(f.zero[i], p.zeros, group_row, column, p.n);
    }
  }

  CUTLASS_DEVICE static void store(Fetched const& f, Element* smem_x, Element* smem_w) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorsX; ++i) {
      int const vector = threadIdx.x + i * kThreads;
      if (vector >= kBlockM * kBlockK / 8) continue;
      auto* const target =
          reinterpret_cast<uint2*>(smem_x + vector / (kBlockK / 8) * kPitchX + vector % (kBlockK / 8) * 8);
      target[0] = make_uint2(f.x[i].x, f.x[i].y);
      target[1] = make_uint2(f.x[i].z, f.x[i].w);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      int const word = threadIdx.x + i * kThreads;
      uint32_t pairs[kWordN / 2];
      Convert::apply(f.packed[i], pairs);
      auto* const target =
          reinterpret_cast<uint32_t*>(smem_w + word / kWordsPerRow * kPitchW + word % kWordsPerRow * kWordN);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kWordN / 2; ++j) {
        if constexpr (kHasZeros) pairs[j] = Math::sub(pairs[j], f.zero[i][j]);
        if constexpr (kHasScales) pairs[j] = Math::mul(pairs[j], f.scale[i][j]);
        target[j] = pairs[j];
      }
    }
  }

  CUTLASS_DEVICE static void multiply(float (&accumulators)[kTilesM][kTilesN][8], Element const* smem_x,
                                      Element const* smem_w, int warp_m, int warp_n) {
    using Mma = cutlass::arch::Mma<cutlass::gemm::GemmShape<8, 8, 4>, 8, cutlass::half_t, cutlass::layout::RowMajor,
                                   cutlass::half_t, cutlass::layout::RowMajor, float, cutlass::layout::RowMajor,
                                   cutlass::arch::OpMultiplyAdd>;
    int const lane = threadIdx.x % 32;
    int const quad_pair = lane % 16 / 4;
    int const upper = lane / 16 * 4;                                        // the second quad of the pair
    int const row = warp_m + quad_pair / 2 * 8 + lane % 4 + upper;          // of A, this lane
    int const column = warp_n + quad_pair % 2 * 8 + upper;                  // of B, first of this lane's four
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kBlockK; k += 4) {
      typename Mma::FragmentA a[kTilesM];
      typename Mma::FragmentB b[kTilesN];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        reinterpret_cast<uint2&>(a[i]) = *reinterpret_cast<uint2 const*>(smem_x + (row + 16 * i) * kPitchX + k);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTilesN; ++j) {
        reinterpret_cast<uint2&>(b[j]) =
            *reinterpret_cast<uint2 const*>(smem_w + (k + lane % 4) * kPitchW + column + 16 * j);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kTilesN; ++j) {
          auto& c = reinterpret_cast<typename Mma::FragmentC&>(accumulators[i][j]);
          Mma{}(c, a[i], b[j], c);
        }
      }
    }
  }

  /// Row and column of a lane's accumulator e, of 8, in the quad pair's 8 x 8 tile.
  CUTLASS_DEVICE static int accumulator_row(int lane, int e) { return (lane & 1) + (e & 2) + lane / 16 * 4; }
  CUTLASS_DEVICE static int accumulator_column(int lane, int e) { return (e & 4) + (lane & 2) + (e & 1); }

  CUTLASS_DEVICE static void run(GemmParams const& p, Element* smem) {
    int const tiles_m = (p.m + kBlockM - 1) / kBlockM;
    int const m0 = blockIdx.x % tiles_m * kBlockM;
    int const n0 = blockIdx.x / tiles_m * kBlockN;
    int const warp = threadIdx.x / 32;
    int const warp_m = warp / kWarpsN * Config::kWarpM;
    int const warp_n = warp % kWarpsN * Config::kWarpN;
    int const k_blocks = p.k_padded / kBlockK;
    int const blocks_per_part = (k_blocks + p.split_k - 1) / p.split_k;
    int const first = blockIdx.y * blocks_per_part;
    int const end = min(k_blocks, first + blocks_per_part);
    Element* const smem_w = smem + kSmemX;

    float accumulators[kTilesM][kTilesN][8] = {};
    Fetched fetched;
    if (first < end) fetch(fetched, p, m0, n0, first * kBlockK);
    for (int block = first; block < end; ++block) {
      __syncthreads();
      store(fetched, smem, smem_w);
      __syncthreads();
      if (block + 1 < end) fetch(fetched, p, m0, n0, (block + 1) * kBlockK);
      multiply(accumulators, smem, smem_w, warp_m, warp_n);
    }

    int const lane = threadIdx.x % 32;
    int const quad_pair = lane % 16 / 4;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTilesN; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 8; ++e) {
        int const column = n0 + warp_n + 16 * j + quad_pair % 2 * 8 + accumulator_column(lane, e);
        auto const epilogue = ColumnEpilogue::load<Element>(p, column, !kHasScales);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTilesM; ++i) {
          int const row = m0 + warp_m + 16 * i + quad_pair / 2 * 8 + accumulator_row(lane, e);
          if (row >= p.m) continue;
          if (p.split_k > 1) {
            if (column >= p.n_padded) continue;
            p.partials[(int64_t(blockIdx.y) * p.m + row) * p.n_padded + column] = accumulators[i][j][e];
          } else if (column < p.n) {
            static_cast<Element*>(p.y)[row * p.ldy + column] =
                Element(epilogue.apply(accumulators[i][j][e], p.activation));
          }
        }
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) gemm_sm70_kernel(__grid_constant__ GemmParams const p) {
  __shared__ __align__(16) typename Kernel::Element smem[Kernel::kSmemBytes / sizeof(typename Kernel::Element)];
  Kernel::run(p, smem);
}

template <class Config>
cudaError_t launch_gemm_sm70(GemmParams const& p, cudaStream_t stream) {
  using Kernel = GemmSm70<Config>;
  dim3 const grid(divide_up(p.m, Kernel::kBlockM) * divide_up(p.n, Kernel::kBlockN), p.split_k);
  gemm_sm70_kernel<Kernel><<<grid, Kernel::kThreads, 0, stream>>>(p);
  if (cudaError_t const error = cudaGetLastError(); error != cudaSuccess) return error;
  if (p.split_k == 1) return cudaSuccess;
  return launch_splitk_reduce<typename Config::Element>(p, !Kernel::kHasScales, stream);
}

}  // namespace weightonly
