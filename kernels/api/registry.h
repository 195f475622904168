// The list of compiled kernels. Each generated unit defines one entry; the generated registry.cu lists them all.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_ext/gemm_params.h"

namespace weightonly {

using Launch = cudaError_t (*)(GemmParams const& params, cudaStream_t stream);

struct KernelEntry {
  char const* name;  // KernelConfig.kernel of the heuristics, and the types: ..._f16_int4_group
  Launch launch;
  int max_m;        // rows of x that one launch handles
  int max_cluster;  // the most CTAs of a cluster that share K; 0: no clusters, split-K goes through GemmParams::partials
};

extern KernelEntry const* const* const kKernels;
extern int const kKernelCount;
extern char const* const kArchs;  // the architectures of the build: "80,90a"

}  // namespace weightonly
