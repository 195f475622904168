// PRMT, with all four bits of a selector's nibbles: __byte_perm costs an instruction more, to clear the highest ones.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

/// Byte i of the result is the one of `low` (0 to 3) or `high` (4 to 7) that nibble i of the selector's low half names. A
/// nibble whose highest bit is set: the sign of that byte, eight times.
CUTLASS_HOST_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes = 0;
#if defined(__CUDA_ARCH__)
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
#else
  uint64_t const of_both = uint64_t(high) << 32 | low;
  for (int i = 0; i < 4; ++i) {
    uint32_t const nibble = selector >> (4 * i), byte = of_both >> (8 * (nibble & 7)) & 0xff;
    bytes |= (nibble & 8 ? byte >> 7 ? 0xff : 0 : byte) << (8 * i);
  }
#endif
  return bytes;
}

}  // namespace weightonly
