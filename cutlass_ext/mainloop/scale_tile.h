// Scales and zero points of one k_block (64 k) of a tile of columns: global -> shared memory -> registers.
//
// A k_block lies in one group; with group_size 32 it spans two. The tile always has two rows, and uses the second for
// group_size 32 only. That of groups of 16 has four, and uses all. Rows are read again for each k_block; with group_size 128 the second read hits the L2 cache.
// Columns beyond n_padded keep whatever shared memory held: a scale affects no column of the result but its own.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/cutlass.h"
#include "cutlass_ext/convert/packed_math.h"
#include "cutlass_ext/fragment/scale_mode.h"
#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// Threads [0, kRows * kBlockN / 8) of a CTA each copy 8 columns of one row, of scales and (if any) of zeros.
/// kLeastGroup: k of the smallest groups, 32 or 16; where it is 16, all groups are.
template <class Element, ScaleMode kScaleMode, int kBlockN, int kLeastGroup>
struct ScaleTile {
  static constexpr bool kHasScales = kScaleMode != ScaleMode::kChannel;
  static constexpr bool kHasZeros = kScaleMode == ScaleMode::kGroupZeros;
  static constexpr int kRows = 64 / kLeastGroup;
  static constexpr int kRowBytes = kBlockN * int(sizeof(Element));
  static constexpr int kZerosOffsetBytes = kRows * kRowBytes;
  static constexpr int kBytes = (kHasScales ? kRows * kRowBytes : 0) + (kHasZeros ? kRows * kRowBytes : 0);
  static constexpr int kVector = 8;  // columns per 16-byte copy
  static constexpr int kVectorsPerRow = kBlockN / kVector;

  char const* scales;  // this thread's 8 columns of the first row
  char const* zeros;
  int64_t row_bytes;
  int smem_offset_bytes;
  int row_k;  // k of this thread's row within the block
  bool active;  // this thread copies
  int second_row_bytes;  // where the second half of a block finds its scales: in row 1, or again in row 0
  GroupIndex group;

  CUTLASS_DEVICE ScaleTile(GemmParams const& p, int column0) : group(p.group) {
    int const thread = threadIdx.x;
    int const vector = thread % kVectorsPerRow;
    int const row = thread / kVectorsPerRow;
    int const column = column0 + vector * kVector;
    scales = static_cast<char const*>(p.scales) + column * int(sizeof(Element));
    zeros = static_cast<char const*>(p.zeros) + column * int(sizeof(Element));
    row_bytes = p.ld_scales * int(sizeof(Element));
    smem_offset_bytes = row * kRowBytes + vector * 16;
    row_k = row * kLeastGroup;
    int const rows = kLeastGroup == 16 ? kRows : p.group_size == 32 ? 2 : 1;
    active = row < rows && column < p.n_padded;
    second_row_bytes = p.group_size == 32 ? kRowBytes : 0;
  }

  /// Starts the copy of the rows of the block that begins at k0.
  CUTLASS_DEVICE void copy_async(char* smem, int k0, bool enabled) const {
    if constexpr (kHasScales) {
      using cutlass::arch::CacheOperation;
      int64_t const offset = group.of<kLeastGroup>(k0 + row_k) * row_bytes;
      cutlass::arch::cp_async<16, CacheOperation::Global>(smem + smem_offset_bytes, scales + offset, active && enabled);
      if constexpr (kHasZeros) {
        cutlass::arch::cp_async<16, CacheOperation::Global>(smem + kZerosOffsetBytes + smem_offset_bytes,
                                                            zeros + offset, active && enabled);
      }
    }
  }
};

}  // namespace weightonly
