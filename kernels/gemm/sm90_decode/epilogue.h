// The epilogue of decode_sm90: partials of the warps, and of the CTAs that share an n_tile, are summed and stored to y.
//
// At the end of an n_tile each warp stores its accumulators to shared memory and goes on to the next n_tile. They are
// reduced after the products of that one, when all warps have stored theirs. If CTAs share an n_tile, the one that
// started it reduces it: the others send it their partials, each to a place of its own. Everything is added in the
// order of warps and CTAs, so the result does not depend on which comes first.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass_ext/epilogue/column.h"
#include "kernels/gemm/launch.h"
#include "kernels/gemm/sm90_decode/traits.h"

namespace weightonly::sm90_decode {

/// A warp's accumulators of an n_tile to shared memory: those of tokens before m. partials: of the warp, [token][column].
template <class Traits>
CUTLASS_DEVICE void store_accumulators(typename Traits::Accumulator const (&accumulators)[Traits::kRowTiles], int m,
                                       int lane, float* partials) {
  constexpr int kTileN = Traits::kTileN;
  int const g = lane / 4, t = lane % 4;
  float* const base = partials + g * Traits::kLaneColumns;
  CUTLASS_PRAGMA_UNROLL
  for (int e = 0; e < 2; ++e) {
    int const token = 2 * t + e;
    if (token >= m) continue;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kRowTiles; ++i) {
      float2 const pair = {accumulators[i][e], accumulators[i][e + 2]};
      *reinterpret_cast<float2*>(base + token * kTileN + 2 * i) = pair;
    }
  }
}

CUTLASS_DEVICE void add(float2& a, float2 const& b) {
  a.x += b.x;
  a.y += b.y;
}

/// The sum of the partials of all warps, beginning with those of warp `first`. stride: from those of one warp to those
/// of the next.
template <int kWarpsK>
CUTLASS_DEVICE float2 sum_of_warps(float2 const* partials, int stride, int first = 0) {
  // Four independent chains hide the latency of the additions.
  float2 chains[4];
  CUTLASS_PRAGMA_UNROLL
  for (int w = 0; w < kWarpsK; ++w) {
    float2 const of_warp = partials[((w + first) & (kWarpsK - 1)) * stride];
    if (w < 4) {
      chains[w] = of_warp;
    } else {
      add(chains[w % 4], of_warp);
    }
  }
  add(chains[0], chains[1]);
  add(chains[2], chains[3]);
  add(chains[0], chains[2]);
  return chains[0];
}

/// A thread's share of the reduction of one n_tile: two columns of a token.
template <class Traits, int kGroups, bool kIsCluster>
struct Epilogue {
  using Element = typename Traits::Element;
  using Layout = typename Traits::Layout;
  using Smem = sm90_decode::Smem<Traits>;
  using WorkTile = sm90_decode::WorkTile<Traits::kWarpsK, kIsCluster>;
  static constexpr bool kHasScales = Traits::kHasScales;
  static constexpr int kRowTiles = Traits::kRowTiles;
  static constexpr int kWarpsK = Traits::kWarpsK;
  static constexpr int kPairs = Traits::kPairs;
  static_assert(8 * kPairs <= Traits::kThreads, "each thread reduces at most one pair");

  Params const& p;
  bool is_active;  // whether this thread has a pair
  int stride;  // from the partials of one warp, or CTA, to those of the next
  float2 const* warp_partials;
  float2* cluster_partials;
  int senders;  // CTAs whose partials are added
  int token, column;
  bool is_stored;  // by this n_tile, not by the one before
  ColumnPairConstants<Element> constants;  // per channel; with group scales only the bias, if any, is loaded, and later
  bool is_plain;  // no bias to load, no activation, and one store takes both columns
  Element* y;

  /// Everything that does not need the partials. iteration: the n_tile's number in the work unit; the warps take turns
  /// at the reduction, so that a small M does not always keep the same ones busy.
  CUTLASS_DEVICE Epilogue(Params const& p, WorkTile const& work, Smem const& smem, int iteration) : p(p) {
    stride = p.m * kPairs;
    int const i = ((work.warp - iteration * divide_up(stride, 32)) & (kWarpsK - 1)) * 32 + work.lane;
    is_active = i < stride;
    warp_partials = reinterpret_cast<float2 const*>(smem.warp_partials(p, kGroups, iteration % 2)) + i;
    cluster_partials = smem.cluster_partials(p, kGroups) + i;
    senders = kIsCluster && work.first_n_tile + iteration == work.last_n_tile ? work.senders : 0;
    token = i / kPairs;
    // Shared memory has a lane's columns side by side.
    int const n_tile = work.first_n_tile + iteration, g = i % kPairs / kRowTiles;
    int const row_tile = Traits::first_row_tile(p, n_tile) + i % kPairs % kRowTiles;
    column = row_tile / Layout::kFragments * Layout::kPanelColumns + 8 * g + row_tile % Layout::kFragments * 2;
    is_stored = Traits::kPanels == 1 || row_tile >= n_tile * kRowTiles;
    y = static_cast<Element*>(p.y) + token * p.ldy + column;
    // With group scales, a branch skips bias and activation where there is none: their code is long and far away.
    if (!kHasScales && is_active) constants = {p, column, true};
    is_plain = (!kHasScales || p.bias == nullptr) && p.activation == int(Activation::kIdentity) &&
               ColumnPair<Element>::is_one_store(p, column);
  }

  /// Sums the partials, applies scale, bias and activation, and stores to y. All warps have stored their partials.
  CUTLASS_DEVICE void reduce_and_store(Smem const& smem) const {
    if (!is_active) return;
    float2 total = sum_of_warps<kWarpsK>(warp_partials, stride);
    if (kIsCluster && senders > 0) {
      cute::wait_barrier(smem.cluster_barrier(), 0);
      asm volatile("" ::: "memory");  // the partials are read after the wait
      for (int sender = 0; sender < senders; ++sender) add(total, cluster_partials[sender * stride]);
    }
    if (!is_stored) return;
    if constexpr (!kHasScales) scale_and_bias(total, constants);
    if (is_plain) {
      ColumnPair<Element>{Element(total.x), Element(total.y)}.store(y);
      return;
    }
    if (kHasScales && p.bias != nullptr) scale_and_bias(total, {p, column, false});
    store_pair<Element>(p, token, column, total);
  }

  /// Sums the partials of the warps and sends the result to the CTA that reduces the n_tile.
  CUTLASS_DEVICE void reduce_and_send(WorkTile const& work, Smem const& smem) const {
    if (is_active) {
      send(cluster_partials + (work.rank - work.owner - 1) * stride, smem.cluster_barrier(), work.owner,
           sum_of_warps<kWarpsK>(warp_partials, stride));
    }
  }

 private:
  CUTLASS_DEVICE static void scale_and_bias(float2& total, ColumnPairConstants<Element> const& constants) {
    total = {constants.column(0, !kHasScales).affine(total.x), constants.column(1, !kHasScales).affine(total.y)};
  }

  /// Writes to the same address in another CTA of the cluster, and counts the bytes on its barrier.
  CUTLASS_DEVICE static void send(float2* target, uint64_t& barrier, int rank, float2 v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     cute::set_block_rank(cute::cast_smem_ptr_to_uint(target), rank)),
                 "f"(v.x), "f"(v.y), "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), rank))
                 : "memory");
  }
};

}  // namespace weightonly::sm90_decode
