// What a CTA of Hopper's kernels does first: its first weights and scales are asked for, into the L2 and nothing nearer.
//
// A copy into shared memory takes a place there, a barrier or a turn among sixteen warps: it is under way 600 to 1100 cycles after the
// kernel's start. One instruction asks the L2 for 16 KB, from an address that follows from the tile alone. So the memory begins that
// much earlier, and the copies find in the L2 what they ask for first. More than the memory brings until then is no gain: the
// copies would wait behind it (bench/NOTES.md).
//
// Allowed before the kernels in front of this one have ended, even if one of them writes these bytes.
#pragma once

#include "cutlass_ext/tiled_layout.h"
#include "kernels/params.h"

namespace weightonly {

CUTLASS_DEVICE void prefetch_line(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/// By one thread: `bytes` of a stripe of weights, multiples of 16, from `skipped` bytes behind a block on; none beyond its end.
template <class Weight>
CUTLASS_DEVICE void prefetch_stripe(GemmParams const& p, int stripe, int block, int skipped, int bytes) {
  using Layout = TiledLayout<Weight>;
  uint32_t const stripe_bytes = Layout::stripe_bytes(p.k_padded);
  uint32_t const first = uint32_t(block) * Layout::kBlockBytes + skipped;
  if (first >= stripe_bytes || stripe * Layout::kStripe >= p.n_padded) return;
  char const* const address = static_cast<char const*>(p.weight) + uint64_t(uint32_t(stripe)) * stripe_bytes + first;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address),
               "r"(min(uint32_t(bytes), stripe_bytes - first))
               : "memory");
}

/// By a warp: rows of scales, or of zero points, of kStripes neighbouring stripes, those of the groups from k on.
template <class Element, int kStripes>
CUTLASS_DEVICE void prefetch_groups(GemmParams const& p, void const* rows, int stripe, int k) {
  int const lane = threadIdx.x % 32;
  int const group_k = k + lane / kStripes * p.group_size;
  int const column = (stripe + lane % kStripes) * 64;
  if (lane / kStripes >= 32 / kStripes || group_k >= p.k || column >= p.n_padded) return;
  prefetch_line(static_cast<Element const*>(rows) + int64_t(p.group.of(group_k)) * p.ld_scales + column);
}

}  // namespace weightonly
