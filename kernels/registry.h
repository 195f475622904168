// The table of compiled kernels. Generated units each define one entry; the generated registry.cu lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace weightonly {

using Launch = cudaError_t (*)(GemmParams const& params, cudaStream_t stream);

struct KernelEntry {
  char const* name;  // KernelConfig.name of heuristics/configs.py + "_" + the types, e.g. ..._f16_int4_group
  Launch launch;
  int max_m;        // rows of x that one launch handles
  int max_cluster;  // CTAs of a cluster that may share K, for tiled weights; 0: parts of K meet in GemmParams::partials
};

extern KernelEntry const* const* const kKernels;
extern int const kKernelCount;
extern char const* const kArchs;  // "80,90a": what the library was built for

}  // namespace weightonly
