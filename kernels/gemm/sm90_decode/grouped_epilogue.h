// The epilogue of grouped_decode_sm90: partials of the warps are summed, scaled, and stored to y (epilogue.h says when).
#pragma once

#include "cutlass_ext/epilogue/column.h"
#include "cutlass_ext/epilogue/gate.h"
#include "kernels/gemm/sm90_decode/epilogue.h"
#include "kernels/gemm/sm90_decode/grouped_traits.h"
#include "kernels/gemm/sm90_decode/grouped_work.h"

namespace weightonly::sm90_decode {

template <class Traits>
struct GroupedEpilogue {
  using Element = typename Traits::Element;
  static constexpr int kWarpsK = Traits::kWarpsK;
  static constexpr int kPairs = Traits::kPairs;

  /// Pairs that a thread reduces, at most.
  static constexpr int kPairsOfThread = divide_up(kRowTileM * kPairs, Traits::kThreads);

  GroupedParams const& p;
  ColumnPair<Element> gates[kPairsOfThread];  // of a gated product, between the tile of the gates and the other one

  /// Stores the rows of a tile. All warps have stored their partials. step: see GroupedTile. A thread has the same rows
  /// and columns of both tiles of a gated product.
  CUTLASS_DEVICE void reduce_and_store(GroupedTile const& tile, int step, float const* partials) {
    int const pairs = tile.rows * kPairs;
    // The warps take turns, so that few rows do not always keep the same ones busy.
    int const turn = p.is_gated ? step / 2 : step;
    int const warp = (int(threadIdx.x) / 32 - turn * divide_up(pairs, 32)) & (kWarpsK - 1);
    // In the order of K, so that a row's result does not depend on where its tile comes.
    int const first = step * p.k_tiles & (kWarpsK - 1);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kPairsOfThread; ++j) {
      int const i = j * Traits::kThreads + warp * 32 + threadIdx.x % 32;
      if (i >= pairs) return;
      float2 const sum =
          sum_of_warps<kWarpsK>(reinterpret_cast<float2 const*>(partials) + i, kRowTileM * kPairs, first);
      finish(tile, i / kPairs, column_of(tile.n_tile, i % kPairs), sum, step, gates[j]);
    }
  }

 private:
  CUTLASS_DEVICE void finish(GroupedTile const& tile, int row, int column, float2 sum, int step,
                             ColumnPair<Element>& gate) const {
    GemmParams const one = p.of_expert(tile.expert);
    if (!Traits::kHasScales || one.bias != nullptr) {
      ColumnPairConstants<Element> const constants(one, column, !Traits::kHasScales);
      sum = {constants.column(0, !Traits::kHasScales).affine(sum.x),
             constants.column(1, !Traits::kHasScales).affine(sum.y)};
    }
    ColumnPair<Element> pair = {Element(sum.x), Element(sum.y)};
    if (!p.is_gated) {
      activate(p.gate, pair.values);
      store(tile.row_begin + row, column, pair);
    } else if (step % 2 == 0) {
      gate = pair;
    } else {
      apply_gate(p.gate, gate.values, pair.values);
      store(tile.row_begin + row, column - one.n / 2, gate);
    }
  }

  /// The first column of a pair: shared memory has those of a lane side by side.
  CUTLASS_DEVICE static int column_of(int n_tile, int pair) {
    using Layout = typename Traits::Layout;
    int const row_tile = n_tile * Traits::kRowTiles + pair % Traits::kRowTiles;
    return row_tile / Layout::kFragments * Layout::kPanelColumns + 8 * (pair / Traits::kRowTiles) +
           row_tile % Layout::kFragments * 2;
  }

  CUTLASS_DEVICE void store(int row, int column, ColumnPair<Element> const& pair) const {
    Element* const y = static_cast<Element*>(p.gemm.y) + row * p.gemm.ldy + column;
    if (pair.is_one_store(p.gemm, column)) {
      pair.store(y);
    } else {
      pair.store_each(p.gemm, y, column);
    }
  }
};

}  // namespace weightonly::sm90_decode
