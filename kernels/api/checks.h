// Makes a launch memory safe for any caller of the C interface. What the arguments mean is checked in Python
// (weightonly/args.py).
#pragma once

#include <climits>
#include <cstdint>
#include <cstdio>

#include "cutlass_ext/epilogue/activation.h"
#include "kernels/api/registry.h"

namespace weightonly {

/// Rows of a matrix, and elements from one to the next.
struct Rows {
  char const* name;
  int32_t count;
  int64_t stride;
};

/// Returns whether a kernel can be launched with these parameters; if not, `message` says why.
inline bool check_params(KernelFacts const& kernel, GemmParams const& p, char* message, int message_bytes) {
  auto fail = [&](char const* name, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "%s: %s must be %s, got %lld", kernel.name, name, expected, got);
    return false;
  };
  auto misaligned = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 != 0; };
  if (p.x == nullptr || misaligned(p.x)) return fail("x", "a 16-byte aligned address", (long long)p.x);
  if (p.weight == nullptr || misaligned(p.weight))
    return fail("weight", "a 16-byte aligned address", (long long)p.weight);
  if (p.scales == nullptr || misaligned(p.scales))
    return fail("scales", "a 16-byte aligned address", (long long)p.scales);
  if (kernel.reads_zeros && p.zeros == nullptr) return fail("zeros", "an address, as this kernel reads it", 0);
  if (misaligned(p.zeros)) return fail("zeros", "null or a 16-byte aligned address", (long long)p.zeros);
  if (p.ld_scales < p.n_padded || p.ld_scales % 8 != 0)
    return fail("ld_scales", "a multiple of 8 from n_padded on", p.ld_scales);
  if (p.y == nullptr || reinterpret_cast<uintptr_t>(p.y) % 2 != 0) return fail("y", "an even address", (long long)p.y);
  if (reinterpret_cast<uintptr_t>(p.bias) % 2 != 0) return fail("bias", "null or an even address", (long long)p.bias);
  if (p.m < 1 || p.m > kernel.max_m)
    return fail("m", kernel.max_m < 64 ? "within the kernel's tokens" : "at least 1", p.m);
  if (p.n < 1 || p.n_padded < p.n || p.n_padded % 32 != 0)
    return fail("n_padded", "a multiple of 32 from n on", p.n_padded);
  // Sums such as m + 255, and the number of tiles, have to stay within 32 bits.
  if (p.m > INT_MAX - 4095) return fail("m", "less than 2^31 - 4096", p.m);
  if (p.n_padded > INT_MAX - 4095) return fail("n_padded", "less than 2^31 - 4096", p.n_padded);
  if (int64_t(p.m) * p.n_padded > (int64_t(1) << 40))
    return fail("m * n_padded", "at most 2^40", int64_t(p.m) * p.n_padded);
  bool const is_fp8 = kernel.x_bytes == 1;  // rows of x are 16-byte aligned
  int const x_step = is_fp8 ? 16 : 8;
  if (p.k < 1 || p.k % x_step != 0) return fail("k", is_fp8 ? "a multiple of 16" : "a multiple of 8", p.k);
  if (p.k_padded < p.k || p.k_padded % 64 != 0) return fail("k_padded", "a multiple of 64 from k on", p.k_padded);
  if (p.k_padded > (1 << 20)) return fail("k_padded", "at most 2^20", p.k_padded);
  if (int64_t(p.k_padded) * p.n_padded > (int64_t(1) << 42))
    return fail("k_padded * n_padded", "at most 2^42", int64_t(p.k_padded) * p.n_padded);
  if (p.ldx < p.k || p.ldx % x_step != 0)
    return fail("ldx", is_fp8 ? "a multiple of 16 from k on" : "a multiple of 8 from k on", p.ldx);
  if (p.m > 1 && p.ldy < p.n) return fail("ldy", "at least n", p.ldy);
  // Bytes of x, y, scales and partials are counted in 64 bits.
  for (auto const& [name, rows, stride] : {Rows{"ldx", p.m, p.ldx}, Rows{"ldy", p.m, p.ldy},
                                           Rows{"ld_scales", p.k_padded / kernel.least_group, p.ld_scales}}) {
    if (stride > (int64_t(1) << 58) / rows) return fail(name, "such that all rows are within 2^58 elements", stride);
  }
  if (kernel.least_group == 16) {
    if (p.group_size != 16) return fail("group_size", "16", p.group_size);
  } else if (p.group_size != 32 && (p.group_size < 64 || p.group_size % 64 != 0)) {
    return fail("group_size", "32 or a multiple of 64", p.group_size);
  } else if (kernel.least_group == 128 && p.group_size % 128 != 0) {
    return fail("group_size", "a multiple of 128 for this kernel", p.group_size);
  }
  if (p.split_k < 1 || p.split_k > 65535) return fail("split_k", "1 to 65535", p.split_k);
  if (kernel.max_cluster == 0) {
    if (p.split_k > 1 && (p.partials == nullptr || misaligned(p.partials))) {
      return fail("partials", "a 16-byte aligned address when split_k > 1", (long long)p.partials);
    }
  } else {
    if (p.split_k > kernel.max_cluster) return fail("split_k", "at most the CTAs of the kernel's cluster", p.split_k);
    if (p.n_padded % 64 != 0) return fail("n_padded", "a multiple of 64 for tiled weights", p.n_padded);
    if (p.clusters < 1) return fail("clusters", "1 to 65535", p.clusters);
    if (p.pdl_mode < 0 || p.pdl_mode > int(PdlMode::kConstantWeights)) return fail("pdl_mode", "0 to 2", p.pdl_mode);
    // The kernels go from row to row of scales in steps of 32-bit byte counts.
    if (p.ld_scales >= (1 << 30)) return fail("ld_scales", "less than 2^30", p.ld_scales);
  }
  if (!kernel.takes_order) {
    if (p.order_split != 0) return fail("order_split", "0 for this kernel", p.order_split);
    if (p.order_warpgroups != 0) return fail("order_warpgroups", "0 for this kernel", p.order_warpgroups);
  } else if (p.order_split > 8) {  // CTAs of a cluster
    return fail("order_split", "0 to 8", p.order_split);
  } else if (p.order_warpgroups > 4 || (p.order_warpgroups == 0) != (p.order_split == 0)) {
    return fail("order_warpgroups", "1 to 4, or 0 with an order_split of 0", p.order_warpgroups);
  }
  if (p.activation < 0 || p.activation >= int(Activation::kCount)) {
    char numbers[32];
    std::snprintf(numbers, sizeof(numbers), "0 to %d", int(Activation::kCount) - 1);
    return fail("activation", numbers, p.activation);
  }
  return true;
}

/// Whether a kernel takes x in elements of x_bytes.
inline bool check_x_bytes(KernelFacts const& kernel, int x_bytes, char* message, int message_bytes) {
  if (kernel.x_bytes == x_bytes) return true;
  std::snprintf(message, message_bytes, "%s: kernel must be one that takes x in %d bits", kernel.name, 8 * x_bytes);
  return false;
}

inline bool check_x_scales(KernelFacts const& kernel, float const* x_scales, char* message, int message_bytes) {
  if (x_scales != nullptr && reinterpret_cast<uintptr_t>(x_scales) % 4 == 0) return true;
  std::snprintf(message, message_bytes, "%s: x_scales must be a 4-byte aligned address, got %lld", kernel.name,
                (long long)x_scales);
  return false;
}

/// The same as check_params for kernels that take x in 8 bits.
inline bool check_fp8_params(KernelFacts const& kernel, Fp8GemmParams const& p, char* message, int message_bytes) {
  return check_params(kernel, p, message, message_bytes) && check_x_scales(kernel, p.x_scales, message, message_bytes);
}

}  // namespace weightonly
