// The C interface of the conversion of packed weights, as gemm reads them, to a matrix of 16-bit floats.
#pragma once

#include "kernels/convert/conversions.h"

namespace weightonly {

enum class PackedLayout : int { kInterleaved = 0, kTiled = 1 };

/// w[k, n] = scales[k / group_size, n] * (q[k, n] - zeros[k / group_size, n]), or scales *
/// codebook[code] where there is a codebook, of the columns from n_begin to n_end. Multiplies in fp32, and rounds to T
/// once.
struct DequantizeParams {
  void const* weight;  // packed bytes of [k_padded, n_padded], 16-byte aligned
  void const* scales;  // T [groups, n_padded], rows ld_scales elements apart, each row 16-byte aligned
  void const* zeros;   // like scales, or null
  float const* codebook;  // [16], of codes; null for integers
  void* w;  // T [k, n_end - n_begin], rows ldw elements apart; stores are quicker where rows are 16-byte aligned
  int64_t ld_scales;  // elements, at least n_padded
  int64_t ldw;  // elements
  int32_t k;
  int32_t k_padded;  // of the packed weight, a multiple of 64; of it k rows are read
  int32_t n_begin;  // a multiple of 64
  int32_t n_end;
  int32_t n_padded;  // a multiple of 32, of tiled weights of 64
  int32_t group_size;  // 16 (see wo_dequantizes_groups_of_16), 32 or a multiple of 64; k_padded when there is one group
  GroupIndex group;  // derived from k and group_size by wo_dequantize
  int32_t bits;  // 4 or 8
  int32_t type;  // enum FloatType of T: kF16 or kBf16
  int32_t layout;  // enum PackedLayout
  int32_t is_float;  // 1: q are floats, E4M3, of 8 bits (see wo_dequantizes_fp8); 0: integers, or codes
};

}  // namespace weightonly

/// Whether the library was built with the kernels for groups of 16 (WEIGHTONLY_GROUPS_OF_16, see kernels/generate.py).
WEIGHTONLY_API int wo_dequantizes_groups_of_16();

/// The same of floats, E4M3 (WEIGHTONLY_FP8).
WEIGHTONLY_API int wo_dequantizes_fp8();

/// Enqueues one kernel on a stream of a device, as wo_gemm does. Returns 0, or nonzero with the reason in message.
WEIGHTONLY_API int wo_dequantize(weightonly::DequantizeParams const* params, int device, void* stream, char* message,
                                 int message_bytes);
