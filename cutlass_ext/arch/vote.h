// A vote of a warpgroup.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

/// Whether the predicate is true for any of the 128 threads that come to the named barrier. It is the same for all.
CUTLASS_DEVICE bool warpgroup_any(int barrier, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %2, 0;\n"
      "barrier.cta.red.or.pred all, %1, 128, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(barrier), "r"(uint32_t(predicate))
      : "memory");
  return any != 0;
}

}  // namespace weightonly
