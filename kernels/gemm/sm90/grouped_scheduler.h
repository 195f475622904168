// The scheduler of grouped GEMM: the tiles of many experts, one launch for all of them.
//
// CTAs are persistent: CTA i computes tiles i, i + gridDim.x, ... of those that there are (cutlass_ext/
// grouped_schedule.h). The grid is as large as the GPU, or as the most tiles that so many rows can make. It does not
// depend on the rows of each expert, so that a CUDA graph serves all of them.
#pragma once

#include "cutlass/fast_math.h"
#include "cutlass_ext/grouped_params.h"
#include "cutlass_ext/grouped_schedule.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly::sm90 {

/// The arguments of the grouped kernel.
struct GroupedParams : Params {
  int32_t const* offs;
  int32_t experts;
  cutlass::FastDivmod n_tiles;
};

/// A tile of one expert.
struct GroupedWork : WorkTile {
  int expert;
  int row_end;

  CUTLASS_DEVICE int panel(Params const& p) const {
    return expert * (p.n_padded / kPanelColumns) + column_begin / kPanelColumns;
  }
  CUTLASS_DEVICE int token_end(Params const&) const { return row_end; }
  CUTLASS_DEVICE GemmParams operands(Params const& p) const {
    GemmParams of_expert = p;
    of_expert.scales = static_cast<uint16_t const*>(p.scales) + int64_t(expert) * p.groups * p.ld_scales;
    if (p.bias != nullptr) of_expert.bias = static_cast<uint16_t const*>(p.bias) + int64_t(expert) * p.n;
    return of_expert;
  }
};

/// Persistent CTAs. The epilogue has shared memory of its own, so that the stages take the next tile meanwhile:
///
///   | mbarriers | x | weights | scales and zeros | codebook | epilogue: partials, or staged y | records | schedule |
template <class Config>
struct GroupedTraits : Traits<Config> {
  using Base = Traits<Config>;
  static constexpr bool kIsGrouped = true;
  static constexpr bool kMayPersist = true;
  static constexpr bool kMayMulticastX = false;
  static constexpr bool kMaySplitK = false;
  static constexpr bool kPreparesReduction = false;
  static constexpr bool kMayStageStore = Base::kWarpgroupsK == 1;
  static constexpr int kMaxExperts = 512;
  /// With the loop for such groups ptxas makes every wgmma of sixteen warps wait for the one before. From 32 tokens on it
  /// spills registers without that loop.
  static constexpr bool kMayHaveGroupsOf32 = Base::kWarpgroups < 4 || Base::kTileM > 16;

  static constexpr int kEpilogueBytes =
      kMayStageStore ? 2 * Base::kWarpgroups * Base::kStagedElements * int(sizeof(typename Base::Element))
                     : Base::kLocalPartialsBytes;
  static constexpr int kRecordsOffset = Base::kStagesBytes + kEpilogueBytes;  // from x
  /// Producers are up to kStages tiles ahead, and write one more, while consumers still read that of their epilogue.
  static constexpr int kRecords = Base::kStages + 2;
  static constexpr int kScheduleOffset = kRecordsOffset + kRecords * int(sizeof(GroupedWork));

  static constexpr int smem_bytes(int experts) {
    return Base::kBarrierBytes + kScheduleOffset + 2 * int(sizeof(int32_t)) * experts;
  }
  static_assert(smem_bytes(kMaxExperts) <= kMaxSmemBytesSm90);
  static_assert(kRecordsOffset % 16 == 0);

  struct Smem : Base::Smem {
    CUTLASS_DEVICE char* local_partials() const { return this->x() + Base::kStagesBytes; }
    CUTLASS_DEVICE auto* staged_y() const {
      return reinterpret_cast<typename Base::Element*>(this->x() + Base::kStagesBytes);
    }
    CUTLASS_DEVICE GroupedWork* records() const { return reinterpret_cast<GroupedWork*>(this->x() + kRecordsOffset); }
    CUTLASS_DEVICE GroupedSchedule schedule(int experts) const {
      auto* const ends = reinterpret_cast<int32_t*>(this->x() + kScheduleOffset);
      return {ends, ends + experts, experts};
    }
  };
};

