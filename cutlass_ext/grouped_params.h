// The parameters of a grouped GEMM: one product for the rows of many experts.
#pragma once

#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// y[t] = x[t] * w[e] + bias[e] for the rows t of expert e, which are offs[e - 1] .. offs[e] - 1; zeros in rows after
/// those of the last expert.
///
/// Plain C layout: it crosses the library's C interface.
struct GroupedGemmParams {
  /// m counts the rows of x of all experts. weight, scales, zeros and bias are those of expert 0; those of the others
  /// follow, contiguous. A codebook is the same for all. split_k is 1, activation is the identity. clusters: SMs of the
  /// GPU.
  GemmParams gemm;
  int32_t const* offs;  // [experts], in device memory: ends of rows, ascending. Ends beyond m count as m
  int32_t experts;
};

}  // namespace weightonly
