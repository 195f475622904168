// Copies of one operand's k_block from global to shared memory: rows of 128 bytes, 16 bytes a thread, into a
// SwizzledTile.
//
// Both operands have the same shape here. A row of x is one token, a row of the weights is a *line*
// (layout/interleaved.h), and a k_block is 128 contiguous bytes of either.
#pragma once

#include "cute/arch/copy_sm80.hpp"
#include "cutlass_ext/layout/swizzle.h"

namespace weightonly {

template <int kRows, int kThreads>
struct TileCopy {
  static constexpr int kRowStep = kThreads / SwizzledTile::kChunks;  // rows that all threads cover in one go
  static constexpr int kCopies = (kRows + kRowStep - 1) / kRowStep;
  static constexpr int kTileBytes = kRows * SwizzledTile::kRowBytes;

  char const* source;  // this thread's chunk of its first row in k_block 0
  int64_t row_step_bytes;
  int rows_inside;  // rows from this thread's first one to the end of the operand
  int row;  // this thread's first row in the tile
  int chunk;
  int k_bytes;  // bytes of a row that exist, counted from this thread's chunk

  CUTLASS_DEVICE TileCopy(void const* operand, int64_t row_bytes, int first_row, int rows, int k_bytes_) {
    chunk = threadIdx.x % SwizzledTile::kChunks;
    row = threadIdx.x / SwizzledTile::kChunks;
    source = static_cast<char const*>(operand) + (first_row + row) * row_bytes + chunk * 16;
    row_step_bytes = kRowStep * row_bytes;
    rows_inside = rows - first_row - row;
    k_bytes = k_bytes_ - chunk * 16;
  }

  CUTLASS_DEVICE bool inside(int i, int k_block) const {
    return i * kRowStep < rows_inside && k_block * SwizzledTile::kRowBytes < k_bytes;
  }

  CUTLASS_DEVICE bool has_row(int i) const { return kRows % kRowStep == 0 || row + i * kRowStep < kRows; }

  CUTLASS_DEVICE char const* address(int i, int k_block) const {
    return source + i * row_step_bytes + int64_t(k_block) * SwizzledTile::kRowBytes;
  }

  CUTLASS_DEVICE char* target(char* smem, int i) const {
    return smem + SwizzledTile::offset_bytes(row + i * kRowStep, chunk);
  }

  /// sm80: by cp.async; zeros beyond the end of the operand. When not enabled it writes zeros and reads nothing,
  /// wherever its address points. The caller commits the group.
  CUTLASS_DEVICE void copy_async(char* smem, int k_block, bool enabled) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      if (!has_row(i)) continue;
      bool const valid = enabled && inside(i, k_block);
      using Copy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
      Copy::copy(*reinterpret_cast<cute::uint128_t const*>(address(i, k_block)),
                 *reinterpret_cast<cute::uint128_t*>(target(smem, i)), valid);
    }
  }

  /// sm75: through registers, in two halves so that the loads are in flight while the tensor cores work.
  CUTLASS_DEVICE void fetch(uint4 (&registers)[kCopies], int k_block) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      registers[i] = has_row(i) && inside(i, k_block) ? *reinterpret_cast<uint4 const*>(address(i, k_block))
                                                      : make_uint4(0, 0, 0, 0);
    }
  }

  CUTLASS_DEVICE void store(char* smem, uint4 const (&registers)[kCopies]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      if (has_row(i)) *reinterpret_cast<uint4*>(target(smem, i)) = registers[i];
    }
  }
};

}  // namespace weightonly
