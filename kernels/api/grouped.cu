// Grouped products: see api.h.
#include <cuda_runtime_api.h>

#include "kernels/api/api.h"
#include "kernels/api/grouped_checks.h"
#include "kernels/api/grouped_registry.h"
#include "kernels/api/on_device.h"

namespace weightonly {
namespace {

/// Launches a kernel that takes x in elements of x_bytes.
template <class Params>
int launch_grouped(int kernel, Params const* params, int x_bytes,
                   bool (*check)(GroupedEntry const&, Params const&, char*, int), int device, void* stream,
                   Message const& place) {
  if (kernel < 0 || kernel >= kGroupedKernelCount) {
    std::snprintf(place.text, place.bytes, "kernel must be 0 to %d, got %d", kGroupedKernelCount - 1, kernel);
    return 1;
  }
  GroupedEntry const& entry = kGroupedKernels[kernel];
  if (!check_address(entry.facts.name, params, place)) return 1;
  if (!check_x_bytes(entry.facts, x_bytes, place.text, place.bytes)) return 1;
  if (!check(entry, *params, place.text, place.bytes)) return 1;
  return run_on_device(entry.facts.name, device, place.text, place.bytes, [&] {
    Params complete = *params;
    complete.gemm.group = GroupIndex::make(complete.gemm.k, complete.gemm.group_size);
    return entry.launch(complete, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace
}  // namespace weightonly

using namespace weightonly;

int wo_grouped_kernel_count() {
  return kGroupedKernelCount;
}

char const* wo_grouped_kernel_name(int kernel) {
  return kernel >= 0 && kernel < kGroupedKernelCount ? kGroupedKernels[kernel].facts.name : nullptr;
}

int wo_grouped_gemm(int kernel, GroupedGemmParams const* params, int device, void* stream, char* message,
                    int message_bytes) {
  return launch_grouped(kernel, params, 2, check_grouped_params, device, stream, Message(message, message_bytes));
}

int wo_grouped_gemm_fp8(int kernel, Fp8GroupedGemmParams const* params, int device, void* stream, char* message,
                        int message_bytes) {
  return launch_grouped(kernel, params, 1, check_fp8_grouped_params, device, stream, Message(message, message_bytes));
}
