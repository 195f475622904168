// The end of a large tile of gemm_sm90 whose K is not shared, without an activation: y goes through shared memory in chunks of 16
// tokens, as 16 bits and beside the stages. Those take the next tile meanwhile, if there is one.
#pragma once

#include "cutlass_ext/epilogue.h"
#include "kernels/gemm_sm90_params.h"

namespace weightonly {

/// Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Chunks {
  using Element = typename Kernel::Element;
  using Place = typename Kernel::Place;
  using Smem = typename Kernel::Smem;
  static constexpr int kRowElements = Smem::kChunkRowElements;

  /// sums(4 i + 2 h + e): column h of the lane's two, token 8 i + e of its own.
  template <class Sums>
  CUTLASS_DEVICE static void store(GemmSm90Params const& p, Place const& place, Smem const& smem, Sums const& sums) {
    static_assert(Kernel::kWarpgroupsK == 1);
    static_assert(Kernel::kTokenTiles % 4 == 0, "the next tile begins with the first buffer");
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0), thread = threadIdx.x % 128;
    int const g = thread % 32 / 4, t = thread % 4;
    int const first_column = place.first_column + 64 * (warpgroup % Kernel::kWarpgroupsN);
    int const column = 8 * g + 2 * (thread / 32);  // and the next one, of tokens 2t and 2t + 1 of eight
    ColumnPairConstants<Element> const constants(p, first_column + column, !Kernel::kHasScales);
    ColumnEpilogue const columns[2] = {constants.column(0, !Kernel::kHasScales),
                                       constants.column(1, !Kernel::kHasScales)};
    Element* const chunks = smem.chunks() + warpgroup * (2 * Smem::kChunkElements);
    bool const is_vector = vector_stores(p);
    int const row = thread / 8, chunk = thread % 8 * 8;  // that this thread stores
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; i += 2) {
      // Two buffers: a barrier on, all have stored what was in this one.
      Element* const rows = chunks + i / 2 % 2 * Smem::kChunkElements;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          ColumnPair<Element> pair;
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) pair.values[h] = Element(columns[h].affine(sums(4 * (i + j) + 2 * h + e)));
          pair.store(rows + (8 * j + 2 * t + e) * kRowElements + column);
        }
      }
      asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
      store_row(p, place, 8 * i + row, first_column + chunk, rows + row * kRowElements + chunk, is_vector);
    }
  }

 private:
  /// Stores eight neighbouring columns of a token, if they exist, from shared memory. row: of the tile.
  CUTLASS_DEVICE static void store_row(GemmSm90Params const& p, Place const& place, int row, int n,
                                       Element const* source, bool is_vector) {
    int64_t const token = place.first_token + row;
    if (token >= p.m || n >= p.n || row < place.known_tokens) return;
    Element* const y = static_cast<Element*>(p.y) + token * p.ldy + n;
    alignas(16) Element values[8];
    *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(source);
    if (is_vector) {
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4 const*>(values);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (n + j < p.n) y[j] = values[j];
      }
    }
  }
};

}  // namespace weightonly
