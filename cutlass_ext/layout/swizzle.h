// Shared-memory tile of 128-byte rows: the shape of both operands of a k_block (a row of 64 fp16 activations, a k_block
// of a line of weights). The 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that the eight rows which one
// ldmatrix phase reads at the same logical chunk, and the 8 columns of interleaved weights, fall into different banks.
#pragma once

#include "cutlass/cutlass.h"

namespace weightonly {

struct SwizzledTile {
  static constexpr int kRowBytes = 128;
  static constexpr int kChunks = 8;

  CUTLASS_HOST_DEVICE static constexpr int offset_bytes(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & (kChunks - 1))) << 4);
  }
};

}  // namespace weightonly
