// The parameters of a grouped GEMM: one product for the rows of many experts.
#pragma once

#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// A tile along M of a decode kernel: rows of one expert.
struct RowTile {
  int32_t row_begin;
  int16_t expert;
  int16_t rows;  // 1 to kRowTileM
};

inline constexpr int kRowTileM = 8;
inline constexpr int kMaxRowTiles = 1024;      // that a decode kernel has room to list
inline constexpr int kGatedColumns = 64;       // of a gated product are a multiple of this, gates as well as others
inline constexpr int kMaxSortedChoices = 128;  // choices of tokens that it sorts

/// Tiles along M of so many rows, at most.
constexpr int64_t most_row_tiles(int64_t rows, int64_t experts) {
  int64_t const with_rows = rows < experts ? rows : experts;
  return (rows + with_rows * (kRowTileM - 1)) / kRowTileM;
}

struct RowTileCounts {
  int32_t tiles_count;
  int32_t rows;  // of all experts: those that follow are of none
};

/// The tiles along M of all experts, as one decode kernel leaves them to the next.
struct RowTileList : RowTileCounts {
  RowTile tiles[1];  // [the rows of the products]
};

/// y[t] = x[t] * w[e] + bias[e] for the rows t of expert e. Where rows are of no expert is said below.
///
/// Three things can say which expert a row is of:
///
///   offs   the rows of expert e are offs[e - 1] .. offs[e] - 1. Rows after the last expert's become zeros
///   ids    tokens have chosen top_k experts each. The kernel sorts the choices by expert: row t of y is that of the
///          t-th choice, and of row `token` of x. It writes `list` and `places`
///   list   what such a kernel has written: rows as there
///
/// Kernels of decode (GroupedEntry.lists_rows) take all three, and gated products; the others take offs.
///
/// Plain C layout: it crosses the library's C interface.
struct GroupedGemmParams {
  /// m counts the rows of y of all experts. weight, scales, zeros and bias are those of expert 0; those of the others
  /// follow, contiguous. A codebook is the same for all. split_k is 1. activation is the identity, or what a gated
  /// product does to its gates.
  GemmParams gemm;
  int32_t const* offs;  // [experts], in device memory: ends of rows, ascending. Ends beyond m count as m. Or null
  int32_t experts;
  int32_t is_gated;     // whether y[t, i] = act(z[t, i]) * z[t, n / 2 + i], z being the product, rounded to T
  void const* ids;  // int32 or int64 [m]: the expert of each choice; other numbers than 0 .. experts - 1: none. Or null
  RowTileList* list;  // room for m tiles; written with ids, else read if offs is null
  int32_t* places;  // [m]: the row of each choice; written with ids
  int32_t top_k;  // choices of a token
  int32_t is_int64;  // whether ids are
};

}  // namespace weightonly
