// The stream of weights of decode_sm90: what one warp has in flight, and in what order it comes.
//
// A piece is what a warp multiplies at a time: kRowTiles tiles of 16 columns by kPieceK of k, with the scales (and zero
// points) of their stripes for each group of k in it. They come by cp.async, 16 bytes a lane. A lane's weights are copied by
// itself: the order of a thread's copies is all the synchronization that they need, but scales are read by other lanes,
// after a __syncwarp.
//
// Measured on an H200, loads straight into registers stream 6% faster, but the compiler has six scoreboards, lets several
// stages share one, and so waits for the newest; bulk copies of these sizes cost a microsecond more in latency
// (bench/NOTES.md).
#pragma once

#include "cutlass_ext/read_shared.h"
#include "cutlass_ext/scale_mode.h"
#include "cutlass_ext/tiled_layout.h"
#include "kernels/params.h"

namespace weightonly {

/// 16 bytes, through the L2 alone.
CUTLASS_DEVICE void copy_async(uint32_t target, void const* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

/// The first `bytes` of 16 from `source`, the rest zero.
CUTLASS_DEVICE void copy_async_or_zero(uint32_t target, void const* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

CUTLASS_DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until no more than kNewer of this thread's commits are under way.
template <int kNewer>
CUTLASS_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer) : "memory");
}

/// kGroups: groups of k in a piece with scales of their own. kPieceBlocks_: of 64 k.
template <class Element, class Weight, ScaleMode kScaleMode, int kRowTiles, int kGroups, int kPieceBlocks_>
struct WeightRing {
  using Layout = TiledLayout<Weight>;
  static constexpr int kPieceBlocks = kPieceBlocks_;
  static constexpr int kPieceK = kPieceBlocks * Layout::kBlockK;
  static constexpr int kGroupK = kPieceK / kGroups;
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;

  /// Stripes that kRowTiles neighbours may lie in.
  static constexpr int kStripes = Layout::kPieces % kRowTiles == 0 ? 1 : 2;
  static_assert(kRowTiles <= Layout::kPieces);

  // A slot: the piece's blocks, each [tile][16 bytes of each lane, kLoads times], then rows of 64 scales [stripe][group], then
  // zero points likewise.
  static constexpr int kBlockBytes = kRowTiles * Layout::kPieceBytes;
  static constexpr int kWeightsBytes = kPieceBlocks * kBlockBytes;
  static constexpr int kPieceStride = kPieceBlocks * Layout::kBlockBytes;  // from a piece to the next one, in memory
  static constexpr int kScaleRowBytes = Layout::kStripe * int(sizeof(Element));
  static constexpr int kStripeRows = kStripes * kGroups;
  static constexpr int kScaleRows = kHasScales ? (kHasZeros ? 2 : 1) * kStripeRows : 0;
  static constexpr int kSlotBytes = kWeightsBytes + kScaleRows * kScaleRowBytes;
  static_assert(kGroups <= 4, "eight lanes copy a row, a warp four rows at once");

  /// Where lies what one lane copies next, of one unit of columns.
  struct Source {
    char const* weight;
    char const* scales;
    char const* zeros;
    uint32_t k;  // of the lane's row of scales, as GroupIndex counts
    int in_stripe;  // tiles that the first one's stripe has from there on
    uint32_t jump;  // what the other ones lie further, bytes

    Source() = default;

    /// tile: of 16 columns, over all of N.
    CUTLASS_DEVICE Source(GemmParams const& p, int tile, int piece, int lane) {
      weight = first_weight(p, tile, piece, lane);
      int64_t const row = tile / Layout::kPieces * kScaleRowBytes + lane % 8 * 16;
      scales = static_cast<char const*>(p.scales) + row;
      zeros = static_cast<char const*>(p.zeros) + row;
      k = GroupIndex::counted(piece * kPieceK + lane / 8 % kGroups * kGroupK);
      in_stripe = Layout::kPieces - tile % Layout::kPieces;
      jump = Layout::stripe_bytes(p.k_padded) - Layout::kBlockBytes;
    }

    CUTLASS_DEVICE bool crosses() const { return kStripes > 1 && in_stripe < kRowTiles; }

