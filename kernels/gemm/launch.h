// Launch helpers shared by all families.
#pragma once

#include <atomic>
#include <cstdint>

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"

#include "cutlass_ext/arch/limits.h"
#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// Allows a kernel its dynamic shared memory: more than kDefaultSmemBytes needs a request, once per kernel and device.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& devices_done) {
  if (bytes <= kDefaultSmemBytes) return cudaSuccess;
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device); error != cudaSuccess) return error;
  uint64_t const bit = uint64_t(1) << (device % 64);
  if (device < 64 && (devices_done.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) devices_done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

CUTLASS_HOST_DEVICE constexpr int divide_up(int a, int b) {
  return (a + b - 1) / b;
}

}  // namespace weightonly
