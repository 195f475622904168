// The arguments of the gemm_sm90 kernel, and how the host makes them from a call's GemmParams: counts, and the tensor
// maps of TMA.
#pragma once

#include "cutlass/fast_math.h"
#include "cutlass_ext/arch/tma.h"
#include "kernels/gemm/launch.h"

namespace weightonly::sm90 {

/// What epilogue_reduce.h needs.
struct ReduceParams {
  int32_t remote_partials;  // of a reduction tile: those that other CTAs of the cluster compute
  int32_t tiles;            // reduction tiles that hold tokens of x
  int32_t tiles_per_cta;    // reduction tiles that one CTA of the cluster reduces, at most
  int32_t rank_multiplier;  // tile / tiles_per_cta = tile * rank_multiplier >> 16
};

/// What TileScheduler needs (tile_scheduler.h).
struct SchedulerParams {
  int32_t tiles;    // tiles of all clusters; the tiles of two CTAs that share x count once
  int32_t m_tiles;  // tiles along M
  int32_t full_swizzles;  // swizzles with kSwizzleM rows of tiles
  cutlass::FastDivmod swizzle_m;       // m_tiles of a full swizzle
  cutlass::FastDivmod last_swizzle_m;  // m_tiles of the swizzle after the full ones
  cutlass::FastDivmod swizzle_tiles;   // tiles of a full swizzle
};

/// The order of the fields is part of the machine code: the kernel reads them at fixed offsets.
struct Params : GemmParams {
  CUtensorMap x_map;
  CUtensorMap weight_map;
  CUtensorMap scale_map;
  CUtensorMap zero_map;
  int32_t k_tiles;          // of K
  int32_t k_tiles_per_cta;  // k_tiles of one of the split_k CTAs, at most
  int32_t scale_k;         // k of one row of scales in shared memory: a group, or the part of it in a k_tile
  int32_t groups;          // of K
  int32_t multicast_ctas;  // CTAs of a cluster that are neighbours along N and share x: 1 or 2
  int32_t x_rows;          // tokens of x in shared memory: kTileM, or M rounded up to 8 if that is less
  int32_t x_box_rows;      // tokens of one TMA load
  int32_t x_box_k_blocks;  // k_blocks of one TMA load: all that a CTA loads, or 1 if K ends within a k_block
  int32_t scale_rows;      // rows of scales of a k_tile
  int32_t scale_box_rows;  // rows of one TMA load: all of a k_tile, or 1 if a k_tile does not hold whole groups
  ReduceParams reduce;
  SchedulerParams scheduler;
  float const* x_scales;  // [m], of x in 8 bits
};

/// Whether x arrives by multicast, each of two CTAs loading one half of it for both.
template <class Traits>
CUTLASS_DEVICE bool multicasts_x(Params const& p) {
  return Traits::kMayMulticastX && p.multicast_ctas > 1;
}

/// The largest k that divides group_size and kTileK. With an order it is at most a k_block: scales then multiply weights
/// (Mainloop::run).
template <class Traits>
int scale_k(GemmParams const& p) {
  int k = p.order_split > 0 ? Traits::Layout::kBlockK : Traits::kTileK;
  while (p.group_size % k != 0) k /= 2;
  return k;
}

/// k of a warpgroup in a k_tile of the kernel that an order is of.
constexpr int kOrderStep = 128;

/// Whether a kernel adds as a call has it: in its own order, or in that of parts that it computes one after another.
template <class Traits>
bool has_order(GemmParams const& p) {
  if (p.order_split == 0 && p.order_warpgroups == 0) return true;
  bool const is_own = p.order_split == p.split_k && p.order_warpgroups == Traits::kWarpgroupsK &&
                      (p.split_k == 1 || Traits::kTileK == kOrderStep * Traits::kWarpgroupsK);
  bool const may_follow = Traits::kMayFollow && (p.split_k == 1 || p.split_k == p.order_split);
  if (Traits::kSumsInSmem && p.order_split > 1 && p.order_warpgroups > 1 && p.partials == nullptr) return false;
  return is_own || (may_follow && p.order_split > 0 && p.order_warpgroups > 0);
}

template <class Traits>
cudaError_t make_tensor_maps(Params& p) {
  using Element = typename Traits::Element;
  using Layout = typename Traits::Layout;
  cudaError_t error =
      map_k_blocks<typename Traits::XElement>(&p.x_map, p.x, p.m, p.k, p.ldx, p.x_box_rows, p.x_box_k_blocks);
  if (error != cudaSuccess) return error;
  constexpr int kBlockLines = Layout::kBlockBytes / kTensorMapLineBytes;
  error = map_lines(&p.weight_map, p.weight, p.n_padded / Layout::kPanelColumns,
                    p.k_padded / Layout::kBlockK * kBlockLines, Traits::kWarpgroupsN, Traits::kKBlocks * kBlockLines);
  if (error != cudaSuccess) return error;
  auto const map_groups = [&](CUtensorMap* map, void const* rows) {
    return map_rows<Element>(map, rows, p.groups, p.n_padded, p.ld_scales, p.scale_box_rows, Traits::kTileN);
  };
  if (Traits::kHasScales) error = map_groups(&p.scale_map, p.scales);
  if (error != cudaSuccess) return error;
  if (Traits::kHasZeros) error = map_groups(&p.zero_map, p.zeros);
  return error;
}

/// The kernel's arguments for a call.
template <class Traits, class TileScheduler>
cudaError_t make_params(GemmParams const& call, Params& p) {
  using Layout = typename Traits::Layout;
  static_cast<GemmParams&>(p) = call;
  p.k_tiles = divide_up(p.k_padded, Traits::kTileK);
  p.k_tiles_per_cta = divide_up(p.k_tiles, p.split_k);
  p.scale_k = scale_k<Traits>(p);
  p.groups = divide_up(p.k, p.group_size);
  int const n_tiles = divide_up(p.n_padded, Traits::kTileN);
  // Two CTAs that share x read it from the L2 once. That saves power, which limits kernels with many tokens. But they
  // wait for each other at their start and end.
  bool const multicasts = Traits::kMayMulticastX && p.split_k == 1 && p.m > Traits::kTileM && n_tiles % 2 == 0;
  p.multicast_ctas = multicasts ? 2 : 1;
  // TMA is slower in rows beyond M than in rows of x. So a box has no more of them than the 128-byte swizzle needs.
  constexpr int kSwizzleRows = 8;
  p.x_rows = min(Traits::kTileM, divide_up(p.m, kSwizzleRows) * kSwizzleRows);
  p.x_box_rows = Traits::kXBlocks == 1 ? p.x_rows / p.multicast_ctas : p.x_rows;
  p.x_box_k_blocks = p.k % Traits::kXBlockK == 0 ? max(1, Traits::kXBlocks / p.multicast_ctas) : 1;
  p.scale_rows = Traits::kTileK / p.scale_k;
  p.scale_box_rows = p.scale_k == p.group_size ? p.scale_rows : 1;
  p.reduce.remote_partials = Traits::remote_partials(p.split_k);
  p.reduce.tiles = Traits::reduction_tiles_per_cta(1, p.m);
  p.reduce.tiles_per_cta = Traits::reduction_tiles_per_cta(p.split_k, p.m);
  p.reduce.rank_multiplier = divide_up(1 << 16, p.reduce.tiles_per_cta);
  static_assert(Traits::kReductionTiles <= 64, "the multiplication is exact");
  p.scheduler = TileScheduler::make_params(divide_up(p.m, Traits::kTileM), n_tiles / p.multicast_ctas);
  return make_tensor_maps<Traits>(p);
}

}  // namespace weightonly::sm90
