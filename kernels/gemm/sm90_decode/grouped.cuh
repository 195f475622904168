// Grouped decode on Hopper, for mixtures of experts: the rows of x are sorted by expert, and each expert has few of them.
//
// The parts are those of decode_sm90 (kernel.cuh): warps with pipelines of their own, weights that the tensor cores
// multiply without a conversion, partials that are reduced one tile later. grouped_work.h says which tiles are a CTA's.
#pragma once

#include "kernels/gemm/launch_cluster.h"
#include "kernels/gemm/sm90_decode/grouped_epilogue.h"
#include "kernels/gemm/sm90_decode/grouped_load.h"

namespace weightonly {
namespace sm90_decode {

template <class Loader_>
struct GroupedKernel {
  using Loader = Loader_;
  using Traits = typename Loader::Traits;
  using Pipeline = typename Loader::Pipeline;
  using Codebook = typename Traits::Codebook;
  using Mma = typename Traits::Mma;
  using Epilogue = GroupedEpilogue<Traits>;
  using Element = typename Traits::Element;
  static constexpr int kGroups = Loader::kGroups;
  using KTile = typename Mma::template KTile<kGroups>;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kStageBytes = Traits::template kStageBytes<kGroups>;
  static constexpr int kSmemBytes = Traits::template kSmemBytes<kGroups>;

  CUTLASS_DEVICE static void run(GroupedParams const& p, char* smem_base) {
    typename Traits::Smem const smem{smem_base};
    int const lane = threadIdx.x % 32;
    if (threadIdx.x == 0) cute::initialize_barrier(smem.warps_barrier(), kThreads);
    // Else the kernel in front writes the experts of rows, and nothing can be loaded before it has ended.
    if (!p.is_in_layer) {
      cudaGridDependencySynchronize();
      cudaTriggerProgrammaticLaunchCompletion();
    }
    uint32_t codebook_value = 0;
    if constexpr (Traits::kHasCodebook) codebook_value = Codebook::fetch_code(p.gemm.zeros);
    int first, n_tile;  // of this CTA's first tile: its index along M, and along N
    p.n_tiles(first, n_tile, blockIdx.x);
    int const row_tiles = RowTiles<kThreads>::find(p, smem.rows(), [&](int index, RowTile const& tile) {
      if (index == first && tile.rows > 0) Loader::prefetch(p, tile, n_tile);
    });
    __syncthreads();
    RowTile const* const list = smem.rows().tiles;
    uint32_t const first_stage =
        cute::cast_smem_ptr_to_uint(smem.pipeline()) + threadIdx.x / 32 * Traits::kStages * kStageBytes;
    uint32_t const last_stage = first_stage + (Traits::kStages - 1) * kStageBytes;
    Loader loader(p, smem.rows(), row_tiles);
    loader.load_first(first_stage, last_stage, kStageBytes);
    if (p.offs != nullptr && !p.is_in_layer) clear_rest(p, smem.rows().rows);
    if constexpr (Traits::kHasCodebook) {
      Codebook::fill(smem.codebook(), codebook_value, kThreads);
      __syncthreads();
    }
    Codebook const codebook(cute::cast_smem_ptr_to_uint(smem.codebook()), lane);

    Epilogue epilogue{p};
    auto const partials_of = [&](int step) { return smem.template warp_partials<kGroups>(step % 2); };
    uint32_t stage = first_stage;
    int warp = threadIdx.x / 32;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; GroupedTile::exists(p, row_tiles, step); ++step) {
      GroupedTile const tile(p, list, step);
      typename Pipeline::ScaleOffsets const scales(tile.n_tile * Traits::kRowTiles, lane);
      // Lanes of rows that the tile does not have read its last one: nobody stores their products.
      uint32_t const x_row = Pipeline::kStageBytes + min(lane % 8, tile.rows - 1) * Traits::kXRowBytes + lane / 8 * 16;
      typename Mma::Accumulator accumulators[Traits::kRowTiles], sum_x;
      Mma::clear(accumulators);
      Mma::clear(sum_x);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int left = Loader::k_tiles_of(p, warp); left > 0; --left) {
        wait_for_copies<Traits::kStages - 1>();
        __syncwarp();  // other lanes loaded x and the scales
        KTile k_tile;
        k_tile.load(stage, scales, lane);
        auto const refill = [&] {
          __syncwarp();  // all lanes have read the stage
          loader.load_next(stage);
        };
        auto const load_x = Mma::loads_x(stage + x_row);
        if constexpr (KTile::kFreesStage) {
          typename Mma::Activations x[Pipeline::kTileBlocks];
          CUTLASS_PRAGMA_UNROLL
          for (int block = 0; block < Pipeline::kTileBlocks; ++block) x[block] = load_x(block);
          refill();
          auto const loaded = [&](int block) { return x[block]; };
          Mma::template accumulate<kGroups>(accumulators, sum_x, k_tile, codebook, loaded, stage);
        } else {
          Mma::template accumulate<kGroups>(accumulators, sum_x, k_tile, codebook, load_x, stage);
          refill();
        }
        stage = stage == last_stage ? first_stage : stage + kStageBytes;
      }
      warp = Loader::next_warp(p, warp);
      if constexpr (!Traits::kHasScales) Mma::correct_channel(accumulators, sum_x);
      if (step > 0) {
        // The barrier also frees the buffer of two tiles ago: each thread read it before it stored the partials of the
        // last tile.
        cute::wait_barrier(smem.warps_barrier(), (step - 1) % 2);
        asm volatile("" ::: "memory");  // the partials are read after the wait
        epilogue.reduce_and_store(GroupedTile(p, list, step - 1), step - 1, partials_of(step - 1));
      }
      float* const partials = partials_of(step) + threadIdx.x / 32 * kRowTileM * Traits::kTileN;
      store_accumulators<Traits>(accumulators, tile.rows, lane, partials);
      if (GroupedTile::exists(p, row_tiles, step + 1)) {
        cute::arrive_barrier(smem.warps_barrier());
      } else {
        __syncthreads();
        epilogue.reduce_and_store(tile, step, partials_of(step));
      }
    }
  }

