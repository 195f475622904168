// Makes the launch of a grouped product memory safe for any caller of the C interface, as checks.h does for one product.
#pragma once

#include "cutlass_ext/grouped_params.h"
#include "kernels/api/checks.h"
#include "kernels/api/grouped_registry.h"

namespace weightonly {

/// Experts whose tiles the CTAs have room to count.
inline constexpr int kMaxGroupedExperts = 512;

/// Returns whether a grouped kernel can be launched with these parameters; if not, `message` says why.
inline bool check_grouped_params(GroupedEntry const& kernel, GroupedGemmParams const& p, char* message,
                                 int message_bytes) {
  // One launch takes any number of rows.
  KernelEntry const as_gemm = {kernel.name, nullptr, INT_MAX, kernel.max_cluster};
  if (!check_params(as_gemm, p.gemm, message, message_bytes)) return false;
  auto fail = [&](char const* field, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "%s: %s must be %s, got %lld", kernel.name, field, expected, got);
    return false;
  };
  if (p.offs == nullptr || reinterpret_cast<uintptr_t>(p.offs) % 4 != 0)
    return fail("offs", "an address of 32-bit integers", (long long)p.offs);
  if (p.experts < 1 || p.experts > kMaxGroupedExperts) return fail("experts", "1 to 512", p.experts);
  if (p.gemm.split_k != 1) return fail("split_k", "1", p.gemm.split_k);
  if (p.gemm.clusters < 1 || p.gemm.clusters > 65535) return fail("clusters", "1 to 65535", p.gemm.clusters);
  if (p.gemm.activation != int(Activation::kIdentity)) return fail("activation", "0", p.gemm.activation);
  // Each expert with rows may have a tile more than its rows fill. The smallest tiles are 8 rows of 64 columns.
  int64_t const m_tiles = p.gemm.m / 8 + (p.gemm.m < p.experts ? p.gemm.m : p.experts) + 1;
  if (m_tiles * ((p.gemm.n_padded + 63) / 64) > (1 << 30))
    return fail("m", "such that there are at most 2^30 tiles", p.gemm.m);
  int64_t const weight_bytes = int64_t(p.gemm.k_padded) * p.gemm.n_padded;
  if (weight_bytes > (int64_t(1) << 46) / p.experts)
    return fail("experts", "such that all are within 2^46 numbers", p.experts);
  return true;
}

}  // namespace weightonly
