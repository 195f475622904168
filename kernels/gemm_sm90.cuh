// GEMM on Hopper's tensor cores for any number of tokens: wgmma with the weights as its A operand, out of registers.
//
// Operands are swapped: y^T = w^T x^T, columns of w are the M of the MMA and tokens its N, so that one weight is converted
// once for up to 256 tokens. Producer threads bring everything by TMA, a step of 64 to 512 k at a time: x, the packed
// weights of all of the CTA's columns (one request, as layout "tiled" has them) and their scales. Each consumer warpgroup
// converts its 64 columns into registers while the tensor cores work on the block before, and multiplies.
//
//   producer    x, w, scales | step 0 | step 1 | ...         full / empty barriers, kStages steps
//   consumers   LDS, convert 0 | LDS, convert 1 | ...
//               mma             | wgmma 0       | wgmma 1 | ...
//
// Where tiles are few the CTAs of a cluster share K, for few tokens the warpgroups of a CTA, too (gemm_sm90_items.h). Where
// they are many and large, CTAs go through several of them: while the consumers finish a tile, the producers ask for the steps
// of the next. Two CTAs, side by side along N, share x: each asks for half of it, for both.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "kernels/gemm_sm90_chunks.h"
#include "kernels/gemm_sm90_items.h"
#include "kernels/gemm_sm90_mainloop.h"
#include "kernels/gemm_sm90_producers.h"
#include "kernels/launch_sm90.h"
#include "kernels/prefetch_sm90.h"
#include "kernels/registry.h"

namespace weightonly {

/// Config: Element, Weight, kScaleMode, kTokens (8 to 256), kWarpgroupsN (of 64 columns), kWarpgroupsK (which share a step's
/// k), kStages (steps in shared memory).
template <class Config>
struct GemmSm90 {
  using Producers = GemmSm90Producers<GemmSm90>;
  using Mainloop = GemmSm90Mainloop<GemmSm90>;
  using Items = GemmSm90Items<GemmSm90>;
  using Chunks = GemmSm90Chunks<GemmSm90>;
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr ScaleMode kScaleMode = Config::kScaleMode;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;
  static constexpr int kTokens = Config::kTokens;
  static constexpr int kWarpgroupsN = Config::kWarpgroupsN;
  static constexpr int kWarpgroupsK = Config::kWarpgroupsK;
  static constexpr int kWarpgroups = kWarpgroupsN * kWarpgroupsK;
  static constexpr int kStages = Config::kStages;

  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kConsumers = 32 * kConsumerWarps;
  // Producers: a warp each for the weights, x, the scales and the zero points. One alone would be what all wait for.
  static constexpr int kProducers = kHasZeros ? 4 : kHasScales ? 3 : 2;
  static constexpr int kThreads = kConsumers + 128;  // a whole warpgroup, so that its registers can go to the others
  // Registers of a thread: at launch, the producers', and the consumers', who get what the producers give.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters =
      cutlass::const_min(240, (kLaunchRegisters * (kWarpgroups + 1) - kProducerRegisters) / kWarpgroups / 8 * 8);
  static constexpr int kColumns = 64 * kWarpgroupsN;
  static constexpr int kBandTokens = 4;  // token tiles
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr bool kMayLoop = kTokens >= 128 && kTokens * kColumns > 128 * 128;  // over tiles
  static constexpr bool kMayShareX = kMayLoop;  // with a CTA beside this one
  // Whether y may go by gemm_sm90_chunks.h. Smaller tiles are not quicker by it, and lose in their loops.
  static constexpr bool kMayChunk = kWarpgroupsK == 1 && (kTokens >= 96 || kTokens * kColumns >= 128 * 128);

  // Blocks of 64 k that a warpgroup waits for at a time: the fewer tokens, the more each wait weighs.
  static constexpr int kWarpgroupBlocks = kTokens <= 128 ? 2 : 1;
  static constexpr int kStepBlocks = kWarpgroupBlocks * kWarpgroupsK;
  static constexpr int kStepK = kStepBlocks * Layout::kBlockK;
  static constexpr int kXBlockBytes = kTokens * Layout::kBlockK * int(sizeof(Element));
  static constexpr int kXBytes = kStepBlocks * kXBlockBytes;  // of a step
  static constexpr int kWeightBytes = kWarpgroupsN * kStepBlocks * Layout::kBlockBytes;
  static constexpr int kScaleRowBytes = kColumns * int(sizeof(Element));
  static constexpr int kMaxScaleRows = 2 * kStepBlocks;  // groups of 32
  static constexpr int kScaleBytes = (kHasScales ? kHasZeros ? 2 : 1 : 0) * kMaxScaleRows * kScaleRowBytes;

