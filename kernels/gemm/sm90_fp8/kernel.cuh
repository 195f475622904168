// GEMM on Hopper's FP8 tensor cores: x in E4M3 with a scale for each row, weights converted to E4M3 in registers. The
// producers, the schedule and the epilogues are those of gemm_sm90.
#pragma once

#include "kernels/gemm/sm90/kernel.cuh"
#include "kernels/gemm/sm90_fp8/mainloop.h"
#include "kernels/gemm/sm90_fp8/traits.h"

namespace weightonly {
namespace sm90_fp8 {

/// How the consumers of a CTA go through its tiles.
template <class Traits>
struct Consumers {
  using Params = sm90::Params;
  using Smem = typename Traits::Smem;
  using Scheduler = sm90::TileScheduler<Traits>;
  using Loop = Mainloop<Traits>;
  using Store = sm90::StagedStore<Traits>;
  using Reduce = sm90::ClusterReduce<Traits>;

  CUTLASS_DEVICE static void consume(Params const& p, typename Scheduler::Tile const& first, Smem const& smem) {
    using namespace cute;
    typename Traits::TiledMma tiled_mma;
    auto const thread_mma = tiled_mma.get_slice(threadIdx.x % Traits::kWarpgroupThreads);
    Tensor const sX = make_tensor(make_smem_ptr(reinterpret_cast<typename Traits::XElement*>(smem.x())),
                                  typename Traits::SmemLayoutX{});  // (kChunkM,128)
    Tensor const tCrX = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (V,1,4): descriptors
    typename Loop::Accum accum;  // (V,1,kChunks): 64 columns x kTileM
    typename Loop::Reader reader(p, smem);
    if (p.split_k > 1) cluster_wait();
    bool const is_staged = Store::serves(p);
    Scheduler::for_each(p, first, [&](sm90::WorkTile const& work) {
      Loop::run(p, work, reader, tCrX, accum);
      if constexpr (Traits::kMayStageStore) {
        if (!is_staged) return;
        Store::store(p, work, smem, accum);
      }
    });
    if (is_staged) return;
    Reduce reduction(p, first, smem, threadIdx.x / 32, threadIdx.x % 32);
    sm90::Epilogue<Traits>::reduce(p, reduction, accum);
  }
};

template <class Config, class T = Traits<Config>>
using GemmKernel = sm90::Kernel<T, sm90::Load<T>, Consumers<T>, sm90::TileScheduler<T>>;

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Traits::kThreads, 1)
    gemm_sm90_fp8_kernel(__grid_constant__ sm90::Params const p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  Kernel::run(p, smem_bytes);
}

}  // namespace sm90_fp8

/// Launches y = act(x_scales x w + bias). Config: see sm90_fp8::Traits. call: Fp8GemmParams, as KernelFacts::x_bytes says.
template <class Config>
cudaError_t launch_gemm_sm90_fp8(GemmParams const& call, cudaStream_t stream) {
  using Kernel = sm90_fp8::GemmKernel<Config>;
  using Traits = typename Kernel::Traits;
  if (call.split_k > 1 && !Traits::kMaySplitK) return cudaErrorInvalidValue;
  sm90::Params p;
  cudaError_t const error = sm90::make_params<Traits, typename Kernel::TileScheduler>(call, p);
  if (error != cudaSuccess) return error;
  p.x_scales = static_cast<Fp8GemmParams const&>(call).x_scales;
  bool const is_persistent = Traits::kMayPersist && sm90::StagedStore<Traits>::serves(call);
  dim3 const cluster(1, p.split_k * p.multicast_ctas);
  dim3 const grid(Kernel::TileScheduler::clusters(p, is_persistent), cluster.y);
  static std::atomic<uint64_t> devices_done{0};
  return launch_clusters(sm90_fp8::gemm_sm90_fp8_kernel<Kernel>, devices_done, p, grid, cluster, Traits::kThreads,
                         Traits::smem_bytes(p.split_k, p.m), stream);
}

}  // namespace weightonly
