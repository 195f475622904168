// The end of a tile of gemm_sm90: from sums in the registers of a wgmma to y.
//
// Where K is shared, by the CTAs of a cluster or by warpgroups of a CTA, the sums of all parts meet in shared memory at the
// CTA that owns them, each in a place of its own, and are added in the order of the parts.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass_ext/epilogue.h"
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
  int32_t x_box_blocks;  // blocks of 64 k that one copy brings: all of a step, or one where K ends within a block
  int32_t scale_box_rows;  // rows that one copy brings: all of a step, or one where they do not lie side by side
  int32_t parts;  // of K, each summed by warpgroups of its own
  int32_t items_per_cta;  // of the sums that they exchange
};

/// Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Epilogue {
  using Element = typename Kernel::Element;

  /// Finished values into shared memory. mine: the lane's first two columns and token.
  template <bool kIsIdentity, int kRowElements, class SumsTensor>
  CUTLASS_DEVICE static void stage(Element* mine, ColumnEpilogue const (&epilogue)[2], SumsTensor const& sums,
                                   int activation) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        alignas(4) Element pair[2];
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          float v = epilogue[h].affine(sums(4 * i + 2 * h + e));
          pair[h] = Element(kIsIdentity ? v : activate(v, activation));
        }
        *reinterpret_cast<uint32_t*>(mine + (8 * i + e) * kRowElements) = *reinterpret_cast<uint32_t const*>(pair);
      }
    }
  }

  /// sums(4 i + 2 h + e): column h of the lane's two, token 8 i + 2 t + e.
  template <class Place, class Smem, class SumsTensor>
  CUTLASS_DEVICE static void store(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                   SumsTensor const& sums) {
    int const warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const g = lane / 4, t = lane % 4;
    int const first_column = place.first_column + 64 * warpgroup;
    int const column = 8 * g + 2 * warp;  // of the warpgroup
    Element* const tile = reinterpret_cast<Element*>(smem.x()) + warpgroup * Kernel::kTokens * Smem::kYRowElements;
    ColumnEpilogue const epilogue[2] = {
        ColumnEpilogue::load<Element>(p, first_column + column, !Kernel::kHasScales),
        ColumnEpilogue::load<Element>(p, first_column + column + 1, !Kernel::kHasScales)};
    asm volatile("bar.sync 1, %0;" ::"n"(Kernel::kConsumers) : "memory");  // nobody uses x any more
    // Without an activation there is no switch in the loop, which would leave the taken path scattered over copies of all of
    // them. One loop for each activation would be as good, but so many erff at once spill with 256 tokens.
    Element* const mine = tile + 2 * t * Smem::kYRowElements + column;
    if (p.activation == int(Activation::kIdentity)) {
      stage<true, Smem::kYRowElements>(mine, epilogue, sums, p.activation);
    } else {
      stage<false, Smem::kYRowElements>(mine, epilogue, sums, p.activation);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
    bool const is_vector = vector_stores(p);
    int const chunk = threadIdx.x % 8 * 8;
    int const n = first_column + chunk;
    for (int row = threadIdx.x % 128 / 8; row < Kernel::kTokens; row += 16) {
      int64_t const token = place.first_token + row;
      if (token >= p.m || n >= p.n) break;
      Element const* const source = tile + row * Smem::kYRowElements + chunk;
      Element* const y = static_cast<Element*>(p.y) + token * p.ldy + n;
      if (is_vector) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4 const*>(source);
      } else {
        for (int j = 0; j < 8 && n + j < p.n; ++j) y[j] = source[j];
      }
    }
  }

  /// The same with the sums of the other CTAs of the cluster.
  template <class Place, class Smem, class SumsTensor>
  CUTLASS_DEVICE static void store_shared(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                          SumsTensor const& sums) {
    int const warpgroup = threadIdx.x / 128, position = threadIdx.x % 128;
    int const per_cta = p.items_per_cta;
    uint32_t const parts = cute::cast_smem_ptr_to_uint(smem.parts());
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.parts_barrier());
    bool const is_alone = Kernel::kWarpgroupsK > 1 && p.split_k == 1;  // only warpgroups of this CTA share K
    if (!is_alone) cute::cluster_wait();  // all CTAs have their barriers
    int const part = place.rank * Kernel::kWarpgroupsK + warpgroup / Kernel::kWarpgroupsN;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      int const item = warpgroup % Kernel::kWarpgroupsN * Kernel::kTokenTiles + i;
      int const owner = item / per_cta;
      int const place_there = (part * per_cta + item - owner * per_cta) * 128 + position;
      if (is_alone) {
        smem.parts()[place_there] = make_float4(sums(4 * i), sums(4 * i + 1), sums(4 * i + 2), sums(4 * i + 3));
        continue;
      }
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                       cute::set_block_rank(parts + place_there * int(sizeof(float4)), owner)),
                   "f"(sums(4 * i)), "f"(sums(4 * i + 1)), "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3)),
                   "r"(cute::set_block_rank(barrier, owner))
                   : "memory");
    }
    if (is_alone) {
      asm volatile("bar.sync 1, %0;" ::"n"(Kernel::kConsumers) : "memory");
    } else {
      cute::wait_barrier(smem.parts_barrier(), 0);
    }
    asm volatile("" ::: "memory");  // what follows is read after it
    int const warp = position / 32, g = position % 32 / 4, t = position % 4;
    int const first_item = place.rank * per_cta;
    int const owned = max(0, min(per_cta, Kernel::kItems - first_item));
    for (int i = warpgroup; i < owned; i += Kernel::kWarpgroups) {
      float4 sum = smem.parts()[i * 128 + position];
      for (int other = 1; other < p.parts; ++other) {
        float4 const addend = smem.parts()[(other * per_cta + i) * 128 + position];
        sum.x += addend.x;
        sum.y += addend.y;
        sum.z += addend.z;
        sum.w += addend.w;
      }
      int const item = first_item + i;
      int const column = place.first_column + item / Kernel::kTokenTiles * 64 + 8 * g + 2 * warp;
      float const values[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};  // [column][token]
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        if (column + h >= p.n) continue;
        auto const epilogue = ColumnEpilogue::load<Element>(p, column + h, !Kernel::kHasScales);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          int64_t const token = place.first_token + item % Kernel::kTokenTiles * 8 + 2 * t + e;
          if (token < p.m) {
            static_cast<Element*>(p.y)[token * p.ldy + column + h] =
                Element(epilogue.apply(values[h][e], p.activation));
          }
        }
      }
    }
  }
};

}  // namespace weightonly
