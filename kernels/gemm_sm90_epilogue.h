// The end of a tile of gemm_sm90: from sums in the registers of a wgmma to y.
//
// What is unrolled here runs but once, and its instructions come from the L2: how many they are is what they cost. So sums
// leave the registers as soon as there is more to do with them than to round them, and loops over shared memory do it.
//
// Where K is shared, by the CTAs of a cluster or by warpgroups of a CTA, each warpgroup finishes some of the items (struct
// GemmSm90). All sums of a CTA go to its shared memory, those that another CTA finishes from there to that one. A thread's
// float4 of an item is the same place of the MMA's C fragment for all who have sums of it.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass_ext/epilogue.h"
#include "kernels/gemm_sm90_params.h"

namespace weightonly {

/// Kernel: GemmSm90.
template <class Kernel>
struct GemmSm90Epilogue {
  using Element = typename Kernel::Element;
  using Place = typename Kernel::Place;
  using Smem = typename Kernel::Smem;
  static constexpr int kTokenTiles = Kernel::kTokenTiles;
  static constexpr int kItemBytes = Kernel::kItemBytes;
  static constexpr int kWarpgroups = Kernel::kWarpgroups;
  static constexpr int kWarpgroupsN = Kernel::kWarpgroupsN;
  static constexpr int kWarpgroupsK = Kernel::kWarpgroupsK;

  /// Whose sums a consumer thread has: columns `column` and the next one of 64, tokens `token` and the next one of eight.
  struct Lane {
    int warpgroup, thread;
    int column, token;

    CUTLASS_DEVICE Lane() {
      warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
      thread = threadIdx.x % 128;
      int const g = thread % 32 / 4, t = thread % 4;
      column = 8 * g + 2 * (thread / 32);
      token = 2 * t;
    }
  };

  /// sums(4 i + 2 h + e): column h of the lane's two, token 8 i + e of its own.
  template <class SumsTensor>
  CUTLASS_DEVICE static void store(GemmSm90Params const& p, Place const& place, Smem const& smem, SumsTensor& sums) {
    bool const is_identity = p.activation == int(Activation::kIdentity);
    Lane const lane;
    if constexpr (Kernel::kMaySplit) {
      if (kWarpgroupsK > 1 || p.split_k > 1) {
        int const first_item = place.rank * p.items_per_cta;
        int const n = (first_item + lane.warpgroup) % kWarpgroupsN;  // of all items that it finishes
        Columns const columns(p, place, n, lane.column);
        share(p, place.rank, lane, smem, sums);
        is_identity ? finish_items<Element>(p, place, smem, lane, columns, n)
                    : finish_items<float>(p, place, smem, lane, columns, n);
        return;
      }
    }
    Columns const columns(p, place, lane.warpgroup % kWarpgroupsN, lane.column);
    all_consumers();  // nobody reads the stages any more
    // Without an activation kernels that may loop do.
    is_identity && !Kernel::kMayLoop ? finish_tile<Element>(p, place, smem, lane, columns, sums)
                                     : finish_tile<float>(p, place, smem, lane, columns, sums);
  }

  /// The same, without an activation, for a tile that others may follow.
  template <class SumsTensor>
  CUTLASS_DEVICE static void store_and_go_on(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                             SumsTensor const& sums) {
    Lane const lane;
    Columns const columns(p, place, lane.warpgroup % kWarpgroupsN, lane.column);
    finish_chunks(p, place, smem, lane, columns, sums);
  }

  /// The constants of a lane's two columns, of a warpgroup's 64.
  struct Columns {
    int first;  // of the 64
    ColumnEpilogue constants[2];

    CUTLASS_DEVICE Columns(GemmSm90Params const& p, Place const& place, int warpgroup_n, int column)
        : first(place.first_column + 64 * warpgroup_n) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        constants[h] = ColumnEpilogue::load<Element>(p, first + column + h, !Kernel::kHasScales);
      }
    }

