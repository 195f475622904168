// The copies of a warp of decode_sm90: its pieces of weights, and with the first ones x.
#pragma once

#include "cutlass_ext/weight_ring.h"
#include "kernels/decode_sm90_place.h"

namespace weightonly {

/// The warp's copies, kDepth pieces ahead of its products. Kernel: Decode.
template <class Kernel, int kGroups, bool kIsCluster>
struct DecodeStream {
  using R = typename Kernel::template Ring<kGroups>;
  using Place = DecodePlace<Kernel::kWarpsK, kIsCluster>;
  using Element = typename Kernel::Element;
  static constexpr int kWarpsK = Kernel::kWarpsK;
  static constexpr int kPieceK = Kernel::kPieceK;
  static constexpr int kPieceXBytes = Kernel::kPieceXBytes;

  static constexpr int kXChunks = kPieceK / 8;  // of 16 bytes, in a piece of one token
  static constexpr int kXRows = 32 / kXChunks;  // tokens that a copy of the warp brings

  DecodeParams const& p;
  Place const& place;
  int unit, piece;  // next; of K
  int left;  // pieces up to the end of K or of the unit; 0 when all is fetched
  int wrapped;  // pieces of the unit after those, from the beginning of K
  int x_left;  // pieces that need their x: the first ones
  uint32_t x_target;  // where x of the next piece belongs, this lane's
  uint32_t smem_x;  // of the CTA
  typename R::Source source;

  CUTLASS_DEVICE DecodeStream(DecodeParams const& p, Place const& place, uint32_t smem_x)
      : p(p), place(place), smem_x(smem_x) {
    unit = place.first_unit;
    begin_unit(unit <= place.last_unit ? place.count(p, unit) : 0);
    x_left = left + wrapped;
    if (kIsCluster && unit < place.last_unit) {
      // Of the next unit those before this one's.
      int const end = min(place.first_piece, unit + 1 == place.last_unit ? place.end_piece : p.pieces);
      x_left += max(0, end - place.warp + kWarpsK - 1) / kWarpsK;
    }
    if (left == 0) begin_next_unit();
  }

  CUTLASS_DEVICE static bool is_whole(DecodeParams const& p, int piece) { return (piece + 1) * kPieceK <= p.k_padded; }

  /// count: of this warp's pieces of it.
  CUTLASS_DEVICE void begin_unit(int count) {
    int const first = place.first(unit);
    piece = first + place.rotation;
    if (piece >= p.pieces) piece -= p.pieces;
    left = min(count, int(uint32_t(p.pieces - piece + kWarpsK - 1) / kWarpsK));
    wrapped = count - left;
    x_target = smem_x + place.lane / kXChunks * p.x_row_bytes + place.lane % kXChunks * 16 +
               (first + place.x_base(p, unit)) * kPieceXBytes;
    source = typename R::Source(p, Kernel::first_tile(p, unit), piece, place.lane);
  }

  /// The next one that has pieces for this warp.
  CUTLASS_DEVICE void begin_next_unit() {
    while (left == 0 && unit < place.last_unit) {
      ++unit;
      begin_unit(place.count(p, unit));
    }
  }

  CUTLASS_DEVICE void advance() {
    piece += kWarpsK;
    x_target += kWarpsK * kPieceXBytes;
    source.advance(kWarpsK);
    if (--left > 0) return;
    if (wrapped > 0) {
      piece -= p.pieces;
      left = wrapped;
      wrapped = 0;
      source = typename R::Source(p, Kernel::first_tile(p, unit), piece, place.lane);
    } else {
      begin_next_unit();
    }
  }

  /// One commit, of the next piece or of nothing. All lanes have read what was in the slot. x comes first: what is asked for
  /// behind the weights of all warps arrives behind them.
  CUTLASS_DEVICE void fetch_next(uint32_t slot) {
    if (left > 0) {
      if (x_left > 0) {
        --x_left;
        fetch_x();
      }
      fetch_weights(slot);
      advance();
    }
    commit_copies();
  }

  /// The same in two: weights and scales, without a commit, and, by a copy of this stream as it was before, x with one. The first
  /// commit counts for all weights.
  CUTLASS_DEVICE void fetch_next_weights(uint32_t slot) {
    if (left <= 0) return;
    if (x_left > 0) --x_left;
    fetch_weights(slot);
    advance();
  }
  CUTLASS_DEVICE void fetch_next_x() {
    if (left > 0) {
      if (x_left > 0) {
        --x_left;
        fetch_x();
      }
      advance();
    }
    commit_copies();
  }

  CUTLASS_DEVICE void fetch_weights(uint32_t slot) const {
    R::fetch_scales(slot, source, p, place.lane);
    R::fetch_weights(slot, source, is_whole(p, piece), place.lane);
  }

  /// Copies x of one piece. Beyond K it is zero, whatever the weights there are.
  CUTLASS_DEVICE void fetch_x() const {
    int const k = piece * kPieceK + place.lane % kXChunks * 8;
    int const bytes = k < p.k ? 16 : 0;
    int token = place.lane / kXChunks;
    auto const* source = static_cast<Element const*>(p.x) + token * p.ldx + (bytes > 0 ? k : 0);
    uint32_t target = x_target;
    if (token < p.m) copy_async_or_zero(target, source, bytes);
    CUTLASS_PRAGMA_NO_UNROLL
    while ((token += kXRows) < p.m) {
      target += kXRows * p.x_row_bytes;
      source += kXRows * p.ldx;
      copy_async_or_zero(target, source, bytes);
    }
  }
};

}  // namespace weightonly
