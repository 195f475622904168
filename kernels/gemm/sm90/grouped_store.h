// The epilogue of grouped_sm90: y goes through shared memory, kStoredTokens at a time, and from there to memory in
// 16-byte stores. There the two warpgroups that have the gates and what they are multiplied with meet.
#pragma once

#include "cutlass_ext/epilogue/column.h"
#include "cutlass_ext/epilogue/gate.h"
#include "kernels/gemm/sm90/grouped_traits.h"

namespace weightonly::sm90 {

template <class Traits>
struct GroupedStore {
  using Element = typename Traits::Element;
  static constexpr int kRowElements = Traits::kStagedRowElements;
  static constexpr int kTokens = Traits::kStoredTokens;
  static constexpr int kVector = 8;  // columns of one store

  struct alignas(16) Vector {
    Element values[kVector];
  };

  /// accum(4 i + 2 h + e): column h of the lane's two, token 8 i + e of its own.
  template <class Smem, class Accumulators>
  CUTLASS_DEVICE static void store(GroupedParams const& p, GroupedWork const& work, Smem const& smem,
                                   Accumulators const& accum) {
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0), thread = threadIdx.x % 128;
    int const half = warpgroup / Traits::kHalfPanels, panel = warpgroup % Traits::kHalfPanels;
    int const g = thread % 32 / 4, t = thread % 4;
    int const column = 8 * g + 2 * (thread / 32);  // and the next one, of tokens 2t and 2t + 1 of eight
    int const first = (half == 0 ? work.column_begin : work.second_column) + panel * kPanelColumns;  // of w
    ColumnPairConstants<Element> const constants(work.operands(p), first + column, !Traits::kHasScales);
    ColumnEpilogue const columns[2] = {constants.column(0, !Traits::kHasScales),
                                       constants.column(1, !Traits::kHasScales)};
    // The buffer of a panel of the first half is followed by that of the same panel of the second half.
    Element* const of_pair = smem.staged_y() + panel * (2 * Traits::kStoredElements);
    Element* const buffer = of_pair + half * Traits::kStoredElements;
    int const tokens = (work.width + 1) * Traits::kWidthStep;  // of the MMA
    auto const synchronize = [&] {
      p.is_gated ? pair_barrier(panel) : warpgroup_barrier_sync(BarrierId::kFirstWarpgroup + warpgroup);
    };
    CUTLASS_PRAGMA_UNROLL
    for (int begin = 0; begin < Traits::kTileM; begin += kTokens) {
      if (begin >= tokens) break;
      [[maybe_unused]] float x_scales[kTokens / 4];  // of the lane's tokens
      if constexpr (Traits::kHasXScales) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTokens / 4; ++i) {
          int const token = work.token_begin + begin + i / 2 * 8 + 2 * t + i % 2;
          x_scales[i] = __ldg(p.x_scales + min(token, work.row_end - 1));
        }
      }
      synchronize();  // all threads have read what was in the buffer
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTokens / 8; ++j) {
        if (begin + 8 * j >= tokens) break;
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          ColumnPair<Element> pair;
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            float const sum = accum(4 * (begin / 8 + j) + 2 * h + e);
            pair.values[h] = Element(columns[h].affine(Traits::kHasXScales ? sum * x_scales[2 * j + e] : sum));
          }
          pair.store(buffer + (8 * j + 2 * t + e) * kRowElements + column);
        }
      }
      synchronize();
      int const last = min(min(tokens, begin + kTokens), work.row_end - work.token_begin);
      int const vector = thread % 8 * kVector;
      if (p.is_gated) {
        int const y_column = work.y_column + panel * kPanelColumns;
        if (y_column >= p.columns) continue;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int row = begin + (half * 128 + thread) / 8; row < last; row += 32) {
          if (row >= work.skipped_tokens) {
            store_gated(p, work.token_begin + row, y_column + vector, of_pair + (row - begin) * kRowElements + vector);
          }
        }
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int row = begin + thread / 8; row < last; row += 16) {
          if (row >= work.skipped_tokens) {
            store_vector(p, work.token_begin + row, first + vector, buffer + (row - begin) * kRowElements + vector);
          }
        }
      }
    }
  }

 private:
  CUTLASS_DEVICE static void pair_barrier(int panel) {
    asm volatile("bar.sync %0, 256;" ::"r"(BarrierId::kFirstWarpgroup + panel) : "memory");
  }

  /// source: gates; kStoredElements behind it what they are multiplied with.
  CUTLASS_DEVICE static void store_gated(GroupedParams const& p, int64_t token, int column, Element const* source) {
    Vector z = *reinterpret_cast<Vector const*>(source);
    Vector const up = *reinterpret_cast<Vector const*>(source + Traits::kStoredElements);
    apply_gate(p.gate, z.values, up.values);
    *reinterpret_cast<Vector*>(static_cast<Element*>(p.y) + token * p.ldy + column) = z;
  }

  /// Columns from p.n on do not exist.
  CUTLASS_DEVICE static void store_vector(GroupedParams const& p, int64_t token, int column, Element const* source) {
    if (column >= p.n) return;
    Vector z = *reinterpret_cast<Vector const*>(source);
    activate(p.gate, z.values);
    Element* const y = static_cast<Element*>(p.y) + token * p.ldy + column;
    if (vector_stores(p)) {
      *reinterpret_cast<Vector*>(y) = z;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kVector; ++j) {
        if (column + j < p.n) y[j] = z.values[j];
      }
    }
  }
};

}  // namespace weightonly::sm90
