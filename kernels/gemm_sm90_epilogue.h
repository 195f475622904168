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

  /// The warpgroup's tile into shared memory, [token][kRowElements], of what it finishes. mine: the place of the lane's first two
  /// columns and token. Finished is what all values are then but for an activation, in which case they stay fp32.
  template <int kRowElements, class Value, class SumsTensor>
  CUTLASS_DEVICE static void stage(Value* mine, ColumnEpilogue const (&epilogue)[2], SumsTensor const& sums,
                                   Owned owned) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      if (Kernel::kMaySplit && (owned >> i & 1) == 0) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        struct alignas(2 * sizeof(Value)) Pair {
          Value values[2];
        } pair;
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) pair.values[h] = Value(epilogue[h].affine(sums(4 * i + 2 * h + e)));
        *reinterpret_cast<Pair*>(mine + (8 * i + e) * kRowElements) = pair;
      }
    }
  }

  /// sums(4 i + 2 h + e): column h of the lane's two, token 8 i + 2 t + e.
  ///
  /// Loops over what lies in registers are unrolled, and run but once: their instructions come from the L2, and how many they
  /// are is what they cost. So activations wait for the loop over shared memory.
  template <class Place, class Smem, class SumsTensor>
  CUTLASS_DEVICE static void store(GemmSm90Params const& p, Place const& place, Smem const& smem, SumsTensor& sums) {
    int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int const g = lane / 4, t = lane % 4;
    int const first_column = place.first_column + 64 * (warpgroup % Kernel::kWarpgroupsN);
    int const column = 8 * g + 2 * warp;  // of the warpgroup
    ColumnEpilogue const epilogue[2] = {
        ColumnEpilogue::load<Element>(p, first_column + column, !Kernel::kHasScales),
        ColumnEpilogue::load<Element>(p, first_column + column + 1, !Kernel::kHasScales)};
    Owned owned = ~Owned(0);
    if (Kernel::kMaySplit && p.parts > 1) {
      owned = add_parts(p, place.rank, warpgroup, smem, sums);
    } else {
      all_consumers();
    }
    if (p.activation == int(Activation::kIdentity)) {
      finish<Element>(p, place, smem, sums, owned, warpgroup, first_column, 2 * t, column, epilogue);
    } else {
      finish<float>(p, place, smem, sums, owned, warpgroup, first_column, 2 * t, column, epilogue);
    }
  }

  /// From sums to y, through shared memory as Values.
  template <class Value, class Place, class Smem, class SumsTensor>
  CUTLASS_DEVICE static void finish(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                    SumsTensor const& sums, Owned owned, int warpgroup, int first_column, int token,
                                    int column, ColumnEpilogue const (&epilogue)[2]) {
    constexpr int kRowElements = Smem::template y_row_elements<Value>();
    constexpr int kRowsPerThread = (Kernel::kTokens + 15) / 16;
    Value* const tile =
        reinterpret_cast<Value*>(smem.x()) + warpgroup % Kernel::kWarpgroupsN * (Kernel::kTokens * kRowElements);
    stage<kRowElements>(tile + token * kRowElements + column, epilogue, sums, owned);
    asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
    int const chunk = threadIdx.x % 8 * 8;
    int const n = first_column + chunk;
    bool const is_vector = vector_stores(p);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      int const row = threadIdx.x % 128 / 8 + 16 * i;
      int64_t const token = place.first_token + row;
      if (token >= p.m || n >= p.n || row >= Kernel::kTokens) break;
      if (row < place.known_tokens || (Kernel::kMaySplit && (owned >> row / 8 & 1) == 0)) continue;
      Value const* const source = tile + row * kRowElements + chunk;
      Element* const y = static_cast<Element*>(p.y) + token * p.ldy + n;
      alignas(16) Element values[8];
      if constexpr (cutlass::platform::is_same<Value, Element>::value) {
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(source);
      } else {
        alignas(16) float finished[8];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          reinterpret_cast<float4*>(finished)[j] = reinterpret_cast<float4 const*>(source)[j];
        }
        activate(finished, p.activation);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 8; ++j) values[j] = Element(finished[j]);
      }
      if (is_vector) {
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4 const*>(values);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 8; ++j) {
          if (n + j < p.n) y[j] = values[j];
        }
      }
    }
  }

  /// Gives the sums that others finish to them, and adds theirs to those that this warpgroup finishes: which, it returns. When
  /// it does, nobody uses the stages any more.
  template <class Smem, class SumsTensor>
  CUTLASS_DEVICE static Owned add_parts(GemmSm90Params const& p, int rank, int warpgroup, Smem const& smem,
                                        SumsTensor& sums) {
    constexpr int kPartBytes = 128 * int(sizeof(float4));
    constexpr int kUnroll = Kernel::kTokenTiles <= 8 ? 4 : 1;
    int const per_cta = p.items_per_cta;
    int const warpgroup_n = warpgroup % Kernel::kWarpgroupsN, warpgroup_k = warpgroup / Kernel::kWarpgroupsN;
    int const part = rank * Kernel::kWarpgroupsK + warpgroup_k;
    int const item_bytes = p.parts * kPartBytes;
    uint32_t const parts = cute::cast_smem_ptr_to_uint(smem.parts()) + threadIdx.x % 128 * int(sizeof(float4));
    uint32_t const mine = parts + part * kPartBytes;
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.parts_barrier());
    if (p.split_k > 1) cute::cluster_wait();  // all CTAs have their barriers
    Owned owned = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      int const item = i * Kernel::kWarpgroupsN + warpgroup_n;
      int const owner = item * p.item_multiplier >> 16, place = item - owner * per_cta;
      uint32_t const target = mine + place * item_bytes;
      if (owner != rank) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         cute::set_block_rank(target, owner)),
                     "f"(sums(4 * i)), "f"(sums(4 * i + 1)), "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3)),
                     "r"(cute::set_block_rank(barrier, owner))
                     : "memory");
      } else if (Kernel::kWarpgroupsK == 1 || place / Kernel::kWarpgroupsN % Kernel::kWarpgroupsK == warpgroup_k) {
        owned |= Owned(1) << i;
      } else {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(sums(4 * i)), "f"(sums(4 * i + 1)),
                     "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3))
                     : "memory");
      }
    }
    all_consumers();
    if (p.split_k > 1) cute::wait_barrier(smem.parts_barrier(), 0);
    asm volatile("" ::: "memory");  // what follows is read after it
    float4 const* const others = smem.parts() + threadIdx.x % 128;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      if ((owned >> i & 1) == 0) continue;
      int const place = i * Kernel::kWarpgroupsN + warpgroup_n - rank * per_cta;
#pragma unroll kUnroll
      for (int other = 0; other < p.parts; ++other) {
        if (other == part) continue;
        float4 const addend = others[(place * p.parts + other) * 128];
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