  using MmaOp = decltype(cute::GMMA::rs_op_selector<Element, Element, float,
                                                    cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>());
  using TiledMma = decltype(cute::make_tiled_mma(MmaOp{}));
  using SmemLayoutX = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                   cute::Shape<cute::Int<kTokens>, cute::_64>{}));

  using Table = PairTable<(kTokens <= 32)>;  // more x leaves no room for wide rows
  static constexpr int kTableBytes = kIsCode<Weight> ? Table::kBytes : 0;

  // An item is the sums of eight tokens and one warpgroup's columns: one float4 a thread. Items are counted with the columns first;
  // where K is shared each CTA of the cluster finishes its part of them, which may be none.
  static constexpr int kItems = kWarpgroupsN * kTokenTiles;
  static constexpr int kItemBytes = 128 * int(sizeof(float4));
  static constexpr int kHalfItems = (kItems + 1) / 2;  // that one CTA finishes at most, of a cluster
  // Whether registers hold, beside the loop's, what a thread knows of its items before it. Channels' scales come from memory.
  static constexpr bool kItemsEarly =
      !kMayLoop && (!kHasScales || kTokens * kWarpgroups <= (kConsumerRegisters >= 240 ? 192 : 96));

  /// Barriers, then for each stage x (1024-byte aligned, for the swizzle), the weights, their scales and zero points; of codes
  /// the table. When all steps have been multiplied, the sums of this CTA take the place of x. Those that other CTAs send have a
  /// place of their own: they come earlier.
  struct Smem {
    static constexpr int kBarrierBytes = 1024;
    static constexpr int kSumsBytes = kWarpgroups * kTokenTiles * kItemBytes;
    static constexpr int kStageBytes = kStages * (kXBytes + kWeightBytes + kScaleBytes) + kTableBytes;
    static constexpr int kPartsOffset = cutlass::const_max(kStageBytes, kSumsBytes);
    /// Whether there is room for the sums of another CTA.
    static constexpr bool kMaySplit =
        kBarrierBytes + kPartsOffset + kWarpgroupsK * kHalfItems * kItemBytes <= 227 * 1024;
    /// Of y, for each warpgroup, while the stages take the next tile: two times 16 tokens, rows 16 bytes longer, for the banks.
    static constexpr int kChunkRowElements = 64 + 16 / int(sizeof(Element));
    static constexpr int kChunkElements = 16 * kChunkRowElements;
    static constexpr int kChunkBytes = kMayChunk ? 2 * kWarpgroups * kChunkElements * int(sizeof(Element)) : 0;
    static_assert(kPartsOffset % 16 == 0);
    static_assert(8 * (2 * kStages + 1) <= kBarrierBytes);

    char* base;
    static int bytes(GemmSm90Params const& p) {
      return kBarrierBytes + kPartsOffset + (p.split_k > 1 ? p.sent_parts * p.items_per_cta * kItemBytes : kChunkBytes);
    }
    CUTLASS_DEVICE uint64_t* full() const { return reinterpret_cast<uint64_t*>(base); }
    CUTLASS_DEVICE uint64_t* empty() const { return full() + kStages; }
    CUTLASS_DEVICE uint64_t& parts_barrier() const { return full()[2 * kStages]; }
    CUTLASS_DEVICE char* x() const { return base + kBarrierBytes; }
    CUTLASS_DEVICE char* weights() const { return x() + kStages * kXBytes; }
    CUTLASS_DEVICE char* scales() const { return weights() + kStages * kWeightBytes; }
    CUTLASS_DEVICE char* pairs() const { return scales() + kStages * kScaleBytes; }
    CUTLASS_DEVICE char* sums() const { return x(); }
    CUTLASS_DEVICE char* parts() const { return x() + kPartsOffset; }
    CUTLASS_DEVICE Element* chunks() const { return reinterpret_cast<Element*>(parts()); }
  };

  static constexpr bool kMaySplit = Smem::kMaySplit;
  static_assert(kMaySplit || kWarpgroupsK == 1);

  /// What a CTA works on: a tile, and of its K what is this CTA's.
  struct Place {
    int rank;
    int first_step, end_step;
    int first_column, first_token;
    int known_tokens;  // of the tile: the tile before it stores them

    CUTLASS_DEVICE Place(GemmSm90Params const& p, int tile) {
      rank = kMaySplit && (!kMayShareX || p.split_k > 1) ? rank_in_cluster() : 0;
      first_step = rank * p.steps_per_cta;
      end_step = min(p.steps, first_step + p.steps_per_cta);
      int column_tile = tile, token_tile = 0;
      if (p.token_tiles > 1) {
        // Bands of a few token tiles, in each of them the tokens first: CTAs that run at a time share weights as well as x.
        int band, in_band, in_column;
        p.band_tiles(band, in_band, tile);
        (band < p.full_bands ? p.band_tokens : p.last_band_tokens)(column_tile, in_column, in_band);
        token_tile = band * p.band_tokens.divisor + in_column;
      }
      if (shares_x(p)) column_tile = 2 * column_tile + rank_in_cluster();
      first_column = column_tile * kColumns;
      // The last tile lies on the one before it rather than beyond M: rows that a TMA box has beyond M are slower than
      // rows of x.
      first_token = min(token_tile * kTokens, max(0, p.m - kTokens));
      known_tokens = token_tile * kTokens - first_token;
    }
  };

  /// Whether y is stored in chunks. Then a CTA may go through several tiles: else the stages take the sums, and so no next tile.
  CUTLASS_HOST_DEVICE static bool in_chunks(GemmParams const& p) {
    return kMayChunk && p.split_k == 1 && p.activation == int(Activation::kIdentity);
  }

  CUTLASS_DEVICE static bool shares_x(GemmSm90Params const& p) { return kMayShareX && p.x_ctas > 1; }

  /// Waits for all threads of the cluster that have not ended.
  CUTLASS_DEVICE static void meet() {
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }

  /// Calls visit(place) for each tile of this cluster.
  template <class Visit>
  CUTLASS_DEVICE static void for_each_tile(GemmSm90Params const& p, Place const& first, Visit const& visit) {
    Place place = first;
    int tile = first_tile();
    while (true) {
      visit(place);
      tile += tiles_at_once();
      if (!kMayLoop || tile >= p.tiles) break;
      place = Place(p, tile);
    }
  }
  // The grid is of clusters along x, of their CTAs along y.
  CUTLASS_DEVICE static int first_tile() { return blockIdx.x; }
  CUTLASS_DEVICE static int tiles_at_once() { return gridDim.x; }
  CUTLASS_DEVICE static int rank_in_cluster() { return blockIdx.y; }

  CUTLASS_DEVICE static void consume(GemmSm90Params const& p, Place const& first, Smem const& smem) {
    using namespace cute;
    TiledMma mma;
    auto const thread_mma = mma.get_slice(threadIdx.x % 128);
    Tensor const s_x = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.x())), SmemLayoutX{});  // (token, k)
    Tensor const x = thread_mma.make_fragment_B(thread_mma.partition_B(s_x));  // (MMA, 1, k16)
    Tensor sums = partition_fragment_C(mma, Shape<_64, Int<kTokens>>{});  // (MMA, 1, 1)
    typename Mainloop::Reader reader(p, smem);
    if (p.split_k > 1) cluster_wait();  // all CTAs have their barriers
    bool const chunks = in_chunks(p);
    auto const visit = [&](Place const& place) {
      if constexpr (!kHasScales && !kItemsEarly) prefetch_scales(p, place);
      Mainloop::run(p, place, reader, x, sums);
      if constexpr (kMayChunk) {
        if (chunks) Chunks::store(p, place, smem, sums);
      }
    };
    if constexpr (kItemsEarly) {
      Items items(p, first, smem);
      visit(first);
      if (!chunks) end(p, items, sums);
    } else {
      for_each_tile(p, first, visit);
      if (chunks) return;
      Items items(p, first, smem);
      end(p, items, sums);
    }
  }

  /// Channels' scales into the L2: they come from memory, and are needed when the loop is over.
  CUTLASS_DEVICE static void prefetch_scales(GemmSm90Params const& p, Place const& place) {
    int const column = place.first_column + 64 * int(threadIdx.x);
    if (threadIdx.x < kWarpgroupsN && column < p.n) prefetch_line(static_cast<Element const*>(p.scales) + column);
  }

  template <class Sums>
  CUTLASS_DEVICE static void end(GemmSm90Params const& p, Items& items, Sums const& sums) {
    items.leave(sums);
    p.activation == int(Activation::kIdentity) ? items.template finish<true>() : items.template finish<false>();
  }

  /// By some of the consumers, before anything else; where there are more tiles of tokens, copies are not what a call waits for.
  CUTLASS_DEVICE static void prefetch_first(GemmSm90Params const& p) {
    int const warp = threadIdx.x / 32;
    if (warp > (kHasZeros ? 2 : 1) || p.token_tiles > 1) return;
    constexpr int kBytes = (kTokens <= 16 ? 24 : 16) * 1024 / kWarpgroupsN / 128 * 128;  // of a stripe
    constexpr int kStepBytes = kStepBlocks * Layout::kBlockBytes;
    int const stripe = first_tile() * kWarpgroupsN;
    int const first_step = rank_in_cluster() * p.steps_per_cta;
    if (threadIdx.x < kWarpgroupsN) {
      // Before the kernels in front have ended there is time for all stages.
      int const bytes = p.overlap == int(Overlap::kPrefetch) ? kStages * kStepBytes : kBytes;
      prefetch_stripe<Weight>(p, stripe + threadIdx.x, first_step * kStepBlocks, 0,
                              min(bytes, p.steps_per_cta * kStepBytes));
    }
    if (kHasScales && warp == 1) prefetch_groups<Element, kWarpgroupsN>(p, p.scales, stripe, first_step * kStepK);
    if (kHasZeros && warp == 2) prefetch_groups<Element, kWarpgroupsN>(p, p.zeros, stripe, first_step * kStepK);
  }

  /// By the producers' threads, before any other. The first warp waits for nobody: what it needs first it has made
  /// itself.
  CUTLASS_DEVICE static void begin_barriers(GemmSm90Params const& p, int producer, Smem const& smem) {
    if (producer == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStages; ++i) cute::initialize_barrier(smem.full()[i], kProducers);
    } else if (producer == 96) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStages; ++i) cute::initialize_barrier(smem.empty()[i], kConsumerWarps * p.x_ctas);
      if (p.split_k > 1) {
        int const owned = max(0, min(p.items_per_cta, p.items - rank_in_cluster() * p.items_per_cta));
        cute::initialize_barrier(smem.parts_barrier(), 1);
        cute::set_barrier_transaction_bytes(smem.parts_barrier(), p.sent_parts * owned * kItemBytes);
      }
    }
    if (producer % 96 == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    if (producer < 32) {
      asm volatile("bar.arrive 8, 128;" ::: "memory");
    } else {
      asm volatile("bar.sync 8, 128;" ::: "memory");
    }
  }

  CUTLASS_DEVICE static void run(GemmSm90Params const& p, char* smem_base) {
    prefetch_first(p);
    Smem const smem{smem_base};
    int const producer = int(threadIdx.x) - kConsumers;
    Place const place(p, first_tile());
    if (producer >= 0) begin_barriers(p, producer, smem);
    // Consumers wait until the barriers are there, most producers for nobody: what they ask for has the longest way.
    if (producer < 0) {
      asm volatile("bar.sync 9, %0;" ::"n"(kThreads) : "memory");
      if (p.split_k > 1) cute::cluster_arrive_relaxed();
      if (shares_x(p)) meet();  // the other CTA has its barriers
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      cudaGridDependencySynchronize();  // bias and y, too, are the kernels' before this one
      cudaTriggerProgrammaticLaunchCompletion();
      consume(p, place, smem);
      if (shares_x(p)) meet();  // the other CTA may still give stages back
    } else {
      if (producer >= 32) asm volatile("bar.arrive 9, %0;" ::"n"(kThreads) : "memory");
      if (producer % 32 == 0) Producers::begin(p, place, smem, producer / 32);
      __syncwarp();
      if (producer < 32) asm volatile("bar.sync 9, %0;" ::"n"(kThreads) : "memory");
      if (p.split_k > 1) cute::cluster_arrive_relaxed();
      if (shares_x(p)) meet();
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (producer % 32 == 0) Producers::go_on(p, place, smem, producer / 32);
      __syncwarp();
      if (p.split_k > 1) cute::cluster_wait();
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) gemm_sm90_kernel(__grid_constant__ GemmSm90Params const p) {
  extern __shared__ __align__(1024) char smem_bytes[];  // the swizzle counts from multiples of it
  Kernel::run(p, smem_bytes);
}

template <class Config>
cudaError_t launch_gemm_sm90(GemmParams const& p, cudaStream_t stream) {
  using Kernel = GemmSm90<Config>;
  using Layout = typename Kernel::Layout;
  using Element = typename Kernel::Element;
  if (p.split_k > 1 && !Kernel::kMaySplit) return cudaErrorInvalidValue;
  if ((Kernel::kHasZeros || kIsCode<typename Kernel::Weight>) && p.zeros == nullptr) return cudaErrorInvalidValue;
  GemmSm90Params g;
  static_cast<GemmParams&>(g) = p;
  g.steps = divide_up(p.k_padded, Kernel::kStepK);
  g.steps_per_cta = divide_up(g.steps, p.split_k);
  g.group_k = Kernel::kStepK;
  while (p.group_size % g.group_k != 0) g.group_k /= 2;
  g.groups = divide_up(p.k, p.group_size);
  g.sent_parts = (p.split_k - 1) * Kernel::kWarpgroupsK;
  int const column_tiles = divide_up(p.n_padded, Kernel::kColumns);
  // Two CTAs that share x take it from the L2 once: that saves power, which is what many tokens are short of. They wait for
  // each other at their start and end.
  g.x_ctas = Kernel::kMayShareX && p.split_k == 1 && p.m > Kernel::kTokens && column_tiles % 2 == 0 ? 2 : 1;
  // Rows that a box has beyond M are slower than rows of x: there are no more of them than the swizzle needs.
  g.x_rows = min(Kernel::kTokens, divide_up(p.m, 8) * 8);
  g.x_box_rows = Kernel::kStepBlocks == 1 ? g.x_rows / g.x_ctas : g.x_rows;
  g.x_box_blocks = p.k % Layout::kBlockK == 0 ? max(1, Kernel::kStepBlocks / g.x_ctas) : 1;
  g.items = Kernel::kWarpgroupsN * (g.x_rows / 8);
  g.items_per_cta = divide_up(g.items, p.split_k);
  g.item_multiplier = divide_up(1 << 16, g.items_per_cta);
  static_assert(Kernel::kItems <= 64);  // so that it is exact
  g.token_tiles = divide_up(p.m, Kernel::kTokens);
  g.tiles = column_tiles / g.x_ctas * g.token_tiles;
  int const band_tokens = min(g.token_tiles, Kernel::kBandTokens);
  g.full_bands = g.token_tiles / band_tokens;
  g.band_tokens = cutlass::FastDivmod(band_tokens);
  g.last_band_tokens = cutlass::FastDivmod(max(1, g.token_tiles % band_tokens));
  g.band_tiles = cutlass::FastDivmod(band_tokens * (column_tiles / g.x_ctas));
  g.scale_rows = Kernel::kStepK / g.group_k;
  g.scale_box_rows = Kernel::kStepK % p.group_size == 0 ? Kernel::kStepK / p.group_size : 1;
  cudaError_t error = map_blocks<Element>(&g.x_map, p.x, p.m, p.k, p.ldx, g.x_box_rows, g.x_box_blocks);
  if (error != cudaSuccess) return error;
  int const stripe_units = p.k_padded / Layout::kBlockK * (Layout::kBlockBytes / kTensorMapUnitBytes);
  error = map_units(&g.weight_map, p.weight, p.n_padded / 64, stripe_units, Kernel::kWarpgroupsN,
                    Kernel::kStepBlocks * Layout::kBlockBytes / kTensorMapUnitBytes);
  if (error != cudaSuccess) return error;
  auto const map_groups = [&](CUtensorMap* map, void const* rows) {
    return map_rows<Element>(map, rows, g.groups, p.n_padded, p.ld_scales, g.scale_box_rows, Kernel::kColumns);
  };
  if (Kernel::kHasScales) error = map_groups(&g.scale_map, p.scales);
  if (error != cudaSuccess) return error;
  if (Kernel::kHasZeros) error = map_groups(&g.zero_map, p.zeros);
  if (error != cudaSuccess) return error;
  static std::atomic<uint64_t> devices_done{0};
  int const clusters = Kernel::kMayLoop && Kernel::in_chunks(p) ? min(g.tiles, max(1, p.clusters / g.x_ctas)) : g.tiles;
  int const cluster_ctas = p.split_k * g.x_ctas;
  return launch_clusters(gemm_sm90_kernel<Kernel>, devices_done, g, dim3(clusters, cluster_ctas), dim3(1, cluster_ctas),
                         Kernel::kThreads, Kernel::Smem::bytes(g), stream);
}

}  // namespace weightonly
