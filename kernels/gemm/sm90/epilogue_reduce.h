// The epilogue that reduces: adds the accumulators of all warpgroups and CTAs that share K, through shared memory, and
// stores y. It serves every tile that epilogue_store.h does not.
//
// A reduction tile is eight tokens and 64 columns of the output tile. A partial is the accumulators that one warpgroup
// of one CTA has of it. Each CTA of the cluster reduces some of the reduction tiles, and each of its warps a quarter of
// some of those:
//
//   accumulators --st.shared--> local partials  [reduction tile][warpgroup along K]       --+
//                --st.async---> remote partials [reduction tile][CTA][warpgroup along K]  --+-> y
//
// With few tokens this takes a fifth of the kernel's time. So it has only two barriers, little code, and computes
// before the main loop what does not depend on the accumulators.
#pragma once

#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/ld_shared.h"
#include "cutlass_ext/epilogue/column.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly::sm90 {

/// One consumer thread's share of the reduction. Work: the scheduler's WorkTile.
template <class Traits, class Work = WorkTile>
struct ClusterReduce {
  using Element = typename Traits::Element;
  using Smem = typename Traits::Smem;
  static constexpr int kTileBytes = Traits::kReductionTileBytes;
  static constexpr int kTileM = Traits::kReductionTileM;
  static constexpr int kWarpgroups = Traits::kWarpgroups;
  static constexpr int kWarpgroupsN = Traits::kWarpgroupsN;
  static constexpr int kWarpgroupsK = Traits::kWarpgroupsK;
  static constexpr bool kMaySplitK = Traits::kMaySplitK;
  static constexpr int kPartialsBytes = kWarpgroupsK * kTileBytes;  // the partials that one CTA has of a reduction tile

  Params const& p;
  Work const& work;
  Smem const& smem;
  int warpgroup_n, warpgroup_k;
  uint32_t lane_bytes;  // where this thread's accumulators lie in a partial
  // This warp reduces every kWarpgroups-th reduction tile from `tile_begin` to `tile_end`. A thread has two columns of
  // two tokens. Four neighbouring lanes have eight columns of a token, eight lanes a 32-byte sector of y.
  int tile_begin, tile_end;
  int column, row;  // row: the first token, in the work tile
  ColumnPairConstants<Element> constants;  // loaded before the main loop: they come from memory
  uint32_t local, remote;  // addresses of this thread's values in the partials of the next reduction tile
  int row_end;
  bool is_one_store;  // for both columns
  Element* y;

  CUTLASS_DEVICE ClusterReduce(Params const& p, Work const& work, Smem const& smem)
      : ClusterReduce(p, work, smem, __shfl_sync(0xffffffff, int(threadIdx.x / 32), 0), threadIdx.x % 32) {}

  /// The same of the thread whose numbers these are.
  CUTLASS_DEVICE ClusterReduce(Params const& p, Work const& work, Smem const& smem, int warp, int lane)
      : p(p),
        work(work),
        smem(smem),
        warpgroup_n(warp / 4 % kWarpgroupsN),
        warpgroup_k(warp / 4 / kWarpgroupsN),
        lane_bytes(offset(warp % 4, lane)),
        tile_begin(work.split_rank * p.reduce.tiles_per_cta + warp / 4),
        tile_end(min(work.split_rank * p.reduce.tiles_per_cta + p.reduce.tiles_per_cta, p.reduce.tiles)),
        // The same for all reduction tiles of a warp.
        column(work.column_begin + tile_begin % kWarpgroupsN * Traits::kWarpgroupN + warp % 4 * 16 + lane / 16 * 8 +
               lane % 4 * 2),
        row(tile_begin / kWarpgroupsN * kTileM + lane / 4 % 4 * 2),
        constants(work.operands(p), column, !Traits::kHasScales) {
    // In the MMA these columns are those of warp lane % 4, and these tokens those of its lane:
    uint32_t const mine = offset(lane % 4, warp % 4 * 8 + lane / 16 * 4 + lane / 4 % 4);
    local = local_partials() + warp / 4 * kPartialsBytes + mine;
    remote = remote_partials() + warp / 4 * remote_tile_bytes() + mine;
    row_end = column < p.n ? work.token_end(p) - work.token_begin : 0;
    is_one_store = ColumnPair<Element>::is_one_store(p, column);
    y = static_cast<Element*>(p.y) + int64_t(work.token_begin + row) * p.ldy + column;
  }

