// The first instruction of the Hopper kernels: a prefetch of the CTA's first weights and scales into the L2 cache.
//
// A load into shared memory needs a barrier and a stage, and is issued 600 to 1100 cycles after the kernel starts. A
// prefetch needs an address, which follows from the output tile alone, and one instruction covers 16 KB. The memory
// starts that much earlier, and the first loads hit the L2 cache. A kernel prefetches no more than the memory delivers
// until its first load: the loads would queue behind the rest (bench/measurements/LOG.md).
//
// A prefetch is allowed before the kernels in front of this one have ended, even if one of them writes these bytes.
#pragma once

#include "cutlass_ext/layout/tiled.h"
#include "cutlass_ext/gemm_params.h"

namespace weightonly {

CUTLASS_DEVICE void prefetch_line(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/// Called by one thread: prefetches `bytes` of a column panel, starting `skipped` bytes into a k_block. Both are
/// multiples of 16. Stops at the end of the panel.
template <class Weight>
CUTLASS_DEVICE void prefetch_panel(GemmParams const& p, int panel, int k_block, int skipped, int bytes) {
  using Layout = TiledLayout<Weight>;
  uint32_t const panel_bytes = Layout::panel_bytes(p.k_padded);
  uint32_t const first = uint32_t(k_block) * Layout::kBlockBytes + skipped;
  if (first >= panel_bytes || panel * Layout::kPanelColumns >= p.n_padded) return;
  char const* const address = static_cast<char const*>(p.weight) + uint64_t(uint32_t(panel)) * panel_bytes + first;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address),
               "r"(min(uint32_t(bytes), panel_bytes - first))
               : "memory");
}

/// Called by a warp: prefetches rows of scales, or of zero points, of kPanels neighbouring panels, for the groups from
/// k on. kGroupStep: in which GroupIndex counts.
template <class Element, int kPanels, int kGroupStep>
CUTLASS_DEVICE void prefetch_groups(GemmParams const& p, void const* rows, int panel, int k) {
  int const lane = threadIdx.x % 32;
  int const group_k = k + lane / kPanels * p.group_size;
  int const column = (panel + lane % kPanels) * kPanelColumns;
  if (lane / kPanels >= 32 / kPanels || group_k >= p.k || column >= p.n_padded) return;
  prefetch_line(static_cast<Element const*>(rows) + int64_t(p.group.of<kGroupStep>(group_k)) * p.ld_scales + column);
}

}  // namespace weightonly
