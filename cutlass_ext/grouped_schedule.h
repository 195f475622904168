// The output tiles of a grouped GEMM, which its CTAs find from the rows of each expert.
//
// The host does not know how many rows an expert has. So each CTA counts tiles when it starts: it reads `offs`, and one
// warp sums the tiles along M of experts 0, 1, ... Tiles are numbered expert by expert, those of an expert in swizzles
// of kSwizzleM tiles along M, column by column, as those of one GEMM (kernels/gemm/sm90/tile_scheduler.h). So CTAs that
// run together share weights, and x in the L2.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace weightonly {

/// An output tile.
struct GroupedTile {
  int expert;
  int row_begin, row_end;  // of x and y
  int n_tile;
};

/// Rows and tiles of all experts. The arrays hold `experts` numbers each; GPUs keep them in shared memory.
struct GroupedSchedule {
  static constexpr int kLanes = 32;  // of the warp that fills the arrays
  static constexpr int kSwizzleM = 8;

  int32_t* row_ends;
  int32_t* tile_ends;  // tiles along M of this expert and those before it
  int experts;

  /// Tiles along M of all experts, at most: that many rows of that many experts cannot make more.
  CUTLASS_HOST_DEVICE static int64_t most_m_tiles(int64_t rows, int64_t experts, int tile_m) {
    int64_t const with_rows = rows < experts ? rows : experts;
    return (rows + with_rows * (tile_m - 1)) / tile_m;
  }

  /// Experts of a lane: those from lane * experts_of_lane() on.
  CUTLASS_HOST_DEVICE int experts_of_lane() const { return (experts + kLanes - 1) / kLanes; }

  /// Fills row_ends. Called by all threads, so that they wait for memory once. Ends outside of 0 .. rows, which no
  /// caller should give, are moved there.
  CUTLASS_HOST_DEVICE void read_ends(int32_t const* offs, int rows, int thread, int threads) const {
    for (int expert = thread; expert < experts; expert += threads) {
      int const end = offs[expert];
      row_ends[expert] = end < 0 ? 0 : end > rows ? rows : end;
    }
  }

  /// Fills tile_ends of a lane's experts as if there were none before them, and returns their tiles along M. After
  /// read_ends of all threads.
  CUTLASS_HOST_DEVICE int count_tiles(int tile_m, int lane) const {
    int tiles = 0;
    for (int i = 0; i < experts_of_lane(); ++i) {
      int const expert = lane * experts_of_lane() + i;
      if (expert >= experts) break;
      int const rows = row_ends[expert] - row_begin(expert);
      tiles += rows > 0 ? (rows + tile_m - 1) / tile_m : 0;
      tile_ends[expert] = tiles;
    }
    return tiles;
  }

  /// Adds the tiles of the lanes before this one to tile_ends.
  CUTLASS_HOST_DEVICE void add_tiles_before(int tiles, int lane) const {
    for (int i = 0; i < experts_of_lane(); ++i) {
      int const expert = lane * experts_of_lane() + i;
      if (expert < experts) tile_ends[expert] += tiles;
    }
  }

#if defined(__CUDACC__)
  /// Fills tile_ends. Called by all lanes of one warp, after read_ends of all threads.
  CUTLASS_DEVICE void count(int tile_m, int lane) const {
    int const tiles = count_tiles(tile_m, lane);
    int sum = tiles;
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) {
      int const before = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += before;
    }
    add_tiles_before(sum - tiles, lane);
  }
#endif

  CUTLASS_HOST_DEVICE int row_begin(int expert) const { return expert > 0 ? row_ends[expert - 1] : 0; }

  /// Tiles along M of all experts.
  CUTLASS_HOST_DEVICE int m_tiles() const { return tile_ends[experts - 1]; }

  /// The tile of a number. m_index: number / n_tiles, less than m_tiles().
  CUTLASS_HOST_DEVICE GroupedTile tile(int number, int m_index, int n_tiles, int tile_m) const {
    int first = 0, last = experts - 1;  // of those that the expert is among: the first with more tiles up to its end
    while (first < last) {
      int const middle = (first + last) / 2;
      if (tile_ends[middle] > m_index) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    int const begin = first > 0 ? tile_ends[first - 1] : 0;
    int const m_tiles_of_expert = tile_ends[first] - begin;
    int m_tile = 0, n_tile = number - begin * n_tiles;
    if (m_tiles_of_expert > 1) {
      int const swizzle = n_tile / (kSwizzleM * n_tiles);
      int const left = m_tiles_of_expert - swizzle * kSwizzleM;
      int const height = left < kSwizzleM ? left : kSwizzleM;
      int const in_swizzle = n_tile - swizzle * kSwizzleM * n_tiles;
      n_tile = in_swizzle / height;
      m_tile = swizzle * kSwizzleM + in_swizzle - n_tile * height;
    }
    int const row = row_begin(first) + m_tile * tile_m, end = row_ends[first];
    return {first, row, row + tile_m < end ? row + tile_m : end, n_tile};
  }
};

}  // namespace weightonly
