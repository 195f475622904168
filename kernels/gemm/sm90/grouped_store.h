// The epilogue of grouped_sm90: y goes through shared memory, 16 tokens at a time, as in epilogue_store.h. There the two
// warpgroups that have the gates and what they are multiplied with meet.
#pragma once

#include "cutlass_ext/epilogue/gate.h"
#include "cutlass_ext/epilogue/column.h"
#include "kernels/gemm/sm90/grouped_traits.h"

namespace weightonly::sm90 {

template <class Traits>
struct GroupedStore {
  using Element = typename Traits::Element;
  static constexpr int kRowElements = Traits::kStagedRowElements;

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
    // The buffers of a panel of the first half are followed by those of the same panel of the second half.
    Element* const pair_buffers = smem.staged_y() + panel * (4 * Traits::kStagedElements);
    Element* const buffers = pair_buffers + half * (2 * Traits::kStagedElements);
    bool const is_vector = vector_stores(p);
    int const steps = divide_up((work.width + 1) * Traits::kWidthStep, Traits::kStagedTokens);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Traits::kTileM / Traits::kStagedTokens; ++step) {
      if (step == steps) break;
      // Two buffers in turn. The barrier of one frees the other: all threads have read it before they come to the
      // barrier.
      int const offset = step % 2 * Traits::kStagedElements;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          ColumnPair<Element> pair;
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            pair.values[h] = Element(columns[h].affine(accum(4 * (2 * step + j) + 2 * h + e)));
          }
          pair.store(buffers + offset + (8 * j + 2 * t + e) * kRowElements + column);
        }
      }
      if (p.is_gated) {
        pair_barrier(panel);
        store_gated(p, work, 16 * step, work.y_column + panel * kPanelColumns, half * 128 + thread,
                    pair_buffers + offset);
      } else {
        warpgroup_barrier_sync(BarrierId::kFirstWarpgroup + warpgroup);
        int const row = thread / 8, vector = thread % 8 * 8;
        store_vector(p, work, 16 * step + row, first + vector, buffers + offset + row * kRowElements + vector,
                     is_vector);
      }
    }
    if (steps % 2 == 1) {  // the next tile begins with the buffer that this one has just read
      p.is_gated ? pair_barrier(panel) : warpgroup_barrier_sync(BarrierId::kFirstWarpgroup + warpgroup);
    }
  }

 private:
  CUTLASS_DEVICE static void pair_barrier(int panel) {
    asm volatile("bar.sync %0, 256;" ::"r"(BarrierId::kFirstWarpgroup + panel) : "memory");
  }

  /// Four columns of a token's gates and what they are multiplied with. thread: of the two warpgroups.
  CUTLASS_DEVICE static void store_gated(GroupedParams const& p, GroupedWork const& work, int first_row,
                                         int first_column, int thread, Element const* buffer) {
    constexpr int kColumns = 4;
    struct alignas(8) Vector {
      Element values[kColumns];
    };
    int const row = thread / 16, column = thread % 16 * kColumns;
    int64_t const token = work.token_begin + first_row + row;
    if (token >= work.row_end || first_column >= p.columns || first_row + row < work.skipped_tokens) return;
    auto const* const source = buffer + row * kRowElements + column;
    Vector z = *reinterpret_cast<Vector const*>(source);
    Vector const up = *reinterpret_cast<Vector const*>(source + 2 * Traits::kStagedElements);
    apply_gate(p.gate, z.values, up.values);
    *reinterpret_cast<Vector*>(static_cast<Element*>(p.y) + token * p.ldy + first_column + column) = z;
  }

  /// Stores eight neighbouring columns of a token, as far as they exist. row: in the work tile.
  CUTLASS_DEVICE static void store_vector(GroupedParams const& p, GroupedWork const& work, int row, int column,
                                          Element const* source, bool is_vector) {
    int64_t const token = work.token_begin + row;
    if (token >= work.row_end || column >= p.n || row < work.skipped_tokens) return;
    Element* const y = static_cast<Element*>(p.y) + token * p.ldy + column;
    alignas(16) Element values[8];
    *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(source);
    activate(p.gate, values);
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
