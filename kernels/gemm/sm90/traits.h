// What gemm_sm90 knows at compile time: tile shapes, types, threads and registers, and the layout of shared memory.
//
// The operands of the MMA are swapped, y^T = w^T x^T: columns of w are its M, tokens (rows of x) its N. So a weight is
// converted once for up to 256 tokens. Names in this folder follow y = x w: M counts tokens, N counts columns.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_ext/arch/limits.h"
#include "cutlass_ext/fragment/scale_mode.h"
#include "cutlass_ext/fragment/weight_format.h"
#include "cutlass_ext/layout/tiled.h"

namespace weightonly::sm90 {

/// Ids of the named barriers of a CTA; 0 is __syncthreads.
struct BarrierId {
  static constexpr int kConsumers = 1;
  static constexpr int kFirstWarpgroup = 2;  // then one for each consumer warpgroup, of which there are at most four
  static constexpr int kProducers = 8;
  static constexpr int kAll = 9;
};

/// Config: Element, Weight, kScaleMode, kTileM, kWarpgroupsN, kWarpgroupsK, kStages, kLeastGroup (16: groups of 16 alone).
template <class Config>
struct Traits {
  using Element = typename Config::Element;  // of x, scales, zero points, bias and y
  using XElement = Element;
  static constexpr bool kHasXScales = false;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr ScaleMode kScaleMode = Config::kScaleMode;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;  // of groups
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;

  // ---- Tile shapes ----

  /// Consumer warpgroups. Each computes 64 columns for all tokens of the tile. Those along K share the k of a k_tile.
  static constexpr int kWarpgroupsN = Config::kWarpgroupsN;
  static constexpr int kWarpgroupsK = Config::kWarpgroupsK;
  static constexpr int kWarpgroups = kWarpgroupsN * kWarpgroupsK;
  static constexpr int kWarpgroupN = Layout::kPanelColumns;
  static constexpr int kTileM = Config::kTileM;  // 8 to 256
  static constexpr int kTileN = kWarpgroupsN * kWarpgroupN;
  /// k_blocks (64 k) of a k_tile that one warpgroup multiplies. The fewer tokens, the more a wait for a stage weighs.
  static constexpr int kWarpgroupKBlocks = kTileM <= 128 ? 2 : 1;
  static constexpr int kKBlocks = kWarpgroupKBlocks * kWarpgroupsK;  // of a k_tile
  static constexpr int kTileK = kKBlocks * Layout::kBlockK;  // 64 to 512
  static constexpr int kStages = Config::kStages;  // k_tiles in shared memory
  static constexpr int kXBlocks = kKBlocks, kXBlockK = Layout::kBlockK;  // blocks of x, whose rows have 128 bytes

