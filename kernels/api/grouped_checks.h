// Makes the launch of a grouped product memory safe for any caller of the C interface, as checks.h does for one product.
#pragma once

#include "cutlass_ext/grouped_params.h"
#include "kernels/api/checks.h"
#include "kernels/api/grouped_registry.h"

namespace weightonly {

/// Returns whether a grouped kernel can be launched with these parameters; if not, `message` says why.
inline bool check_grouped_params(GroupedEntry const& kernel, GroupedGemmParams const& p, char* message,
                                 int message_bytes) {
  GemmParams with_columns_of_y = p.gemm;
  if (p.is_gated) with_columns_of_y.n = p.gemm.n / 2;
  if (!check_params(kernel.facts, with_columns_of_y, message, message_bytes)) return false;
  auto fail = [&](char const* field, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "%s: %s must be %s, got %lld", kernel.facts.name, field, expected, got);
    return false;
  };
  auto are_words = [](void const* address) { return reinterpret_cast<uintptr_t>(address) % 4 == 0; };
  auto is_flag = [](int32_t value) { return value == 0 || value == 1; };
  bool const has_ids = p.ids != nullptr;
  if (has_ids && !kernel.sorts) return fail("ids", "null for this kernel", (long long)p.ids);
  if (has_ids && p.offs != nullptr) return fail("offs", "null where there are ids", (long long)p.offs);
  if (!has_ids && (p.offs == nullptr || !are_words(p.offs)))
    return fail("offs", "an address of 32-bit integers", (long long)p.offs);
  if (p.experts < 1 || p.experts > kMaxGroupedExperts) return fail("experts", "1 to 1024", p.experts);
  if (p.gemm.split_k != 1) return fail("split_k", "1", p.gemm.split_k);
  if (p.gemm.clusters < 1) return fail("clusters", "1 to 65535", p.gemm.clusters);
  if (p.gemm.activation != int(Activation::kIdentity)) return fail("activation", "0", p.gemm.activation);
  if (!is_flag(p.is_gated)) return fail("is_gated", "0 or 1", p.is_gated);
  if (!is_flag(p.is_in_layer)) return fail("is_in_layer", "0 or 1", p.is_in_layer);
  if (p.gate.function < 0 || p.gate.function >= kGateFunctions) return fail("gate.function", "0 to 6", p.gate.function);
  bool const has_gate = p.is_gated || p.gate.function != int(GateFunction::kIdentity);
  if (p.is_gated && !kernel.in_layers) return fail("is_gated", "0 for this kernel", p.is_gated);
  if (!kernel.in_layers && (has_gate || p.is_in_layer))
    return fail(has_gate ? "gate.function" : "is_in_layer", "0 for this kernel", has_gate ? p.gate.function : 1);
  if (has_gate && !(p.gate.alpha != 0.f && p.gate.limit > 0.f))
    return fail("gate", "of an alpha that is not 0 and a limit above 0, as fp32", 0);
  if (p.is_gated) {
    if (p.gemm.n % (2 * kGatedColumns) != 0 || p.gemm.n_padded != p.gemm.n)
      return fail("n", "a multiple of 128 of a gated product, and n_padded", p.gemm.n);
    if (p.gemm.ldy % 8 != 0) return fail("ldy", "a multiple of 8 of a gated product", p.gemm.ldy);
    if (reinterpret_cast<uintptr_t>(p.gemm.y) % 16 != 0)
      return fail("y", "a 16-byte aligned address of a gated product", (long long)p.gemm.y);
  }
  if (has_ids) {
    if (reinterpret_cast<uintptr_t>(p.ids) % (p.is_int64 ? 8 : 4) != 0)
      return fail("ids", "an address of 32-bit or 64-bit integers", (long long)p.ids);
    if ((p.places == nullptr) != (p.rows == nullptr)) return fail("rows", "null where places are", (long long)p.rows);
    if (!are_words(p.places)) return fail("places", "null or an address of 32-bit integers", (long long)p.places);
    if (!are_words(p.rows)) return fail("rows", "null or an address of a 32-bit integer", (long long)p.rows);
    if (!is_flag(p.is_int64)) return fail("is_int64", "0 or 1", p.is_int64);
    if (p.gemm.m > kMaxSortedChoices) return fail("m", "at most 128 where there are ids", p.gemm.m);
    if (p.top_k < 1 || p.gemm.m % p.top_k != 0) return fail("top_k", "a divisor of m", p.top_k);
  }
  if (kernel.sorts && most_row_tiles(p.gemm.m, p.experts) > kMaxRowTiles)
    return fail("m", "such that there are at most 1024 tiles of 8 rows", p.gemm.m);
  // Each expert with rows may have a tile more than its rows fill. The smallest tiles are 8 rows of 64 columns.
  int64_t const m_tiles = p.gemm.m / 8 + (p.gemm.m < p.experts ? p.gemm.m : p.experts) + 1;
  if (m_tiles * ((p.gemm.n_padded + 63) / 64) > (1 << 30))
    return fail("m", "such that there are at most 2^30 tiles", p.gemm.m);
  int64_t const weight_bytes = int64_t(p.gemm.k_padded) * p.gemm.n_padded;
  if (weight_bytes > (int64_t(1) << 46) / p.experts)
    return fail("experts", "such that all are within 2^46 numbers", p.experts);
  return true;
}

/// The same for kernels that take x in 8 bits.
inline bool check_fp8_grouped_params(GroupedEntry const& kernel, Fp8GroupedGemmParams const& p, char* message,
                                     int message_bytes) {
  return check_grouped_params(kernel, p, message, message_bytes) &&
         check_x_scales(kernel.facts, p.x_scales, message, message_bytes);
}

}  // namespace weightonly
