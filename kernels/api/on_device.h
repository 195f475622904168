// Launches on a device, for every function of the C interface, and says what failed.
#pragma once

#include <cstdio>

#include <cuda_runtime_api.h>

#include "kernels/api/registry.h"

namespace weightonly {

/// Where a reason is written: the caller's place, or, where it gave none, one that nobody reads.
struct Message {
  Message(char* given, int given_bytes) : text(given), bytes(given_bytes) {
    if (text == nullptr || bytes < 1) {
      text = unread;
      bytes = sizeof(unread);
    }
    text[0] = 0;
  }
  Message(Message const&) = delete;
  Message& operator=(Message const&) = delete;

  char* text;
  int bytes;
  char unread[1];
};

/// Whether the parameters of a function are there.
inline bool check_address(char const* name, void const* params, Message const& message) {
  if (params != nullptr) return true;
  std::snprintf(message.text, message.bytes, "%s: params must be an address, got null", name);
  return false;
}

/// Makes `device` the current one as long as the guard lives.
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

/// Calls `launch`, which returns a cudaError_t, while `device` is current. Returns 0, or 1 with the reason in `message`.
template <class Launch>
int run_on_device(char const* name, int device, char* message, int message_bytes, Launch launch) {
  DeviceGuard const guard(device);
  cudaError_t error = guard.error();
  if (error == cudaSuccess) error = launch();
  if (error == cudaSuccess) return 0;
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    std::snprintf(
        message, message_bytes,
        "%s on device %d: the driver supports CUDA %d.%d, but the library is built with CUDA %d.%d: update the "
        "driver, or take kernels that an older CUDA built",
        name, device, driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return 1;
  }
  std::snprintf(message, message_bytes, "%s on device %d: %s (%s); the library is built for %s", name, device,
                cudaGetErrorString(error), cudaGetErrorName(error), kArchs);
  return 1;
}

}  // namespace weightonly
