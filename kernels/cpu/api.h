// The plain C interface of libweightonly_cpu.so: no type of a framework, no Python.
#pragma once

#include "params.h"

#define WEIGHTONLY_API extern "C" __attribute__((visibility("default")))

/// Counts up with every change of what crosses this interface.
#define WEIGHTONLY_CPU_ABI_VERSION 3

WEIGHTONLY_API int wo_cpu_abi_version();
WEIGHTONLY_API int wo_cpu_params_bytes();

/// The last `Level` that was compiled, that this CPU has, and that the system lets a process use.
WEIGHTONLY_API int wo_cpu_level();

/// Whether products use the threads of an OpenMP runtime; else each takes one thread.
WEIGHTONLY_API int wo_cpu_has_threads();

/// The `Kernel` of a product of at most kMaxRows rows: a question of its m, type, groups, group_size and level alone. The
/// level is one that was compiled, whether this CPU has it or not; else the one before it.
WEIGHTONLY_API int wo_cpu_kernel(weightonly::cpu::GemmParams const* params);

/// Computes a product. The caller has checked it. Returns 0; 1 where memory is full; 2 for a level that is not there.
WEIGHTONLY_API int wo_cpu_gemm(weightonly::cpu::GemmParams const* params);
