// What gemm_sm90_fp8 knows at compile time. It is gemm_sm90 with x in E4M3: MMAs of 32 k, rows of x of 128 k.
#pragma once

#include "cutlass/float8.h"
#include "cutlass_ext/fragment/fp8_weight.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly {

/// E2M1 with a scale for 32 k. Kernels of x in 16 bits have a codebook for it: Code4.
struct Mxfp4;

template <>
struct WeightFormat<Mxfp4> {
  static constexpr int kBits = 4;
  static constexpr bool kIsCodebook = false;
};

namespace sm90_fp8 {

struct BarrierId : sm90::BarrierId {
  /// Then one for each consumer warpgroup. A warpgroup still votes while another, with which it shares a barrier of the
  /// grouped epilogue, waits there.
  static constexpr int kFirstVote = kAll + 1;
};

/// Config: as that of sm90::Traits, and kChunks.
template <class Config>
struct Traits {
  using Element = typename Config::Element;  // of scales, zero points, bias and y
  using XElement = cutlass::float_e4m3_t;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr ScaleMode kScaleMode = Config::kScaleMode;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;
  static constexpr bool kHasXScales = true;
  static constexpr bool kEndsTurns = false;
  static constexpr bool kIsE2m1 = cutlass::platform::is_same<Weight, Mxfp4>::value;
  /// Else 32 k are a sum of their own: of few tokens it costs less to multiply sums by scales.
  static constexpr bool kFoldsScales = kIsE2m1 && Config::kTileM > 64;
  static constexpr float kWeightUnit = !kIsE2m1 ? kUnitOfInt4 : kFoldsScales ? kUnitOfFolded : 1.f;

  static constexpr int kWarpgroupsN = Config::kWarpgroupsN;
  static constexpr int kWarpgroupsK = Config::kWarpgroupsK;
  static constexpr int kWarpgroups = kWarpgroupsN * kWarpgroupsK;
  static constexpr int kWarpgroupN = Layout::kPanelColumns;
  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = kWarpgroupsN * kWarpgroupN;
  static constexpr int kWarpgroupK = 128;  // k of a k_tile that a warpgroup multiplies, and adds up in tensor cores
  static constexpr int kWarpgroupKBlocks = kWarpgroupK / Layout::kBlockK;
  static constexpr int kKBlocks = kWarpgroupKBlocks * kWarpgroupsK;
  static constexpr int kTileK = kKBlocks * Layout::kBlockK;
  static constexpr int kXBlockK = 128, kXBlocks = kTileK / kXBlockK;
  static constexpr int kStages = Config::kStages;

  /// A job of the main loop multiplies one of kChunks chunks of tokens.
  static constexpr int kChunks = Config::kChunks;
  /// Sums of a chunk that are under way, as registers allow.
  static constexpr int buffers(int groups, int tokens) { return kWarpgroups == 2 ? 2 : 1; }
  static constexpr int kChunkM = kTileM / kChunks;
  static_assert(kChunkM * kChunks == kTileM && kChunkM % 8 == 0);

