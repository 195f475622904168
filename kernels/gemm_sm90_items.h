// The end of gemm_sm90 where gemm_sm90_chunks.h does not serve: the sums of all warpgroups and CTAs that share K meet in shared
// memory and become y.
//
// An item is the sums of eight tokens and 64 columns, struct GemmSm90. Each CTA of a cluster finishes some of the tile's items,
// each of its warps a quarter of some of those:
//
//   registers --st.shared--> sums of this CTA  [item][part of K]  --+
//             --st.async---> those of another  [item][part of K]  --+--> added, scaled, rounded, stored
//
// At few tokens this is a fifth of the kernel's time, so it is short: two barriers, nothing unrolled but what registers need, and
// what does not depend on the sums is known before.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass_ext/epilogue.h"
#include "cutlass_ext/read_shared.h"
#include "kernels/gemm_sm90_params.h"

namespace weightonly {

/// A consumer thread's part in it. Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Items {
  using Element = typename Kernel::Element;
  using Place = typename Kernel::Place;
  using Smem = typename Kernel::Smem;
  static constexpr int kItemBytes = Kernel::kItemBytes;
  static constexpr int kWarpgroups = Kernel::kWarpgroups;
  static constexpr int kWarpgroupsN = Kernel::kWarpgroupsN;
  static constexpr int kWarpgroupsK = Kernel::kWarpgroupsK;
  static constexpr bool kMaySplit = Kernel::kMaySplit;
  static constexpr int kOwnBytes = kWarpgroupsK * kItemBytes;  // a CTA's own sums of an item

  GemmSm90Params const& p;
  Place const& place;
  Smem const& smem;
  int warpgroup_n, warpgroup_k;
  uint32_t lane_bytes;  // where an item has this thread's sums
  // What it finishes: of the CTA's items those from `first` on, every kWarpgroups-th, two columns of two tokens. Four neighbouring
  // lanes have eight columns of a token, eight neighbours a sector of 32 bytes of y.
  int first, end;
  int column, row;  // row: of the tile, the first token
  ColumnPairConstants<Element> constants;  // asked for before the loop: they come from memory
  uint32_t own, others;  // this CTA's sums of the first item, and those that were sent
  int end_row;
  bool is_one_store;  // of both columns
  Element* y;

  CUTLASS_DEVICE GemmSm90Items(GemmSm90Params const& p, Place const& place, Smem const& smem)
      : GemmSm90Items(p, place, smem, __shfl_sync(0xffffffff, int(threadIdx.x / 32), 0), threadIdx.x % 32) {}

