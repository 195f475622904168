// The end of a tile of gemm_sm90: from sums in the registers of a wgmma to y.
//
// Where K is shared, by the CTAs of a cluster or by warpgroups of a CTA, each warpgroup finishes some of the sums. It gets the
// others' parts of them in shared memory, each in a place of its own, and adds them to its own in the order of the parts.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass_ext/epilogue.h"
#include "kernels/gemm_sm90_params.h"

namespace weightonly {

/// Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Epilogue {
  using Element = typename Kernel::Element;

  /// Which of a warpgroup's tiles of eight tokens it finishes: a bit each.
  using Owned = uint32_t;

  /// Finished values into shared memory. mine: the lane's first two columns and token.
  template <bool kIsIdentity, int kRowElements, class SumsTensor>
  CUTLASS_DEVICE static void stage(Element* mine, ColumnEpilogue const (&epilogue)[2], SumsTensor const& sums,
                                   Owned owned, int activation) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      if (Kernel::kMaySplit && (owned >> i & 1) == 0) continue;
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
  CUTLASS_DEVICE static void store(GemmSm90Params const& p, Place const& place, Smem const& smem, SumsTensor& sums) {
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const g = lane / 4, t = lane % 4;
    int const first_column = place.first_column + 64 * (warpgroup % Kernel::kWarpgroupsN);
    int const column = 8 * g + 2 * warp;  // of the warpgroup
    Element* const tile = reinterpret_cast<Element*>(smem.x()) +
                          warpgroup % Kernel::kWarpgroupsN * (Kernel::kTokens * Smem::kYRowElements);
    ColumnEpilogue const epilogue[2] = {
        ColumnEpilogue::load<Element>(p, first_column + column, !Kernel::kHasScales),
        ColumnEpilogue::load<Element>(p, first_column + column + 1, !Kernel::kHasScales)};
    Owned owned = ~Owned(0);
    if (Kernel::kMaySplit && p.parts > 1) {
      owned = add_parts(p, place.rank, warpgroup, smem, sums);
    } else {
      all_consumers();
    }
    // Without an activation there is no switch in the loop, which would leave the taken path scattered over copies of all of
    // them. One loop for each activation would be as good, but so many erff at once spill with 256 tokens.
    Element* const mine = tile + 2 * t * Smem::kYRowElements + column;
    if (p.activation == int(Activation::kIdentity)) {
      stage<true, Smem::kYRowElements>(mine, epilogue, sums, owned, p.activation);
    } else {
      stage<false, Smem::kYRowElements>(mine, epilogue, sums, owned, p.activation);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
    bool const is_vector = vector_stores(p);
    int const chunk = threadIdx.x % 8 * 8;
    int const n = first_column + chunk;
    for (int row = threadIdx.x % 128 / 8; row < Kernel::kTokens; row += 16) {
      int64_t const token = place.first_token + row;
      if (token >= p.m || n >= p.n) break;
      if (Kernel::kMaySplit && (owned >> row / 8 & 1) == 0) continue;
      Element const* const source = tile + row * Smem::kYRowElements + chunk;
      Element* const y = static_cast<Element*>(p.y) + token * p.ldy + n;
      if (is_vector) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4 const*>(source);
      } else {
        for (int j = 0; j < 8 && n + j < p.n; ++j) y[j] = source[j];
      }
    }
  }

  /// Gives the sums that others finish to them, and adds theirs to those that this warpgroup finishes: which, it returns. When
  /// it does, nobody uses the stages any more.
  template <class Smem, class SumsTensor>
  CUTLASS_DEVICE static Owned add_parts(GemmSm90Params const& p, int rank, int warpgroup, Smem const& smem,
                                        SumsTensor& sums) {
    int const position = threadIdx.x % 128, per_cta = p.items_per_cta;
    int const warpgroup_n = warpgroup % Kernel::kWarpgroupsN, warpgroup_k = warpgroup / Kernel::kWarpgroupsN;
    int const part = rank * Kernel::kWarpgroupsK + warpgroup_k;
    uint32_t const parts = cute::cast_smem_ptr_to_uint(smem.parts());
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.parts_barrier());
    auto const owner_of = [&](int item) { return item * p.item_multiplier >> 16; };
    if (p.split_k > 1) cute::cluster_wait();  // all CTAs have their barriers
    Owned owned = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      int const item = i * Kernel::kWarpgroupsN + warpgroup_n;
      int const owner = owner_of(item), place = item - owner * per_cta;
      int const place_there = (place * p.parts + part) * 128 + position;
      if (owner != rank) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         cute::set_block_rank(parts + place_there * int(sizeof(float4)), owner)),
                     "f"(sums(4 * i)), "f"(sums(4 * i + 1)), "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3)),
                     "r"(cute::set_block_rank(barrier, owner))
                     : "memory");
      } else if (place / Kernel::kWarpgroupsN % Kernel::kWarpgroupsK == warpgroup_k) {
        owned |= Owned(1) << i;
      } else {
        smem.parts()[place_there] = make_float4(sums(4 * i), sums(4 * i + 1), sums(4 * i + 2), sums(4 * i + 3));
      }
    }
    all_consumers();
    if (p.split_k > 1) cute::wait_barrier(smem.parts_barrier(), 0);
    asm volatile("" ::: "memory");  // what follows is read after it
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      if ((owned >> i & 1) == 0) continue;
      int const place = i * Kernel::kWarpgroupsN + warpgroup_n - rank * per_cta;
      for (int other = 0; other < p.parts; ++other) {
        if (other == part) continue;
        float4 const addend = smem.parts()[(place * p.parts + other) * 128 + position];
        sums(4 * i) += addend.x;
        sums(4 * i + 1) += addend.y;
        sums(4 * i + 2) += addend.z;
        sums(4 * i + 3) += addend.w;
      }
    }
    return owned;
  }

  CUTLASS_DEVICE static void all_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(Kernel::kConsumers) : "memory"); }
};

}  // namespace weightonly
