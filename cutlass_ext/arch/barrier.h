// Barriers among the threads of a CTA on sm90: named barriers, and mbarriers by their shared memory address.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

/// Waits until kThreads threads have called named_barrier_sync or named_barrier_arrive with this id. 0 is
/// __syncthreads.
template <int kId, int kThreads>
CUTLASS_DEVICE void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/// The same for the 128 threads of a warpgroup, where the id depends on the warpgroup.
CUTLASS_DEVICE void warpgroup_barrier_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

/// Counts as a thread that has come to the barrier, and does not wait.
template <int kId, int kThreads>
CUTLASS_DEVICE void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/// Makes initialized mbarriers visible to TMA and to the other CTAs of the cluster.
CUTLASS_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Waits until the phase of an mbarrier of this CTA with this parity has ended.
CUTLASS_DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Arrives at an mbarrier. kInCluster: the address is of the cluster's window, and may lie in another CTA.
template <bool kInCluster>
CUTLASS_DEVICE void mbarrier_arrive(uint32_t barrier) {
  if constexpr (kInCluster) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
}

}  // namespace weightonly
