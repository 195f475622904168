// Grouped GEMM on interleaved weights, for mixtures of experts (sm80 and up): the rows of x are sorted by expert, and
// each expert has a weight. Tiles are those of gemm_sm80 (sm80.cuh); which there are follows from the rows of each
// expert (cutlass_ext/grouped_schedule.h).
//
// CTAs are persistent: CTA i computes tiles i, i + gridDim.x, ... There are as many CTAs as the GPU holds at once, or as
// the most tiles that so many rows can make: the grid does not depend on the rows of each expert, so that a CUDA graph
// serves all of them. Nothing of a tile overlaps the next one of its CTA. That is left to the other CTAs of the SM.
#pragma once

#include "cutlass_ext/epilogue/clear_rows.h"
#include "cutlass_ext/grouped_params.h"
#include "cutlass_ext/grouped_schedule.h"
#include "kernels/gemm/sm80.cuh"

namespace weightonly {

/// Config: see GemmTile.
template <class Config>
struct GroupedTiles {
  using Tile = GemmTile<Config>;
  using Element = typename Config::Element;
  using Format = WeightFormat<typename Config::Weight>;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kMaxExperts = 512;  // GPUs with 99 KiB of shared memory have no room for more

  /// | stages and codebook of a tile, in their place y | schedule |
  static constexpr int smem_bytes(int experts) { return Tile::kSmemBytes + 2 * int(sizeof(int32_t)) * experts; }

  CUTLASS_DEVICE static void run(GroupedGemmParams const& p, char* smem) {
    auto* const ends = reinterpret_cast<int32_t*>(smem + Tile::kSmemBytes);
    GroupedSchedule const schedule{ends, ends + p.experts, p.experts};
    schedule.read_ends(p.offs, p.gemm.m, threadIdx.x, kThreads);
    __syncthreads();
    if (threadIdx.x < GroupedSchedule::kLanes) schedule.count(Config::kBlockM, threadIdx.x);
    __syncthreads();
    clear_rows<Element>(p.gemm, schedule.row_ends[p.experts - 1] + blockIdx.x, gridDim.x, threadIdx.x, kThreads);

    int const tiles_n = (p.gemm.n + Config::kBlockN - 1) / Config::kBlockN;
    // The number of tiles is read again for each: it would keep a register.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int number = blockIdx.x; number < schedule.m_tiles() * tiles_n; number += gridDim.x) {
      GroupedTile const tile = schedule.tile(number, number / tiles_n, tiles_n, Config::kBlockM);
      Tile::compute(of_expert(p.gemm, tile), smem, tile.row_begin, tile.n_tile * Config::kBlockN, 0,
                    p.gemm.k_padded / kLineBlockK, 0);
      __syncthreads();  // y has left shared memory
    }
  }

 private:
  /// The product that a tile is of: that of its expert, whose last row is the tile's.
  CUTLASS_DEVICE static GemmParams of_expert(GemmParams const& all, GroupedTile const& tile) {
    GemmParams p = all;
    int64_t const scales = int64_t(tile.expert) * (all.group.last + 1) * all.ld_scales;
    int64_t const weights = int64_t(tile.expert) * all.k_padded * all.n_padded;
    p.weight = static_cast<char const*>(all.weight) + weights * Format::kBits / 8;
    p.scales = static_cast<Element const*>(all.scales) + scales;
    if (Config::kScaleMode == ScaleMode::kGroupZeros) p.zeros = static_cast<Element const*>(all.zeros) + scales;
    if (all.bias != nullptr) p.bias = static_cast<Element const*>(all.bias) + int64_t(tile.expert) * all.n;
    p.m = tile.row_end;
    p.split_k = 1;
    p.activation = int(Activation::kIdentity);
    return p;
  }
};

template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::Tile::kMinBlocks)
    grouped_sm80_kernel(__grid_constant__ GroupedGemmParams const p) {
  extern __shared__ __align__(128) char smem[];
  Tiles::run(p, smem);
}

/// Launches y = x w + bias as GroupedGemmParams has it. Its `clusters` are SMs, which run several CTAs each.
template <class Config>
cudaError_t launch_grouped_sm80(GroupedGemmParams const& p, cudaStream_t stream) {
  using Tiles = GroupedTiles<Config>;
  if (p.experts > Tiles::kMaxExperts) return cudaErrorInvalidValue;
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = grouped_sm80_kernel<Tiles>;
  constexpr int kMostSmemBytes = Tiles::smem_bytes(Tiles::kMaxExperts);
  if (cudaError_t const error = allow_shared_memory(kernel, kMostSmemBytes, devices_done); error != cudaSuccess) {
    return error;
  }
  int const smem_bytes = Tiles::smem_bytes(p.experts);
  int ctas_on_sm = 0;
  cudaError_t const error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_on_sm, kernel, Tiles::kThreads, smem_bytes);
  if (error != cudaSuccess) return error;
  int64_t const tiles =
      GroupedSchedule::most_m_tiles(p.gemm.m, p.experts, Config::kBlockM) * divide_up(p.gemm.n, Config::kBlockN);
  dim3 const grid(int(min(tiles, int64_t(p.gemm.clusters) * ctas_on_sm)));
  kernel<<<grid, Tiles::kThreads, smem_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace weightonly
