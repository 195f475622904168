// The order in which a tile's k_tiles are added, where a launch asks for that of another kernel.
//
// A kernel whose K is shared by S CTAs of W warpgroups has S W sums, one for each warpgroup: a CTA has one S-th of the
// k_tiles, and each of its warpgroups 128 k of every one of them. Those of a CTA are added first, then those of the CTAs
// (epilogue_reduce.h). A tile that follows this order computes these sums, its parts, one after another: those of all
// CTAs, or of one where as many CTAs share its K. With S = 2, W = 2 and K = 1024 its k_tiles are:
//
//   part 0: 0, 2 | part 1: 1, 3 | part 2: 4, 6 | part 3: 5, 7
#pragma once

#include "cutlass_ext/arch/ld_shared.h"
#include "kernels/gemm/sm90/tile_scheduler.h"

namespace weightonly::sm90 {

template <class Traits>
struct KOrder {
  static constexpr int kKTiles = Traits::kTileK < kOrderStep ? kOrderStep / Traits::kTileK : 1;  // of a block

  int k_tiles;  // of K
  int blocks;  // of K, each of kOrderStep k
  int warpgroups;
  int part_blocks;  // at most
  int first_part;
  int splits;  // parts are those of so many CTAs
  bool follows;

  CUTLASS_DEVICE KOrder(Params const& p, WorkTile const& work)
      : k_tiles(p.k_tiles),
        blocks(divide_up(k_tiles, kKTiles)),
        warpgroups(max(1, int(p.order_warpgroups))),
        part_blocks(divide_up(divide_up(blocks, warpgroups), max(1, int(p.order_split)))),
        first_part(work.split_rank * warpgroups),
        splits(max(1, p.order_split / p.split_k)),
        follows(splits * warpgroups > 1) {}

  CUTLASS_DEVICE int parts() const { return splits * warpgroups; }

  /// Calls visit(k_tile) for the k_tiles of a part. Divisions are slow: there are none for each.
  template <class Visit>
  CUTLASS_DEVICE void for_each_k_tile(int part, Visit const& visit) const {
    int const count = k_tiles_of(part);
    part += first_part;
    int k_tile = (part / warpgroups * part_blocks * warpgroups + part % warpgroups) * kKTiles;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      visit(k_tile);
      k_tile += i % kKTiles == kKTiles - 1 ? (warpgroups - 1) * kKTiles + 1 : 1;
    }
  }

  /// How many k_tiles a part has.
  CUTLASS_DEVICE int k_tiles_of(int part) const {
    part += first_part;
    int const begin = part / warpgroups * part_blocks;
    int const end = min(begin + part_blocks, divide_up(max(0, blocks - part % warpgroups), warpgroups));
    int const last = (end - 1) * warpgroups + part % warpgroups;  // of its blocks; of K it may be half a block
    int const missing = last == blocks - 1 ? blocks * kKTiles - k_tiles : 0;
    return end > begin ? (end - begin) * kKTiles - missing : 0;
  }
};

/// A sum that a thread keeps in registers.
template <class Accumulators>
struct SumInRegisters {
  Accumulators kept;

  CUTLASS_DEVICE void store(Accumulators const& accum) { cute::copy(accum, kept); }

  CUTLASS_DEVICE void add_to(Accumulators& accum) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum); ++i) accum(i) += kept(i);
  }
};

/// The same in shared memory.
template <class Traits>
struct SumInSmem {
  static_assert(Traits::smem_bytes(1, Traits::kTileM, true) <= kMaxSmemBytesSm90);
  uint32_t address;

  CUTLASS_DEVICE explicit SumInSmem(typename Traits::Smem const& smem)
      : address(cute::cast_smem_ptr_to_uint(smem.sum()) + threadIdx.x * uint32_t(sizeof(float4))) {}

  template <class Accumulators>
  CUTLASS_DEVICE void store(Accumulators const& accum) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum) / 4; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address + i * kStride), "f"(accum(4 * i)),
                   "f"(accum(4 * i + 1)), "f"(accum(4 * i + 2)), "f"(accum(4 * i + 3))
                   : "memory");
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void add_to(Accumulators& accum) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum) / 4; ++i) {
      uint32_t words[4];
      read_shared(words, address + i * kStride);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) accum(4 * i + j) += __uint_as_float(words[j]);
    }
  }

 private:
  static constexpr uint32_t kStride = Traits::kConsumers * sizeof(float4);
};

/// The same in global memory, where each CTA of the grid has a place: GemmParams::partials.
template <class Traits>
struct SumInGlobal {
  float4* first;

  CUTLASS_DEVICE explicit SumInGlobal(Params const& p)
      : first(reinterpret_cast<float4*>(p.partials) +
              int64_t(cluster_index() * p.multicast_ctas + rank_in_cluster()) * (Traits::kTileM * Traits::kTileN / 4) +
              threadIdx.x) {}

  template <class Accumulators>
  CUTLASS_DEVICE void store(Accumulators const& accum) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum) / 4; ++i) {
      __stcg(first + i * Traits::kConsumers,
             float4{accum(4 * i), accum(4 * i + 1), accum(4 * i + 2), accum(4 * i + 3)});
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void add_to(Accumulators& accum) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(accum) / 4; ++i) {
      float4 const kept = __ldcg(first + i * Traits::kConsumers);
      accum(4 * i) += kept.x;
      accum(4 * i + 1) += kept.y;
      accum(4 * i + 2) += kept.z;
      accum(4 * i + 3) += kept.w;
    }
  }
};

}  // namespace weightonly::sm90
