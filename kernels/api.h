// The plain C interface of libweightonly_kernels.so. It names no type of any framework: one build serves every Python
// and every PyTorch.
#pragma once

#include "kernels/params.h"

#define WEIGHTONLY_API extern "C" __attribute__((visibility("default")))

/// Number of compiled kernels, the name of each, and the architectures of the build ("80,90a").
WEIGHTONLY_API int wo_kernel_count();
WEIGHTONLY_API char const* wo_kernel_name(int kernel);
WEIGHTONLY_API char const* wo_archs();

/// A kernel for codes ("code4" in its name) is given their table in params->zeros: 16 numbers of the type of x.
///
/// Enqueues kernel number `kernel` on a stream of a device. Never synchronizes, never allocates. Returns 0, or nonzero
/// with the reason in message.
WEIGHTONLY_API int wo_gemm(int kernel, weightonly::GemmParams const* params, int device, void* stream, char* message,
                           int message_bytes);

/// The operations of FastInterleavedAndBiasedNumericArrayConverter on the host: `words` packed 32-bit words, of int4
/// (bits 4) or int8 (bits 8) weights, to fp16 (bf16 != 0: bf16). Returns nonzero for other bits.
WEIGHTONLY_API int wo_convert_host(int bits, int bf16, unsigned const* packed, int words, unsigned short* out);
