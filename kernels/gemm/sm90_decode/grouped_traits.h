// Types and sizes of a grouped_decode_sm90 kernel, and its shared memory.
#pragma once

#include "cutlass_ext/arch/limits.h"
#include "kernels/gemm/sm90_decode/row_tiles.h"
#include "kernels/gemm/sm90_decode/traits.h"

namespace weightonly::sm90_decode {

/// Config: as that of decode_sm90, and kCtas, the CTAs that share an SM. Two of few warps keep each other's memory busy
/// at the end of a tile, which comes often where K is short.
template <class Config>
struct GroupedTraits : Traits<Config> {
  using Base = Traits<Config>;
  static constexpr int kCtas = Config::kCtas;
  static_assert(Base::kTileN == kPanelColumns && Base::kTileN == kGatedColumns, "an n_tile is a column panel");
  /// Of one CTA: of all that an SM has, each needs 1 KB more.
  static constexpr int kMostSmemBytes = (kMaxSmemBytesSm90 + 1024) / kCtas - 1024;

  // A stage is that of decode_sm90 with x behind it: its rows are other ones in the next tile, so that x of all of K
  // would be of no use. The 16 extra bytes of a row put the rows that one ldmatrix reads into different banks.
  static constexpr int kXRowBytes = Base::kTileXBytes + 16;

  template <int kGroups>
  static constexpr int kStageBytes = Base::template Pipeline<kGroups>::kStageBytes + kRowTileM * kXRowBytes;

  // Dynamic shared memory: a barrier, the tiles along M, the codebook, the pipeline [warp][stage], and two buffers of
  // partials [warp][row][column].
  static constexpr int kWarpPartialsBytes = Base::kWarpsK * kRowTileM * Base::kTileN * int(sizeof(float));

  static constexpr int kRowsBytes = (int(sizeof(RowTilesSmem)) + 127) / 128 * 128;  // the codebook is aligned to 128

  CUTLASS_HOST_DEVICE static constexpr int smem_bytes(int stage_bytes, int codebook_bytes) {
    return Base::kBarrierBytes + kRowsBytes + codebook_bytes + Base::kWarpsK * Base::kStages * stage_bytes +
           2 * kWarpPartialsBytes;
  }

  /// The wide rows of a codebook where there is room for them.
  static constexpr bool kWideCodebook =
      smem_bytes(kStageBytes<Base::kMaxGroups>, CodebookPairs<true>::kBytes) <= kMostSmemBytes;
  using Codebook = CodebookPairs<kWideCodebook>;
  static constexpr int kCodebookBytes = Base::kHasCodebook ? Codebook::kBytes : 0;

  template <int kGroups>
  static constexpr int kSmemBytes = smem_bytes(kStageBytes<kGroups>, kCodebookBytes);
  static_assert(kSmemBytes<Base::kMaxGroups> <= kMostSmemBytes);

  struct Smem {
    char* base;

    CUTLASS_DEVICE uint64_t& warps_barrier() const { return *reinterpret_cast<uint64_t*>(base); }
    CUTLASS_DEVICE RowTilesSmem& rows() const { return *reinterpret_cast<RowTilesSmem*>(base + Base::kBarrierBytes); }
    CUTLASS_DEVICE char* codebook() const { return base + Base::kBarrierBytes + kRowsBytes; }
    CUTLASS_DEVICE char* pipeline() const { return codebook() + kCodebookBytes; }
    template <int kGroups>
    CUTLASS_DEVICE float* warp_partials(int buffer) const {
      char* const first = pipeline() + Base::kWarpsK * Base::kStages * kStageBytes<kGroups>;
      return reinterpret_cast<float*>(first + buffer * kWarpPartialsBytes);
    }
  };
};

}  // namespace weightonly::sm90_decode