  /// Stores the thread's accumulators in the shared memory of the CTAs that reduce them. accum(4 i + 2 h + e): column h
  /// of the lane's two in the MMA, token 8 i + e of its own.
  template <class Accumulators>
  CUTLASS_DEVICE void store_partials(Accumulators const& accum) const {
    sync_consumers();  // the partials overwrite the stages, which no warp reads any more
    uint32_t const target = local_partials() + warpgroup_k * kTileBytes + lane_bytes;
    auto const values = [&](int i) {
      return float4{accum(4 * i), accum(4 * i + 1), accum(4 * i + 2), accum(4 * i + 3)};
    };
    if (!kMaySplitK || p.split_k == 1) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kReductionTilesM; ++i) {
        store_shared(target + (i * kWarpgroupsN + warpgroup_n) * kPartialsBytes, values(i));
      }
      return;
    }
    uint32_t const remote_target = remote_partials() + warpgroup_k * kTileBytes + lane_bytes;
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.partials_barrier());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kReductionTilesM; ++i) {
      int const tile = i * kWarpgroupsN + warpgroup_n;
      if (tile >= p.reduce.tiles) break;
      int const rank = tile * p.reduce.rank_multiplier >> 16;  // of the CTA that reduces it
      int const tile_of_rank = tile - rank * p.reduce.tiles_per_cta;
      if (rank == work.split_rank) {
        store_shared(target + tile_of_rank * kPartialsBytes, values(i));
      } else {
        int const sender = work.split_rank - (work.split_rank > rank);  // counted without the CTA that reduces
        store_async(remote_target + tile_of_rank * remote_tile_bytes() + sender * kPartialsBytes, barrier, rank,
                    values(i));
      }
    }
  }

  /// Adds the partials, finishes y and stores it. The order of the sum is that of the CTAs' ranks, whichever of them
  /// adds, and within a CTA that of its warpgroups: the bits of a row do not depend on its place.
  template <bool kIsIdentity>
  CUTLASS_DEVICE void reduce() {
    ColumnEpilogue const columns[2] = {constants.column(0, !Traits::kHasScales),
                                       constants.column(1, !Traits::kHasScales)};
    sync_consumers();
    if (kMaySplitK && p.split_k > 1) cute::wait_barrier(smem.partials_barrier(), 0);
    asm volatile("" ::: "memory");  // no read of a partial moves before the wait
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = tile_begin; i < tile_end; i += kWarpgroups) {
      float4 const sum = add_partials();
      float2 x_scale{1.f, 1.f};
      if constexpr (Traits::kHasXScales) x_scale = read_x_scales();
      float values[4] = {columns[0].affine(sum.x * x_scale.x), columns[1].affine(sum.z * x_scale.x),
                         columns[0].affine(sum.y * x_scale.y), columns[1].affine(sum.w * x_scale.y)};
      if (!kIsIdentity) activate(values, p.activation);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if (row + e >= row_end || row + e < work.skipped_tokens) continue;
        ColumnPair<Element> const pair = {Element(values[2 * e]), Element(values[2 * e + 1])};
        if (is_one_store) {
          pair.store(y + e * p.ldy);
        } else {
          pair.store_each(p, y + e * p.ldy, column);
        }
      }
      row += kTileM * kWarpgroupsK;
      y += kTileM * kWarpgroupsK * p.ldy;
    }
  }

 private:
  /// Where a partial has the accumulators of a lane of a warpgroup's warp. Neither their stores nor the loads of the
  /// reduction have bank conflicts.
  CUTLASS_DEVICE static uint32_t offset(int warp, int lane) {
    return (32 * warp + (lane ^ 2 * warp)) * int(sizeof(float4));
  }

  CUTLASS_DEVICE uint32_t local_partials() const { return cute::cast_smem_ptr_to_uint(smem.local_partials()); }
  CUTLASS_DEVICE uint32_t remote_partials() const { return cute::cast_smem_ptr_to_uint(smem.remote_partials()); }
  /// Of all remote partials of a reduction tile.
  CUTLASS_DEVICE int remote_tile_bytes() const { return p.reduce.remote_partials * kTileBytes; }

  CUTLASS_DEVICE static void store_shared(uint32_t target, float4 const& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
  }

  /// The sum of all partials of a reduction tile, of this thread's values. Moves on to the warp's next reduction tile.
  CUTLASS_DEVICE float4 add_partials() {
    float4 sum{-0.f, -0.f, -0.f, -0.f};  // what changes no addend, not even a zero
    if constexpr (kMaySplitK) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int rank = 0; rank < p.split_k; ++rank) {
        bool const is_local = rank == work.split_rank;
        add(sum, partials_of_cta(is_local ? local : remote));
        remote += is_local ? 0 : kPartialsBytes;
      }
      remote += (kWarpgroups - 1) * remote_tile_bytes();
    } else {
      sum = partials_of_cta(local);
    }
    local += kWarpgroups * kPartialsBytes;
    return sum;
  }

  CUTLASS_DEVICE static float4 partials_of_cta(uint32_t source) {
    float4 sum = load_shared(source);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 1; k < kWarpgroupsK; ++k) add(sum, load_shared(source + k * kTileBytes));
    return sum;
  }

  /// Of the thread's two tokens.
  CUTLASS_DEVICE float2 read_x_scales() const {
    int const token = work.token_begin + row;
    return {p.x_scales[min(token, p.m - 1)], p.x_scales[min(token + 1, p.m - 1)]};
  }

  CUTLASS_DEVICE static float4 load_shared(uint32_t source) {
    uint32_t words[4];
    read_shared(words, source);
    return {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]), __uint_as_float(words[3])};
  }

  CUTLASS_DEVICE static void add(float4& sum, float4 const& addend) {
    sum.x += addend.x;
    sum.y += addend.y;
    sum.z += addend.z;
    sum.w += addend.w;
  }

  CUTLASS_DEVICE static void sync_consumers() { named_barrier_sync<BarrierId::kConsumers, Traits::kConsumers>(); }
};

}  // namespace weightonly::sm90
