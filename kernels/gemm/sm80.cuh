// Ampere-class GEMM on interleaved weights: cp.async multistage mainloop, mma.m16n8k16, fp32 accumulators (sm80 and
// up).
//
// Grid: one CTA per output tile and part of K.
//
//            n ->                       Tile swizzle: blockIdx.x runs down kSwizzleM tiles of M, then goes to the next
//        +----+----+----+               tile of N. CTAs that run together share the x rows of this group of tiles and
//     m  | 0  | 4  | 8  | group of 4    each line of weights, so after the first read both come from the L2 cache.
//     |  | 1  | 5  | .. |               blockIdx.y is the part of K (split-K).
//     v  | 2  | 6  |    |
//        | 3  | 7  |    |
#pragma once

#include "cutlass_ext/mainloop/sm80_multistage.h"
#include "cutlass_ext/epilogue/tile_store.h"
#include "kernels/gemm/launch.h"
#include "kernels/gemm/splitk_reduce.h"

namespace weightonly {

/// Config: Element, Weight, kScaleMode, kBlockM, kBlockN, kWarpM, kWarpN, kStages, and of gemm_sm80 kLeastGroup
/// (see kernels/generate.py).
template <class Config, template <class> class Mainloop = MmaMultistage>
struct GemmTile {
  using Mma = Mainloop<Config>;
  using Element = typename Config::Element;
  using Epilogue = TileEpilogue<Element, Config::kScaleMode, Config::kBlockM, Config::kBlockN, Mma::kTilesM,
                                Mma::kTilesN, Mma::kThreads>;
  static constexpr int kThreads = Mma::kThreads;
  static constexpr int kSmemBytes = Mma::kSmemBytes > Epilogue::kSmemBytes ? Mma::kSmemBytes : Epilogue::kSmemBytes;
  static constexpr int kSwizzleM = 8;
  // 65536 registers per SM: two CTAs of 128 threads may use 255 each.
  static constexpr int kMinBlocks = kThreads <= 128 ? 2 : 1;

  CUTLASS_DEVICE static void run(GemmParams const& p, char* smem) {
    int const tiles_m = (p.m + Config::kBlockM - 1) / Config::kBlockM;
    int const tiles_n = (p.n + Config::kBlockN - 1) / Config::kBlockN;
    int const group = blockIdx.x / (kSwizzleM * tiles_n);
    int const group_m = min(kSwizzleM, tiles_m - group * kSwizzleM);
    int const in_group = blockIdx.x - group * kSwizzleM * tiles_n;
    int const m0 = (group * kSwizzleM + in_group % group_m) * Config::kBlockM;
    int const n0 = in_group / group_m * Config::kBlockN;

    int const k_blocks = p.k_padded / kLineBlockK;
    int const blocks_per_part = (k_blocks + p.split_k - 1) / p.split_k;
    int const first_block = blockIdx.y * blocks_per_part;
    int const blocks = max(0, min(blocks_per_part, k_blocks - first_block));

    compute(p, smem, m0, n0, first_block, blocks, blockIdx.y);
  }

  /// Computes the output tile of row m0 and column n0 from k_blocks first_block .. first_block + blocks - 1, which are
  /// part `part` of K. Rows from p.m on are neither read nor stored.
  CUTLASS_DEVICE static void compute(GemmParams const& p, char* smem, int m0, int n0, int first_block, int blocks,
                                     int part) {
    int const warp = threadIdx.x / 32;
    int const warp_m = warp / Mma::kWarpsN * Config::kWarpM;
    int const warp_n = warp % Mma::kWarpsN * Config::kWarpN;

    using Layout = typename Mma::Layout;
    int64_t const line_bytes = int64_t(p.k_padded) / kLineBlockK * kLineBlockBytes;
    typename Mma::CopyX const copy_x(p.x, p.ldx * int(sizeof(Element)), m0, p.m, p.k * int(sizeof(Element)));
    typename Mma::CopyWeight const copy_weight(p.weight, line_bytes, n0 / Layout::kColumnsPerLine,
                                               p.n_padded / Layout::kColumnsPerLine, int(line_bytes));
    typename Mma::Scales const scales(p, n0);

    float accumulators[Mma::kTilesM][Mma::kTilesN][4] = {};
    // A codebook is passed as the zero points.
    Mma::run(accumulators, copy_x, copy_weight, scales, p.zeros, smem, first_block, blocks, warp_m, warp_n);

    if (p.split_k > 1) {
#if __CUDA_ARCH__ >= 900
      cudaTriggerProgrammaticLaunchCompletion();  // the reduction may be launched; it waits for all of this grid
#endif
      Epilogue::store_partials(p, accumulators, part, m0 + warp_m, n0 + warp_n);
    } else {
      Epilogue::store(p, accumulators, smem, m0, n0, warp_m, warp_n);
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    gemm_tile_kernel(__grid_constant__ GemmParams const p) {
  extern __shared__ __align__(128) char smem[];
  Tile::run(p, smem);
}

template <class Config, class Tile>
cudaError_t launch_gemm_tile(GemmParams const& p, cudaStream_t stream) {
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = gemm_tile_kernel<Tile>;
  if (cudaError_t const error = allow_shared_memory(kernel, Tile::kSmemBytes, devices_done); error != cudaSuccess) {
    return error;
  }
  dim3 const grid(divide_up(p.m, Config::kBlockM) * divide_up(p.n, Config::kBlockN), p.split_k);
  kernel<<<grid, Tile::kThreads, Tile::kSmemBytes, stream>>>(p);
  if (cudaError_t const error = cudaGetLastError(); error != cudaSuccess) return error;
  if (p.split_k == 1) return cudaSuccess;
  return launch_splitk_reduce<typename Config::Element>(p, Config::kScaleMode == ScaleMode::kChannel, stream);
}

template <class Config>
cudaError_t launch_gemm_sm80(GemmParams const& p, cudaStream_t stream) {
  return launch_gemm_tile<Config, GemmTile<Config>>(p, stream);
}

}  // namespace weightonly
