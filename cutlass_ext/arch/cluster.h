// The CTAs of a thread block cluster: a barrier for all of them, and stores into each other's shared memory.
#pragma once

#include <cstdint>

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/cutlass.h"

namespace weightonly {

/// Waits until all threads of the cluster that have not exited have called this. Orders no memory accesses.
CUTLASS_DEVICE void cluster_sync() {
  __syncwarp();
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

/// Stores 16 bytes into the shared memory of CTA `rank`, and counts them on the mbarrier `barrier` of that CTA.
/// `target` and `barrier` are addresses of this CTA's shared memory: those of the same variables in the other CTA
/// follow from them.
CUTLASS_DEVICE void store_async(uint32_t target, uint32_t barrier, int rank, float4 const& v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cute::set_block_rank(target, rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cute::set_block_rank(barrier, rank))
               : "memory");
}

}  // namespace weightonly
