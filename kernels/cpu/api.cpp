// What this CPU can run, and the way from the C interface to a variant.

#include "api.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "checks.h"
#include "threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace weightonly::cpu {

namespace generic {
Outcome gemm(GemmParams const&);
Kernel kernel_of(GemmParams const&, int64_t rows);
}  // namespace generic
#if defined(__x86_64__)
namespace avx2 {
Outcome gemm(GemmParams const&);
Kernel kernel_of(GemmParams const&, int64_t rows);
}  // namespace avx2
namespace avx512 {
Outcome gemm(GemmParams const&);
Kernel kernel_of(GemmParams const&, int64_t rows);
}  // namespace avx512
namespace amx {
Outcome gemm(GemmParams const&);
Kernel kernel_of(GemmParams const&, int64_t rows);
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
  Outcome (*gemm)(GemmParams const&);
  Kernel (*kernel_of)(GemmParams const&, int64_t rows);
};

Variant variant_of(GemmParams const& p) {
#if defined(__x86_64__)
  // Variants may round an activation otherwise: one of them has all rows of a mode that is invariant.
  if (p.level == kAmx && p.invariant == 0 && pays_in_tiles(p)) return {amx::gemm, amx::kernel_of};
  if (p.level >= kAvx512) return {avx512::gemm, avx512::kernel_of};
  if (p.level == kAvx2) return {avx2::gemm, avx2::kernel_of};
#endif
  return {generic::gemm, generic::kernel_of};
}

bool check_address(GemmParams const* params) {
  bool const fits = params != nullptr && reinterpret_cast<uintptr_t>(params) % alignof(GemmParams) == 0;
  return fits || refuse("params", "an 8-byte aligned address", (long long)params);
}

}  // namespace
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
  return has_threads();
}

int wo_cpu_kernel(GemmParams const* params) {
  if (!check_address(params) || !check_choice(*params)) return -1;
  return variant_of(*params).kernel_of(*params, params->m);
}

int wo_cpu_gemm(GemmParams const* params) {
  if (!check_address(params) || !check_params(*params, level())) return 2;
  return variant_of(*params).gemm(*params) == Outcome::kDone ? 0 : 1;
}

char const* wo_cpu_error() {
  char const* const message = message_of_thread();
  return message == nullptr ? "no memory for a message" : message;
}
