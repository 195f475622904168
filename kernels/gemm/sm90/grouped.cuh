// Grouped GEMM on Hopper, for mixtures of experts: the rows of x are sorted by expert, and each expert has a weight.
// The parts are those of gemm_sm90 (kernel.cuh); grouped_scheduler.h says which tiles a CTA computes.
//
//   all         count tiles | synchronize
//   producers                             | k_tiles of the first tile | those of the next tile ...
//   consumers                             |          main loop of the first tile | epilogue | main loop of the next ...
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ext/arch/barrier.h"
#include "kernels/api/grouped_registry.h"
#include "kernels/gemm/launch_cluster.h"
#include "kernels/gemm/sm90/arguments.h"
#include "kernels/gemm/sm90/epilogue_reduce.h"
#include "kernels/gemm/sm90/epilogue_store.h"
#include "kernels/gemm/sm90/grouped_scheduler.h"
#include "kernels/gemm/sm90/load.h"
#include "kernels/gemm/sm90/mainloop.h"

namespace weightonly {
namespace sm90 {

template <class Traits_>
struct GroupedKernel {
  using Traits = Traits_;
  using Scheduler = GroupedScheduler<Traits>;
  using Tile = typename Scheduler::Tile;
  using Work = typename Scheduler::Work;
  using Smem = typename Traits::Smem;
  using Load = sm90::Load<Traits>;
  using Mainloop = sm90::Mainloop<Traits>;
  using Element = typename Traits::Element;

  CUTLASS_DEVICE static void run(GroupedParams const& p, char* smem_base) {
    Smem const smem{{smem_base}};
    GroupedSchedule const schedule = smem.schedule(p.experts);
    int const producer = int(threadIdx.x) - Traits::kConsumers;  // negative: a consumer
    prefetch_maps(p, producer);
    if (producer == 0) initialize_barriers(smem);
    // A kernel in front of this one writes `offs`, so nothing can be loaded before it has ended.
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    schedule.read_ends(p.offs, p.m, threadIdx.x, Traits::kThreads);
    __syncthreads();
    if (threadIdx.x < 32) Scheduler::count(schedule);
    __syncthreads();
    if (producer < 0) {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      clear_rest(p, schedule);
      consume(p, schedule, smem);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      int const warp = producer / 32;
      if (producer % 32 == 0) {
        Tile const first(p, schedule, warp == 0 ? smem.records() : nullptr);
        Load::issue_first(p, first, smem, warp);
        Load::template load<Scheduler>(p, first, smem, warp);
      }
    }
  }

 private:
  /// The first use of a tensor map takes longer. producer: the thread's number among the producers.
  CUTLASS_DEVICE static void prefetch_maps(GroupedParams const& p, int producer) {
    if (producer == 0) cute::prefetch_tma_descriptor(&p.weight_map);
    if (producer == 32) cute::prefetch_tma_descriptor(&p.x_map);
    if (Traits::kHasScales && producer == 64) cute::prefetch_tma_descriptor(&p.scale_map);
    if (Traits::kHasZeros && producer == 96) cute::prefetch_tma_descriptor(&p.zero_map);
  }

  CUTLASS_DEVICE static void initialize_barriers(Smem const& smem) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      cute::initialize_barrier(smem.full()[i], Traits::kProducerWarps);
      cute::initialize_barrier(smem.empty()[i], Traits::kConsumerWarps);
    }
    mbarrier_init_fence();
  }

  CUTLASS_DEVICE static void consume(GroupedParams const& p, GroupedSchedule const& schedule, Smem const& smem) {
    using namespace cute;
    typename Traits::TiledMma tiled_mma;
    auto const thread_mma = tiled_mma.get_slice(threadIdx.x % Traits::kWarpgroupThreads);
    Tensor const sX = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.x())),
                                  typename Traits::SmemLayoutX{});  // (kTileM,64): a k_block
    Tensor const tCrX = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (V,1,4): descriptors
    Tensor accum = partition_fragment_C(tiled_mma, typename Traits::ShapeC{});  // (V,1,1): 64 columns x kTileM
    typename Mainloop::Reader reader(p, smem);
    auto const compute = [&](WorkTile const& work) { Mainloop::run(p, work, reader, tCrX, accum); };
    auto const finish = [&](Work const& work) {
      if constexpr (Traits::kMayStageStore) {
        StagedStore<Traits>::store(p, work, smem, accum);
      } else {
        // Else the compiler computes what follows from the thread before the loop, and has no registers for wgmma.
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));
        ClusterReduce<Traits, Work> reduction(p, work, smem, __shfl_sync(0xffffffff, thread / 32, 0), thread % 32);
        reduction.store_partials(accum);
        reduction.template reduce<true>();
      }
    };
    Scheduler::for_each(p, schedule, smem.records(), compute, finish);
  }

  /// Sets y to zeros in rows of no expert. Called by all consumers.
  CUTLASS_DEVICE static void clear_rest(GroupedParams const& p, GroupedSchedule const& schedule) {
    bool const is_vector = vector_stores(p);
    int const step = is_vector ? 8 : 1;  // elements
    for (int row = schedule.row_ends[p.experts - 1] + cluster_index(); row < p.m; row += cluster_count()) {
      Element* const y = static_cast<Element*>(p.y) + int64_t(row) * p.ldy;
      for (int column = step * int(threadIdx.x); column < p.n; column += step * Traits::kConsumers) {
        if (is_vector) {
          *reinterpret_cast<uint4*>(y + column) = uint4{0, 0, 0, 0};
        } else {
          y[column] = Element(0.f);
        }
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Traits::kThreads, 1)
    grouped_sm90_kernel(__grid_constant__ GroupedParams const p) {
  extern __shared__ __align__(1024) char smem_bytes[];  // for the swizzle of x, which starts at multiples of 1024 bytes
  Kernel::run(p, smem_bytes);
}

}  // namespace sm90

/// Launches y = x w + bias as GroupedGemmParams has it. Config: see sm90::Traits.
template <class Config>
cudaError_t launch_grouped_sm90(GroupedGemmParams const& call, cudaStream_t stream) {
  using Traits = sm90::GroupedTraits<Config>;
  using Kernel = sm90::GroupedKernel<Traits>;
  constexpr bool kNeedsZeros = Traits::kHasZeros || WeightFormat<typename Traits::Weight>::kIsCodebook;
  if (kNeedsZeros && call.gemm.zeros == nullptr) return cudaErrorInvalidValue;
  if (call.experts > Traits::kMaxExperts) return cudaErrorInvalidValue;
  if (!Traits::kMayHaveGroupsOf32 && call.gemm.group_size == 32) return cudaErrorInvalidValue;
  int const n_tiles = divide_up(call.gemm.n_padded, Traits::kTileN);
  int64_t const tiles = GroupedSchedule::most_m_tiles(call.gemm.m, call.experts, Traits::kTileM) * n_tiles;
  if (tiles > (1 << 30)) return cudaErrorInvalidValue;
  sm90::GroupedParams p;
  cudaError_t const error = sm90::make_params<Traits, typename Kernel::Scheduler>(call.gemm, p, call.experts);
  if (error != cudaSuccess) return error;
  p.offs = call.offs;
  p.experts = call.experts;
  p.n_tiles = cutlass::FastDivmod(n_tiles);
  dim3 const grid(int(min(tiles, int64_t(p.clusters))));
  static std::atomic<uint64_t> devices_done{0};
  return launch_clusters(sm90::grouped_sm90_kernel<Kernel>, devices_done, p, grid, dim3(1), Traits::kThreads,
                         Traits::smem_bytes(call.experts), stream);
}

}  // namespace weightonly