  /// Puts the thread's sums where those find them who finish them. sums(4 i + 2 h + e): column h of the lane's two in the MMA,
  /// token 8 i + e of its own.
  template <class Sums>
  CUTLASS_DEVICE void leave(Sums const& sums) const {
    all_consumers();  // nobody reads the stages any more
    uint32_t const target = own_sums() + warpgroup_k * kItemBytes + lane_bytes;
    auto const values = [&](int i) { return float4{sums(4 * i), sums(4 * i + 1), sums(4 * i + 2), sums(4 * i + 3)}; };
    if (!kMaySplit || p.split_k == 1) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Kernel::kTokenTiles; ++i) {
        put(target + (i * kWarpgroupsN + warpgroup_n) * kOwnBytes, values(i));
      }
      return;
    }
    uint32_t const sent = sent_sums() + warpgroup_k * kItemBytes + lane_bytes;
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.parts_barrier());
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Kernel::kTokenTiles; ++i) {
      int const item = i * kWarpgroupsN + warpgroup_n;
      if (item >= p.items) break;
      int const owner = item * p.item_multiplier >> 16, in_owner = item - owner * p.items_per_cta;
      if (owner == place.rank) {
        put(target + in_owner * kOwnBytes, values(i));
      } else {
        int const cta = place.rank - (place.rank > owner);  // of those that send there
        send(sent + in_owner * sent_bytes() + cta * kOwnBytes, barrier, owner, values(i));
      }
    }
  }

  /// From the sums of all parts of K to y. They are added in the same order in every run: this CTA's, then those of the others by
  /// rank.
  template <bool kIsIdentity>
  CUTLASS_DEVICE void finish() {
    ColumnEpilogue const columns[2] = {constants.column(0, !Kernel::kHasScales),
                                       constants.column(1, !Kernel::kHasScales)};
    all_consumers();
    if (kMaySplit && p.split_k > 1) cute::wait_barrier(smem.parts_barrier(), 0);
    asm volatile("" ::: "memory");  // what follows is read after it
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = first; i < end; i += kWarpgroups) {
      float4 const sum = add_parts();
      float values[4] = {columns[0].affine(sum.x), columns[1].affine(sum.z), columns[0].affine(sum.y),
                         columns[1].affine(sum.w)};
      if (!kIsIdentity) activate(values, p.activation);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        if (row + e >= end_row || row + e < place.known_tokens) continue;
        ColumnPair<Element> const pair = {Element(values[2 * e]), Element(values[2 * e + 1])};
        if (is_one_store) {
          pair.store(y + e * p.ldy);
        } else {
          pair.store_each(p, y + e * p.ldy, column);
        }
      }
      row += 8 * kWarpgroupsK;
      y += 8 * kWarpgroupsK * p.ldy;
    }
  }

 private:
  CUTLASS_DEVICE GemmSm90Items(GemmSm90Params const& p, Place const& place, Smem const& smem, int warp, int lane)
      : p(p),
        place(place),
        smem(smem),
        warpgroup_n(warp / 4 % kWarpgroupsN),
        warpgroup_k(warp / 4 / kWarpgroupsN),
        lane_bytes(offset(warp % 4, lane)),
        first(place.rank * p.items_per_cta + warp / 4),
        end(min(place.rank * p.items_per_cta + p.items_per_cta, p.items)),
        // All items that a warp finishes have the same columns.
        column(place.first_column + first % kWarpgroupsN * 64 + warp % 4 * 16 + lane / 16 * 8 + lane % 4 * 2),
        row(first / kWarpgroupsN * 8 + lane / 4 % 4 * 2),
        constants(p, column, !Kernel::kHasScales) {
    // In the MMA the columns are those of warp lane % 4, and with these tokens of its lane:
    uint32_t const mine = offset(lane % 4, warp % 4 * 8 + lane / 16 * 4 + lane / 4 % 4);
    own = own_sums() + warp / 4 * kOwnBytes + mine;
    others = sent_sums() + warp / 4 * sent_bytes() + mine;
    end_row = column < p.n ? p.m - place.first_token : 0;
    is_one_store = ColumnPair<Element>::is_one_store(p, column);
    y = static_cast<Element*>(p.y) + int64_t(place.first_token + row) * p.ldy + column;
  }

  /// Where an item has the sums of a lane of warp `warp` of a warpgroup: neither those who leave them nor those who finish them meet
  /// in banks.
  CUTLASS_DEVICE static uint32_t offset(int warp, int lane) {
    return (32 * warp + (lane ^ 2 * warp)) * int(sizeof(float4));
  }

  CUTLASS_DEVICE uint32_t own_sums() const { return cute::cast_smem_ptr_to_uint(smem.sums()); }
  CUTLASS_DEVICE uint32_t sent_sums() const { return cute::cast_smem_ptr_to_uint(smem.parts()); }
  CUTLASS_DEVICE int sent_bytes() const { return p.sent_parts * kItemBytes; }  // of an item

  CUTLASS_DEVICE static void put(uint32_t target, float4 const& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
  }

  /// Into another CTA of the cluster, on whose barrier the bytes count.
  CUTLASS_DEVICE static void send(uint32_t target, uint32_t barrier, int rank, float4 const& v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     cute::set_block_rank(target, rank)),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cute::set_block_rank(barrier, rank))
                 : "memory");
  }

  /// All sums of this thread's part of an item; the next one's are read next.
  CUTLASS_DEVICE float4 add_parts() {
    float4 sum = read(own);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 1; k < kWarpgroupsK; ++k) add(sum, read(own + k * kItemBytes));
    own += kWarpgroups * kOwnBytes;
    if constexpr (kMaySplit) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int part = 0; part < p.sent_parts; part += kWarpgroupsK) {
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kWarpgroupsK; ++k) add(sum, read(others + k * kItemBytes));
        others += kOwnBytes;
      }
      others += (kWarpgroups - 1) * sent_bytes();
    }
    return sum;
  }

  CUTLASS_DEVICE static float4 read(uint32_t source) {
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

  CUTLASS_DEVICE static void all_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(Kernel::kConsumers) : "memory"); }
};

}  // namespace weightonly
