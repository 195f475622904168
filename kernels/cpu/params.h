// What one product on a CPU is: the struct that crosses the C interface (api.h), and how it is cut into work.
#pragma once

#include <cstdint>

namespace weightonly::cpu {

enum FloatType : int { kFp16 = 0, kBf16 = 1, kFp32 = 2 };

/// How stored bits become numbers: u - 8, u - 128, codebook[u], and the float of 8 bits that u is (E4M3).
enum Format : int { kInt4 = 0, kInt8 = 1, kCode4 = 2, kFp8 = 3 };

/// The instructions that a variant of the kernels is made of; each has those before it.
enum Level : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

/// What computes rows of y: the files of these names.
enum Kernel : int { kFewRows = 0, kManyRows = 1, kMatrixTiles = 2 };

/// What becomes of rows. kBeyondRange: nothing was written, as their sums might leave the range of fp32 on the way.
enum class Outcome { kDone, kNoMemory, kBeyondRange };

/// y [m, n] = act(x [m, k] @ w [k, n] + bias [n]); the order of the fields is that of weightonly/cpu/library.py.
struct GemmParams {
  void const* x;        // [m, k] of type `type`, rows `ldx` elements apart
  uint8_t const* weight;
  void const* scales;   // [groups, n] of type `type`, rows `ld_scales` elements apart
  void const* zeros;    // [groups, n] of type `type`, rows `ld_zeros` elements apart, or null
  void const* bias;     // [n] of type `type`, or null
  void* y;              // [m, n] of type `type`, rows `ldy` elements apart
  float const* codebook;  // the 16 numbers of kCode4
  // null: the weight has layout "cpu". Else it has another one, in blocks of 64 x 64: where each element of a block of
  // "cpu" is among those of `segments` pieces of `segment_bytes`, `segment_stride` bytes apart (weightonly/cpu/blocks.py).
  uint16_t const* block_order;
  int64_t ldx, ld_scales, ld_zeros, ldy;
  int64_t block_stride_k, block_stride_n, segment_stride;  // bytes from a block to the next one along k and n
  int64_t m, n, k;
  int64_t k_padded;  // a multiple of 64
  int64_t group_size;  // rows that share a scale; k_padded for one group
  int64_t groups;
  int32_t segments, segment_bytes;
  int32_t type, format;
  int32_t activation;  // enum Activation of cutlass_ext/epilogue/activation.h
  int32_t threads, level;
  int32_t invariant;  // 1: a row's bits depend on that row alone; 0: what is quickest
};

// Functions here are static: variants are compiled for different machines, and a linker must not merge theirs.

constexpr int kPanel = 32;  // columns of a panel of layout "cpu"
constexpr int kMaxRows = 512;  // rows of x that are packed at a time

static constexpr int bits_of(int format) {
  return format == kInt8 || format == kFp8 ? 8 : 4;
}

static constexpr bool is_integer(int format) {
  return format == kInt4 || format == kInt8;
}

/// Rows of the weight that scales belong to: all but some of those that pad K.
static inline int64_t rows_of(GemmParams const& p) {
  return p.groups == 1 ? p.k_padded : p.groups * p.group_size;
}

/// Bytes of a panel: all rows of 32 columns.
static inline int64_t panel_bytes(GemmParams const& p) {
  return p.k_padded * kPanel * bits_of(p.format) / 8;
}

static inline int panels_of(GemmParams const& p) {
  return int((p.n + kPanel - 1) / kPanel);
}

/// Whether matrix tiles take no longer than a vector for each row of x: they compute 16 rows in any case, once for each
/// part of a number of x (matrix_tiles.h).
static inline bool pays_in_tiles(GemmParams const& p) {
  bool const whole_tiles = p.groups == 1 || p.group_size % 32 == 0;
  return whole_tiles && p.m > (p.type == kBf16 ? 1 : 4);
}

static inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace weightonly::cpu
