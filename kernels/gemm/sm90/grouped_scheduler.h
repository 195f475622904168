// The scheduler of grouped GEMM: the tiles of many experts, one launch for all of them.
//
// CTAs are persistent: CTA i computes tiles i, i + gridDim.x, ... of those that there are (cutlass_ext/
// grouped_schedule.h); two CTAs that share x compute two neighbours along N each time. The grid is as large as the GPU,
// or as the most tiles that so many rows can make. It does not depend on the rows of each expert, so that a CUDA graph
// serves all of them.
#pragma once

#include "kernels/gemm/sm90/grouped_traits.h"

namespace weightonly::sm90 {

/// The tiles of this CTA, one after another, as a producer finds them. One of the producers records them for the
/// consumers, which have no registers to spare: before it arrives at the `full` barrier of a tile's first k_tile.
template <class Traits>
struct GroupedTiles : GroupedWork {
  GroupedParams const& p;
  GroupedSchedule schedule;
  GroupedWork* records;  // [Traits::kRecords], or null: this producer does not record
  int number;
  int record = 0;

  CUTLASS_DEVICE GroupedTiles(GroupedParams const& p, GroupedSchedule const& schedule, GroupedWork* records)
      : GroupedWork{}, p(p), schedule(schedule), records(records), number(cluster_index()) {
    if (exists()) find();
  }

  /// Output tiles of all experts; two that share x count once.
  CUTLASS_DEVICE static int count(GroupedParams const& p, GroupedSchedule const& schedule) {
    return schedule.m_tiles() * p.n_tiles.divisor;
  }

  CUTLASS_DEVICE bool exists() const { return number < count(p, schedule); }

  CUTLASS_DEVICE void advance() {
    number += cluster_count();
    if (exists()) find();
  }

  /// Whether the second half of the columns has any. That of a gated product has.
  CUTLASS_DEVICE bool has_second() const { return second_column < p.n_padded; }

 private:
  CUTLASS_DEVICE void find() {
    int m_index, unused;
    p.n_tiles(m_index, unused, number);
    GroupedTile const tile = schedule.tile(number, m_index, p.n_tiles.divisor, Traits::kTileM);
    expert = tile.expert;
    row_end = tile.row_end;
    k_tile_end = p.k_tiles;
    int const n_tile = multicasts_x<Traits>(p) ? 2 * tile.n_tile + rank_in_cluster() : tile.n_tile;
    if (p.is_gated) {
      y_column = column_begin = n_tile * Traits::kHalfColumns;
      second_column = column_begin + p.columns;
    } else {
      y_column = column_begin = n_tile * Traits::kTileN;
      second_column = column_begin + Traits::kHalfColumns;
    }
    width = (tile.row_end - tile.row_begin - 1) / Traits::kWidthStep;
    // An MMA that would reach beyond the last row of x begins before the tile's own rows: TMA is slower there.
    token_begin = min(tile.row_begin, max(0, p.m - (width + 1) * Traits::kWidthStep));
    skipped_tokens = tile.row_begin - token_begin;
    if (records == nullptr) return;
    records[record] = *this;
    record = record + 1 == Traits::kRecords ? 0 : record + 1;
  }
};

}  // namespace weightonly::sm90
