// cp.async: asynchronous copies of 16 or 4 bytes a thread from global to shared memory, in program order (sm80 and up).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

/// Copies 16 bytes, cached in the L2 only.
CUTLASS_DEVICE void copy_async(uint32_t target, void const* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

/// Writes 16 bytes: the first `bytes` from `source`, zeros after them.
CUTLASS_DEVICE void copy_async_or_zero(uint32_t target, void const* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

CUTLASS_DEVICE void copy_float_async(uint32_t target, float const* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

CUTLASS_DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kNewer of this thread's commits are pending.
template <int kNewer>
CUTLASS_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer) : "memory");
}

}  // namespace weightonly
