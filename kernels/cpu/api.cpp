// What this CPU can run, the threads, and the way from the C interface to a variant.

#include "api.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace weightonly::cpu {

void run_on_threads(void (*function)(void*), void* context, int threads);

namespace generic {
bool gemm(GemmParams const&);
Kernel kernel_of(int rows);
}  // namespace generic
#if defined(__x86_64__)
namespace avx2 {
bool gemm(GemmParams const&);
Kernel kernel_of(int rows);
}  // namespace avx2
namespace avx512 {
bool gemm(GemmParams const&);
Kernel kernel_of(int rows);
}  // namespace avx512
namespace amx {
bool gemm(GemmParams const&);
Kernel kernel_of(int rows);
}  // namespace amx
#endif

namespace {

#if defined(__x86_64__)
/// Linux gives a process the registers of matrix tiles on request.
bool request_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

int find_level() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return kGeneric;
  bool const f16c = c >> 29 & 1;
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kGeneric;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return kAvx2;
  }
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return kAvx512;
  bool const tiles = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE, AMX-BF16
  return tiles && request_tiles() ? kAmx : kAvx512;
}
#else
int find_level() {
  return kGeneric;
}
#endif

int level() {
  static int const found = find_level();
  return found;
}

struct Variant {
  bool (*gemm)(GemmParams const&);
  Kernel (*kernel_of)(int rows);
};

Variant variant_of(GemmParams const& p) {
#if defined(__x86_64__)
  if (p.level == kAmx && pays_in_tiles(p)) return {amx::gemm, amx::kernel_of};
  if (p.level >= kAvx512) return {avx512::gemm, avx512::kernel_of};
  if (p.level == kAvx2) return {avx2::gemm, avx2::kernel_of};
#endif
  return {generic::gemm, generic::kernel_of};
}

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel gomp_parallel() {
  static auto const found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

}  // namespace

void run_on_threads(void (*function)(void*), void* context, int threads) {
  if (auto const run = gomp_parallel()) {
    run(function, context, unsigned(threads), 0);
  } else {
    function(context);
  }
}

}  // namespace weightonly::cpu

using namespace weightonly::cpu;

int wo_cpu_abi_version() {
  return WEIGHTONLY_CPU_ABI_VERSION;
}

int wo_cpu_params_bytes() {
  return int(sizeof(GemmParams));
}

int wo_cpu_level() {
  return level();
}

int wo_cpu_has_threads() {
  return gomp_parallel() != nullptr;
}

int wo_cpu_kernel(GemmParams const* params) {
  return variant_of(*params).kernel_of(params->m);
}

int wo_cpu_gemm(GemmParams const* params) {
  if (params->level > level()) return 2;
  return variant_of(*params).gemm(*params) ? 0 : 1;
}
