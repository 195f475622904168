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

  DecodeParams const& p;
  Place const& place;
  int unit, piece;  // next; of K
  int left;  // pieces up to the end of K or of the unit; 0 when all is fetched
  int wrapped;  // pieces of the unit after those, from the beginning of K
  int x_left;  // pieces that need their x: the first ones
  uint32_t x_target;  // where x of the next piece belongs
  uint32_t smem_x;
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

  CUTLASS_DEVICE static int tile(int of_unit) { return of_unit * Kernel::kRowTiles; }
  CUTLASS_DEVICE bool is_whole() const { return (piece + 1) * kPieceK <= p.k_padded; }

  /// count: of this warp's pieces of it.
  CUTLASS_DEVICE void begin_unit(int count) {
    int const first = place.first(unit);
    piece = first + place.rotation;
    if (piece >= p.pieces) piece -= p.pieces;
    left = min(count, (p.pieces - piece + kWarpsK - 1) / kWarpsK);
    wrapped = count - left;
    x_target = smem_x + (first + place.x_base(p, unit)) * kPieceXBytes;
    source = typename R::Source(p, tile(unit), piece, place.lane);
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
      source = typename R::Source(p, tile(unit), piece, place.lane);
    } else {
      begin_next_unit();
    }
  }

  /// What is fetched first, into the L2.
  CUTLASS_DEVICE void prefetch() const {
    DecodeStream ahead = *this;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < Kernel::kDepth && ahead.left > 0; ++i) {
      R::prefetch(ahead.source, ahead.is_whole(), place.lane);
      ahead.advance();
    }
  }

  /// One commit, of the next piece or of nothing. All lanes have read what was in the slot.
  CUTLASS_DEVICE void fetch_next(uint32_t slot) {
    if (left > 0) {
      if (x_left > 0) {
        --x_left;
        fetch_x(x_target, p, piece, place.lane);
      }
      R::fetch(slot, source, p, is_whole(), place.lane);
      advance();
    }
    commit_copies();
  }

  /// Copies x of one piece, half a row (16 chunks of 16 bytes at most) per half warp.
  /// Beyond K it is zero, whatever the weights there are. target: of the piece's first token and k.
  CUTLASS_DEVICE static void fetch_x(uint32_t target, DecodeParams const& p, int piece, int lane) {
    constexpr int kChunks = kPieceK / 8;
    constexpr int kRows = 32 / kChunks;  // per copy of a warp
    int const offset = lane % kChunks * 8;
    int const k = piece * kPieceK + offset;
    int const bytes = k < p.k ? 16 : 0;
    int const first_token = lane / kChunks;
    target += first_token * p.x_row_bytes + offset * int(sizeof(Element));
    auto const* source = static_cast<Element const*>(p.x) + first_token * p.ldx + (bytes > 0 ? k : 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int token = first_token; token < p.m; token += kRows) {
      copy_async_or_zero(target, source, bytes);
      target += kRows * p.x_row_bytes;
      source += kRows * p.ldx;
    }
  }
};

}  // namespace weightonly
