// Loads from shared memory that stay in program order with the waits for asynchronous copies: asm volatile.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

template <int kWords>
CUTLASS_DEVICE void read_shared(uint32_t (&words)[kWords], uint32_t address) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
  }
}

}  // namespace weightonly
