// GEMM on Hopper's tensor cores for any number of tokens: y^T = w^T x^T by wgmma, the weights as its A operand, out of
// registers.
//
// A CTA is a producer warpgroup and one to four consumer warpgroups. The producers load x, the packed weights of the
// CTA's columns and their scales by TMA, a k_tile of 64 to 512 k at a time, kStages ahead (load.h). The consumers
// convert and multiply (mainloop.h), then finish y (epilogue.h). Which tile is whose: tile_scheduler.h. Sizes and
// shared memory: traits.h.
//
//   producers   issue k_tile 0, 1, 2, ... | those of the next tile ...
//   consumers   main loop of this tile              | epilogue | main loop of the next tile
//
// With fewer tiles than SMs, the CTAs of a cluster share the K of a tile (split_k). With few tokens, the warpgroups of
// a CTA also share K. With many large tiles, a CTA computes several of them: the producers load the next tile while the
// consumers finish this one. Two CTAs that are neighbours along N then share x: each loads one half of it for both.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/cluster.h"
#include "kernels/gemm/launch_cluster.h"
#include "kernels/gemm/sm90/arguments.h"
#include "kernels/gemm/sm90/epilogue.h"
#include "kernels/gemm/sm90/k_order.h"
#include "kernels/gemm/sm90/load.h"
#include "kernels/gemm/sm90/mainloop.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly {
namespace sm90 {

/// How the consumers of a CTA go through its tiles.
template <class Traits, class Mainloop, class Epilogue, class TileScheduler>
struct Consumers {
  using Smem = typename Traits::Smem;

  CUTLASS_DEVICE static void consume(Params const& p, typename TileScheduler::Tile const& first, Smem const& smem) {
    using namespace cute;
    using Element = typename Traits::Element;
    using Reduce = typename Epilogue::Reduce;
    typename Traits::TiledMma tiled_mma;
    auto const thread_mma = tiled_mma.get_slice(threadIdx.x % Traits::kWarpgroupThreads);
    Tensor const sX = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.x())),
                                  typename Traits::SmemLayoutX{});  // (kTileM,64): a k_block
    Tensor const tCrX = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (V,1,4): descriptors
    Tensor accum = partition_fragment_C(tiled_mma, typename Traits::ShapeC{});  // (V,1,1): 64 columns x kTileM
    typename Mainloop::Reader reader(p, smem);
    if (p.split_k > 1) cluster_wait();  // all CTAs have initialized their barriers
    bool const is_staged = Epilogue::Store::serves(p);
    auto const compute = [&](WorkTile const& work) {
      if constexpr (!Traits::kHasScales && !Traits::kPreparesReduction) Epilogue::prefetch(p, work);
      multiply(p, work, smem, reader, tCrX, accum);
      if constexpr (Traits::kMayStageStore) {
        if (is_staged) Epilogue::Store::store(p, work, smem, accum);
      }
    };
    if constexpr (Traits::kPreparesReduction) {
      Reduce reduction(p, first, smem);
      compute(first);
      if (!is_staged) Epilogue::reduce(p, reduction, accum);
    } else {
      TileScheduler::for_each(p, first, compute);
      if (is_staged) return;
      Reduce reduction(p, first, smem);
      Epilogue::reduce(p, reduction, accum);
    }
  }

 private:
  /// accum = w x of a tile, added in the order that the launch asks for.
  template <class Reader, class XFragment, class Accumulators>
  CUTLASS_DEVICE static void multiply(Params const& p, WorkTile const& work, Smem const& smem, Reader& reader,
                                      XFragment const& x, Accumulators& accum) {
    if constexpr (!Traits::kMayFollow) {
      Mainloop::run(p, work, reader, x, accum);
    } else {
      using namespace cute;
      KOrder<Traits> const order(p, work);
      // Of single warpgroups the parts are one chain. Else those of a CTA are, and then the CTAs.
      int const chains = order.warpgroups > 1 ? order.splits : 1;
      int const links = order.splits * order.warpgroups / chains;
      auto const add_parts = [&](auto& sum, auto const& total) {
        WorkTile part = work;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int chain = 0; chain < chains; ++chain) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int link = 0; link < links; ++link) {
            if (order.follows) {
              part.k_tile_begin = 0;
              part.k_tile_end = order.k_tiles_of(chain * links + link);
            }
            if (part.k_tile_end > part.k_tile_begin) {
              Mainloop::run(p, part, reader, x, accum);
            } else {
              fill(accum, -0.f);  // what changes no sum, not even a zero
            }
            if (link > 0) sum.add_to(accum);
            if (link + 1 < links) sum.store(accum);
          }
          if (chain > 0) total.add_to(accum);
          if (chain + 1 < chains) total.store(accum);
        }
      };
      if constexpr (Traits::kSumsInSmem) {
        SumInSmem<Traits> const sum(smem);
        add_parts(sum, SumInGlobal<Traits>(p));
      } else {
        SumInRegisters<Accumulators> sum;
        add_parts(sum, SumInSmem<Traits>(smem));
        // The epilogue uses the same shared memory.
        if (chains > 1) named_barrier_sync<BarrierId::kConsumers, Traits::kConsumers>();
      }
    }
  }
};

