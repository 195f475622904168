// The tiles along M of grouped_decode_sm90, which each CTA lists in shared memory when it starts: from the ends of
// sorted rows, or from the choices of tokens.
#pragma once

#include "cutlass_ext/grouped_params.h"

namespace weightonly::sm90_decode {

/// What the CTA has in shared memory of its rows.
struct RowTilesSmem {
  RowTile tiles[kMaxRowTiles];
  alignas(16) int16_t ids[kMaxSortedChoices];  // of each choice
  uint16_t tokens[kMaxSortedChoices];  // of each sorted row: the row of x
  RowTile first_of[kMaxSortedChoices];  // of each sorted row: the tile that begins with it; no rows: none does
  int32_t warp_sums[32];
  int32_t rows;  // of all experts, where p.offs says whose they are
};

template <int kThreads>
struct RowTiles {
  static_assert(kThreads >= kMaxSortedChoices, "a thread has one choice");

  /// Lists the tiles and returns their number. Called by all threads; they may read the list after a barrier.
  /// visit(index, tile): called once for each tile, by some thread.
  template <class Visit>
  CUTLASS_DEVICE static int find(GroupedGemmParams const& p, RowTilesSmem& smem, Visit const& visit) {
    auto const add = [&](int index, RowTile const& tile) {
      smem.tiles[index] = tile;
      visit(index, tile);
    };
    return p.ids != nullptr ? sort(p, smem, add) : from_ends(p, smem, add);
  }

 private:
  /// Where the rows of an expert begin. Ends outside of 0 .. m, which no caller should give, are moved there.
  CUTLASS_DEVICE static int row_begin(GroupedGemmParams const& p, int expert) {
    return expert > 0 ? max(0, min(p.gemm.m, p.offs[expert - 1])) : 0;
  }

  template <class Add>
  CUTLASS_DEVICE static int from_ends(GroupedGemmParams const& p, RowTilesSmem& smem, Add const& add) {
    int const per_thread = (p.experts + kThreads - 1) / kThreads;
    int const first = threadIdx.x * per_thread, last = min(p.experts, first + per_thread);
    auto const for_each = [&](auto const& visit) {
      for (int expert = first; expert < last; ++expert) {
        int const begin = row_begin(p, expert), end = row_begin(p, expert + 1);
        for (int row = begin; row < end; row += kRowTileM) visit(expert, row, end);
      }
    };
    int count = 0;
    for_each([&](int, int, int) { ++count; });
    if (last == p.experts && first < last) smem.rows = row_begin(p, last);
    int total;
    int index = sum_before(count, total, smem);
    // Ends that do not ascend could make more tiles than there is room for.
    for_each([&](int expert, int row, int end) {
      if (index < kMaxRowTiles) add(index, {row, int16_t(expert), int16_t(min(kRowTileM, end - row))});
      ++index;
    });
    return min(total, kMaxRowTiles);
  }

  /// Sorts the choices by expert, in their order; those of no expert come last. Every CTA does it by itself: it takes
  /// less time than a kernel in front. The first one writes down the places.
  template <class Add>
  CUTLASS_DEVICE static int sort(GroupedGemmParams const& p, RowTilesSmem& smem, Add const& add) {
    int const choice = threadIdx.x, choices = p.gemm.m;
    bool const exists = choice < choices;
    int id = INT16_MAX;
    if (exists) {
      int64_t const given =
          p.is_int64 ? static_cast<int64_t const*>(p.ids)[choice] : static_cast<int32_t const*>(p.ids)[choice];
      id = given >= 0 && given < p.experts ? int(given) : p.experts;
    }
    if (choice < kMaxSortedChoices) smem.ids[choice] = int16_t(id);
    int const rows = __syncthreads_count(id < p.experts);
    int before = 0, same = 0, smaller = 0;
    if (exists) {
      for (int j = 0; j < choices; j += 8) {
        uint4 const eight = *reinterpret_cast<uint4 const*>(smem.ids + j);
        uint32_t const words[4] = {eight.x, eight.y, eight.z, eight.w};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) {
          int const other = words[i / 2] >> (16 * (i % 2)) & 0xffff;
          smaller += other < id;
          same += other == id;
          before += other == id && j + i < choice;
        }
      }
      int const row = smaller + before;
      bool const begins_tile = id < p.experts && before % kRowTileM == 0;
      smem.tokens[row] = uint16_t(choice / p.top_k);
      smem.first_of[row] = {row, int16_t(id), int16_t(begins_tile ? min(kRowTileM, same - before) : 0)};
      if (blockIdx.x == 0 && p.places != nullptr) p.places[choice] = row;
    }
    __syncthreads();
    RowTile const tile = exists ? smem.first_of[choice] : RowTile{};
    int total;
    int const index = sum_before(int(tile.rows > 0), total, smem);
    if (tile.rows > 0) add(index, tile);
    if (blockIdx.x == 0 && choice == 0 && p.places != nullptr) *p.rows = rows;
    return total;
  }

  /// Prefix sums of one number of each thread: those of the threads before.
  CUTLASS_DEVICE static int sum_before(int value, int& total, RowTilesSmem& smem) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      int const before = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += before;
    }
    if (lane == 31) smem.warp_sums[warp] = sum;
    __syncthreads();
    int before = sum - value;
    total = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += smem.warp_sums[w];
      total += smem.warp_sums[w];
    }
    return before;
  }
};

}  // namespace weightonly::sm90_decode
