// The C interface of the conversions of whole weights, beside api.h: AWQ words to floats, floats to blocks of 4-bit
// codes and back.
#pragma once

#include <cstdint>

#include "kernels/api/api.h"

namespace weightonly {

enum class FloatType : int { kF16 = 0, kBf16 = 1, kF32 = 2 };

/// How AWQ's values become floats; the results are the same, bit for bit.
enum class AwqPath : int {
  kAuto = 0,  // kBitTricks where the GPU can, from compute capability 7.5 on (bf16: 8.0)
  kArithmetic = 1,  // shifts, an integer subtraction and conversions: any GPU
  kBitTricks = 2,  // cutlass_ext/convert/numeric_conversion.h: bits put into the mantissas of 16-bit floats
};

/// w[k, n] = scales[k / g, n] * (u[k, n] - z[k / g, n]), g = k / groups: the product is rounded to T, once.
///
/// u and z are 4-bit numbers, eight columns to a word: nibble i (bits 4i) is column (0, 2, 4, 6, 1, 3, 5, 7)[i].
struct AwqDequantizeParams {
  void const* qweight;  // 32-bit words [k, n / 8]
  void const* scales;  // T [groups, n], 16-byte aligned
  void const* qzeros;  // 32-bit words [groups, n / 8]
  void* w;  // T [k, n], 16-byte aligned
  int32_t k;
  int32_t n;  // a multiple of 8
  int32_t groups;  // a divisor of k
  int32_t type;  // enum FloatType of T: kF16 or kBf16
  int32_t path;  // enum AwqPath
};

/// bitsandbytes' blocks: w[i] = codebook[code i] * absmax[i / blocksize], of the flattened weight.
///
/// Two codes to a byte, the even element in the high nibble.
struct Blocks4bitParams {
  void* w;  // T [count], 16-byte aligned; quantizing reads it, dequantizing writes it
  uint8_t* packed;  // [(count + 1) / 2], 4-byte aligned
  float* absmax;  // [ceil(count / blocksize)]
  int64_t count;
  int32_t blocksize;  // a power of two, 32 to 4096
  int32_t type;  // enum FloatType of T
  float codebook[16];  // finite
};

/// x8 = x / x_scales[m], to E4M3: saturating, NaN stays NaN. x_scales[m] is the largest magnitude of the row / 448, NaN
/// where the row has one; 1 where that is 0.
struct QuantizeActivationsParams {
  void const* x;  // T [m, k], rows ldx elements apart, each row 16-byte aligned
  void* x8;  // E4M3 [m, k], 16-byte aligned
  float* x_scales;  // [m]
  int64_t ldx;  // elements
  int32_t m;
  int32_t k;
  int32_t type;  // enum FloatType of T
  int32_t const* rows_end;  // [1]: rows from this one on are left; null: none are
};

}  // namespace weightonly

/// Each enqueues one kernel on a stream of a device, as wo_gemm does: no synchronization, no allocation. Returns 0, or
/// nonzero with the reason in message.
WEIGHTONLY_API int wo_awq_dequantize(weightonly::AwqDequantizeParams const* params, int device, void* stream,
                                     char* message, int message_bytes);

/// Divides each block by its largest magnitude, and takes the nearest value of the codebook. A number halfway between
/// two values goes to the lower one. Of equal values the first stands for numbers up to them, the last for numbers
/// above. If count is odd, the second half of the last byte has the code of 0.
WEIGHTONLY_API int wo_quantize_4bit(weightonly::Blocks4bitParams const* params, int device, void* stream, char* message,
                                    int message_bytes);

/// Divides in fp32, and rounds once.
WEIGHTONLY_API int wo_quantize_activations(weightonly::QuantizeActivationsParams const* params, int device,
                                           void* stream, char* message, int message_bytes);

/// Multiplies in fp32, and rounds to T once.
WEIGHTONLY_API int wo_dequantize_4bit(weightonly::Blocks4bitParams const* params, int device, void* stream,
                                      char* message, int message_bytes);
