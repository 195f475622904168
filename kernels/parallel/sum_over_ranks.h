// The C interface of sums over GPUs that share memory (weightonly/parallel/sums.py), beside kernels/api/api.h.
#pragma once

#include "kernels/api/api.h"

namespace weightonly {

inline constexpr int kMaxRanks = 8;

/// y = the sum of the terms of all ranks, in fp32, from rank 0 on, rounded once.
///
/// All ranks call it in the same order with the same sizes; calls that share memory follow each other on each device.
struct SumOverRanksParams {
  void* y;                  // T [count], 16-byte aligned: this rank's term before, the sum after
  void* memory[kMaxRanks];  // of each rank, as this one addresses it: [3, ranks, capacity] bytes; all bits set at first
  uint32_t* state;  // [3], of this rank; zeros at first
  int64_t count;  // at least 1
  int64_t capacity;  // bytes of a term, at most; a multiple of 16
  int32_t ranks;  // 2 to kMaxRanks
  int32_t rank;
  int32_t type;  // enum FloatType of T: kF16 or kBf16
  int32_t pdl_mode;  // enum PdlMode
};

}  // namespace weightonly

/// Enqueues one kernel on a stream of a device, as wo_gemm does: no synchronization, no allocation. Returns 0, or nonzero
/// with the reason in message. It needs compute capability 9.0.
WEIGHTONLY_API int wo_sum_over_ranks(weightonly::SumOverRanksParams const* params, int device, void* stream,
                                     char* message, int message_bytes);
