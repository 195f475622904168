// What every function of the C interface does around its launch: the device, and the message where it failed.
#pragma once

#include <cstdio>

#include <cuda_runtime_api.h>

#include "kernels/registry.h"

namespace weightonly {

/// Makes `device` current for the life of the guard.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ != cudaSuccess || previous_ == device) return;
    error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

/// Calls `launch`, which returns a cudaError_t, with `device` current. Returns 0, or 1 with the reason in message.
template <class Launch>
int run_on_device(char const* name, int device, char* message, int message_bytes, Launch launch) {
  DeviceGuard const guard(device);
  cudaError_t error = guard.error();
  if (error == cudaSuccess) error = launch();
  if (error == cudaSuccess) return 0;
  std::snprintf(message, message_bytes, "%s on device %d: %s (%s); the library is built for %s", name, device,
                cudaGetErrorString(error), cudaGetErrorName(error), kArchs);
  return 1;
}

}  // namespace weightonly
