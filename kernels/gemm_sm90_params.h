// What a launch of gemm_sm90 knows beyond GemmParams: counts of its steps and parts, and the tensor maps.
#pragma once

#include "cutlass/fast_math.h"
#include "kernels/tensor_map.h"

namespace weightonly {

struct GemmSm90Params : GemmParams {
  CUtensorMap x_map;
  CUtensorMap weight_map;
  CUtensorMap scale_map;
  CUtensorMap zero_map;
  int32_t steps;  // of K
  int32_t steps_per_cta;
  int32_t group_k;  // k of a step with scales of their own
  int32_t groups;  // of K
  int32_t x_ctas;  // of a cluster that lie side by side along N and share x: 1 or 2
  int32_t x_rows;  // tokens of a block of x in shared memory: of a tile, or M where it is less, rounded up to 8
  int32_t x_box_rows;  // tokens that one copy brings
  int32_t x_box_blocks;  // blocks of 64 k that one copy brings: all of a CTA's, or one where K ends within a block
  int32_t scale_rows;  // of a step
  int32_t scale_box_rows;  // rows that one copy brings: all of a step, or one where they do not lie side by side
  int32_t sent_parts;  // of K, whose sums come from other CTAs
  int32_t items;  // of sums that CTAs exchange, of tokens that exist
  int32_t items_per_cta;  // that one finishes, at most
  int32_t item_multiplier;  // item / items_per_cta = item * item_multiplier >> 16
  int32_t tiles;  // of all of a cluster's columns
  int32_t token_tiles;
  int32_t full_bands;  // of band_tokens (GemmSm90::Place)
  cutlass::FastDivmod band_tokens;  // token tiles of a band
  cutlass::FastDivmod last_band_tokens;  // of the one after the full ones
  cutlass::FastDivmod band_tiles;  // all tiles of a full one
};

}  // namespace weightonly
