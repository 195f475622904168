// Arithmetic on two 16-bit floats packed in one 32-bit register, on the device and, bit for bit the same, on the host.
//
// The dequantizing code works on registers, not on vectors of elements: a register that ldmatrix delivered holds eight
// int4 weights, and what the tensor core wants is four registers of two halves each. The host versions exist so that a
// test on a CPU can run the very sequence of operations that the kernels run.
#pragma once

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/cutlass.h"
#include "cutlass/half.h"

namespace weightonly {

/// (a & mask) | bits in one LOP3.
template <uint32_t kMask, uint32_t kBits>
CUTLASS_HOST_DEVICE uint32_t and_or(uint32_t a) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  // The immediate is the truth table of (a & b) | c; nvcc does not always fuse the two operations by itself.
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(kMask), "n"(kBits));
  return result;
#else
  return (a & kMask) | kBits;
#endif
}

/// Bytes of {b, a} picked by the four low nibbles of the selector (PRMT without its sign mode).
template <uint32_t kSelector>
CUTLASS_HOST_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, kSelector);
#else
  uint64_t const bytes = (uint64_t(b) << 32) | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const index = (kSelector >> (4 * i)) & 0x7;
    result |= uint32_t((bytes >> (8 * index)) & 0xff) << (8 * i);
  }
  return result;
#endif
}

/// Operations on a register of two Elements (low half first), one rounding each.
template <class Element>
struct PackedMath;

namespace detail {

/// Host emulation: applies `op` to the float values of both halves, rounding once to Element. Products of two 16-bit
/// floats and their sums with a third are exact in double for every operand the converters use.
template <class Element, class Op>
inline uint32_t emulate(Op op, uint32_t a, uint32_t b, uint32_t c = 0) {
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    auto value = [i](uint32_t pair) { return double(float(Element::bitcast(uint16_t(pair >> (16 * i))))); };
    result |= uint32_t(Element(float(op(value(a), value(b), value(c)))).raw()) << (16 * i);
  }
  return result;
}

}  // namespace detail

template <>
struct PackedMath<cutlass::half_t> {
  CUTLASS_HOST_DEVICE static uint32_t sub(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return detail::emulate<cutlass::half_t>([](double x, double y, double) { return x - y; }, a, b);
#endif
  }

  CUTLASS_HOST_DEVICE static uint32_t mul(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return detail::emulate<cutlass::half_t>([](double x, double y, double) { return x * y; }, a, b);
#endif
  }

  CUTLASS_HOST_DEVICE static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return detail::emulate<cutlass::half_t>([](double x, double y, double z) { return x * y + z; }, a, b, c);
#endif
  }
};

template <>
struct PackedMath<cutlass::bfloat16_t> {
  /// sm80 has only the fma of bf16x2; a - b is fma(b, -1, a) and a * b is fma(a, b, -0), both rounded once.
  CUTLASS_HOST_DEVICE static uint32_t sub(uint32_t a, uint32_t b) { return fma(b, 0xbf80bf80u, a); }

  CUTLASS_HOST_DEVICE static uint32_t mul(uint32_t a, uint32_t b) { return fma(a, b, 0x80008000u); }

  CUTLASS_HOST_DEVICE static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return detail::emulate<cutlass::bfloat16_t>([](double x, double y, double z) { return x * y + z; }, a, b, c);
#endif
  }
};

/// The same 16-bit value in both halves of a register.
CUTLASS_HOST_DEVICE uint32_t broadcast(uint16_t value) {
  return permute_bytes<0x1010>(value, 0);
}

}  // namespace weightonly
