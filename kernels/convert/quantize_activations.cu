// Rows of floats to E4M3, each with a scale. A CTA reads its row twice: for the largest magnitude, then, out of caches, to
// divide.
#include <climits>

#include <cuda_fp8.h>

#include "kernels/api/on_device.h"
#include "kernels/convert/blocks_4bit.h"

namespace weightonly {
inline namespace quantize_activations_cu {  // not anonymous, as in generate.py

constexpr int kThreads = 256;
constexpr float kLargest = 448.f;  // of E4M3

/// The largest of all threads' numbers, which are 0 or more; NaN if one is NaN.
__device__ float largest_of_cta(float value) {
  __shared__ float of_warps[kThreads / 32];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) value = larger(value, __shfl_xor_sync(~0u, value, distance));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) value = larger(value, of_warps[i]);
  return value;
}

__device__ uint8_t to_e4m3(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    quantize_activations_kernel(__grid_constant__ QuantizeActivationsParams const p) {
  using Vector = FloatVector<Element>;
  constexpr int kElements = Vector::kElements;
  int64_t const row = blockIdx.x;
  auto const* const x = static_cast<Element const*>(p.x) + row * p.ldx;
  auto* const x8 = static_cast<uint8_t*>(p.x8) + row * p.k;
  auto const* const vectors = reinterpret_cast<uint4 const*>(x);
  int const vector_count = p.k / kElements, rest = vector_count * kElements;
  float largest = 0;
  for (int i = threadIdx.x; i < vector_count; i += kThreads) largest = larger(largest, Vector::absmax(vectors[i]));
  for (int i = rest + threadIdx.x; i < p.k; i += kThreads) largest = larger(largest, fabsf(float(x[i])));
  float scale = __fdiv_rn(largest_of_cta(largest), kLargest);
  if (scale == 0) scale = 1;
  if (threadIdx.x == 0) p.x_scales[row] = scale;
  bool const is_vector = p.k % kElements == 0;  // else rows of x8 are not aligned
  for (int i = threadIdx.x; i < vector_count; i += kThreads) {
    float values[kElements];
    Vector::unpack(vectors[i], values);
    alignas(8) uint8_t bytes[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) bytes[j] = to_e4m3(__fdiv_rn(values[j], scale));
    if (is_vector) {
      using Bytes = std::conditional_t<kElements == 8, uint2, uint32_t>;
      reinterpret_cast<Bytes*>(x8)[i] = *reinterpret_cast<Bytes const*>(bytes);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) x8[i * kElements + j] = bytes[j];
    }
  }
  for (int i = rest + threadIdx.x; i < p.k; i += kThreads) x8[i] = to_e4m3(__fdiv_rn(float(x[i]), scale));
}

inline bool check_params(QuantizeActivationsParams const& p, char* message, int message_bytes) {
  auto fail = [&](char const* name, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "quantize_activations: %s must be %s, got %lld", name, expected, got);
    return false;
  };
  auto misaligned = [](void const* address, int bytes) {
    return address == nullptr || reinterpret_cast<uintptr_t>(address) % bytes != 0;
  };
  if (p.type < 0 || p.type > int(FloatType::kF32)) return fail("type", "0 to 2", p.type);
  int const step = FloatType(p.type) == FloatType::kF32 ? 4 : 8;
  if (misaligned(p.x, 16)) return fail("x", "a 16-byte aligned address", (long long)p.x);
  if (misaligned(p.x8, 16)) return fail("x8", "a 16-byte aligned address", (long long)p.x8);
  if (misaligned(p.x_scales, 4)) return fail("x_scales", "a 4-byte aligned address", (long long)p.x_scales);
  if (p.m < 1) return fail("m", "at least 1", p.m);
  if (p.k < 1 || p.k > INT_MAX - 4095) return fail("k", "1 to 2^31 - 4096", p.k);
  if (p.m > 1 && (p.ldx < p.k || p.ldx % step != 0 || p.ldx > (int64_t(1) << 58) / p.m))
    return fail("ldx", "such that rows are 16-byte aligned, from k on", p.ldx);
  return true;
}

template <class Element>
cudaError_t launch(QuantizeActivationsParams const& p, cudaStream_t stream) {
  quantize_activations_kernel<Element><<<p.m, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace quantize_activations_cu
}  // namespace weightonly

using namespace weightonly;

int wo_quantize_activations(QuantizeActivationsParams const* params, int device, void* stream, char* message,
                            int message_bytes) {
  Message const place(message, message_bytes);
  if (!check_address("quantize_activations", params, place)) return 1;
  QuantizeActivationsParams const& p = *params;
  if (!check_params(p, place.text, place.bytes)) return 1;
  return run_on_device("quantize_activations", device, place.text, place.bytes, [&] {
    auto const s = static_cast<cudaStream_t>(stream);
    switch (FloatType(p.type)) {
      case FloatType::kF16:
        return launch<cutlass::half_t>(p, s);
      case FloatType::kBf16:
        return launch<cutlass::bfloat16_t>(p, s);
      default:
        return launch<float>(p, s);
    }
  });
}
