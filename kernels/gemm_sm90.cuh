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
// For few tokens the CTAs of a cluster share K, and so do the warpgroups of a CTA (gemm_sm90_epilogue.h).
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ext/read_shared.h"
#include "cutlass_ext/scaled_fragment.h"
#include "kernels/gemm_sm90_epilogue.h"
#include "kernels/launch_sm90.h"
#include "kernels/registry.h"
#include "kernels/tensor_map.h"

namespace weightonly {

/// Config: Element, Weight, kScaleMode, kTokens (16 to 256), kWarpgroupsN (of 64 columns), kWarpgroupsK (which share a step's
/// k), kStages (steps in shared memory).
template <class Config>
struct GemmSm90 {
  using Epilogue = GemmSm90Epilogue<GemmSm90>;
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
  static constexpr bool kMaySplit = kTokens * kColumns <= 128 * 128;  // more have no room for the sums of other CTAs
  static_assert(kMaySplit || kWarpgroupsK == 1);

  // A scale multiplies the sums of its group, of 128 at least, where they are fewer than the weights.
  static constexpr bool kMayScaleSums = kHasScales && kTokens <= 32;

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
  using SmemLayoutX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kTokens>, cute::_64, cute::Int<kStages * kStepBlocks>>{}));

  using Table = PairTable<(kTokens <= 32)>;  // more x leaves no room for wide rows
  static constexpr int kTableBytes = kIsCode<Weight> ? Table::kBytes : 0;

  /// Barriers, then for each stage x (1024-byte aligned, for the swizzle), the weights, their scales and zero points; of codes the table; with
  /// split-K the sums of the cluster's CTAs. When x has been used its place takes y.
  struct Smem {
    static constexpr int kBarrierBytes = 1024;
    static constexpr int kYRowElements = 64 + 8;
    static constexpr int kYBytes = kWarpgroupsN * kTokens * kYRowElements * int(sizeof(Element));
    static_assert(kYBytes <= kStages * (kXBytes + kWeightBytes), "y takes the place of x and the weights");
    static_assert(8 * (2 * kStages + 1) <= kBarrierBytes);

    char* base;
    static int bytes(GemmSm90Params const& p) {
      int const parts = p.parts == 1 ? 0 : p.parts * p.items_per_cta * 128 * int(sizeof(float4));
      // 1024: for the alignment
      return 1024 + kBarrierBytes + kStages * (kXBytes + kWeightBytes + kScaleBytes) + kTableBytes + parts;
    }
    CUTLASS_DEVICE uint64_t* full() const { return reinterpret_cast<uint64_t*>(base); }
    CUTLASS_DEVICE uint64_t* empty() const { return full() + kStages; }
    CUTLASS_DEVICE uint64_t& parts_barrier() const { return full()[2 * kStages]; }
    CUTLASS_DEVICE char* x() const { return base + kBarrierBytes; }
    CUTLASS_DEVICE char* weights() const { return x() + kStages * kXBytes; }
    CUTLASS_DEVICE char* scales() const { return weights() + kStages * kWeightBytes; }
    CUTLASS_DEVICE char* pairs() const { return scales() + kStages * kScaleBytes; }
    CUTLASS_DEVICE float4* parts() const { return reinterpret_cast<float4*>(pairs() + kTableBytes); }
  };

  // Where K is shared an item is the sums of eight tokens and one warpgroup's columns: one float4 a thread. Items are counted
  // with the columns first: each warpgroup finishes some.
  static constexpr int kItems = kWarpgroupsN * kTokenTiles;

  struct Place {
    int rank;
    int first_step, end_step;
    int first_column, first_token;
    CUTLASS_DEVICE Place(GemmSm90Params const& p) {
      rank = blockIdx.x;
      first_step = rank * p.steps_per_cta;
      end_step = min(p.steps, first_step + p.steps_per_cta);
      int column_tile = blockIdx.y, token_tile = blockIdx.z;
      if (p.band_tokens > 1) {
        // Bands of a few token tiles, in each of them the tokens first: CTAs that run at a time share weights as well as x.
        int const tile = blockIdx.z * gridDim.y + blockIdx.y;
        int const band = tile / (p.band_tokens * gridDim.y);
        int const in_band = tile - band * p.band_tokens * gridDim.y;
        int const height = min(p.band_tokens, int(gridDim.z) - band * p.band_tokens);
        column_tile = in_band / height;
        token_tile = band * p.band_tokens + in_band % height;
      }
      first_column = column_tile * kColumns;
      first_token = token_tile * kTokens;
    }
  };

  /// Calls copy(step, stage, full barrier) for each step, as soon as its stage is empty, having announced `bytes`.
  template <class Copy>
  CUTLASS_DEVICE static void produce(Place const& place, Smem const& smem, int bytes, Copy const& copy) {
    int stage = 0, phase = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = place.first_step; step < place.end_step; ++step) {
      cute::wait_barrier(smem.empty()[stage], phase ^ 1);
      cute::set_barrier_transaction_bytes(smem.full()[stage], bytes);
      copy(step, stage, &smem.full()[stage]);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

  CUTLASS_DEVICE static void produce_weights(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    using Load = cute::SM90_TMA_LOAD_3D;
    constexpr int kUnits = kStepBlocks * Layout::kBlockBytes / kTensorMapUnitBytes;
    int const stripe = place.first_column / 64;
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.weight_map));
    if (p.overlap) {
      // Into the L2 and nothing nearer: allowed before the kernels in front of this one have ended, even if one of them
      // writes these bytes.
      for (int step = place.first_step; step < min(place.end_step, place.first_step + kStages); ++step) {
        Load::PREFETCH::copy(&p.weight_map, 0, step * kUnits, stripe);
      }
    }
    cudaGridDependencySynchronize();
    produce(place, smem, kWeightBytes, [&](int step, int stage, uint64_t* full) {
      Load::copy(&p.weight_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                 smem.weights() + stage * kWeightBytes, 0, step * kUnits, stripe);
    });
  }

  CUTLASS_DEVICE static void produce_x(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.x_map));
    cudaGridDependencySynchronize();
    produce(place, smem, kXBytes, [&](int step, int stage, uint64_t* full) {
      for (int block = 0; block < kStepBlocks; block += p.x_box_blocks) {
        int const k_block = step * kStepBlocks + block;
        cute::SM90_TMA_LOAD_3D::copy(&p.x_map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                                     smem.x() + stage * kXBytes + block * kXBlockBytes,
                                     p.x_box_blocks == 1 ? k_block * Layout::kBlockK : 0, place.first_token,
                                     p.x_box_blocks == 1 ? 0 : k_block);
      }
    });
  }

  /// Scales, or zero points.
  CUTLASS_DEVICE static void produce_scales(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                            CUtensorMap const& map, int offset_bytes) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&map));
    cudaGridDependencySynchronize();
    int const rows = kStepK / p.group_k;
    produce(place, smem, rows * kScaleRowBytes, [&](int step, int stage, uint64_t* full) {
      for (int row = 0; row < rows; row += p.scale_box_rows) {
        int const k = step * kStepK + row * p.group_k;
        // Groups beyond K, out of the map's bounds, are zero: weights dequantized with another group's scale might overflow,
        // and Inf times 0 is NaN.
        cute::SM90_TMA_LOAD_2D::copy(&map, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                     smem.scales() + stage * kScaleBytes + offset_bytes + row * kScaleRowBytes,
                                     place.first_column, k < p.k ? p.group.of(k) : p.groups);
      }
    });
  }

  /// What a consumer lane reads of the steps, one stage after another.
  struct Reader {
    uint32_t weights, scales, barriers;  // of stage 0
    uint32_t block_bytes;  // of scales, from a block to the next
    Table table;  // of codes
    int first_block;  // of a step
    int stage = 0, phase = 0;

    CUTLASS_DEVICE Reader(GemmSm90Params const& p, Smem const& smem)
        : table(cute::cast_smem_ptr_to_uint(smem.pairs()), threadIdx.x % 32) {
      // Broadcast: the compiler then knows it to be the same in all lanes, and keeps the descriptors of x, which depend on
      // it, in uniform registers.
      int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
      int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
      int const warpgroup_n = warpgroup % kWarpgroupsN;
      first_block = warpgroup / kWarpgroupsN * kWarpgroupBlocks;
      weights = cute::cast_smem_ptr_to_uint(smem.weights()) +
                (warpgroup_n * kStepBlocks + first_block) * Layout::kBlockBytes + warp * Layout::kPieceBytes +
                lane * 16;
      scales = cute::cast_smem_ptr_to_uint(smem.scales()) +
               (warpgroup_n * 64 + lane / 4 * 8 + warp * 2) * int(sizeof(Element)) +
               first_block * Layout::kBlockK / p.group_k * kScaleRowBytes;
      block_bytes = p.group_k <= 64 ? 64 / p.group_k * kScaleRowBytes : 0;

      barriers = cute::cast_smem_ptr_to_uint(smem.full());
      // Without this the compiler computes them anew in every step.
      asm volatile("" : "+r"(weights), "+r"(scales), "+r"(barriers));
    }

    CUTLASS_DEVICE void wait() const {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "again:\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
          "@!done bra again;\n"
          "}\n" ::"r"(barriers + 8 * stage),
          "r"(phase)
          : "memory");
    }

    /// Gives a stage back to the producers.
    CUTLASS_DEVICE void release(int used_stage) const {
      if (threadIdx.x % 32 == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + 8 * (kStages + used_stage))
                     : "memory");
      }
    }

    CUTLASS_DEVICE void advance() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }

    CUTLASS_DEVICE void read_words(uint32_t (&words)[Layout::kLaneWords], int block) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Layout::kLoads; ++i) {
        read_shared(reinterpret_cast<uint32_t (&)[4]>(words[4 * i]),
                    weights + stage * kWeightBytes + block * Layout::kBlockBytes + i * 512);
      }
    }

    /// The lane's two scales, and zero points, at an offset into those of this stage.
    CUTLASS_DEVICE void read_scales(uint32_t (&scale)[1], uint32_t (&zero)[1], uint32_t offset) const {
      if constexpr (kHasScales) read_shared(scale, scales + stage * kScaleBytes + offset);
      if constexpr (kHasZeros)
        read_shared(zero, scales + stage * kScaleBytes + offset + kMaxScaleRows * kScaleRowBytes);
    }
  };

  /// The scales, and zero points, of a lane's columns for the group that starts at an offset into those of the stage.
  CUTLASS_DEVICE static ScalePair<Element, kScaleMode> scale_pair(Reader const& reader, uint32_t offset) {
    uint32_t scale[1] = {0}, zero[1] = {0};
    reader.read_scales(scale, zero, offset);
    return ScalePair<Element, kScaleMode>(scale[0], zero[0]);
  }

  /// sums += a block of w x, in place of what they were if kIsFirst. When it returns the tensor cores have read all blocks
  /// but this one. kGroups: of the block; pairs(group): their scales; kScales: whether weights are multiplied by them.
  template <int kGroups, bool kScales, bool kIsFirst, class Fragment, class XFragments, class Sums, class Pairs>
  CUTLASS_DEVICE static void multiply_block(Reader const& reader, int block, Fragment& w, XFragments const& x,
                                            Sums& sums, Pairs const& pairs) {
    using namespace cute;
    using Scaled = ScaledFragment<Element, Weight, kScaleMode, kScales>;
    TiledMma mma;
    uint32_t words[Layout::kLaneWords];
    reader.read_words(words, block);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      auto const pair = pairs(group);
      CUTLASS_PRAGMA_UNROLL
      for (int k16 = 4 / kGroups * group; k16 < 4 / kGroups * (group + 1); ++k16) {
        Scaled::load(words + k16 * Scaled::kWords, reader.table, pair, reinterpret_cast<uint32_t*>(&w(0)) + 4 * k16);
      }
    }
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k16 = 0; k16 < 4; ++k16) {
      mma.accumulate_ = kIsFirst && k16 == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      gemm(mma, w(_, _, k16), x(_, _, k16, reader.stage * kStepBlocks + reader.first_block + block), sums);
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();  // the block before has been multiplied
    warpgroup_fence_operand(sums);
  }

  /// sums = w x. While one block is converted, the tensor cores read the one before it. kGroups: of a block, 1 or 2.
  template <int kGroups, class XFragments, class Sums>
  CUTLASS_DEVICE static void multiply(Place const& place, Reader& reader, XFragments const& x, Sums& sums) {
    using namespace cute;
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, Shape<_64, _64>{}));  // (MMA, 1, k16)
    Tensor w1 = make_fragment_like(w0);  // (MMA, 1, k16)
    auto const block = [&](auto& w, int block) {
      multiply_block<kGroups, true, false>(reader, block, w, x, sums, [&](int group) {
        return scale_pair(reader, block * reader.block_bytes + group * kScaleRowBytes);
      });
    };
    int previous_stage = 0;
    bool is_first = true;
    auto const step = [&](auto& w, auto& w_second) {
      reader.wait();
      block(w, 0);
      if (!is_first) reader.release(previous_stage);
      if constexpr (kWarpgroupBlocks == 2) block(w_second, 1);
      is_first = false;
      previous_stage = reader.stage;
      reader.advance();
    };
    clear(sums);
    int i = place.first_step;
    CUTLASS_PRAGMA_NO_UNROLL
    while (i < place.end_step) {
      step(w0, w1);
      ++i;
      if constexpr (kWarpgroupBlocks == 1) {
        if (i == place.end_step) break;
        step(w1, w0);
        ++i;
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
  }

  /// sums += scales * part, the columns' sums of one group.
  template <class Sums, class Part>
  CUTLASS_DEVICE static void add_scaled(Sums& sums, float const (&scales)[2], Part& part) {
    cute::warpgroup_fence_operand(part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums); ++i) sums(i) += scales[i / 2 % 2] * part(i);
  }

  CUTLASS_DEVICE static void set_scales(float (&scales)[2], ScalePair<Element, kScaleMode> const& pair) {
    for (int h = 0; h < 2; ++h) scales[h] = float(Element::bitcast(uint16_t(pair.scale[h])));
  }

  /// The same where all k of a warpgroup's step have one scale: it multiplies the sums of the step, while the tensor cores work
  /// on the next one. (With groups of one block, and sums of blocks, nvcc 13.0 makes every wgmma wait for the one before.)
  template <class XFragments, class Sums>
  CUTLASS_DEVICE static void multiply_scaling_sums(Place const& place, Reader& reader, XFragments const& x,
                                                   Sums& sums) {
    using namespace cute;
    static_assert(kWarpgroupBlocks == 2);
    Tensor w0 = make_tensor<Element>(partition_shape_A(TiledMma{}, Shape<_64, _64>{}));  // (MMA, 1, k16)
    Tensor w1 = make_fragment_like(w0);  // (MMA, 1, k16)
    Tensor even = make_fragment_like(sums), odd = make_fragment_like(sums);  // (MMA, 1, 1), of a step
    float scales[2] = {0.f, 0.f};  // of the step before
    clear(sums);
    clear(odd);
    int previous_stage = 0;
    auto const step = [&](auto& mine, auto& before, bool is_first) {
      reader.wait();
      auto const pair = scale_pair(reader, 0);
      auto const same = [&](int) { return pair; };
      multiply_block<1, false, true>(reader, 0, w0, x, mine, same);
      if (!is_first) reader.release(previous_stage);
      add_scaled(sums, scales, before);
      set_scales(scales, pair);
      multiply_block<1, false, false>(reader, 1, w1, x, mine, same);
      previous_stage = reader.stage;
      reader.advance();
    };
    int i = place.first_step;
    CUTLASS_PRAGMA_NO_UNROLL
    while (true) {
      step(even, odd, i == place.first_step);
      if (++i == place.end_step) {
        warpgroup_wait<0>();
        add_scaled(sums, scales, even);
        break;
      }
      step(odd, even, false);
      if (++i == place.end_step) {
        warpgroup_wait<0>();
        add_scaled(sums, scales, odd);
        break;
      }
    }
  }

  CUTLASS_DEVICE static void consume(GemmSm90Params const& p, Place const& place, Smem const& smem) {
    using namespace cute;
    TiledMma mma;
    auto const thread_mma = mma.get_slice(threadIdx.x % 128);
    Tensor const s_x =
        make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem.x())), SmemLayoutX{});  // (token, k, block)
    Tensor const x = thread_mma.make_fragment_B(thread_mma.partition_B(s_x));  // (MMA, 1, k16, block)
    Tensor sums = partition_fragment_C(mma, Shape<_64, Int<kTokens>>{});  // (MMA, 1, 1)
    Reader reader(p, smem);
    if constexpr (kIsCode<Weight>) {
      Table::template fill<Element>(smem.pairs(), p.zeros, kConsumers);
      asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
    }
    if (kHasScales && p.group_k == 32) {
      multiply<2>(place, reader, x, sums);
    } else if constexpr (kMayScaleSums) {
      if (p.group_k > 64) {
        multiply_scaling_sums(place, reader, x, sums);
      } else {
        multiply<1>(place, reader, x, sums);
      }
    } else {
      multiply<1>(place, reader, x, sums);
    }
    Epilogue::store(p, place, smem, sums);
  }

  CUTLASS_DEVICE static void run(GemmSm90Params const& p, char* smem_base) {
    // The swizzle counts from multiples of 1024.
    uint32_t const address = cute::cast_smem_ptr_to_uint(smem_base);
    Smem const smem{smem_base + ((address + 1023) / 1024 * 1024 - address)};
    Place const place(p);
    static_assert(kStages < 32);
    if (int const i = int(threadIdx.x) - kConsumers; i >= 0 && i <= kStages) {
      if (i < kStages) {
        cute::initialize_barrier(smem.full()[i], kProducers);
        cute::initialize_barrier(smem.empty()[i], kConsumerWarps);
      } else if (p.split_k > 1) {
        // Sums come from the warpgroups of other CTAs.
        int const owned = max(0, min(p.items_per_cta, kItems - place.rank * p.items_per_cta));
        cute::initialize_barrier(smem.parts_barrier(), 1);
        cute::set_barrier_transaction_bytes(smem.parts_barrier(),
                                            (p.parts - kWarpgroupsK) * owned * 128 * int(sizeof(float4)));
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (p.split_k > 1) cute::cluster_arrive_relaxed();
    if (threadIdx.x < kConsumers) {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      cudaGridDependencySynchronize();  // bias and y, too, are the kernels' before this one
      cudaTriggerProgrammaticLaunchCompletion();
      consume(p, place, smem);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      switch (threadIdx.x - kConsumers) {
        case 0:
          produce_weights(p, place, smem);
          break;
        case 32:
          produce_x(p, place, smem);
          break;
        case 64:
          if constexpr (kHasScales) produce_scales(p, place, smem, p.scale_map, 0);
          break;
        case 96:
          if constexpr (kHasZeros) produce_scales(p, place, smem, p.zero_map, kMaxScaleRows * kScaleRowBytes);
          break;
      }
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
  g.parts = p.split_k * Kernel::kWarpgroupsK;
  g.items_per_cta = divide_up(Kernel::kItems, p.split_k);
  g.item_multiplier = divide_up(1 << 16, g.items_per_cta);
  static_assert(Kernel::kItems <= 64);  // so that it is exact
  g.band_tokens = min(divide_up(p.m, Kernel::kTokens), Kernel::kBandTokens);
  g.x_box_blocks = p.k % Layout::kBlockK == 0 ? Kernel::kStepBlocks : 1;
  g.scale_box_rows = Kernel::kStepK % p.group_size == 0 ? Kernel::kStepK / p.group_size : 1;
  cudaError_t error = map_blocks<Element>(&g.x_map, p.x, p.m, p.k, p.ldx, Kernel::kTokens, g.x_box_blocks);
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
  return launch_clusters(gemm_sm90_kernel<Kernel>, devices_done, g,
                         dim3(p.split_k, divide_up(p.n_padded, Kernel::kColumns), divide_up(p.m, Kernel::kTokens)),
                         Kernel::kThreads, Kernel::Smem::bytes(g), stream);
}

}  // namespace weightonly
