// Grouped GEMM on Hopper, for mixtures of experts: the rows of x are sorted by expert, and each expert has a weight.
// The main loop is that of gemm_sm90 (mainloop.h); grouped_scheduler.h says which tiles a CTA computes.
//
//   all         count tiles | synchronize
//   producers                             | k_tiles of the first tile | those of the next tile ...
//   consumers                             |          main loop of the first tile | epilogue | main loop of the next ...
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/cluster.h"
#include "kernels/gemm/launch_cluster.h"
#include "kernels/gemm/sm90/grouped_load.h"
#include "kernels/gemm/sm90/grouped_store.h"
#include "kernels/gemm/sm90/mainloop.h"

namespace weightonly {
namespace sm90 {

/// How a warpgroup goes through the k_tiles of a tile.
template <class Traits>
struct GroupedLoop {
  StageReader<Traits> reader;

  CUTLASS_DEVICE GroupedLoop(GroupedParams const& p, typename Traits::Smem const& smem) : reader(p, smem) {}

  /// Called by all threads of the CTA, before anything is loaded.
  CUTLASS_DEVICE static void prepare(typename Traits::Smem const&) {}

  /// width: see GroupedWork.
  template <class XFragment, class Accumulators>
  CUTLASS_DEVICE void run(GroupedParams const& p, int width, XFragment const& x, Accumulators& accum) {
    reader.width = width;
    reader.k_block_x = (width + 1) * Traits::kWidthStep * (Traits::kXRowBytes / Traits::kDescriptorBytes);
    Mainloop<Traits>::run(p, WorkTile{0, 0, p.k_tiles, 0, 0, 0}, reader, x, accum);
  }
};

template <class Traits_, class Loop = GroupedLoop<Traits_>>
struct GroupedKernel {
  using Traits = Traits_;
  using Tiles = GroupedTiles<Traits>;
  using Smem = typename Traits::Smem;
  using Element = typename Traits::Element;

  CUTLASS_DEVICE static void run(GroupedParams const& p, char* smem_base) {
    Smem const smem{smem_base};
    GroupedSchedule const schedule = smem.schedule(p.experts);
    int const producer = int(threadIdx.x) - Traits::kConsumers;  // negative: a consumer
    prefetch_maps(p, producer);
    if (producer == 0) initialize_barriers(p, smem);
    Loop::prepare(smem);
    if (!p.is_in_layer) {
      cudaGridDependencySynchronize();
      cudaTriggerProgrammaticLaunchCompletion();
    }
    schedule.read_ends(p.offs, p.m, threadIdx.x, Traits::kThreads);
    __syncthreads();
    if (threadIdx.x < 32) schedule.count(Traits::kTileM, threadIdx.x);
    __syncthreads();
    if (multicasts_x<Traits>(p)) cluster_sync();  // the other CTA has initialized its barriers, too
    if (producer < 0) {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      if (!p.is_in_layer) clear_rest(p, schedule);
      consume(p, schedule, smem);
      if (multicasts_x<Traits>(p)) cluster_sync();  // the other CTA may still release stages to this one
    } else {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      if (producer % 32 == 0) GroupedLoad<Traits>::run(p, schedule, smem, producer / 32);
    }
  }

 private:
  /// The first use of a tensor map takes longer. producer: the thread's number among the producers.
  CUTLASS_DEVICE static void prefetch_maps(GroupedParams const& p, int producer) {
    if (producer == 0) cute::prefetch_tma_descriptor(&p.weight_map);
    if (producer >= 32 && producer < 32 + Traits::kWidths) cute::prefetch_tma_descriptor(&p.x_maps[producer - 32]);
    if (Traits::kHasScales && producer == 64) cute::prefetch_tma_descriptor(&p.scale_map);
    if (Traits::kHasZeros && producer == 96) cute::prefetch_tma_descriptor(&p.zero_map);
  }