    /// What a tile lies further than it would in the first one's stripe, bytes.
    CUTLASS_DEVICE uint32_t jump_to(int i) const { return kStripes > 1 && i >= in_stripe ? jump : 0; }

    CUTLASS_DEVICE void advance(int pieces) {
      weight += pieces * kPieceStride;
      k += pieces * GroupIndex::kCounts<kPieceK>;
    }
  };

  /// tile: of 16 columns, over all of N. In few instructions: it is what a kernel begins with.
  CUTLASS_DEVICE static char const* first_weight(GemmParams const& p, uint32_t tile, uint32_t piece, uint32_t lane) {
    uint32_t const offset = piece * kPieceStride + tile % Layout::kPieces * Layout::kPieceBytes + lane * 16;
    return static_cast<char const*>(p.weight) + uint64_t(tile / Layout::kPieces) * Layout::stripe_bytes(p.k_padded) +
           offset;
  }

  /// Where a slot has the scales of a lane's columns of `tile` and the kRowTiles - 1 after it, of group 0: in one stripe they are
  /// neighbours.
  struct ScaleOffsets {
    uint32_t of[kStripes == 1 ? 1 : kRowTiles];

    ScaleOffsets() = default;
    CUTLASS_DEVICE ScaleOffsets(int tile, int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < int(sizeof(of) / sizeof(of[0])); ++i) {
        int const piece = tile % Layout::kPieces + i;  // of the first stripe
        int const stripe = piece / Layout::kPieces;
        of[i] = kWeightsBytes + stripe * (kGroups * kScaleRowBytes) + lane / 4 * 16 + piece % Layout::kPieces * 4;
      }
    }

    CUTLASS_DEVICE ScaleOffsets from(uint32_t slot) const {
      ScaleOffsets sum = *this;
      for (uint32_t& offset : sum.of) offset += slot;
      return sum;
    }
  };

  /// is_whole: the half that a last piece may lack meets zeros of x, and scales of zero: any integers will do.
  CUTLASS_DEVICE static void fetch_weights(uint32_t slot, Source const& source, bool is_whole, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kPieceBlocks; ++block) {
      if (block > 0 && !is_whole) break;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Layout::kLoads; ++j) {
          copy_async(
              slot + block * kBlockBytes + lane * 16 + (i * Layout::kLoads + j) * 512,
              source.weight + source.jump_to(i) + (block * Layout::kBlockBytes + i * Layout::kPieceBytes + j * 512));
        }
      }
    }
  }

  CUTLASS_DEVICE static void fetch_scales(uint32_t slot, Source const& source, GemmParams const& p, int lane) {
    if constexpr (!kHasScales) return;
    if (lane / 8 >= kStripeRows) return;
    // Groups beyond K get zeros: weights dequantized with another group's scale might overflow, and Inf times 0 is NaN.
    bool const is_group = kGroups == 1 || GroupIndex::first_k(source.k) < p.k;
    uint32_t const group = p.group.of_counted(source.k);
    uint64_t const offset = uint64_t(group) * (uint32_t(p.ld_scales) * uint32_t(sizeof(Element)));
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kStripeRows; first += 4) {
      int const row = first + lane / 8, stripe = kStripes == 1 ? 0 : row / kGroups;
      if (stripe > 0 && !source.crosses()) return;
      uint32_t const target = slot + kWeightsBytes + row * kScaleRowBytes + lane % 8 * 16;
      copy_async_or_zero(target, source.scales + offset + stripe * kScaleRowBytes, is_group ? 16 : 0);
      if constexpr (kHasZeros) {
        copy_async_or_zero(target + kStripeRows * kScaleRowBytes, source.zeros + offset + stripe * kScaleRowBytes,
                           is_group ? 16 : 0);
      }
    }
  }

  CUTLASS_DEVICE static void read_block(uint32_t (&words)[kRowTiles][Layout::kLaneWords], uint32_t slot, int block,
                                        int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Layout::kLoads; ++j) {
        read_shared(reinterpret_cast<uint32_t (&)[4]>(words[i][4 * j]),
                    slot + block * kBlockBytes + lane * 16 + (i * Layout::kLoads + j) * 512);
      }
    }
  }
};

}  // namespace weightonly
