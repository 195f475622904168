// One k16 step of the tensor core, m16n8k16: one instruction on sm80, two on sm75.
#pragma once

#include "cute/arch/mma_sm75.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"

namespace weightonly {

/// From sm80: mma.m16n8k16, fp16 and bf16.
struct MmaSm80 {
  template <class Element>
  CUTLASS_DEVICE static void k16(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    using Atom =
        cutlass::platform::conditional_t<cutlass::platform::is_same<Element, cutlass::half_t>::value,
                                         cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]);
  }
};

/// sm75: two mma.m16n8k8, fp16. The operands of m16n8k16 are those of two m16n8k8 one after the other.
struct MmaSm75 {
  template <class Element>
  CUTLASS_DEVICE static void k16(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    static_assert(cutlass::platform::is_same<Element, cutlass::half_t>::value, "sm75 has no bf16");
    using Atom = cute::SM75_16x8x8_F32F16F16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], b[0], c[0], c[1], c[2], c[3]);
    Atom::fma(c[0], c[1], c[2], c[3], a[2], a[3], b[1], c[0], c[1], c[2], c[3]);
  }
};

}  // namespace weightonly