  // One warpgroup multiplies one k_block: A is (64,64) of w^T, B (kTileM,64) of x, C (64,kTileM) of y^T.
  using MmaM = cute::Int<kWarpgroupN>;  // columns
  using MmaN = cute::Int<kTileM>;  // tokens
  using MmaK = cute::Int<Layout::kBlockK>;
  using MmaOp = decltype(cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<MmaM, MmaN, MmaK>>());
  using TiledMma = decltype(cute::make_tiled_mma(MmaOp{}));
  /// Whether tiles have MMAs of several widths (grouped_traits.h).
  static constexpr bool kHasWidths = false;
  /// Whether group scales multiply the accumulators of each k_tile: a kernel for groups of whole k_tiles alone.
  static constexpr bool kScalesPartials = false;
  /// Calls issue(tiled_mma, accum) with the MMA of a tile.
  template <class Accumulators, class Issue>
  CUTLASS_DEVICE static void with_mma(int, Accumulators& accum, Issue const& issue) {
    issue(TiledMma{}, accum);
  }
  using ShapeA = cute::Shape<MmaM, MmaK>;
  using ShapeC = cute::Shape<MmaM, MmaN>;
  static constexpr int kDescriptorBytes = 16;  // descriptors of wgmma count units of 16 bytes
  using SmemLayoutX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<MmaN, MmaK>{}));

  // ---- What a kernel of this shape can do ----

  /// k of the smallest groups, 32 or 16. Where it is 16, all groups are.
  static constexpr int kLeastGroup = Config::kLeastGroup;

  /// Whether a CTA may compute several tiles, and load the next one while it stores this one. Only large tiles do so.
  static constexpr bool kMayPersist = kTileM >= 128 && kTileM * kTileN > 128 * 128;
  /// Whether two neighbouring CTAs may load x once, by multicast.
  static constexpr bool kMayMulticastX = kMayPersist;
  /// Whether y may be stored by epilogue_store.h. Smaller tiles gain nothing by it, and their main loops become slower.
  static constexpr bool kMayStageStore = kWarpgroupsK == 1 && (kTileM >= 96 || kTileM * kTileN >= 128 * 128);

  // ---- Threads and registers ----

  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kConsumers = kWarpgroupThreads * kWarpgroups;  // threads
  /// Producer warps: one each for the weights, x, the scales and the zero points. A single one would be the bottleneck.
  static constexpr int kProducerWarps = kHasZeros ? 4 : kHasScales ? 3 : 2;
  /// The producers are a whole warpgroup, because registers are moved from one warpgroup to others.
  static constexpr int kThreads = kConsumers + kWarpgroupThreads;
  /// Registers of a thread: at launch, then of a producer, and of a consumer, which gets what the producers give up.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters =
      cutlass::const_min(240, (kLaunchRegisters * (kWarpgroups + 1) - kProducerRegisters) / kWarpgroups / 8 * 8);

  // ---- Bytes of one stage ----

  /// One token of a k_block: 128 bytes, the width of the swizzle.
  static constexpr int kXRowBytes = Layout::kBlockK * int(sizeof(Element));
  static constexpr int kXStageBytes = kKBlocks * kTileM * kXRowBytes;
  static constexpr int kWeightStageBytes = kWarpgroupsN * kKBlocks * Layout::kBlockBytes;
  static constexpr int kScaleRowBytes = kTileN * int(sizeof(Element));
  static constexpr int kMaxScaleRows = kTileK / kLeastGroup;  // with the smallest groups
  static constexpr int kZerosOffset = kMaxScaleRows * kScaleRowBytes;  // from a stage's scales to its zero points
  static constexpr int kScaleStageBytes = (kHasScales ? kHasZeros ? 2 : 1 : 0) * kMaxScaleRows * kScaleRowBytes;

  /// The codebook of Code4. With more tokens x leaves no room for its wide rows.
  using Codebook = CodebookPairs<(kTileM <= 32)>;
  static constexpr int kCodebookBytes = WeightFormat<Weight>::kIsCodebook ? Codebook::kBytes : 0;

  // ---- Reduction (epilogue_reduce.h) ----

  /// A reduction tile is the accumulators of eight tokens and one warpgroup's columns: one float4 of each thread.
  static constexpr int kReductionTileM = 8;
  static constexpr int kReductionTilesM = kTileM / kReductionTileM;
  /// The reduction tiles of a tile are numbered along N first.
  static constexpr int kReductionTiles = kWarpgroupsN * kReductionTilesM;
  static constexpr int kReductionTileBytes = kWarpgroupThreads * int(sizeof(float4));
  /// Whether a thread prepares its reduction before the main loop: it computes addresses, and loads the bias and the
  /// channel scales, which come from memory. The loop must leave registers for these values.
  static constexpr bool kPreparesReduction =
      !kMayPersist && (!kHasScales || kTileM * kWarpgroups <= (kConsumerRegisters >= 240 ? 192 : 96));

  // ---- Staged store (epilogue_store.h) ----

  /// Two buffers for each warpgroup, of 16 tokens each. Their rows are 16 bytes longer than 64 columns, against bank
  /// conflicts.
  static constexpr int kStagedTokens = 16;
  static constexpr int kStagedRowElements = kWarpgroupN + 16 / int(sizeof(Element));
  static constexpr int kStagedElements = kStagedTokens * kStagedRowElements;
  static constexpr int kStagedBytes = kMayStageStore ? 2 * kWarpgroups * kStagedElements * int(sizeof(Element)) : 0;

  // ---- Shared memory of a CTA ----
  //
  //   | mbarriers | x: stage 0, 1, ... | weights: stage 0, ... | scales and zeros: stage 0, ... | codebook | epilogue |
  //               | local partials, after the last k_tile ...           |
  //
  // With split_k > 1 "epilogue" holds the partials of the other CTAs. They may arrive while this CTA still multiplies.
  // With split_k = 1 it holds the buffers of the staged store. They are in use while the stages take the next tile.
  // A sum of parts (kMayFollow) lies in their place, or behind them where tiles follow each other.

  static constexpr int kBarrierBytes = 1024;  // x is aligned to 1024 bytes: its swizzle counts from there
  static constexpr int kStagesBytes = kStages * (kXStageBytes + kWeightStageBytes + kScaleStageBytes) + kCodebookBytes;
  static constexpr int kLocalPartialsBytes = kWarpgroups * kReductionTilesM * kReductionTileBytes;
  static constexpr int kEpilogueOffset = cutlass::const_max(kStagesBytes, kLocalPartialsBytes);  // from x

  /// Whether its tiles may be added in the order of another kernel, whose warpgroups and CTAs share K (k_order.h): there
  /// is room for the sum of parts of K beside the accumulators of one. Tiles of up to 128 tokens keep it in registers,
  /// and that of several CTAs in shared memory; persistent ones, which have few stages for that, in shared memory and
  /// in global memory.
  static constexpr bool kHasPlainParts = kWarpgroupsK == 1 && kWarpgroupsN == 2 && kLeastGroup == 32;
  static constexpr int kSumBytes = kTileM * kTileN * int(sizeof(float));
  static constexpr bool kSumsInSmem =
      kHasPlainParts && kMayPersist && kBarrierBytes + kEpilogueOffset + kStagedBytes + kSumBytes <= kMaxSmemBytesSm90;
  static constexpr bool kMayFollow = kSumsInSmem || (kHasPlainParts && kTileM >= 96 && kTileM <= 128);
  static_assert(kEpilogueOffset % 16 == 0);
  static_assert(int(sizeof(uint64_t)) * (2 * kStages + 1) <= kBarrierBytes);

  /// Reduction tiles that one CTA of the cluster reduces, at most. m: rows of x.
  CUTLASS_HOST_DEVICE static constexpr int reduction_tiles_per_cta(int split_k, int m = kTileM) {
    int const tokens = m < kTileM ? m : kTileM;
    int const tiles = kWarpgroupsN * ((tokens + kReductionTileM - 1) / kReductionTileM);
    return (tiles + split_k - 1) / split_k;
  }

  /// Partials of a reduction tile that other CTAs of the cluster compute.
  CUTLASS_HOST_DEVICE static constexpr int remote_partials(int split_k) { return (split_k - 1) * kWarpgroupsK; }

  /// Dynamic shared memory of a CTA, bytes. m: rows of x; fewer than kTileM need less. A static_assert in the generated
  /// units can compare it with the formula of heuristics/, which leaves out sums of parts.
  CUTLASS_HOST_DEVICE static constexpr int smem_bytes(int split_k, int m = kTileM, bool sums_ctas = false) {
    int const epilogue_bytes =
        split_k > 1   ? remote_partials(split_k) * reduction_tiles_per_cta(split_k, m) * kReductionTileBytes
        : kSumsInSmem ? kStagedBytes + kSumBytes
                      : cutlass::const_max(kStagedBytes, sums_ctas ? kSumBytes : 0);
    return kBarrierBytes + kEpilogueOffset + epilogue_bytes;
  }

  /// Whether CTAs of a cluster may share K: there is room for the partials of one other CTA.
  static constexpr bool kMaySplitK = !kSumsInSmem && smem_bytes(2) <= kMaxSmemBytesSm90;
  static_assert(kMaySplitK || kWarpgroupsK == 1);

  /// Addresses of the parts of shared memory.
  struct Smem {
    char* base;

    CUTLASS_DEVICE uint64_t* full() const { return reinterpret_cast<uint64_t*>(base); }  // [kStages]
    CUTLASS_DEVICE uint64_t* empty() const { return full() + kStages; }  // [kStages]
    CUTLASS_DEVICE uint64_t& partials_barrier() const { return full()[2 * kStages]; }
    CUTLASS_DEVICE char* x() const { return base + kBarrierBytes; }
    CUTLASS_DEVICE char* weights() const { return x() + kStages * kXStageBytes; }
    CUTLASS_DEVICE char* scales() const { return weights() + kStages * kWeightStageBytes; }
    CUTLASS_DEVICE char* codebook() const { return scales() + kStages * kScaleStageBytes; }
    CUTLASS_DEVICE char* local_partials() const { return x(); }
    CUTLASS_DEVICE char* remote_partials() const { return x() + kEpilogueOffset; }
    CUTLASS_DEVICE char* sum() const { return x() + kEpilogueOffset + (kSumsInSmem ? kStagedBytes : 0); }
    CUTLASS_DEVICE Element* staged_y() const { return reinterpret_cast<Element*>(x() + kEpilogueOffset); }
  };
};

}  // namespace weightonly::sm90
