// The epilogue of large tiles without split-K, and but for tiles that follow another order (kSumsInSmem) without an
// activation: y goes through shared memory, 16 tokens at a time, and from there to memory in 16-byte stores. Its buffers
// lie behind the stages, which take the next tile meanwhile.
#pragma once

#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/epilogue/column.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly::sm90 {

template <class Traits>
struct StagedStore {
  using Element = typename Traits::Element;
  using Smem = typename Traits::Smem;
  static constexpr int kRowElements = Traits::kStagedRowElements;

  /// Whether a call's y is stored this way. Only then may a CTA compute several tiles: ClusterReduce overwrites the
  /// stages.
  CUTLASS_HOST_DEVICE static bool serves(GemmParams const& p) {
    return Traits::kMayStageStore && p.split_k == 1 &&
           (Traits::kSumsInSmem || p.activation == int(Activation::kIdentity));
  }

  /// accum(4 i + 2 h + e): column h of the lane's two, token 8 i + e of its own.
  template <class Work, class Accumulators>
  CUTLASS_DEVICE static void store(Params const& p, Work const& work, Smem const& smem, Accumulators const& accum) {
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
    store_panel(p, work, smem, accum, warpgroup, warpgroup % Traits::kWarpgroupsN);
  }

  /// The same of a warpgroup that has the accumulators of several column panels, for one of these.
  template <class Work, class Accumulators>
  CUTLASS_DEVICE static void store_panel(Params const& p, Work const& work, Smem const& smem, Accumulators const& accum,
                                         int warpgroup, int panel) {
    static_assert(Traits::kWarpgroupsK == 1);
    static_assert(Traits::kReductionTilesM % 4 == 0, "every tile begins with the first buffer");
    int const thread = threadIdx.x % 128;
    int const g = thread % 32 / 4, t = thread % 4;
    int const column_begin = work.column_begin + Traits::kWarpgroupN * panel;
    int const column = 8 * g + 2 * (thread / 32);  // and the next one, of tokens 2t and 2t + 1 of eight
    ColumnPairConstants<Element> const constants(work.operands(p), column_begin + column, !Traits::kHasScales);
    ColumnEpilogue const columns[2] = {constants.column(0, !Traits::kHasScales),
                                       constants.column(1, !Traits::kHasScales)};
    Element* const buffers = smem.staged_y() + warpgroup * (2 * Traits::kStagedElements);
    [[maybe_unused]] float x_scales[2 * Traits::kReductionTilesM];  // of the lane's tokens
    if constexpr (Traits::kHasXScales) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kReductionTilesM; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          x_scales[2 * i + e] = __ldg(p.x_scales + min(work.token_begin + 8 * i + 2 * t + e, p.m - 1));
        }
      }
    }
    bool const is_vector = vector_stores(p);
    int const store_row = thread / 8, store_column = thread % 8 * 8;  // what this thread stores to memory
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kReductionTilesM; i += 2) {
      // Two buffers in turn. The barrier of one frees the other: all threads have read it before they come to the
      // barrier.
      Element* const buffer = buffers + i / 2 % 2 * Traits::kStagedElements;
      [[maybe_unused]] float activated[8];  // as accum: [token / 8][column][token % 2]
      if constexpr (Traits::kSumsInSmem) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 8; ++v) activated[v] = columns[v / 2 % 2].affine(accum(4 * i + v));
        activate(activated, p.activation);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          ColumnPair<Element> pair;
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            float const sum = accum(4 * (i + j) + 2 * h + e);
            if constexpr (Traits::kSumsInSmem) {
              pair.values[h] = Element(activated[4 * j + 2 * h + e]);
            } else {
              pair.values[h] = Element(columns[h].affine(Traits::kHasXScales ? sum * x_scales[2 * (i + j) + e] : sum));
            }
          }
          pair.store(buffer + (8 * j + 2 * t + e) * kRowElements + column);
        }
      }
      warpgroup_barrier_sync(BarrierId::kFirstWarpgroup + warpgroup);
      store_vector(p, work, 8 * i + store_row, column_begin + store_column,
                   buffer + store_row * kRowElements + store_column, is_vector);
    }
  }

 private:
  /// Stores eight neighbouring columns of a token from shared memory, as far as they exist. row: in the work tile.
  template <class Work>
  CUTLASS_DEVICE static void store_vector(Params const& p, Work const& work, int row, int column, Element const* source,
                                          bool is_vector) {
    int64_t const token = work.token_begin + row;
    if (token >= work.token_end(p) || column >= p.n || row < work.skipped_tokens) return;
    Element* const y = static_cast<Element*>(p.y) + token * p.ldy + column;
    alignas(16) Element values[8];
    *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(source);
    if (is_vector) {
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4 const*>(values);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (column + j < p.n) y[j] = values[j];
      }
    }
  }
};

}  // namespace weightonly::sm90