  using MmaM = cute::Int<kWarpgroupN>;
  using MmaN = cute::Int<kChunkM>;
  using MmaK = cute::Int<kWarpgroupK>;
  template <int kTokens>
  using ChunkMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<XElement, XElement, float, cute::Shape<MmaM, cute::Int<kTokens>, cute::Int<32>>>()));
  using TiledMma = ChunkMma<kChunkM>;
  using ShapeA = cute::Shape<MmaM, MmaK>;
  using ShapeC = cute::Shape<MmaM, cute::Int<kTileM>>;
  static constexpr int kDescriptorBytes = 16;
  using SmemLayoutX = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<XElement>{},
                                                   cute::Shape<MmaN, cute::Int<kXBlockK>>{}));

  static constexpr int kLeastGroup = Config::kLeastGroup;  // 32, or 128: more loops would need more registers
  static_assert(kLeastGroup == 32 || kLeastGroup == 128);
  static constexpr bool kMayPersist = kTileM >= 128 && kWarpgroupsK == 1;
  static constexpr bool kMayMulticastX = kMayPersist;
  static constexpr bool kMayFollow = false, kSumsInSmem = false;
  static constexpr bool kMayStageStore = kWarpgroupsK == 1 && kTileM % 32 == 0;

  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kConsumers = kWarpgroupThreads * kWarpgroups;
  static constexpr int kProducerWarps = kHasZeros ? 4 : kHasScales ? 3 : 2;
  static constexpr int kThreads = kConsumers + kWarpgroupThreads;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kTileM == 256 && !kFoldsScales ? 24 : kWarpgroups == 2 ? 40 : 32;
  static constexpr int consumer_registers(int of_producers) {
    return cutlass::const_min(240, (kLaunchRegisters * (kWarpgroups + 1) - of_producers) / kWarpgroups / 8 * 8);
  }
  static constexpr int kConsumerRegisters = consumer_registers(kProducerRegisters);

  static constexpr int kXRowBytes = kXBlockK;
  static constexpr int kXStageBytes = kXBlocks * kTileM * kXRowBytes;
  static constexpr int kWeightStageBytes = kWarpgroupsN * kKBlocks * Layout::kBlockBytes;
  static constexpr int kScaleRowBytes = kTileN * int(sizeof(Element));
  static constexpr int kMaxScaleRows = kTileK / kLeastGroup;
  static constexpr int kZerosOffset = kMaxScaleRows * kScaleRowBytes;
  static constexpr int kScaleStageBytes = (kHasScales ? kHasZeros ? 2 : 1 : 0) * kMaxScaleRows * kScaleRowBytes;

  static constexpr int kReductionTileM = 8;
  static constexpr int kReductionTilesM = kTileM / kReductionTileM;
  static constexpr int kReductionTiles = kWarpgroupsN * kReductionTilesM;
  static constexpr int kReductionTileBytes = kWarpgroupThreads * int(sizeof(float4));

  static constexpr int kStagedTokens = 16;
  static constexpr int kStagedRowElements = kWarpgroupN + 16 / int(sizeof(Element));
  static constexpr int kStagedElements = kStagedTokens * kStagedRowElements;
  static constexpr int kStagedBytes = kMayStageStore ? 2 * kWarpgroups * kStagedElements * int(sizeof(Element)) : 0;

  static constexpr int kBarrierBytes = 1024;
  static constexpr int kStagesBytes = kStages * (kXStageBytes + kWeightStageBytes + kScaleStageBytes);
  static constexpr int kLocalPartialsBytes = kWarpgroups * kReductionTilesM * kReductionTileBytes;
  static constexpr int kEpilogueOffset = cutlass::const_max(kStagesBytes, kLocalPartialsBytes);
  static_assert(kEpilogueOffset % 16 == 0);
  static_assert(int(sizeof(uint64_t)) * (2 * kStages + 1) <= kBarrierBytes);

  CUTLASS_HOST_DEVICE static constexpr int reduction_tiles_per_cta(int split_k, int m = kTileM) {
    int const tokens = m < kTileM ? m : kTileM;
    int const tiles = kWarpgroupsN * ((tokens + kReductionTileM - 1) / kReductionTileM);
    return (tiles + split_k - 1) / split_k;
  }
  CUTLASS_HOST_DEVICE static constexpr int remote_partials(int split_k) { return (split_k - 1) * kWarpgroupsK; }
  CUTLASS_HOST_DEVICE static constexpr int smem_bytes(int split_k, int m = kTileM) {
    int const epilogue_bytes =
        split_k > 1 ? remote_partials(split_k) * reduction_tiles_per_cta(split_k, m) * kReductionTileBytes
                    : kStagedBytes;
    return kBarrierBytes + kEpilogueOffset + epilogue_bytes;
  }
  static constexpr bool kMaySplitK = smem_bytes(2) <= kMaxSmemBytesSm90;
  static_assert(smem_bytes(1) <= kMaxSmemBytesSm90);

  struct Smem {
    char* base;

    CUTLASS_DEVICE uint64_t* full() const { return reinterpret_cast<uint64_t*>(base); }  // [kStages]
    CUTLASS_DEVICE uint64_t* empty() const { return full() + kStages; }  // [kStages]
    CUTLASS_DEVICE uint64_t& partials_barrier() const { return full()[2 * kStages]; }
    CUTLASS_DEVICE char* x() const { return base + kBarrierBytes; }
    CUTLASS_DEVICE char* weights() const { return x() + kStages * kXStageBytes; }
    CUTLASS_DEVICE char* scales() const { return weights() + kStages * kWeightStageBytes; }
    CUTLASS_DEVICE char* local_partials() const { return x(); }
    CUTLASS_DEVICE char* remote_partials() const { return x() + kEpilogueOffset; }
    CUTLASS_DEVICE Element* staged_y() const { return reinterpret_cast<Element*>(x() + kEpilogueOffset); }
  };
};

}  // namespace sm90_fp8
}  // namespace weightonly