  CUTLASS_DEVICE static void initialize_barriers(GroupedParams const& p, Smem const& smem) {
    int const releases = Traits::kConsumerWarps * (Traits::kMayMulticastX ? p.multicast_ctas : 1);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      cute::initialize_barrier(smem.full()[i], Traits::kProducerWarps);
      cute::initialize_barrier(smem.empty()[i], releases);
    }
    mbarrier_init_fence();
  }

  CUTLASS_DEVICE static void consume(GroupedParams const& p, GroupedSchedule const& schedule, Smem const& smem) {
    using namespace cute;
    typename Traits::TiledMma tiled_mma;
    auto const thread_mma = tiled_mma.get_slice(threadIdx.x % Traits::kWarpgroupThreads);
    Tensor const sX = make_tensor(make_smem_ptr(reinterpret_cast<typename Traits::XElement*>(smem.x())),
                                  typename Traits::SmemLayoutX{});  // (kTileM,64): a k_block; of 8 bits (kChunkM,128)
    Tensor const tCrX = thread_mma.make_fragment_B(thread_mma.partition_B(sX));  // (V,1,4): descriptors
    Tensor accum = partition_fragment_C(tiled_mma, typename Traits::ShapeC{});  // (V,1,chunks): 64 columns x kTileM
    Loop loop(p, smem);
    // The reader has it right if the second half follows one row of the first.
    if (int(threadIdx.x) / 128 >= Traits::kHalfPanels)
      loop.reader.scales += Traits::kHalfScaleBytes - Traits::kScaleRowBytes;
    // Broadcasts tell the compiler that all lanes have the same value. So it keeps descriptors in uniform registers.
    int const tiles = __reduce_or_sync(0xffffffff, Tiles::count(p, schedule));
    int record = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int number = cluster_index(); number < tiles; number += cluster_count()) {
      loop.reader.wait();  // until the tile's first k_tile, and its record, are there
      GroupedWork const& work = smem.records()[record];
      GroupedStore<Traits>::copy_x_scales(p, work, smem);
      loop.run(p, __reduce_or_sync(0xffffffff, work.width), tCrX, accum);
      GroupedStore<Traits>::store(p, work, smem, accum);
      record = record + 1 == Traits::kRecords ? 0 : record + 1;
    }
  }

