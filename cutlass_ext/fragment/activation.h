// From activations in shared memory to the A operand of the tensor core, for one warp and one k16 step.
#pragma once

#include "cute/arch/copy_sm75.hpp"
#include "cutlass_ext/layout/swizzle.h"

namespace weightonly {

template <int kWarpM>
struct ActivationFragment {
  static constexpr int kTilesM = kWarpM / 16;

  uint32_t values[kTilesM][4];  // rows g and g + 8 of k 2t, 2t+1, then the same rows of k 2t+8, 2t+9

  /// smem_x points at the warp's first row, a multiple of 8 rows into the tile.
  CUTLASS_DEVICE void load(char const* smem_x, int k16_step, int lane) {
    int const row = lane % 16;
    int const chunk = 2 * k16_step + lane / 16;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTilesM; ++i) {
      char const* const source = smem_x + i * 16 * SwizzledTile::kRowBytes + SwizzledTile::offset_bytes(row, chunk);
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(source), values[i][0], values[i][1],
                                    values[i][2], values[i][3]);
    }
  }
};

}  // namespace weightonly
