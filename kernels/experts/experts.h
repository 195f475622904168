// The C interface of what a layer of experts does around its two grouped products (weightonly/experts.py), beside
// kernels/api/api.h.
#pragma once

#include "kernels/api/api.h"

namespace weightonly {

/// Choices of experts, tokens * top_k, that one launch sorts.
inline constexpr int kMaxChoices = 4096;

/// Sorts tokens by expert, and gathers their rows.
struct RouteParams {
  void const* ids;    // int32 or int64 [tokens, top_k]; any number but 0 .. experts - 1 means no expert
  void const* x;      // 16-bit floats [tokens, columns], rows ldx elements apart, 16-byte aligned
  void* sorted;       // like x, [tokens * top_k, columns], contiguous: rows of expert 0 first, in the order of ids
  int32_t* offs;      // [experts]: where the rows of each expert end
  int32_t* places;    // [tokens, top_k]: the row of `sorted` that a choice has become; those of no expert come last
  int64_t ldx;        // elements, a multiple of 8
  int32_t tokens;
  int32_t top_k;
  int32_t experts;    // 1 to 512
  int32_t columns;    // a multiple of 8
  int32_t is_int64;   // whether ids are
  int32_t pdl_mode;   // enum PdlMode
};

/// y[t, i] = act(gate[t, i]) * up[t, i]. act's result is rounded to T, and so is the product.
struct GateParams {
  void const* gate_up;  // T [rows, 2 * columns], contiguous, 16-byte aligned: gate before up
  void* y;              // T [rows, columns], contiguous, 16-byte aligned
  int32_t rows;
  int32_t columns;      // a multiple of 8
  int32_t activation;   // enum Activation
  int32_t type;         // enum FloatType of T: kF16 or kBf16
  int32_t pdl_mode;     // enum PdlMode
};

/// y[m] = sum_j weights[m, j] * rows[places[m, j]], in fp32, from j = 0 on, rounded once.
struct CombineParams {
  void const* rows;      // T [tokens * top_k, columns], contiguous, 16-byte aligned
  float const* weights;  // [tokens, top_k]
  int32_t const* places;  // [tokens, top_k]
  int32_t const* offs;   // [experts]: rows from the last end on are not added
  void* y;               // T [tokens, columns], contiguous, 16-byte aligned
  int32_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t columns;       // a multiple of 8
  int32_t type;          // enum FloatType of T: kF16 or kBf16
  int32_t pdl_mode;      // enum PdlMode
};

}  // namespace weightonly

/// Each enqueues one kernel on a stream of a device, as wo_gemm does: no synchronization, no allocation. Returns 0, or
/// nonzero with the reason in message.
WEIGHTONLY_API int wo_route(weightonly::RouteParams const* params, int device, void* stream, char* message,
                            int message_bytes);
WEIGHTONLY_API int wo_gate(weightonly::GateParams const* params, int device, void* stream, char* message,
                           int message_bytes);
WEIGHTONLY_API int wo_combine(weightonly::CombineParams const* params, int device, void* stream, char* message,
                              int message_bytes);
