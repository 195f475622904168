// GEMM on Hopper's tensor cores for any number of tokens: wgmma with the weights as its A operand, out of registers.
//
// Operands are swapped: y^T = w^T x^T, columns of w are the M of the MMA and tokens its N, so that one weight is converted
// once for up to 256 tokens. One producer warp brings x by TMA into a ring of 64-k blocks; each consumer warp streams its
// own weights (cutlass_ext/weight_ring.h), converts a block into registers while the tensor cores work on the block before
// it, and multiplies.
//
//   producer    x  | block 0 | block 1 | ...         full / empty barriers, kStages blocks
//   consumers   w  | LDS, convert 1 | LDS, convert 2 | ...
//               mma          | wgmma 0        | wgmma 1 | ...
//
// For few tokens the CTAs of a cluster share K. Their sums meet in shared memory at the CTA that owns them, each in a place
// of its own, and are added in the order of the CTAs.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ext/epilogue.h"
#include "cutlass_ext/scaled_fragment.h"
#include "cutlass_ext/weight_ring.h"
#include "kernels/launch.h"
#include "kernels/registry.h"
#include "kernels/tensor_map.h"

namespace weightonly {

struct GemmSm90Params : GemmParams {
  CUtensorMap x_map;
  int32_t pieces;  // of K, 128 each
  int32_t pieces_per_cta;
  int32_t groups_per_piece;  // 1, 2 or 4
  int32_t group_k;  // k of a piece with scales of their own
  int32_t items_per_cta;  // of the sums that a cluster's CTAs exchange
};

/// Config: Element, Weight, kScaleMode, kTokens (32 to 256), kWarpgroups (of 64 columns), kDepth (pieces of weights), kStages
/// (steps of x).
template <class Config>
struct GemmSm90 {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr ScaleMode kScaleMode = Config::kScaleMode;
  static constexpr int kTokens = Config::kTokens;
  static constexpr int kWarpgroups = Config::kWarpgroups;
  static constexpr int kDepth = Config::kDepth;
  static constexpr int kStages = Config::kStages;
  // Slots have room for four groups; how many a piece has is only known at run time.
  using Ring = WeightRing<Element, Weight, kScaleMode, 1, 4, 2>;
  using Fragment = ScaledFragment<Element, Weight, kScaleMode>;

  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kConsumers = 32 * kConsumerWarps;
  static constexpr int kThreads = kConsumers + 128;  // a whole warpgroup, so that its registers can go to the others
  // Registers of a thread: the producers give theirs to the consumers, who get no more than there are at launch.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : kWarpgroups == 3 ? 160 : 112;
  static constexpr int kColumns = 64 * kWarpgroups;
  static constexpr int kBlockBytes = kTokens * Layout::kBlockK * int(sizeof(Element));  // of x
  // Blocks that are converted, waited for and multiplied together: the fewer tokens, the more each of these steps weighs.
  static constexpr int kStepBlocks = kTokens * kWarpgroups <= 128 ? 2 : 1;
  static constexpr int kStepBytes = kStepBlocks * kBlockBytes;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr bool kMaySplit = kTokens <= 128;  // more have no room for the sums of other CTAs