    /// A lane's sums of eight tokens to its place in rows of y, in shared memory. Finished is what all values are then but for
    /// an activation, in which case they stay fp32.
    template <class Value>
    CUTLASS_DEVICE void stage(Value* target, float4 const& sums) const {
      float const values[4] = {sums.x, sums.y, sums.z, sums.w};
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        struct alignas(2 * sizeof(Value)) Pair {
          Value values[2];
        } pair;
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) pair.values[h] = Value(constants[h].affine(values[2 * h + e]));
        *reinterpret_cast<Pair*>(target + e * Smem::template y_row_elements<Value>()) = pair;
      }
    }
  };

  /// Stores eight neighbouring columns of a token, if they exist, from shared memory. row: of the tile.
  template <class Value>
  CUTLASS_DEVICE static void store_chunk(GemmSm90Params const& p, Place const& place, int row, int n,
                                         Value const* source, bool is_vector) {
    int64_t const token = place.first_token + row;
    if (token >= p.m || n >= p.n || row < place.known_tokens) return;
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

  /// From the sums of a warpgroup, all of K, to y.
  template <class Value, class SumsTensor>
  CUTLASS_DEVICE static void finish_tile(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                         Lane const& lane, Columns const& columns, SumsTensor const& sums) {
    constexpr int kRowElements = Smem::template y_row_elements<Value>();
    Value* const tile = reinterpret_cast<Value*>(smem.y(false)) + lane.warpgroup * (Kernel::kTokens * kRowElements);
    Value* const mine = tile + lane.token * kRowElements + lane.column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokenTiles; ++i) {
      columns.stage(mine + 8 * i * kRowElements,
                    float4{sums(4 * i), sums(4 * i + 1), sums(4 * i + 2), sums(4 * i + 3)});
    }
    one_warpgroup(lane);
    bool const is_vector = vector_stores(p);
    int const chunk = lane.thread % 8 * 8;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int row = lane.thread / 8; row < Kernel::kTokens; row += 16) {
      store_chunk(p, place, row, columns.first + chunk, tile + row * kRowElements + chunk, is_vector);
    }
  }

  /// The same without an activation, 16 tokens at a time: the stages are not free, they take the next tile.
  template <class SumsTensor>
  CUTLASS_DEVICE static void finish_chunks(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                           Lane const& lane, Columns const& columns, SumsTensor const& sums) {
    constexpr int kRowElements = Smem::template y_row_elements<Element>();
    static_assert(!Kernel::kMayLoop || kTokenTiles % 4 == 0, "the next tile begins with the first buffer");
    Element* const chunks = smem.chunks() + lane.warpgroup * (2 * Smem::kChunkElements);
    bool const is_vector = vector_stores(p);
    int const row = lane.thread / 8, chunk = lane.thread % 8 * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokenTiles; i += 2) {
      // Two buffers: a barrier on, all have stored what was in this one.
      Element* const rows = chunks + i / 2 % 2 * Smem::kChunkElements;
      CUTLASS_PRAGMA_UNROLL
      for (int j = i; j < i + 2; ++j) {
        columns.stage(rows + (8 * (j - i) + lane.token) * kRowElements + lane.column,
                      float4{sums(4 * j), sums(4 * j + 1), sums(4 * j + 2), sums(4 * j + 3)});
      }
      one_warpgroup(lane);
      store_chunk(p, place, 8 * i + row, columns.first + chunk, rows + row * kRowElements + chunk, is_vector);
    }
  }

  /// Puts the sums where those find them that finish them, and waits for those of others.
  template <class SumsTensor>
  CUTLASS_DEVICE static void share(GemmSm90Params const& p, int rank, Lane const& lane, Smem const& smem,
                                   SumsTensor const& sums) {
    all_consumers();  // nobody reads the stages any more
    uint32_t const mine = cute::cast_smem_ptr_to_uint(smem.sums()) + lane.warpgroup * (kTokenTiles * kItemBytes) +
                          lane.thread * int(sizeof(float4));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokenTiles; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * kItemBytes), "f"(sums(4 * i)),
                   "f"(sums(4 * i + 1)), "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3))
                   : "memory");
    }
    if (p.split_k > 1) {
      cute::cluster_wait();  // all CTAs have their barriers
      send(p, rank, lane, mine, smem);
    }
    all_consumers();
    if (p.split_k > 1) cute::wait_barrier(smem.parts_barrier(), 0);
    asm volatile("" ::: "memory");  // what follows is read after it
  }

  /// The thread's sums that other CTAs finish. mine: of the warpgroup's first item.
  CUTLASS_DEVICE static void send(GemmSm90Params const& p, int rank, Lane const& lane, uint32_t mine,
                                  Smem const& smem) {
    int const warpgroup_n = lane.warpgroup % kWarpgroupsN, warpgroup_k = lane.warpgroup / kWarpgroupsN;
    uint32_t const parts = cute::cast_smem_ptr_to_uint(smem.parts()) + lane.thread * int(sizeof(float4));
    uint32_t const barrier = cute::cast_smem_ptr_to_uint(&smem.parts_barrier());
#pragma unroll 2
    for (int i = 0; i < p.items / kWarpgroupsN; ++i) {
      int const item = i * kWarpgroupsN + warpgroup_n;
      int const owner = item * p.item_multiplier >> 16, place = item - owner * p.items_per_cta;
      if (owner == rank) continue;
      int const part = (rank - (rank > owner)) * kWarpgroupsK + warpgroup_k;
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                   : "r"(mine + i * kItemBytes)
                   : "memory");
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                       cute::set_block_rank(parts + (place * p.sent_parts + part) * kItemBytes, owner)),
                   "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cute::set_block_rank(barrier, owner))
                   : "memory");
    }
  }

  CUTLASS_DEVICE static void add(float4& sum, float4 const& addend) {
    sum.x += addend.x;
    sum.y += addend.y;
    sum.z += addend.z;
    sum.w += addend.w;
  }

  /// The warpgroup's items, from the sums of all parts of K to y. They are added in the same order in every run: this CTA's,
  /// then those of the others by rank.
  template <class Value>
  CUTLASS_DEVICE static void finish_items(GemmSm90Params const& p, Place const& place, Smem const& smem,
                                          Lane const& lane, Columns const& columns, int warpgroup_n) {
    constexpr int kRowElements = Smem::template y_row_elements<Value>();
    constexpr int kPart = kItemBytes / int(sizeof(float4));
    int const first_item = place.rank * p.items_per_cta;
    int const items = min(p.items_per_cta, p.items - first_item);  // of the CTA
    Value* const rows =
        reinterpret_cast<Value*>(smem.y(true)) + lane.warpgroup * (Kernel::kWarpgroupSharedItems * 8 * kRowElements);
    float4 const* const own = reinterpret_cast<float4 const*>(smem.sums()) + lane.thread;
    float4 const* const parts = reinterpret_cast<float4 const*>(smem.parts()) + lane.thread;
    Value* target = rows + lane.token * kRowElements + lane.column;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = lane.warpgroup; i < items; i += kWarpgroups) {
      int const token_tile = (first_item + i) / kWarpgroupsN;
      float4 sum = own[(warpgroup_n * kTokenTiles + token_tile) * kPart];
      CUTLASS_PRAGMA_UNROLL
      for (int k = 1; k < kWarpgroupsK; ++k) {
        add(sum, own[((k * kWarpgroupsN + warpgroup_n) * kTokenTiles + token_tile) * kPart]);
      }
#pragma unroll 4
      for (int part = 0; part < p.sent_parts; ++part) add(sum, parts[(i * p.sent_parts + part) * kPart]);
      columns.stage(target, sum);
      target += 8 * kRowElements;
    }
    one_warpgroup(lane);
    bool const is_vector = vector_stores(p);
    int const chunk = lane.thread % 8 * 8;
    int const row = lane.thread / 8 % 8;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int j = lane.thread / 64; lane.warpgroup + j * kWarpgroups < items; j += 2) {
      int const token_tile = (first_item + lane.warpgroup + j * kWarpgroups) / kWarpgroupsN;
      store_chunk(p, place, 8 * token_tile + row, columns.first + chunk, rows + (8 * j + row) * kRowElements + chunk,
                  is_vector);
    }
  }

  CUTLASS_DEVICE static void all_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(Kernel::kConsumers) : "memory"); }
  CUTLASS_DEVICE static void one_warpgroup(Lane const& lane) {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + lane.warpgroup) : "memory");
  }
};

}  // namespace weightonly
