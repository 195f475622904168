// Rows of floats to E4M3, each with a scale. A CTA has a row in registers, and what has no room there it reads twice: for
// the largest magnitude, then, out of caches, to divide.
#include <algorithm>
#include <climits>

#include <cuda_fp8.h>

#include "kernels/api/on_device.h"
#include "kernels/convert/blocks_4bit.h"

namespace weightonly {
inline namespace quantize_activations_cu {  // not anonymous, as in generate.py

constexpr int kMaxThreads = 1024;
constexpr float kLargest = 448.f;  // of E4M3

/// The largest of all threads' numbers, which are 0 or more; NaN if one is NaN.
__device__ float largest_of_cta(float value) {
  __shared__ float of_warps[kMaxThreads / 32];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) value = larger(value, __shfl_xor_sync(~0u, value, distance));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; ++i) value = larger(value, of_warps[i]);
  return value;
}

/// Numbers over a scale, rounded to fp32 and then to E4M3.
struct Divider {
  float scale, inverse;
  bool is_usual;  // no step below overflows, and none underflows where the byte is not that of 0

  /// The quotient, by two steps of Newton's method: the second begins within one unit in the last place, and so is right
  /// (Markstein 1990). A division takes the compiler twice as many instructions.
  __device__ float divide(float x) const {
    if (!is_usual) return __fdiv_rn(x, scale);
    float quotient = x * inverse;
#pragma unroll
    for (int i = 0; i < 2; ++i) quotient = fmaf(fmaf(-quotient, scale, x), inverse, quotient);
    return copysignf(quotient, x);
  }
  __device__ uint8_t byte(float x) const { return __nv_cvt_float_to_fp8(divide(x), __NV_SATFINITE, __NV_E4M3); }
  __device__ uint16_t bytes(float x0, float x1) const {
    return __nv_cvt_float2_to_fp8x2({divide(x0), divide(x1)}, __NV_SATFINITE, __NV_E4M3);
  }
};

__device__ Divider divider_of(float scale) {
  // No step of `divide` overflows, and none underflows where the byte is not that of 0.
  return {scale, __frcp_rn(scale), scale > 0x1p-60f && scale < 0x1p60f};
}

/// kHeld: vectors of a row that a thread has in registers.
template <class Element, int kHeld>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_activations_kernel(__grid_constant__ QuantizeActivationsParams const p) {
  using Vector = FloatVector<Element>;
  constexpr int kElements = Vector::kElements;
#if __CUDA_ARCH__ >= 900
  // The product that follows waits for all of this grid. (That this one, too, starts early, made a pair slower.)
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  int64_t const row = blockIdx.x;
  if (p.rows_end != nullptr && row >= *p.rows_end) return;
  auto const* const x = static_cast<Element const*>(p.x) + row * p.ldx;
  auto* const x8 = static_cast<uint8_t*>(p.x8) + row * p.k;
  auto const* const vectors = reinterpret_cast<uint4 const*>(x);
  int const vector_count = p.k / kElements, rest = vector_count * kElements;
  int const thread = threadIdx.x, threads = blockDim.x;
  uint4 held[kHeld];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    held[i] = thread + i * threads < vector_count ? vectors[thread + i * threads] : uint4{};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) largest = larger(largest, Vector::absmax(held[i]));
  int const first_left = thread + kHeld * threads;
  for (int i = first_left; i < vector_count; i += threads) largest = larger(largest, Vector::absmax(vectors[i]));
  for (int i = rest + thread; i < p.k; i += threads) largest = larger(largest, fabsf(float(x[i])));
  float scale = __fdiv_rn(largest_of_cta(largest), kLargest);
  if (scale == 0) scale = 1;
  if (thread == 0) p.x_scales[row] = scale;
  Divider const divider = divider_of(scale);
  bool const is_vector = p.k % kElements == 0;  // else rows of x8 are not aligned
  auto const store = [&](int i, uint4 const& vector) {
    float values[kElements];
    Vector::unpack(vector, values);
    uint16_t pairs[kElements / 2];
#pragma unroll
    for (int j = 0; j < kElements / 2; ++j) pairs[j] = divider.bytes(values[2 * j], values[2 * j + 1]);
    if (is_vector) {
      uint32_t words[kElements / 4];
#pragma unroll
      for (int j = 0; j < kElements / 4; ++j) words[j] = pairs[2 * j] | uint32_t(pairs[2 * j + 1]) << 16;
      if constexpr (kElements == 8) {
        reinterpret_cast<uint2*>(x8)[i] = make_uint2(words[0], words[1]);
      } else {
        reinterpret_cast<uint32_t*>(x8)[i] = words[0];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) x8[i * kElements + j] = uint8_t(pairs[j / 2] >> 8 * (j % 2));
    }
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (thread + i * threads < vector_count) store(thread + i * threads, held[i]);
  }
  for (int i = first_left; i < vector_count; i += threads) store(i, vectors[i]);
  for (int i = rest + thread; i < p.k; i += threads) x8[i] = divider.byte(float(x[i]));
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
  if (reinterpret_cast<uintptr_t>(p.rows_end) % 4 != 0)
    return fail("rows_end", "a 4-byte aligned address or null", (long long)p.rows_end);
  if (p.m < 1) return fail("m", "at least 1", p.m);
  if (p.k < 1 || p.k > INT_MAX - 4095) return fail("k", "1 to 2^31 - 4096", p.k);
  if (p.m > 1 && (p.ldx < p.k || p.ldx % step != 0 || p.ldx > (int64_t(1) << 58) / p.m))
    return fail("ldx", "such that rows are 16-byte aligned, from k on", p.ldx);
  return true;
}

template <class Element, int kHeld>
cudaError_t launch_holding(QuantizeActivationsParams const& p, cudaStream_t stream) {
  int const vectors = p.k / FloatVector<Element>::kElements, warps = (vectors + 32 * kHeld - 1) / (32 * kHeld);
  int const threads = 32 * std::clamp(warps, 2, kMaxThreads / 32);
  quantize_activations_kernel<Element, kHeld><<<p.m, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch(QuantizeActivationsParams const& p, cudaStream_t stream) {
  // Long rows: several CTAs fit in an SM only if they have few threads.
  return p.k / FloatVector<Element>::kElements > 1024 ? launch_holding<Element, 7>(p, stream)
                                                      : launch_holding<Element, 4>(p, stream);
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
