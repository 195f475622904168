// Decode on Hopper: 1 to 8 tokens, weights in the layout "tiled" as the A operand of mma.sync m16n8k16.
//
// The kernel is bound by memory, so everything serves the stream of weights. Each SM gets the same number of them
// (work.h), they are loaded kStages k_tiles ahead (load.h, cutlass_ext/mainloop/weight_pipeline.h), and the tensor
// cores multiply them without a conversion (cutlass_ext/fragment/weight_format.h). Partials are reduced one n_tile
// later, while the loads go on (epilogue.h).
#pragma once

#include "kernels/gemm/sm90_decode/epilogue.h"
#include "kernels/gemm/sm90_decode/load.h"

namespace weightonly::sm90_decode {

template <class Loader, class Mma, class Epilogue, class WorkTile>
struct Kernel {
  using Traits = typename Loader::Traits;
  using Pipeline = typename Loader::Pipeline;
  using Codebook = typename Traits::Codebook;
  static constexpr int kGroups = Loader::kGroups;
  static constexpr bool kIsCluster = Loader::kIsCluster;
  using KTile = typename Mma::template KTile<kGroups>;
  static constexpr int kThreads = Traits::kThreads;

  CUTLASS_DEVICE static void run(Params const& p, char* smem_base) {
    Loader::prefetch(p);
    Smem<Traits> const smem{smem_base};
    WorkTile work(p);
    uint32_t const smem_x = cute::cast_smem_ptr_to_uint(smem.x(kGroups));
    uint32_t const first_stage =
        cute::cast_smem_ptr_to_uint(smem.pipeline()) + work.warp * Traits::kStages * Pipeline::kStageBytes;
    uint32_t const last_stage = first_stage + (Traits::kStages - 1) * Pipeline::kStageBytes;
    Loader loader(p, work, smem_x);
    uint32_t const codebook_value = loader.load_first(first_stage, last_stage);
    cudaTriggerProgrammaticLaunchCompletion();
    if constexpr (Traits::kHasCodebook) Codebook::fill(smem.codebook(), codebook_value, kThreads);
    Codebook const codebook(cute::cast_smem_ptr_to_uint(smem.codebook()), work.lane);
    if (threadIdx.x == 0) {
      cute::initialize_barrier(smem.warps_barrier(), kThreads);
      if constexpr (kIsCluster) {
        cute::initialize_barrier(smem.cluster_barrier(), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
    }
    __syncthreads();
    if constexpr (kIsCluster) {
      cute::cluster_arrive_relaxed();  // the others may write to this CTA once all have come this far
      work.find_owner_and_senders(p);
      if (threadIdx.x == 0) {
        cute::set_barrier_transaction_bytes(smem.cluster_barrier(), work.senders * Traits::partial_bytes(p.m));
      }
    }
    if constexpr (!Traits::kHasScales) {
      Loader::prefetch_scales(p, work.first_n_tile + int(threadIdx.x), work.last_n_tile);
    }
    // Lanes of tokens from M on read the row of token M - 1: nobody stores their products.
    uint32_t x_row = smem_x + min(work.lane % 8, p.m - 1) * p.x_row_bytes + work.lane / 8 * 16;
    asm volatile("" : "+r"(x_row));  // else the compiler computes it again for every k_tile

    uint32_t stage = first_stage;

    int iteration = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n_tile = work.first_n_tile; n_tile <= work.last_n_tile; ++n_tile, ++iteration) {
      typename Pipeline::ScaleOffsets const scales(Traits::first_row_tile(p, n_tile), work.lane);
      uint32_t x = x_row + (work.warp_first_k_tile(n_tile) + work.x_base(p, n_tile)) * Traits::kTileXBytes;
      typename Mma::Accumulator accumulators[Traits::kRowTiles], sum_x;
      Mma::clear(accumulators);
      Mma::clear(sum_x);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int left = work.warp_k_tiles(p, n_tile); left > 0; --left) {
        wait_for_copies<Traits::kStages - 1>();
        __syncwarp();  // other lanes loaded the scales and x
        KTile k_tile;
        k_tile.load(stage, scales, work.lane);
        auto const refill = [&] {
          __syncwarp();  // all lanes have read the stage
          loader.load_next(stage);
        };
        if constexpr (KTile::kFreesStage) refill();
        Mma::template accumulate<kGroups>(accumulators, sum_x, k_tile, codebook, Mma::loads_x(x), stage);
        if constexpr (!KTile::kFreesStage) refill();
        stage = stage == last_stage ? first_stage : stage + Pipeline::kStageBytes;
        x += Traits::kWarpsK * Traits::kTileXBytes;
      }
      if constexpr (!Traits::kHasScales) Mma::correct_channel(accumulators, sum_x);
      if (iteration > 0) {
        // The barrier also frees the buffer of two n_tiles ago: each thread read it before it stored the partials of
        // the last n_tile.
        cute::wait_barrier(smem.warps_barrier(), (iteration - 1) % 2);
        asm volatile("" ::: "memory");  // the partials are read after the wait
        if (!(work.sends() && iteration == 1)) Epilogue(p, work, smem, iteration - 1).reduce_and_store(smem);
      }
      float* const partials = smem.warp_partials(p, kGroups, iteration % 2);
      store_accumulators<Traits>(accumulators, p.m, work.lane, partials + work.warp * p.m * Traits::kTileN);
      if (kIsCluster && iteration == 0) {
        cute::cluster_wait();
        if (work.sends()) {  // at once: another CTA waits for these partials
          __syncthreads();
          Epilogue(p, work, smem, 0).reduce_and_send(work, smem);
        }
      }
      if (n_tile < work.last_n_tile) cute::arrive_barrier(smem.warps_barrier());
    }
    if (kIsCluster && iteration == 0) cute::cluster_wait();
    if (iteration > (work.sends() ? 1 : 0)) {
      Epilogue const epilogue(p, work, smem, iteration - 1);
      __syncthreads();
      epilogue.reduce_and_store(smem);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) decode_kernel(__grid_constant__ Params const p) {
  extern __shared__ __align__(128) char smem_bytes[];
  Kernel::run(p, smem_bytes);
}

}  // namespace weightonly::sm90_decode
