// The tiles of a grouped GEMM (cutlass_ext/grouped_schedule.h), counted on the host as the lanes of a warp count them.
#include "cutlass_ext/grouped_schedule.h"

using weightonly::GroupedSchedule;

extern "C" {

/// Fills row_ends and tile_ends [experts]. Returns the tiles along M.
int wo_schedule(int const* offs, int experts, int rows, int tile_m, int* row_ends, int* tile_ends) {
  GroupedSchedule const schedule{row_ends, tile_ends, experts};
  constexpr int kThreads = 384;
  for (int thread = 0; thread < kThreads; ++thread) schedule.read_ends(offs, rows, thread, kThreads);
  int tiles[GroupedSchedule::kLanes], before = 0;
  for (int lane = 0; lane < GroupedSchedule::kLanes; ++lane) tiles[lane] = schedule.count_tiles(tile_m, lane);
  for (int lane = 0; lane < GroupedSchedule::kLanes; ++lane) {
    schedule.add_tiles_before(before, lane);
    before += tiles[lane];
  }
  return schedule.m_tiles();
}

/// expert, row_begin, row_end and n_tile of each tile, [tiles][4].
void wo_tiles(int* row_ends, int* tile_ends, int experts, int n_tiles, int tile_m, int* found) {
  GroupedSchedule const schedule{row_ends, tile_ends, experts};
  for (int number = 0; number < schedule.m_tiles() * n_tiles; ++number) {
    auto const tile = schedule.tile(number, number / n_tiles, n_tiles, tile_m);
    int const values[4] = {tile.expert, tile.row_begin, tile.row_end, tile.n_tile};
    for (int i = 0; i < 4; ++i) found[4 * number + i] = values[i];
  }
}

long long wo_most_m_tiles(long long rows, long long experts, int tile_m) {
  return GroupedSchedule::most_m_tiles(rows, experts, tile_m);
}
}
