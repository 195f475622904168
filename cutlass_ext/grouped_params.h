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
inline constexpr int kMaxSortedChoices = 128;  // choices of tokens that a decode kernel sorts
inline constexpr int kMaxGroupedExperts = 1024;

/// Tiles along M of so many rows, at most.
constexpr int64_t most_row_tiles(int64_t rows, int64_t experts) {
  int64_t const with_rows = rows < experts ? rows : experts;
  return (rows + with_rows * (kRowTileM - 1)) / kRowTileM;
}

/// act of a Gate. Those that a dense product has, too, have its numbers (Activation).
enum class GateFunction : int {
  kIdentity = 0,
  kRelu = 1,
  kGelu = 2,  // the erf form
  kSilu = 3,  // z * sigmoid(alpha * z)
  kGeluTanh = 4,
  kReluSquared = 5,
  kSitu = 6,  // alpha * tanh(z / alpha) * sigmoid(z)
};
inline constexpr int kGateFunctions = 7;

/// What experts compute between their products: act(gate) * (up + shift), both at most `limit`, and up at least -limit.
/// Of kSitu up is limit * tanh(up / limit) instead, and the gate has no limit.
struct Gate {
  int32_t function;  // enum GateFunction
  float alpha;  // not 0
  float limit;  // above 0; infinity: none
  float shift;
};

/// y[t] = x[t] * w[e] + bias[e] for the rows t of expert e; rows of no expert become zeros. Which expert a row is of:
///
///   offs   the rows of expert e are offs[e - 1] .. offs[e] - 1. Those after the last expert's are of none
///   ids    tokens have chosen top_k experts each. The kernel sorts the choices by expert, those of none last: row t of
///          y is that of the t-th choice. It does not write rows of no expert
///
/// Plain C layout: it crosses the library's C interface.
struct GroupedGemmParams {
  /// m counts the rows of y of all experts. weight, scales, zeros and bias are those of expert 0; those of the others
  /// follow, contiguous. A codebook is the same for all. split_k is 1, and activation the identity.
  GemmParams gemm;
  int32_t const* offs;  // [experts], in device memory: ends of rows, ascending. Ends beyond m count as m. Or null
  /// int32 or int64 [m]: the expert of each choice; other numbers than 0 .. experts - 1: none. Or null
  void const* ids;
  /// [m]: written with ids: the row of each choice. Null: x has a row for each sorted choice, else one for each token
  int32_t* places;
  int32_t* rows;  // [1]: written with places: how many choices are of an expert
  Gate gate;  // its function is applied to z, rounded to T
  int32_t experts;
  int32_t is_gated;     // whether y[t, i] = act(z[t, i]) * z[t, n / 2 + i], z being the product; else y = act(z)
  int32_t top_k;        // choices of a token, with ids
  int32_t is_int64;     // whether ids are
  /// Whether it is a later product of a layer: the kernel in front writes x alone, and all else is there when that one
  /// lets this one start. So this one loads before that one has ended. It does not write rows of no expert.
  int32_t is_in_layer;
};

/// y[t] = x_scales[t] * x[t] * w[e] + bias[e], as Fp8GemmParams has it.
struct Fp8GroupedGemmParams : GroupedGemmParams {
  float const* x_scales;  // [m], 4-byte aligned
};

}  // namespace weightonly
