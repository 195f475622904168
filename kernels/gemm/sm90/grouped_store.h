// The epilogue of grouped_sm90: y goes through shared memory, kStoredTokens at a time, and from there to memory in
// 16-byte stores. There the two warpgroups that have the gates and what they are multiplied with meet.
//
// A warp has one of four words of 16 bytes, of eight columns, and four pairs of tokens. So that it writes to all banks,
// pair t has the words in the order word ^ t.
#pragma once

#include "cutlass_ext/arch/cp_async.h"
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

  /// Begins to copy the scales of the tile's rows of x to where `store` reads them. Threads of a warpgroup read those that
  /// the same warpgroup copied.
  template <class Smem>
  CUTLASS_DEVICE static void copy_x_scales(GroupedParams const& p, GroupedWork const& work, Smem const& smem) {
    if constexpr (Traits::kHasXScales) {
      uint32_t const target = cute::cast_smem_ptr_to_uint(smem.x_scales(threadIdx.x / 128));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kTileM; i += 128) {
        int const token = i + threadIdx.x % 128;
        if (token < Traits::kTileM) {
          copy_float_async(target + 4 * token, p.x_scales + min(work.token_begin + token, work.row_end - 1));
        }
      }
      commit_copies();
    }
  }

  /// accum(4 i + 2 h + e): column h of the lane's two, token 8 i + e of its own.
  template <class Smem, class Accumulators>
  CUTLASS_DEVICE static void store(GroupedParams const& p, GroupedWork const& work, Smem const& smem,
                                   Accumulators const& accum) {
    int const number = thread_number();
    int const warpgroup = __shfl_sync(0xffffffff, number / 128, 0), thread = number % 128;
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
    [[maybe_unused]] float const* const x_scales = smem.x_scales(warpgroup) + 2 * t;
    if constexpr (Traits::kHasXScales) wait_for_copies<0>();  // and for those of others below
    bool const is_vector = vector_stores(p);
    int const column_in_buffer = 8 * g + 2 * (thread / 32 ^ t);
    CUTLASS_PRAGMA_UNROLL
    for (int begin = 0; begin < Traits::kTileM; begin += kTokens) {
      if (begin >= tokens) break;
      synchronize();  // all threads have read what was in the buffer
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTokens / 8; ++j) {
        if (begin + 8 * j >= tokens) break;
        [[maybe_unused]] float2 scales;
        if constexpr (Traits::kHasXScales) scales = *reinterpret_cast<float2 const*>(x_scales + begin + 8 * j);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          ColumnPair<Element> pair;
          CUTLASS_PRAGMA_UNROLL
          for (int h = 0; h < 2; ++h) {
            float const sum = accum(4 * (begin / 8 + j) + 2 * h + e);
            pair.values[h] =
                Element(columns[h].affine(Traits::kHasXScales ? sum * (e == 0 ? scales.x : scales.y) : sum));
          }
          pair.store(buffer + (8 * j + 2 * t + e) * kRowElements + column_in_buffer);
        }
      }
      synchronize();
      int const last = min(min(tokens, begin + kTokens), work.row_end - work.token_begin);
      int const vector = thread % 8 * kVector, pair_of_row = thread / 16 % 4;
      if (p.is_gated) {
        int const y_column = work.y_column + panel * kPanelColumns;
        if (y_column >= p.columns) continue;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int row = begin + (half * 128 + thread) / 8; row < last; row += 32) {
          if (row >= work.skipped_tokens) {
            store_gated(p, work.token_begin + row, y_column + vector, of_pair + (row - begin) * kRowElements + vector,
                        pair_of_row);
          }
        }
      } else {
        if (first + vector >= p.n) continue;
        auto const of_row = [&](int row) {
          return read_vector(buffer + (row - begin) * kRowElements + vector, pair_of_row);
        };
        auto const put = [&](int row, Vector const& z) {
          if (row < last && row >= work.skipped_tokens) {
            store_vector(p, work.token_begin + row, first + vector, z, is_vector);
          }
        };
        int const first_row = begin + thread / 8;
        if (p.gate.function == int(GateFunction::kIdentity)) {
          Vector rows[kTokens / 16];
          cute::for_each(cute::make_int_sequence<kTokens / 16>{},
                         [&](auto i) { rows[i] = of_row(first_row + 16 * i); });
          cute::for_each(cute::make_int_sequence<kTokens / 16>{}, [&](auto i) { put(first_row + 16 * i, rows[i]); });
        } else {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int row = first_row; row < last; row += 16) {
            Vector z = of_row(row);
            activate(p.gate, z.values);
            put(row, z);
          }
        }
      }
    }
  }

 private:
  /// threadIdx.x, read anew for each tile: what follows from it would stay in registers during the main loop.
  CUTLASS_DEVICE static int thread_number() {
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
  }

  CUTLASS_DEVICE static void pair_barrier(int panel) {
    asm volatile("bar.sync %0, 256;" ::"r"(BarrierId::kFirstWarpgroup + panel) : "memory");
  }

  /// pair: of tokens, of four, whose order the words have.
  CUTLASS_DEVICE static Vector read_vector(Element const* source, int pair) {
    uint4 v = *reinterpret_cast<uint4 const*>(source);
    if (pair & 1) v = uint4{v.y, v.x, v.w, v.z};
    if (pair & 2) v = uint4{v.z, v.w, v.x, v.y};
    return reinterpret_cast<Vector const&>(v);
  }

  /// source: gates; kStoredElements behind it what they are multiplied with.
  CUTLASS_DEVICE static void store_gated(GroupedParams const& p, int64_t token, int column, Element const* source,
                                         int pair) {
    Vector z = read_vector(source, pair);
    Vector const up = read_vector(source + Traits::kStoredElements, pair);
    apply_gate(p.gate, z.values, up.values);
    *reinterpret_cast<Vector*>(static_cast<Element*>(p.y) + token * p.ldy + column) = z;
  }

  /// Columns from p.n on do not exist.
  CUTLASS_DEVICE static void store_vector(GroupedParams const& p, int64_t token, int column, Vector const& z,
                                          bool is_vector) {
    Element* const y = static_cast<Element*>(p.y) + token * p.ldy + column;
    if (is_vector) {
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
