// The C interface of what a layer of experts does around its two grouped products (weightonly/plan/experts.py), beside
// kernels/api/api.h.
#pragma once

#include "kernels/api/api.h"

namespace weightonly {

/// Choices of experts, tokens * top_k, of one layer: 65,536 tokens of 32 experts each.
inline constexpr int kMaxChoices = 1 << 21;

/// Sorts choices by expert, in their order; those of no expert come last.
struct RouteParams {
  void const* ids;   // int32 or int64 [choices]; any number but 0 .. experts - 1 means no expert
  int32_t* offs;     // [experts]: where the rows of each expert end
  int32_t* places;   // [choices]: the row that a choice has become
  int32_t choices;   // 1 to kMaxChoices
  int32_t experts;   // 1 to 1024
  int32_t is_int64;  // whether ids are
  int32_t pdl_mode;  // enum PdlMode
};

/// Copies each token's row, and its scale, to the rows of its choices, of those that are of an expert. The kernel in
/// front may write offs and places, but not x and scales.
struct GatherParams {
  void const* x;          // 16-bit floats [tokens, columns], rows ldx elements apart, 16-byte aligned
  void* sorted;           // like x, [tokens * top_k, columns], contiguous
  int32_t const* offs;    // [experts]
  int32_t const* places;  // [tokens, top_k]
  int64_t ldx;            // elements, a multiple of 8
  int32_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t columns;        // a multiple of 8
  int32_t pdl_mode;       // enum PdlMode
  float const* scales;    // [tokens]; or null
  float* sorted_scales;   // [tokens * top_k]; null if scales are
};

/// y[m] = sum_j weights[m, j] * rows[places[m, j]], in fp32, from j = 0 on, rounded once.
struct CombineParams {
  void const* rows;      // T [tokens * top_k, columns], contiguous, 16-byte aligned
  float const* weights;  // [tokens, top_k]
  int32_t const* places;  // [tokens, top_k]
  int32_t const* rows_end;  // [1]: rows from this one on are not added
  void* y;               // T [tokens, columns], contiguous, 16-byte aligned
  int32_t tokens;
  int32_t top_k;
  int32_t columns;       // a multiple of 8
  int32_t type;          // enum FloatType of T: kF16 or kBf16
  int32_t pdl_mode;      // enum PdlMode
};

/// The gradients of Combine: of_rows[places[m, j]] = weights[m, j] * grad[m], rounded once, and of_weights[m, j] =
/// sum of grad[m] * rows[places[m, j]], in fp32. Both are zeros for choices whose rows are not added.
struct SpreadParams {
  void const* grad;         // T [tokens, columns], contiguous, 16-byte aligned
  void const* rows;         // T [tokens * top_k, columns], contiguous, 16-byte aligned; null if of_weights is
  float const* weights;     // [tokens, top_k]
  int32_t const* places;    // [tokens, top_k]
  int32_t const* rows_end;  // [1]: rows from this one on were not added
  void* of_rows;            // like rows; or null
  float* of_weights;        // [tokens, top_k]; or null
  int32_t tokens;
  int32_t top_k;
  int32_t columns;          // a multiple of 8
  int32_t type;             // enum FloatType of T: kF16 or kBf16
  int32_t pdl_mode;         // enum PdlMode
};

}  // namespace weightonly

/// Each enqueues one kernel on a stream of a device, as wo_gemm does: no synchronization, no allocation. Returns 0, or
/// nonzero with the reason in message. All need compute capability 9.0.
WEIGHTONLY_API int wo_route(weightonly::RouteParams const* params, int device, void* stream, char* message,
                            int message_bytes);
WEIGHTONLY_API int wo_gather(weightonly::GatherParams const* params, int device, void* stream, char* message,
                             int message_bytes);
WEIGHTONLY_API int wo_combine(weightonly::CombineParams const* params, int device, void* stream, char* message,
                              int message_bytes);
WEIGHTONLY_API int wo_spread(weightonly::SpreadParams const* params, int device, void* stream, char* message,
                             int message_bytes);
