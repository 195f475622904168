// The list of compiled grouped kernels, as registry.h has that of all others.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass_ext/grouped_params.h"
#include "kernels/api/registry.h"

namespace weightonly {

using GroupedLaunch = cudaError_t (*)(GroupedGemmParams const& params, cudaStream_t stream);

struct GroupedEntry {
  KernelFacts facts;
  GroupedLaunch launch;
  bool sorts;      // whether it takes ids: see GroupedGemmParams
  bool in_layers;  // whether it computes gated products, applies the function of a gate, and is_in_layer
};

extern GroupedEntry const* const kGroupedKernels;
extern int const kGroupedKernelCount;

}  // namespace weightonly
