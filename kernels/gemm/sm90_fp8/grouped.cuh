// Grouped GEMM with x in E4M3, for mixtures of experts: grouped_sm90 (sm90/grouped.cuh) with the main loop of
// gemm_sm90_fp8. A tile multiplies as many of its chunks as have rows; where chunks are small, one of 16 rows as 16.
#pragma once

#include "cutlass/arch/barrier.h"
#include "kernels/gemm/sm90/grouped.cuh"
#include "kernels/gemm/sm90_fp8/mainloop.h"
#include "kernels/gemm/sm90_fp8/traits.h"

namespace weightonly {
namespace sm90_fp8 {

template <class Config>
struct GroupedTraits
    : sm90::GroupedTraits<Config, false, Traits<Config>, Traits<Config>::kChunkM <= 32 ? 16 : Traits<Config>::kChunkM> {
  using Base = Traits<Config>;
  static constexpr bool kEndsTurns = true;  // there may be one chunk
  /// Of small groups of 16 tokens, which the memory binds, two sums took 4% longer than one.
  static constexpr int buffers(int groups, int tokens) {
    return groups > 1 && tokens == 32 ? 2 : Base::buffers(groups, tokens);
  }
  static constexpr int kProducerRegisters = Base::kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = Base::consumer_registers(kProducerRegisters);
};

template <class Traits>
struct GroupedLoop {
  using Loop = Mainloop<Traits>;
  typename Loop::Reader reader;

  CUTLASS_DEVICE GroupedLoop(sm90::GroupedParams const& p, typename Traits::Smem const& smem) : reader(p, smem) {}

  /// No box brings the scales of a half without columns: other bits than zeros there would not fold at once.
  CUTLASS_DEVICE static void prepare(typename Traits::Smem const& smem) {
    if constexpr (Traits::kFoldsScales) {
      auto* const scales = reinterpret_cast<uint4*>(smem.scales());
      constexpr int kVectors = Traits::kStages * Traits::kScaleStageBytes / int(sizeof(uint4));
      for (int i = threadIdx.x; i < kVectors; i += Traits::kThreads) scales[i] = uint4{0, 0, 0, 0};
      cutlass::arch::fence_view_async_shared();
    }
  }

  template <class XFragment>
  CUTLASS_DEVICE void run(sm90::GroupedParams const& p, int width, XFragment const& x, typename Loop::Accum& accum) {
    run_width<0>(p, width, x, accum);
  }

 private:
  /// Compares one width after another: a switch would become an indirect branch.
  template <int kWidth, class XFragment>
  CUTLASS_DEVICE void run_width(sm90::GroupedParams const& p, int width, XFragment const& x,
                                typename Loop::Accum& accum) {
    constexpr int kTokens = (kWidth + 1) * Traits::kWidthStep, kChunkM = Traits::kChunkM;
    if constexpr (kWidth + 1 < Traits::kWidths) {
      constexpr bool kHasOwn = kTokens < kChunkM || kTokens % kChunkM == 0;  // else whole chunks, as the next one
      if (!kHasOwn || width > kWidth) return run_width<kWidth + 1>(p, width, x, accum);
    }
    Loop::template run<(kTokens + kChunkM - 1) / kChunkM, cutlass::const_min(kTokens, kChunkM)>(
        p, sm90::WorkTile{0, 0, p.k_tiles, 0, 0, 0}, reader, x, accum);
  }
};

}  // namespace sm90_fp8

/// Launches a grouped product. Config: see sm90_fp8::Traits. call: Fp8GroupedGemmParams, as KernelFacts::x_bytes says.
template <class Config>
cudaError_t launch_grouped_sm90_fp8(GroupedGemmParams const& call, cudaStream_t stream) {
  using Traits = sm90_fp8::GroupedTraits<Config>;
  return sm90::launch_grouped_kernel<Traits, sm90_fp8::GroupedLoop<Traits>>(call, stream);
}

}  // namespace weightonly
