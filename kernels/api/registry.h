// The list of compiled kernels: the generated registry.cu. Units define the functions alone, and read none of this: a
// fact that is added here compiles no kernel anew.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// What the checks of a launch know of a kernel, single or grouped.
struct KernelFacts {
  char const* name;  // KernelConfig.kernel of the heuristics, and the types: ..._f16_int4_group
  int max_m;         // rows of x that one launch handles
  int max_cluster;   // the most CTAs of a cluster that share K; 0: no clusters, split-K goes through partials
  bool reads_zeros;  // reads zero points, or the codebook that is in their place, without asking for null
  int least_group;   // 16: groups of 16 alone; 32: of 32 and of multiples of 64; 128: of multiples of 128
  int x_bytes;       // of an element of x. 1: params are Fp8GemmParams
  bool takes_order;  // may add its sums over K in the order of another kernel
};

using Launch = cudaError_t (*)(GemmParams const& params, cudaStream_t stream);

struct KernelEntry {
  KernelFacts facts;
  Launch launch;
};

extern KernelEntry const* const kKernels;
extern int const kKernelCount;
extern char const* const kArchs;  // the architectures of the build: "80,90a"

}  // namespace weightonly
