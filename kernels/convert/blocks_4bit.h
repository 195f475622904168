// What quantize_4bit and dequantize_4bit share: vectors of 16 bytes, and the checks of their parameters.
#pragma once

#include <cstdio>

#include "kernels/convert/conversions.h"
#include "cutlass_ext/convert/float_pairs.h"

namespace weightonly {

/// 16 bytes of floats. Their codes are 32 contiguous bits (16-bit floats) or 16 (fp32).
template <class Element>
struct FloatVector {
  static constexpr int kElements = 8;
  using Codes = uint32_t;

  /// The largest magnitude, NaN if one is NaN.
  __device__ static float absmax(uint4 const& bytes) {
    return larger_of_pair<Element>(
        larger_pair<Element>(larger_pair<Element>(bytes.x, bytes.y), larger_pair<Element>(bytes.z, bytes.w)));
  }

  __device__ static void unpack(uint4 const& bytes, float values[kElements]) {
    uint32_t const pairs[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const pair = unpack_pair<Element>(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }

  __device__ static uint4 pack(float const values[kElements]) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_pair<Element>(values[2 * i], values[2 * i + 1]);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

template <>
struct FloatVector<float> {
  static constexpr int kElements = 4;
  using Codes = uint16_t;

  __device__ static float absmax(uint4 const& bytes) {
    float values[kElements];
    unpack(bytes, values);
    return larger(larger(fabsf(values[0]), fabsf(values[1])), larger(fabsf(values[2]), fabsf(values[3])));
  }

  __device__ static void unpack(uint4 const& bytes, float values[kElements]) {
    values[0] = __uint_as_float(bytes.x);
    values[1] = __uint_as_float(bytes.y);
    values[2] = __uint_as_float(bytes.z);
    values[3] = __uint_as_float(bytes.w);
  }

  __device__ static uint4 pack(float const values[kElements]) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                      __float_as_uint(values[3]));
  }
};

/// The lowest bit of the code of element i among the codes of a vector: of a byte's two elements the even one has the
/// high nibble.
__host__ __device__ constexpr int code_shift(int i) {
  return 4 * (i ^ 1);
}

inline int log2_of(int power_of_two) {
  int exponent = 0;
  while ((1 << exponent) < power_of_two) ++exponent;
  return exponent;
}

/// Writes what is wrong into `message` and returns false, or returns true.
inline bool check_params(char const* function, Blocks4bitParams const& p, char* message, int message_bytes) {
  auto fail = [&](char const* name, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "%s: %s must be %s, got %lld", function, name, expected, got);
    return false;
  };
  auto wrong = [](void const* pointer, int alignment) {
    return pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % alignment != 0;
  };
  if (wrong(p.w, 16)) return fail("w", "a 16-byte aligned address", (long long)p.w);
  if (wrong(p.packed, 4)) return fail("packed", "a 4-byte aligned address", (long long)p.packed);
  if (wrong(p.absmax, 4)) return fail("absmax", "a 4-byte aligned address", (long long)p.absmax);
  if (p.count < 1 || p.count > (int64_t(1) << 42)) return fail("count", "1 to 2^42", p.count);
  if (p.blocksize < 32 || p.blocksize > 4096 || (p.blocksize & (p.blocksize - 1)) != 0) {
    return fail("blocksize", "a power of two from 32 to 4096", p.blocksize);
  }
  if (p.type < 0 || p.type > int(FloatType::kF32)) return fail("type", "0 to 2", p.type);
  return true;
}

}  // namespace weightonly
