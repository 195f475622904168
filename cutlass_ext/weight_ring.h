// The stream of weights of decode_sm90: what one warp has in flight, and in what order it comes.
//
// A piece is what a warp multiplies at a time: kRowTiles tiles of 16 columns by kPieceK of k, with the scales (and zero
// points) of its stripe for each group of k in it. They come by cp.async, 16 bytes a lane. A lane's weights are copied by
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

  // A slot: the piece's blocks, each [tile][16 bytes of each lane, kLoads times], then rows of 64 scales, one per group, then
  // zero points likewise.
  static constexpr int kBlockBytes = kRowTiles * Layout::kPieceBytes;
  static constexpr int kWeightsBytes = kPieceBlocks * kBlockBytes;
  static constexpr int kPieceStride = kPieceBlocks * Layout::kBlockBytes;  // from a piece to the next one, in memory
  static constexpr int kScaleRowBytes = Layout::kStripe * int(sizeof(Element));
  static constexpr int kScaleRows = kHasScales ? (kHasZeros ? 2 : 1) * kGroups : 0;
  static constexpr int kSlotBytes = kWeightsBytes + kScaleRows * kScaleRowBytes;
  static_assert(kGroups <= 4, "eight lanes copy a row, a warp four rows at once");

  /// Where lies what one lane copies next, of one unit of columns.
  struct Source {
    char const* weight;
    char const* scales;
    char const* zeros;
    uint32_t k;  // of the lane's row of scales, as GroupIndex counts

    Source() = default;

    /// tile: of 16 columns, over all of N.
    CUTLASS_DEVICE Source(GemmParams const& p, int tile, int piece, int lane) {
      weight = first_weight(p, tile, piece, lane);
      int64_t const row = tile / Layout::kPieces * kScaleRowBytes + lane % 8 * 16;
      scales = static_cast<char const*>(p.scales) + row;
      zeros = static_cast<char const*>(p.zeros) + row;
      k = GroupIndex::counted(piece * kPieceK + lane / 8 * kGroupK);
    }

    CUTLASS_DEVICE void advance(int pieces) {
      weight += pieces * kPieceStride;
      k += pieces * GroupIndex::kCounts<kPieceK>;
    }
  };

  /// tile: of 16 columns, over all of N. In few instructions: it is what a kernel begins with.
  CUTLASS_DEVICE static char const* first_weight(GemmParams const& p, uint32_t tile, uint32_t piece, uint32_t lane) {
    uint32_t const stripe_bytes = uint32_t(p.k_padded) * (Layout::kBlockBytes / Layout::kBlockK);
    uint32_t const offset = piece * kPieceStride + tile % Layout::kPieces * Layout::kPieceBytes + lane * 16;
    return static_cast<char const*>(p.weight) + uint64_t(tile / Layout::kPieces) * stripe_bytes + offset;
  }

  /// A lane's columns of `tile` and the kRowTiles - 1 after it, in row 0 of a slot's scales.
  CUTLASS_DEVICE static uint32_t scale_offset(int tile, int lane) {
    return kWeightsBytes + lane / 4 * 16 + tile % Layout::kPieces * 4;
  }

  /// is_whole: the half that a last piece may lack meets zeros of x, and scales of zero: any integers will do.
  CUTLASS_DEVICE static void fetch_weights(uint32_t slot, char const* weight, bool is_whole, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kPieceBlocks; ++block) {
      if (block > 0 && !is_whole) break;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles * Layout::kLoads; ++i) {
        copy_async(slot + block * kBlockBytes + lane * 16 + i * 512, weight + block * Layout::kBlockBytes + i * 512);
      }
    }
  }

  CUTLASS_DEVICE static void fetch_scales(uint32_t slot, Source const& source, GemmParams const& p, int lane) {
    if constexpr (!kHasScales) return;
    int const row = lane / 8;
    if (row >= kGroups) return;
    // Groups beyond K get zeros: weights dequantized with another group's scale might overflow, and Inf times 0 is NaN.
    bool const is_group = kGroups == 1 || GroupIndex::first_k(source.k) < p.k;
    uint32_t const group = p.group.of_counted(source.k);
    uint64_t const offset = uint64_t(group) * (uint32_t(p.ld_scales) * uint32_t(sizeof(Element)));
    uint32_t const target = slot + kWeightsBytes + row * kScaleRowBytes + lane % 8 * 16;
    copy_async_or_zero(target, source.scales + offset, is_group ? 16 : 0);
    if constexpr (kHasZeros) {
      copy_async_or_zero(target + kGroups * kScaleRowBytes, source.zeros + offset, is_group ? 16 : 0);
    }
  }

  /// Brings a piece into the L2 and nothing nearer: allowed before the kernels that precede this one have ended, even if
  /// one of them writes these bytes.
  CUTLASS_DEVICE static void prefetch(char const* weight, bool is_whole, int lane) {
    constexpr int kLines = kRowTiles * Layout::kPieceBytes / 128;  // of a block
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPieceBlocks * kLines; i += 32) {
      int const line = i + lane;
      int const block = line / kLines;
      char const* const address = weight - lane * 16 + block * Layout::kBlockBytes + line % kLines * 128;
      if (block < (is_whole ? kPieceBlocks : 1)) asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
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