  /// Sets y to zeros in rows of no expert. Called by all consumers.
  CUTLASS_DEVICE static void clear_rest(GroupedParams const& p, GroupedSchedule const& schedule) {
    bool const is_vector = vector_stores(p);
    int const step = is_vector ? 8 : 1;  // elements
    int const ctas = Traits::kMayMulticastX ? p.multicast_ctas : 1;
    int const first = cluster_index() * ctas + (ctas > 1 ? rank_in_cluster() : 0);
    for (int row = schedule.row_ends[p.experts - 1] + first; row < p.m; row += cluster_count() * ctas) {
      Element* const y = static_cast<Element*>(p.y) + int64_t(row) * p.ldy;
      for (int column = step * int(threadIdx.x); column < p.columns; column += step * Traits::kConsumers) {
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

/// The kernel's arguments for a call.
template <class Traits>
cudaError_t make_grouped_params(GroupedGemmParams const& call, GroupedParams& p) {
  using Element = typename Traits::Element;
  using Layout = typename Traits::Layout;
  static_cast<GemmParams&>(p) = call.gemm;
  p.offs = call.offs;
  p.experts = call.experts;
  p.is_gated = call.is_gated;
  p.is_in_layer = call.is_in_layer;
  p.gate = call.gate;
  if constexpr (Traits::kHasXScales) p.x_scales = static_cast<Fp8GroupedGemmParams const&>(call).x_scales;
  p.columns = call.is_gated ? p.n / 2 : p.n;
  int const n_tiles =
      call.is_gated ? divide_up(p.columns, Traits::kHalfColumns) : divide_up(p.n_padded, Traits::kTileN);
  p.multicast_ctas = Traits::kMayMulticastX && n_tiles % 2 == 0 ? 2 : 1;
  p.n_tiles = cutlass::FastDivmod(n_tiles / p.multicast_ctas);
  p.k_tiles = divide_up(p.k_padded, Traits::kTileK);
  p.scale_k = scale_k<Traits>(p);
  p.groups = divide_up(p.k, p.group_size);
  p.x_box_k_blocks = p.k % Traits::kXBlockK == 0 ? max(1, Traits::kXBlocks / p.multicast_ctas) : 1;
  p.scale_rows = Traits::kTileK / p.scale_k;
  p.scale_box_rows = p.scale_k == p.group_size ? p.scale_rows : 1;
  constexpr int kBlockLines = Layout::kBlockBytes / kTensorMapLineBytes;
  cudaError_t error =
      map_lines(&p.weight_map, p.weight, int64_t(p.experts) * (p.n_padded / Layout::kPanelColumns),
                p.k_padded / Layout::kBlockK * kBlockLines, Traits::kHalfPanels, Traits::kKBlocks * kBlockLines);
  for (int i = 0; i < Traits::kWidths && error == cudaSuccess; ++i) {
    int const rows = (i + 1) * Traits::kWidthStep / (Traits::kXBlocks == 1 ? p.multicast_ctas : 1);
    error = map_k_blocks<typename Traits::XElement>(&p.x_maps[i], p.x, p.m, p.k, p.ldx, rows, p.x_box_k_blocks);
  }
  auto const map_groups = [&](CUtensorMap* map, void const* rows) {
    return map_matrices<Element>(map, rows, p.experts, p.groups, p.n_padded, p.ld_scales, p.scale_box_rows,
                                 Traits::kHalfColumns);
  };
  if (Traits::kHasScales && error == cudaSuccess) error = map_groups(&p.scale_map, p.scales);
  if (Traits::kHasZeros && error == cudaSuccess) error = map_groups(&p.zero_map, p.zeros);
  return error;
}

template <class Traits, class Loop = GroupedLoop<Traits>>
cudaError_t launch_grouped_kernel(GroupedGemmParams const& call, cudaStream_t stream) {
  using Kernel = GroupedKernel<Traits, Loop>;
  GroupedParams p;
  cudaError_t const error = make_grouped_params<Traits>(call, p);
  if (error != cudaSuccess) return error;
  int64_t const tiles = GroupedSchedule::most_m_tiles(call.gemm.m, call.experts, Traits::kTileM) * p.n_tiles.divisor;
  if (tiles > (1 << 30)) return cudaErrorInvalidValue;
  dim3 const grid(int(min(tiles, int64_t(max(1, p.clusters / p.multicast_ctas)))), p.multicast_ctas);
  static std::atomic<uint64_t> devices_done{0};
  return launch_clusters(grouped_sm90_kernel<Kernel>, devices_done, p, grid, dim3(1, p.multicast_ctas),
                         Traits::kThreads, Traits::smem_bytes(call.experts), stream);
}

}  // namespace sm90

/// Launches a grouped product as GroupedGemmParams has it. Config: see sm90::Traits.
template <class Config>
cudaError_t launch_grouped_sm90(GroupedGemmParams const& call, cudaStream_t stream) {
  using Traits = sm90::GroupedTraits<Config>;
  using Format = WeightFormat<typename Traits::Weight>;
  constexpr bool kNeedsZeros = Traits::kHasZeros || Format::kIsCodebook;
  if (kNeedsZeros && call.gemm.zeros == nullptr) return cudaErrorInvalidValue;
  // With few tokens integers of 4 bits leave registers for the accumulators of a k_tile beside those of the tile.
  constexpr bool kIsInteger4 = Format::kBits == 4 && !Format::kIsCodebook;
  if constexpr (kIsInteger4 && Traits::kHasScales && Traits::kLeastGroup == 32 && Traits::kTileM <= 32) {
    if (call.gemm.group_size % Traits::kTileK == 0) {
      return sm90::launch_grouped_kernel<sm90::GroupedTraits<Config, true>>(call, stream);
    }
  }
  return sm90::launch_grouped_kernel<Traits>(call, stream);
}

}  // namespace weightonly