 private:
  /// Sets y to zeros in rows of no expert, which are those from `first` on.
  CUTLASS_DEVICE static void clear_rest(GroupedParams const& p, int first) {
    for (int row = first + int(blockIdx.x); row < p.gemm.m; row += int(gridDim.x)) {
      Element* const y = static_cast<Element*>(p.gemm.y) + row * p.gemm.ldy;
      for (int column = threadIdx.x; column < p.gemm.n; column += kThreads) y[column] = Element(0.f);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::Traits::kCtas)
    grouped_decode_kernel(__grid_constant__ GroupedParams const p) {
  extern __shared__ __align__(128) char smem_bytes[];
  Kernel::run(p, smem_bytes);
}

template <class Traits>
GroupedParams make_params(GroupedGemmParams const& call) {
  using Layout = typename Traits::Layout;
  GemmParams const& gemm = call.gemm;
  GroupedParams p;
  static_cast<GroupedGemmParams&>(p) = call;
  p.k_tiles = divide_up(gemm.k_padded, Traits::kTileK);
  p.n_tiles = cutlass::FastDivmod((call.is_gated ? gemm.n / 2 : gemm.n_padded) / Traits::kTileN);
  p.expert_weight_bytes = int64_t(gemm.n_padded / Layout::kPanelColumns) * Layout::panel_bytes(gemm.k_padded);
  p.expert_scales = int64_t(divide_up(gemm.k, gemm.group_size)) * gemm.ld_scales;
  p.pdl_mode = gemm.pdl_mode;
  return p;
}

template <class Traits, int kGroups>
cudaError_t launch_grouped_kernel(GroupedParams const& p, cudaStream_t stream) {
  if constexpr (kGroups > Traits::kMaxGroups) {
    return cudaErrorInvalidValue;
  } else {
    using Kernel = GroupedKernel<GroupedLoader<Traits, kGroups>>;
    static std::atomic<uint64_t> devices_done{0};
    int64_t const tiles = most_row_tiles(p.gemm.m, p.experts) * p.n_tiles.divisor;
    return launch_clusters(grouped_decode_kernel<Kernel>, devices_done, p,
                           dim3(int(min(tiles, int64_t(p.gemm.clusters) * Traits::kCtas))), dim3(1), Kernel::kThreads,
                           Kernel::kSmemBytes, stream);
  }
}

}  // namespace sm90_decode

/// Launches a grouped product as GroupedGemmParams has it. Config: see sm90_decode::Traits.
template <class Config>
cudaError_t launch_grouped_decode_sm90(GroupedGemmParams const& call, cudaStream_t stream) {
  using Traits = sm90_decode::GroupedTraits<Config>;
  if ((Traits::kHasZeros || Traits::kHasCodebook) && call.gemm.zeros == nullptr) return cudaErrorInvalidValue;
  auto const p = sm90_decode::make_params<Traits>(call);
  int const group_size = call.gemm.group_size;
  if constexpr (Traits::kHasGroupsOf16) {
    return sm90_decode::launch_grouped_kernel<Traits, Traits::kMaxGroups>(p, stream);
  }
  if (!Traits::kHasScales || group_size % Traits::kTileK == 0) {
    return sm90_decode::launch_grouped_kernel<Traits, 1>(p, stream);
  }
  constexpr int kHalf = Traits::kTileK / 64;  // groups of 64 in a k_tile
  return group_size % 64 == 0 ? sm90_decode::launch_grouped_kernel<Traits, kHalf>(p, stream)
                              : sm90_decode::launch_grouped_kernel<Traits, 2 * kHalf>(p, stream);
}

}  // namespace weightonly
