// Pairs of 16-bit floats in a 32-bit register, low half first: to and from fp32, and the larger magnitude of two.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"

namespace weightonly {

/// CUDA's own type of a pair, with the same bits.
template <class Element>
struct CudaPair;
template <>
struct CudaPair<cutlass::half_t> {
  using Type = __half2;
};
template <>
struct CudaPair<cutlass::bfloat16_t> {
  using Type = __nv_bfloat162;
};

template <class To, class From>
__device__ To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class Element>
__device__ float2 unpack_pair(uint32_t pair) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return __half22float2(bit_cast<__half2>(pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

/// Rounds each to the nearest.
template <class Element>
__device__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return bit_cast<uint32_t>(__floats2half2_rn(low, high));
  } else {
    return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
  }
}

/// The larger of two numbers that are 0 or more; NaN if one of them is NaN.
__device__ inline float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));  // floats from 0 on are ordered like their bits
#endif
}

/// The larger magnitude of two pairs, in each half; NaN if one of them is NaN.
template <class Element>
__device__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  using Pair = typename CudaPair<Element>::Type;
  return bit_cast<uint32_t>(__hmax2_nan(__habs2(bit_cast<Pair>(a)), __habs2(bit_cast<Pair>(b))));
}

/// The larger magnitude of the two of a pair; NaN if one of them is NaN.
template <class Element>
__device__ float larger_of_pair(uint32_t pair) {
  float2 const values = unpack_pair<Element>(pair);
  return larger(fabsf(values.x), fabsf(values.y));
}

}  // namespace weightonly
