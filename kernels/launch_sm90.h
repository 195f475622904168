// How the kernels of Hopper are launched: in clusters, and, if wanted, before the kernel in front of them has ended.
#pragma once

#include "kernels/launch.h"

namespace weightonly {

/// cluster: CTAs of one, along x and y. Params is GemmParams or derived from it.
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
  config.numAttrs = p.overlap ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace weightonly