template <class Traits>
struct GroupedScheduler {
  /// What a CTA computes at a time, of one expert.
  using Work = GroupedWork;

  /// The tiles of this CTA, one after another, as a producer finds them. One of the producers records them for the
  /// consumers, which have no registers to spare: before it arrives at the `full` barrier of a tile's first k_tile.
  struct Tile : Work {
    GroupedParams const& p;
    GroupedSchedule schedule;
    Work* records;  // [Traits::kRecords], or null: this producer does not record
    int number;
    int record = 0;

    CUTLASS_DEVICE Tile(GroupedParams const& p, GroupedSchedule const& schedule, Work* records)
        : p(p), schedule(schedule), records(records), number(cluster_index()) {
      this->split_rank = 0;
      this->k_tile_begin = 0;
      this->k_tile_end = 0;
      if (exists()) find();
    }

    CUTLASS_DEVICE bool exists() const { return number < tiles(p, schedule); }

    CUTLASS_DEVICE void advance() {
      number += cluster_count();
      if (exists()) find();
    }

   private:
    CUTLASS_DEVICE void find() {
      int m_index, unused;
      p.n_tiles(m_index, unused, number);
      GroupedTile const tile = schedule.tile(number, m_index, p.n_tiles.divisor, Traits::kTileM);
      this->expert = tile.expert;
      this->row_end = tile.row_end;
      this->k_tile_end = p.k_tiles;
      this->column_begin = tile.n_tile * Traits::kTileN;
      // A tile that would reach beyond the last row of x begins before its own rows: TMA is slower there.
      this->token_begin = min(tile.row_begin, max(0, p.m - Traits::kTileM));
      this->skipped_tokens = tile.row_begin - this->token_begin;
      if (records == nullptr) return;
      records[record] = *this;
      record = record + 1 == Traits::kRecords ? 0 : record + 1;
    }
  };

  static SchedulerParams make_params(int, int) { return {}; }

  /// Output tiles of all experts.
  CUTLASS_DEVICE static int tiles(GroupedParams const& p, GroupedSchedule const& schedule) {
    return schedule.m_tiles() * p.n_tiles.divisor;
  }

  /// Counts the tiles, when the ends of rows are there. Called by all lanes of one warp.
  CUTLASS_DEVICE static void count(GroupedSchedule const& schedule) {
    int const lane = threadIdx.x % 32;
    int const tiles = schedule.count_tiles(Traits::kTileM, lane);
    int sum = tiles;
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      int const before = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += before;
    }
    schedule.add_tiles_before(sum - tiles, lane);
  }

  /// Calls visit(tile) for each tile of this CTA, which are `first` and those after it. Called by producers.
  template <class Visit>
  CUTLASS_DEVICE static void for_each(Params const&, Tile const& first, Visit const& visit) {
    for (Tile tile = first; tile.exists(); tile.advance()) visit(tile);
  }

  /// The same for consumers, which see nothing of a tile before its main loop. compute(k_tiles): the main loop.
  /// finish(work): the epilogue.
  template <class Compute, class Finish>
  CUTLASS_DEVICE static void for_each(GroupedParams const& p, GroupedSchedule const& schedule, Work const* records,
                                      Compute const& compute, Finish const& finish) {
    int const end = tiles(p, schedule);
    int record = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int number = cluster_index(); number < end; number += cluster_count()) {
      compute(WorkTile{0, 0, p.k_tiles, 0, 0, 0});
      finish(records[record]);
      record = record + 1 == Traits::kRecords ? 0 : record + 1;
    }
  }
};

}  // namespace weightonly::sm90
