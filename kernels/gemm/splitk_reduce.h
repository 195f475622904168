// The reduction of split-K: y = epilogue(sum of the partials). See splitk_reduce.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// Enqueues the reduction of params.partials behind the kernel that writes them. Element: cutlass::half_t, bfloat16_t.
/// channel_scale: whether the reduction multiplies by the per-channel scale.
template <class Element>
cudaError_t launch_splitk_reduce(GemmParams const& params, bool channel_scale, cudaStream_t stream);

}  // namespace weightonly
