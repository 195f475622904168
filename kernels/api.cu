// See api.h.
#include "kernels/api.h"

#include <cstdio>
#include <cstring>

#include <cuda_runtime_api.h>

#include "cutlass_ext/numeric_conversion.h"
#include "kernels/checks.h"
#include "kernels/registry.h"

namespace weightonly {
namespace {

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

template <class Element, class Source>
void convert_host(unsigned const* packed, int words, unsigned short* out) {
  constexpr int kCount = detail::ConvertWord<Element, Source>::kElements;
  using Converter = FastInterleavedAndBiasedNumericArrayConverter<Element, Source, kCount>;
  for (int i = 0; i < words; ++i) {
    typename Converter::source_type source;
    std::memcpy(&source, packed + i, sizeof(unsigned));
    auto const result = Converter::convert(source);
    std::memcpy(out + i * kCount, &result, sizeof(result));
  }
}

}  // namespace
}  // namespace weightonly

using namespace weightonly;

int wo_kernel_count() {
  return kKernelCount;
}

char const* wo_kernel_name(int kernel) {
  return kernel >= 0 && kernel < kKernelCount ? kKernels[kernel]->name : nullptr;
}

char const* wo_archs() {
  return kArchs;
}

int wo_gemm(int kernel, GemmParams const* params, int device, void* stream, char* message, int message_bytes) {
  if (kernel < 0 || kernel >= kKernelCount) {
    std::snprintf(message, message_bytes, "kernel must be 0 to %d, got %d", kKernelCount - 1, kernel);
    return 1;
  }
  KernelEntry const& entry = *kKernels[kernel];
  if (!check_params(entry, *params, message, message_bytes)) return 1;
  DeviceGuard const guard(device);
  cudaError_t error = guard.error();
  if (error == cudaSuccess) {
    GemmParams complete = *params;
    complete.group = GroupIndex::make(complete.k, complete.group_size);
    error = entry.launch(complete, static_cast<cudaStream_t>(stream));
  }
  if (error == cudaSuccess) return 0;
  std::snprintf(message, message_bytes, "%s on device %d: %s (%s); the library is built for %s", entry.name, device,
                cudaGetErrorString(error), cudaGetErrorName(error), kArchs);
  return 1;
}

int wo_convert_host(int bits, int bf16, unsigned const* packed, int words, unsigned short* out) {
  using cutlass::bfloat16_t;
  using cutlass::half_t;
  using cutlass::uint4b_t;
  if (bits != 4 && bits != 8) return 1;
  if (bits == 4) {
    bf16 ? convert_host<bfloat16_t, uint4b_t>(packed, words, out) : convert_host<half_t, uint4b_t>(packed, words, out);
  } else {
    bf16 ? convert_host<bfloat16_t, uint8_t>(packed, words, out) : convert_host<half_t, uint8_t>(packed, words, out);
  }
  return 0;
}