/// The parts are classes of static device functions. They take Traits, not the kernel, so that each can be replaced
/// alone.
template <class Traits_, class Load, class Consumers, class TileScheduler_>
struct Kernel {
  using Traits = Traits_;
  using TileScheduler = TileScheduler_;
  using Tile = typename TileScheduler::Tile;
  using Smem = typename Traits::Smem;

  CUTLASS_DEVICE static void run(Params const& p, char* smem_base) {
    Load::prefetch_first(p);
    Smem const smem{smem_base};
    int const producer = int(threadIdx.x) - Traits::kConsumers;  // negative: a consumer
    Tile const work(p, TileScheduler::first_index());
    if (producer >= 0) initialize_barriers(p, producer, smem);
    // Consumers wait until all barriers are initialized. Producers issue their first loads before that: these have the
    // longest latency.
    if (producer < 0) {
      named_barrier_sync<BarrierId::kAll, Traits::kThreads>();
      if (p.split_k > 1) cute::cluster_arrive_relaxed();
      if (multicasts_x<Traits>(p)) cluster_sync();  // the other CTA has initialized its barriers
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      // Not only x: kernels in front of this one may also be writing the bias, or reading y.
      cudaGridDependencySynchronize();
      cudaTriggerProgrammaticLaunchCompletion();
      Consumers::consume(p, work, smem);
      if (multicasts_x<Traits>(p)) cluster_sync();  // the other CTA may still release stages to this one
    } else {
      int const warp = producer / 32;
      if (producer >= 32) named_barrier_arrive<BarrierId::kAll, Traits::kThreads>();
      if (producer % 32 == 0) Load::issue_first(p, work, smem, warp);
      __syncwarp();
      if (producer < 32) named_barrier_sync<BarrierId::kAll, Traits::kThreads>();
      if (p.split_k > 1) cute::cluster_arrive_relaxed();
      if (multicasts_x<Traits>(p)) cluster_sync();
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      if (producer % 32 == 0) Load::template load<TileScheduler>(p, work, smem, warp);
      __syncwarp();
      if (p.split_k > 1) cute::cluster_wait();
    }
  }

 private:
  /// Called by the producers. Warp 0 initializes the full barriers, warp 3 the others. Warp 0 loads the weights, and
  /// does not wait for warp 3: its first loads need full barriers only.
  CUTLASS_DEVICE static void initialize_barriers(Params const& p, int producer, Smem const& smem) {
    if (producer == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) cute::initialize_barrier(smem.full()[i], Traits::kProducerWarps);
    } else if (producer == 96) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        cute::initialize_barrier(smem.empty()[i], Traits::kConsumerWarps * p.multicast_ctas);
      }
      if (p.split_k > 1) {
        int const tiles =
            max(0, min(p.reduce.tiles_per_cta, p.reduce.tiles - rank_in_cluster() * p.reduce.tiles_per_cta));
        cute::initialize_barrier(smem.partials_barrier(), 1);
        cute::set_barrier_transaction_bytes(smem.partials_barrier(),
                                            p.reduce.remote_partials * tiles * Traits::kReductionTileBytes);
      }
    }
    if (producer % 96 == 0) mbarrier_init_fence();
    __syncwarp();
    if (producer < 32) {
      named_barrier_arrive<BarrierId::kProducers, Traits::kWarpgroupThreads>();
    } else {
      named_barrier_sync<BarrierId::kProducers, Traits::kWarpgroupThreads>();
    }
  }
};

/// The kernel of a configuration.
template <class Config, class T = Traits<Config>, class Scheduler = TileScheduler<T>>
using GemmKernel = Kernel<T, Load<T>, Consumers<T, Mainloop<T>, Epilogue<T>, Scheduler>, Scheduler>;

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Traits::kThreads, 1) gemm_sm90_kernel(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) char smem_bytes[];  // for the swizzle of x, which starts at multiples of 1024 bytes
  Kernel::run(p, smem_bytes);
}

}  // namespace sm90

/// Launches y = act(x w + bias) as GemmParams has it. Config: see sm90::Traits.
template <class Config>
cudaError_t launch_gemm_sm90(GemmParams const& call, cudaStream_t stream) {
  using Kernel = sm90::GemmKernel<Config>;
  using Traits = typename Kernel::Traits;
  // A codebook is passed as the zero points.
  constexpr bool kNeedsZeros = Traits::kHasZeros || WeightFormat<typename Traits::Weight>::kIsCodebook;
  if (call.split_k > 1 && !Traits::kMaySplitK) return cudaErrorInvalidValue;
  if (!sm90::has_order<Traits>(call)) return cudaErrorInvalidValue;
  if (kNeedsZeros && call.zeros == nullptr) return cudaErrorInvalidValue;
  sm90::Params p;
  cudaError_t const error = sm90::make_params<Traits, typename Kernel::TileScheduler>(call, p);
  if (error != cudaSuccess) return error;
  bool const is_persistent = Traits::kMayPersist && sm90::StagedStore<Traits>::serves(call);
  dim3 const cluster(1, p.split_k * p.multicast_ctas);
  dim3 const grid(Kernel::TileScheduler::clusters(p, is_persistent), cluster.y);
  static std::atomic<uint64_t> devices_done{0};
  return launch_clusters(sm90::gemm_sm90_kernel<Kernel>, devices_done, p, grid, cluster, Traits::kThreads,
                         Traits::smem_bytes(p.split_k, p.m, p.order_split > p.split_k), stream);
}

}  // namespace weightonly
