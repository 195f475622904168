// The plain C interface of libweightonly_kernels.so. It names no type of any framework: one build serves every Python
// and every PyTorch.
#pragma once

#include "cutlass_ext/gemm_params.h"
#include "cutlass_ext/grouped_params.h"

#define WEIGHTONLY_API extern "C" __attribute__((visibility("default")))

/// Counts up with every change of what crosses this interface: functions, structs, the meaning of a field.
#define WEIGHTONLY_ABI_VERSION 10

/// WEIGHTONLY_ABI_VERSION of the library, and the size of its structs: 0 GemmParams, 1 AwqDequantizeParams,
/// 2 Blocks4bitParams, 3 DequantizeParams, 4 GroupedGemmParams, 5 RouteParams, 6 GatherParams, 7 CombineParams,
/// 8 Fp8GemmParams, 9 QuantizeActivationsParams, 10 Fp8GroupedGemmParams, 11 SpreadParams; 0 bytes for other numbers. A
/// caller compares them with its own before all else.
WEIGHTONLY_API int wo_abi_version();
WEIGHTONLY_API int wo_struct_bytes(int which);

/// The number of compiled kernels; the name of one, null where there is none; the architectures of the build ("80,90a").
WEIGHTONLY_API int wo_kernel_count();
WEIGHTONLY_API char const* wo_kernel_name(int kernel);
WEIGHTONLY_API char const* wo_archs();

/// Enqueues kernel number `kernel` on a stream of a device. Never synchronizes, never allocates.
///
/// A kernel for codes ("code4" in its name) reads its codebook from params->zeros: 16 numbers of the type of x.
/// Returns 0, or nonzero with the reason in `message`, which may be null. What is refused is refused before any launch.
WEIGHTONLY_API int wo_gemm(int kernel, weightonly::GemmParams const* params, int device, void* stream, char* message,
                           int message_bytes);

/// The same for kernels that take x in 8 bits ("fp8" in their names), which wo_gemm refuses; this one refuses all others.
WEIGHTONLY_API int wo_gemm_fp8(int kernel, weightonly::Fp8GemmParams const* params, int device, void* stream,
                               char* message, int message_bytes);

/// The same four functions for grouped products, whose kernels have numbers of their own.
WEIGHTONLY_API int wo_grouped_kernel_count();
WEIGHTONLY_API char const* wo_grouped_kernel_name(int kernel);
WEIGHTONLY_API int wo_grouped_gemm(int kernel, weightonly::GroupedGemmParams const* params, int device, void* stream,
                                   char* message, int message_bytes);
WEIGHTONLY_API int wo_grouped_gemm_fp8(int kernel, weightonly::Fp8GroupedGemmParams const* params, int device,
                                       void* stream, char* message, int message_bytes);

/// Runs FastInterleavedAndBiasedNumericArrayConverter on the host, so that tests need no GPU: `words` packed 32-bit words
/// of int4 (bits 4) or int8 (bits 8) become 32 / bits elements each, fp16 or, for bf16 != 0, bf16. Returns nonzero for
/// other bits, null addresses and a negative number of words.
WEIGHTONLY_API int wo_convert_host(int bits, int bf16, unsigned const* packed, int words, unsigned short* out);
