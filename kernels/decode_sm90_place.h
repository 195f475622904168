// What each CTA and each warp of decode_sm90 work on.
//
// The work is units of kUnitColumns columns by pieces of K. A cluster of `split_k` CTAs takes consecutive units,
// and cuts their pieces, one unit after another, into runs of the same length, one for each of its CTAs. So a CTA computes
// whole units but for the first and the last of its run, which it may share with its neighbours. Three units, two CTAs:
//
//   K ->
//   unit 0   | CTA 0: warp 0 | warp 1 | warp 0 | warp 1 |
//   unit 1   | CTA 0: warp 0 | warp 1 | CTA 1: 0 | 1    |     CTA 1 sends its sums of unit 1 to CTA 0
//   unit 2   | CTA 1: warp 0 | warp 1 | warp 0 | warp 1 |
//
// In a CTA the warps take turns along K, a piece at a time. The copies of a warp run on over the end of a unit. x stays in
// shared memory; a warp meets the same k in every unit, so it copies its own k of x with the first pieces that need them.
// Each cluster begins at a piece of its own and goes around K: else all SMs ask the L2 for the same lines of x at a time,
// which took up to 8% (M = 8). Below, pieces are counted from there, but for those of DecodeStream::piece.
#pragma once

#include "cutlass/cutlass.h"
#include "kernels/params.h"

namespace weightonly {

/// GemmParams and what the host works out once, so that threads divide no more than they must.
struct DecodeParams : GemmParams {
  int32_t units;
  int32_t units_per_cluster;
  int32_t pieces;  // of K
  int32_t run_pieces;  // of a CTA's run, at most
  uint32_t pieces_multiplier;  // i / pieces = i * pieces_multiplier / 2^32, for all i that there are
  uint32_t rotation_multiplier;  // cluster i begins at piece i * rotation_multiplier / 2^32 of K
  int32_t x_row_bytes;  // of x in shared memory
  int32_t groups_per_piece;

#if defined(__CUDACC__)
  /// Whole units in so many pieces.
  __device__ int units_in(int i) const { return pieces == 1 ? i : int(__umulhi(uint32_t(i), pieces_multiplier)); }
#endif
};

/// What this CTA and this warp work on.
template <int kWarpsK, bool kIsCluster>
struct DecodePlace {
  static_assert((kWarpsK & (kWarpsK - 1)) == 0, "a warp's pieces are found by a mask");

  int warp, lane;
  int rank;  // in the cluster
  int first_unit, last_unit;  // of the run; without one the last comes before the first
  int first_piece, end_piece;  // of the first unit, of the last
  int end;  // of the run, in pieces of the cluster
  int rotation;  // piece of K that the cluster begins with
  int owner;  // CTA that began the first unit: this one, or where the sums of it are sent
  int senders;  // CTAs that send this one their sums of the last unit

  CUTLASS_DEVICE DecodePlace(DecodeParams const& p) {
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    rank = owner = blockIdx.x;
    senders = 0;
    rotation = int(__umulhi(blockIdx.y, p.rotation_multiplier));
    int const unit = blockIdx.y * p.units_per_cluster;  // the cluster's first
    int const units = min(p.units - unit, p.units_per_cluster);
    if constexpr (!kIsCluster) {
      first_unit = unit;
      last_unit = unit + units - 1;
      first_piece = 0;
      end = end_piece = p.pieces;
      return;
    }
    int const all = units * p.pieces;
    int const begin = min(all, rank * p.run_pieces);
    end = min(all, begin + p.run_pieces);
    first_unit = p.units_in(begin);
    last_unit = begin < end ? p.units_in(end - 1) : first_unit - 1;
    first_piece = begin - first_unit * p.pieces;
    end_piece = end - last_unit * p.pieces;
    first_unit += unit;
    last_unit += unit;
  }

  /// Sets owner and senders, which the copies do not need.
  CUTLASS_DEVICE void find_sharers(DecodeParams const& p) {
    if constexpr (kIsCluster) {
      int const begin_of_first = end - end_piece - (last_unit - first_unit) * p.pieces;
      while (owner * p.run_pieces > begin_of_first) --owner;
      if (owner == rank || first_unit < last_unit) {
        int const end_of_last = end - end_piece + p.pieces;
        for (int other = end; other < end_of_last; other += p.run_pieces) ++senders;
      }
    }
  }

  CUTLASS_DEVICE bool sends() const { return kIsCluster && owner != rank; }

  /// The warp's first piece of a unit, and how many it has.
  CUTLASS_DEVICE int first(int unit) const {
    return kIsCluster && unit == first_unit ? first_piece + ((warp - first_piece) & (kWarpsK - 1)) : warp;
  }
  CUTLASS_DEVICE int count(DecodeParams const& p, int unit) const {
    int const end = kIsCluster && unit == last_unit ? end_piece : p.pieces;
    return max(0, end - first(unit) + kWarpsK - 1) / kWarpsK;
  }

  /// Where x of a unit's piece 0 lies, in pieces: all of x is there, or that of a run shorter than K.
  CUTLASS_DEVICE int x_base(DecodeParams const& p, int unit) const {
    if (!kIsCluster || p.run_pieces >= p.pieces) return 0;
    return (unit == first_unit ? 0 : p.pieces) - first_piece;
  }
};

}  // namespace weightonly
