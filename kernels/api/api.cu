// See api.h.
#include "kernels/api/api.h"

#include <cstdio>
#include <cstring>

#include <cuda_runtime_api.h>

#include "cutlass_ext/convert/numeric_conversion.h"
#include "kernels/api/checks.h"
#include "kernels/api/on_device.h"
#include "kernels/api/registry.h"
#include "kernels/convert/conversions.h"
#include "kernels/convert/dequantize.h"
#include "kernels/experts/experts.h"

namespace weightonly {
namespace {

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

/// Launches a kernel that takes x in elements of x_bytes.
template <class Params>
int launch_gemm(int kernel, Params const* params, int x_bytes,
                bool (*check)(KernelFacts const&, Params const&, char*, int), int device, void* stream,
                Message const& place) {
  if (kernel < 0 || kernel >= kKernelCount) {
    std::snprintf(place.text, place.bytes, "kernel must be 0 to %d, got %d", kKernelCount - 1, kernel);
    return 1;
  }
  KernelEntry const& entry = kKernels[kernel];
  if (!check_address(entry.facts.name, params, place)) return 1;
  if (!check_x_bytes(entry.facts, x_bytes, place.text, place.bytes)) return 1;
  if (!check(entry.facts, *params, place.text, place.bytes)) return 1;
  return run_on_device(entry.facts.name, device, place.text, place.bytes, [&] {
    Params complete = *params;
    complete.group = GroupIndex::make(complete.k, complete.group_size);
    return entry.launch(complete, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace
}  // namespace weightonly

using namespace weightonly;

int wo_abi_version() {
  return WEIGHTONLY_ABI_VERSION;
}

int wo_struct_bytes(int which) {
  switch (which) {
    case 0:
      return int(sizeof(GemmParams));
    case 1:
      return int(sizeof(AwqDequantizeParams));
    case 2:
      return int(sizeof(Blocks4bitParams));
    case 3:
      return int(sizeof(DequantizeParams));
    case 4:
      return int(sizeof(GroupedGemmParams));
    case 5:
      return int(sizeof(RouteParams));
    case 6:
      return int(sizeof(GatherParams));
    case 7:
      return int(sizeof(CombineParams));
    case 8:
      return int(sizeof(Fp8GemmParams));
    case 9:
      return int(sizeof(QuantizeActivationsParams));
    case 10:
      return int(sizeof(Fp8GroupedGemmParams));
    case 11:
      return int(sizeof(SpreadParams));
    default:
      return 0;
  }
}

int wo_kernel_count() {
  return kKernelCount;
}

char const* wo_kernel_name(int kernel) {
  return kernel >= 0 && kernel < kKernelCount ? kKernels[kernel].facts.name : nullptr;
}

char const* wo_archs() {
  return kArchs;
}

int wo_gemm(int kernel, GemmParams const* params, int device, void* stream, char* message, int message_bytes) {
  return launch_gemm(kernel, params, 2, check_params, device, stream, Message(message, message_bytes));
}

int wo_gemm_fp8(int kernel, Fp8GemmParams const* params, int device, void* stream, char* message, int message_bytes) {
  return launch_gemm(kernel, params, 1, check_fp8_params, device, stream, Message(message, message_bytes));
}

int wo_convert_host(int bits, int bf16, unsigned const* packed, int words, unsigned short* out) {
  using cutlass::bfloat16_t;
  using cutlass::half_t;
  using cutlass::uint4b_t;
  if ((bits != 4 && bits != 8) || packed == nullptr || out == nullptr || words < 0) return 1;
  if (bits == 4) {
    bf16 ? convert_host<bfloat16_t, uint4b_t>(packed, words, out) : convert_host<half_t, uint4b_t>(packed, words, out);
  } else {
    bf16 ? convert_host<bfloat16_t, uint8_t>(packed, words, out) : convert_host<half_t, uint8_t>(packed, words, out);
  }
  return 0;
}
