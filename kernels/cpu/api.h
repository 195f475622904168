// The plain C interface of libweightonly_cpu.so: no type of a framework, no Python.
#pragma once

#include "params.h"

#define WEIGHTONLY_API extern "C" __attribute__((visibility("default")))

/// Counts up with every change of what crosses this interface.
#define WEIGHTONLY_CPU_ABI_VERSION 4

WEIGHTONLY_API int wo_cpu_abi_version();
WEIGHTONLY_API int wo_cpu_params_bytes();

/// The last `Level` that was compiled, that this CPU has, and that the system lets a process use.
WEIGHTONLY_API int wo_cpu_level();

/// Whether products use the threads of an OpenMP runtime; else each takes one thread.
WEIGHTONLY_API int wo_cpu_has_threads();

/// The `Kernel` of a product of at most kMaxRows rows: a question of its m, type, groups, group_size, level and
/// invariant alone. The level is one that was compiled, whether this CPU has it or not; else the one before it. -1: they
/// were refused.
WEIGHTONLY_API int wo_cpu_kernel(weightonly::cpu::GemmParams const* params);

/// Computes a product. Returns 0; 1 where memory is full; 2 for parameters that it refuses (checks.h), before any work.
WEIGHTONLY_API int wo_cpu_gemm(weightonly::cpu::GemmParams const* params);

/// Why this thread's last call that was refused was so: "NAME must be EXPECTED, got GOT". Valid until its next call.
WEIGHTONLY_API char const* wo_cpu_error();