  using MmaOp = decltype(cute::GMMA::rs_op_selector<Element, Element, float,
                                                    cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>());
  using TiledMma = decltype(cute::make_tiled_mma(MmaOp{}));
  using SmemLayoutX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kTokens>, cute::_64, cute::Int<kStages * kStepBlocks>>{}));

  /// Barriers, x blocks (1024-byte aligned, for the swizzle), the weights' ring, with split-K the sums of the cluster's
  /// CTAs. When x has been used its place takes y.
  struct Smem {
    static constexpr int kBarrierBytes = 1024;
    static constexpr int kXBytes = kStages * kStepBytes;
    static constexpr int kRingBytes = kConsumerWarps * kDepth * Ring::kSlotBytes;
    static constexpr int kYRowElements = 64 + 8;
    static constexpr int kYBytes = kWarpgroups * kTokens * kYRowElements * int(sizeof(Element));
    static_assert(kYBytes <= kXBytes, "y takes the place of x");
    static_assert(8 * (2 * kStages + 1) <= kBarrierBytes);

    char* base;
    static int bytes(GemmSm90Params const& p) {
      int const parts = p.split_k == 1 ? 0 : p.split_k * p.items_per_cta * 128 * int(sizeof(float4));
      return 1024 + kBarrierBytes + kXBytes + kRingBytes + parts;  // 1024: for the alignment
    }
    CUTLASS_DEVICE uint64_t* full() const { return reinterpret_cast<uint64_t*>(base); }
    CUTLASS_DEVICE uint64_t* empty() const { return full() + kStages; }
    CUTLASS_DEVICE uint64_t& parts_barrier() const { return full()[2 * kStages]; }
    CUTLASS_DEVICE Element* x() const { return reinterpret_cast<Element*>(base + kBarrierBytes); }
    CUTLASS_DEVICE char* ring() const { return base + kBarrierBytes + kXBytes; }
    CUTLASS_DEVICE float4* parts() const { return reinterpret_cast<float4*>(ring() + kRingBytes); }
  };

  // With split-K an item is the sums of eight tokens and one warpgroup's columns: one float4 a thread.
  static constexpr int kItems = kWarpgroups * kTokenTiles;

  struct Place {
    int rank;
    int first_piece, end_piece;
    int first_column, first_token;
    CUTLASS_DEVICE Place(GemmSm90Params const& p) {
      rank = blockIdx.x;
      first_piece = rank * p.pieces_per_cta;
      end_piece = min(p.pieces, first_piece + p.pieces_per_cta);
      first_column = blockIdx.y * kColumns;
      first_token = blockIdx.z * kTokens;
    }
  };

  CUTLASS_DEVICE static void produce(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    cudaGridDependencySynchronize();
    int const steps = (place.end_piece - place.first_piece) * (Ring::kPieceBlocks / kStepBlocks);
    int stage = 0, phase = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < steps; ++i) {
      cute::wait_barrier(smem.empty()[stage], phase ^ 1);
      cute::set_barrier_transaction_bytes(smem.full()[stage], kStepBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kStepBlocks; ++block) {
        cute::SM90_TMA_LOAD_2D::copy(
            &p.x_map, &smem.full()[stage], uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
            reinterpret_cast<char*>(smem.x()) + stage * kStepBytes + block * kBlockBytes,
            (place.first_piece * Ring::kPieceBlocks + i * kStepBlocks + block) * Layout::kBlockK, place.first_token);
      }
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

  /// The weights of one consumer warp.
  struct Stream {
    GemmSm90Params const& p;
    typename Ring::Source source;
    int lane, piece, end_piece;

    CUTLASS_DEVICE Stream(GemmSm90Params const& p, Place const& place, int tile, int lane)
        : p(p), source(p, tile, lane), lane(lane), piece(place.first_piece), end_piece(place.end_piece) {}

    CUTLASS_DEVICE void prefetch() const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        if (piece + i < end_piece) Ring::prefetch(source, p, piece + i, lane);
      }
    }

    CUTLASS_DEVICE void fetch_next(uint32_t slot) {
      __syncwarp();  // all lanes have read what was there
      if (piece < end_piece) {
        Ring::fetch_weights(slot, source, p, piece, lane);
        if constexpr (Ring::kHasScales) {
          Ring::fetch_scales(slot, source, p, piece, p.groups_per_piece, p.group_k, lane);
        }
        ++piece;
      }
      commit_copies();
    }
  };

  /// A operands of one step, from block `first` of the piece on.
  CUTLASS_DEVICE static void convert(uint32_t slot, uint32_t scale_offset, int first, int groups, int lane,
                                     uint32_t* a) {
    CUTLASS_PRAGMA_UNROLL
    for (int block = first; block < first + kStepBlocks; ++block) {
      uint32_t words[1][Layout::kLaneWords];
      Ring::read_block(words, slot, block, lane);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {  // of 32 k: no group is smaller
        uint32_t scale[1] = {0}, zero[1] = {0};
        if constexpr (Ring::kHasScales) {
          int const row = (2 * block + half) * groups / 4;
          uint32_t const scales = slot + scale_offset + row * Ring::kScaleRowBytes;
          read_shared(scale, scales);
          if constexpr (Ring::kHasZeros) read_shared(zero, scales + 4 * Ring::kScaleRowBytes);
        }
        ScalePair<Element, kScaleMode> const scales(scale[0], zero[0]);
        CUTLASS_PRAGMA_UNROLL
        for (int k16 = 2 * half; k16 < 2 * half + 2; ++k16) {
          Fragment::load(words[0] + k16 * Fragment::kWords, scales, a + 4 * (4 * (block - first) + k16));
        }
      }
    }
  }

  CUTLASS_DEVICE static void consume(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    using namespace cute;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int const tile = min(place.first_column / 16 + warp, p.n_padded / 16 - 1);  // beyond N: some tile, not stored
    Stream stream(p, place, tile, lane);
    if (p.overlap) stream.prefetch();
    cudaGridDependencySynchronize();
    uint32_t const first_slot = cast_smem_ptr_to_uint(smem.ring()) + warp * kDepth * Ring::kSlotBytes;
    uint32_t const last_slot = first_slot + (kDepth - 1) * Ring::kSlotBytes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t slot = first_slot; slot <= last_slot; slot += Ring::kSlotBytes) stream.fetch_next(slot);
    cudaTriggerProgrammaticLaunchCompletion();

    TiledMma mma;
    auto const thread_mma = mma.get_slice(threadIdx.x % 128);
    Tensor const s_x = make_tensor(make_smem_ptr(smem.x()), SmemLayoutX{});  // (token, k, stage)
    Tensor const x_fragments = thread_mma.make_fragment_B(thread_mma.partition_B(s_x));  // (MMA, 1, k16, stage)
    Tensor sums = partition_fragment_C(mma, Shape<_64, Int<kTokens>>{});  // (MMA, 1, 1)
    Tensor w0 = make_tensor<Element>(partition_shape_A(mma, Shape<_64, Int<64 * kStepBlocks>>{}));  // (MMA, 1, k16)
    Tensor w1 = make_fragment_like(w0);  // (MMA, 1, k16)
    clear(sums);

    int stage = 0, phase = 0, previous_stage = 0;
    bool is_first = true;
    uint32_t slot = first_slot;
    uint32_t const scale_offset = Ring::scale_offset(tile, lane);
    auto const step = [&](auto& w, int first_block) {
      convert(slot, scale_offset, first_block, p.groups_per_piece, lane, reinterpret_cast<uint32_t*>(&w(0)));
      wait_barrier(smem.full()[stage], phase);
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k16 = 0; k16 < 4 * kStepBlocks; ++k16) {
        gemm(mma, w(_, _, k16), x_fragments(_, _, k16 % 4, stage * kStepBlocks + k16 / 4), sums);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();  // the step before has used its x
      warpgroup_fence_operand(sums);
      if (!is_first && lane == 0) arrive(smem.empty()[previous_stage]);
      is_first = false;
      previous_stage = stage;
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    };
    auto const next_piece = [&] {
      stream.fetch_next(slot);
      slot = slot == last_slot ? first_slot : slot + Ring::kSlotBytes;
    };
    int piece = place.first_piece;
    CUTLASS_PRAGMA_NO_UNROLL
    while (piece < place.end_piece) {
      wait_for_copies<kDepth - 1>();
      __syncwarp();  // scales were copied by other lanes
      step(w0, 0);
      if constexpr (kStepBlocks == 1) {
        step(w1, 1);
        next_piece();
        ++piece;
      } else {
        next_piece();
        if (++piece == place.end_piece) break;
        wait_for_copies<kDepth - 1>();
        __syncwarp();
        step(w1, 0);
        next_piece();
        ++piece;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    if (kMaySplit && p.split_k > 1) {
      store_shared(p, place, smem, sums);
    } else {
      store(p, place, smem, sums);
    }
  }

  CUTLASS_DEVICE static void arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cute::cast_smem_ptr_to_uint(&barrier)) : "memory");
  }

  /// sums(4 i + 2 h + e): column h of the lane's two, token 8 i + 2 t + e.
  template <class SumsTensor>
  CUTLASS_DEVICE static void store(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                   SumsTensor const& sums) {
    int const warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const g = lane / 4, t = lane % 4;
    int const first_column = place.first_column + 64 * warpgroup;
    int const column = 8 * g + 2 * warp;  // of the warpgroup
    Element* const tile = smem.x() + warpgroup * kTokens * Smem::kYRowElements;
    ColumnEpilogue const epilogue[2] = {ColumnEpilogue::load<Element>(p, first_column + column, !Ring::kHasScales),
                                        ColumnEpilogue::load<Element>(p, first_column + column + 1, !Ring::kHasScales)};
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");  // nobody uses x any more
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokenTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        alignas(4) Element pair[2];
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          pair[h] = Element(activate(epilogue[h].affine(sums(4 * i + 2 * h + e)), p.activation));
        }
        *reinterpret_cast<uint32_t*>(tile + (8 * i + 2 * t + e) * Smem::kYRowElements + column) =
            *reinterpret_cast<uint32_t const*>(pair);
      }
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
    bool const is_vector = vector_stores(p);
    int const chunk = threadIdx.x % 8 * 8;
    int const n = first_column + chunk;
    for (int row = threadIdx.x % 128 / 8; row < kTokens; row += 16) {
      int64_t const token = place.first_token + row;
      if (token >= p.m || n >= p.n) break;
      Element const* const source = tile + row * Smem::kYRowElements + chunk;
      Element* const y = static_cast<Element*>(p.y) + token * p.ldy + n;
      if (is_vector) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4 const*>(source);
      } else {
        for (int j = 0; j < 8 && n + j < p.n; ++j) y[j] = source[j];
      }
    }
  }

  /// The same with the sums of the other CTAs of the cluster.
  template <class SumsTensor>
  CUTLASS_DEVICE static void store_shared(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                          SumsTensor const& sums) {
    int const warpgroup = threadIdx.x / 128, position = threadIdx.x % 128;
    int const per_cta = p.items_per_cta;
    uint32_t const parts = cute::cast_smem_ptr_to_uint(smem.parts());
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.parts_barrier());
    cute::cluster_wait();  // all CTAs have their barriers
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokenTiles; ++i) {
      int const item = warpgroup * kTokenTiles + i;
      int const owner = item / per_cta;
      int const place_there = (place.rank * per_cta + item - owner * per_cta) * 128 + position;
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                       cute::set_block_rank(parts + place_there * int(sizeof(float4)), owner)),
                   "f"(sums(4 * i)), "f"(sums(4 * i + 1)), "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3)),
                   "r"(cute::set_block_rank(barrier, owner))
                   : "memory");
    }
    cute::wait_barrier(smem.parts_barrier(), 0);
    asm volatile("" ::: "memory");  // what follows is read after it
    int const warp = position / 32, g = position % 32 / 4, t = position % 4;
    int const first_item = place.rank * per_cta;
    int const owned = max(0, min(per_cta, kItems - first_item));
    for (int i = warpgroup; i < owned; i += kWarpgroups) {
      float4 sum = smem.parts()[i * 128 + position];
      for (int rank = 1; rank < p.split_k; ++rank) {
        float4 const part = smem.parts()[(rank * per_cta + i) * 128 + position];
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
      int const item = first_item + i;
      int const column = place.first_column + item / kTokenTiles * 64 + 8 * g + 2 * warp;
      float const values[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};  // [column][token]
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        if (column + h >= p.n) continue;
        auto const epilogue = ColumnEpilogue::load<Element>(p, column + h, !Ring::kHasScales);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          int64_t const token = place.first_token + item % kTokenTiles * 8 + 2 * t + e;
          if (token < p.m) {
            static_cast<Element*>(p.y)[token * p.ldy + column + h] =
                Element(epilogue.apply(values[h][e], p.activation));
          }
        }
      }
    }
  }

  CUTLASS_DEVICE static void run(GemmSm90Params const& p, char* smem_base) {
    // The swizzle counts from multiples of 1024.
    uint32_t const address = cute::cast_smem_ptr_to_uint(smem_base);
    Smem const smem{smem_base + ((address + 1023) / 1024 * 1024 - address)};
    Place const place(p);
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.x_map));
      for (int i = 0; i < kStages; ++i) {
        cute::initialize_barrier(smem.full()[i], 1);
        cute::initialize_barrier(smem.empty()[i], kConsumerWarps);
      }
      if (p.split_k > 1) {
        int const owned = max(0, min(p.items_per_cta, kItems - place.rank * p.items_per_cta));
        cute::initialize_barrier(smem.parts_barrier(), 1);
        cute::set_barrier_transaction_bytes(smem.parts_barrier(), p.split_k * owned * 128 * int(sizeof(float4)));
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (p.split_k > 1) cute::cluster_arrive_relaxed();
    if (threadIdx.x < kConsumers) {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(p, place, smem);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(p, place, smem);
      __syncwarp();
      if (p.split_k > 1) cute::cluster_wait();
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) gemm_sm90_kernel(__grid_constant__ GemmSm90Params const p) {
  extern __shared__ __align__(128) char smem_bytes[];
  Kernel::run(p, smem_bytes);
}

template <class Config>
cudaError_t launch_gemm_sm90(GemmParams const& p, cudaStream_t stream) {
  using Kernel = GemmSm90<Config>;
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = gemm_sm90_kernel<Kernel>;
  if (cudaError_t const error = allow_shared_memory(kernel, kMaxSmemBytesSm90, devices_done); error != cudaSuccess) {
    return error;
  }
  if (p.split_k > 1 && !Kernel::kMaySplit) return cudaErrorInvalidValue;
  GemmSm90Params g;
  static_cast<GemmParams&>(g) = p;
  constexpr bool kIsBf16 = cutlass::platform::is_same<typename Config::Element, cutlass::bfloat16_t>::value;
  if (cudaError_t const error = make_tensor_map(&g.x_map, p.x, kIsBf16, p.m, p.k, p.ldx, Kernel::kTokens);
      error != cudaSuccess) {
    return error;
  }
  g.pieces = divide_up(p.k_padded, Kernel::Ring::kPieceK);
  g.pieces_per_cta = divide_up(g.pieces, p.split_k);
  g.items_per_cta = divide_up(Kernel::kItems, p.split_k);
  g.groups_per_piece = p.group_size % 128 == 0 ? 1 : p.group_size % 64 == 0 ? 2 : 4;
  g.group_k = Kernel::Ring::kPieceK / g.groups_per_piece;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = p.split_k;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.split_k, divide_up(p.n_padded, Kernel::kColumns), divide_up(p.m, Kernel::kTokens));
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = Kernel::Smem::bytes(g);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.overlap ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, g);
}

}  // namespace weightonly
