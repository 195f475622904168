// How the Hopper kernels are launched: in thread block clusters, and with programmatic dependent launch (PDL) if asked
// for.
#pragma once

#include "kernels/gemm/launch.h"

namespace weightonly {

/// Params is GemmParams or derived from it. cluster: the CTAs of one cluster along x and y of the grid. smem_bytes:
/// dynamic shared memory of one CTA. devices_done: see allow_shared_memory.
template <class Params>
cudaError_t launch_clusters(void (*kernel)(Params), std::atomic<uint64_t>& devices_done, Params const& p, dim3 grid,
                            dim3 cluster, int threads, int smem_bytes, cudaStream_t stream) {
  if (cudaError_t const error = allow_shared_memory(kernel, kMaxSmemBytesSm90, devices_done); error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster.x;
  attributes[0].val.clusterDim.y = cluster.y;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.pdl_mode == int(PdlMode::kNone) ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace weightonly
