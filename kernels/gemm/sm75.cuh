// Turing GEMM on interleaved weights: the tile of sm80.cuh around the two-stage pipelined mainloop. fp16 only:
// the tensor cores of sm75 have no bf16.
#pragma once

#include "cutlass_ext/mainloop/sm75_two_stage.h"
#include "kernels/gemm/sm80.cuh"

namespace weightonly {

template <class Config>
cudaError_t launch_gemm_sm75(GemmParams const& p, cudaStream_t stream) {
  return launch_gemm_tile<Config, GemmTile<Config, MmaPipelined>>(p, stream);
}

}  // namespace weightonly
