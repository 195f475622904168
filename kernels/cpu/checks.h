// Makes a product memory safe for any caller of the C interface. What the arguments mean is checked in Python
// (weightonly/args.py).
#pragma once

#include <climits>
#include <cstdio>
#include <initializer_list>

#include "../../cutlass_ext/epilogue/activation.h"
#include "params.h"
#include "threads.h"

namespace weightonly::cpu {

/// False, and the reason where wo_cpu_error finds it.
inline bool refuse(char const* name, char const* expected, long long got) {
  if (char* const message = message_of_thread()) {
    std::snprintf(message, kMessageBytes, "%s must be %s, got %lld", name, expected, got);
  }
  return false;
}

/// Whether parameters say which kernel computes them: m, type, groups, group_size, level and invariant.
inline bool check_choice(GemmParams const& p) {
  if (p.m < 1 || p.m > (int64_t(1) << 48)) return refuse("m", "1 to 2^48", p.m);
  if (p.type < kFp16 || p.type > kFp32) return refuse("type", "0 to 2", p.type);
  if (p.groups < 1 || p.groups > INT_MAX) return refuse("groups", "1 to 2^31 - 1", p.groups);
  if (p.group_size < 16 || p.group_size > INT_MAX || p.group_size % 16 != 0) {
    return refuse("group_size", "a multiple of 16 below 2^31", p.group_size);
  }
  if (p.level < kGeneric || p.level > kAmx) return refuse("level", "0 to 3", p.level);
  if (p.invariant != 0 && p.invariant != 1) return refuse("invariant", "0 or 1", p.invariant);
  return true;
}

/// Where blocks of a layout of GPUs are: weightonly/cpu/blocks.py.
inline bool check_blocks(GemmParams const& p) {
  int64_t const elems = 64 * 64, bytes = elems * bits_of(p.format) / 8, most = int64_t(1) << 56;
  if (reinterpret_cast<uintptr_t>(p.block_order) % 2 != 0) {
    return refuse("block_order", "null or a 2-byte aligned address", (long long)p.block_order);
  }
  if (p.segments < 1 || p.segments > bytes) return refuse("segments", "1 to the bytes of a block", p.segments);
  if (p.segment_bytes < 1 || p.segment_bytes * int64_t(p.segments) != bytes) {
    return refuse("segment_bytes", "such that all segments are a block", p.segment_bytes);
  }
  struct Stride {
    char const* name;
    int64_t value, count;
  };
  for (auto const& [name, value, count] : {Stride{"block_stride_k", p.block_stride_k, p.k_padded / 64},
                                           Stride{"block_stride_n", p.block_stride_n, p.n / 64 + 1},
                                           Stride{"segment_stride", p.segment_stride, p.segments}}) {
    if (value < 0 || value > most / count) return refuse(name, "at least 0, and all blocks within 2^56 bytes", value);
  }
  unsigned largest = 0;
  for (int i = 0; i < elems; ++i) largest = p.block_order[i] > largest ? p.block_order[i] : largest;
  if (largest >= elems) return refuse("block_order", "numbers below 4096", largest);
  return true;
}

/// Whether a product can be computed on a CPU whose last level is `highest`.
inline bool check_params(GemmParams const& p, int highest) {
  if (!check_choice(p)) return false;
  if (p.level > highest) return refuse("level", "one that this CPU has", p.level);
  if (p.format < kInt4 || p.format > kFp8) return refuse("format", "0 to 3", p.format);
  if (p.activation < 0 || p.activation >= int(Activation::kCount)) {
    char numbers[32];
    std::snprintf(numbers, sizeof(numbers), "0 to %d", int(Activation::kCount) - 1);
    return refuse("activation", numbers, p.activation);
  }
  if (p.threads < 1 || p.threads > 65536) return refuse("threads", "1 to 65536", p.threads);
  int64_t const most = INT_MAX - 4095;  // sums such as n + 31 stay within 32 bits
  if (p.n < 1 || p.n > most) return refuse("n", "1 to 2^31 - 4096", p.n);
  if (p.k < 1 || p.k > most) return refuse("k", "1 to 2^31 - 4096", p.k);
  if (p.k_padded < p.k || p.k_padded > most || p.k_padded % 64 != 0) {
    return refuse("k_padded", "a multiple of 64 from k to 2^31 - 4096", p.k_padded);
  }
  if (p.groups == 1 && p.group_size != p.k_padded) return refuse("group_size", "k_padded for one group", p.group_size);
  if (p.groups > 1 && (p.groups * p.group_size < p.k || p.groups * p.group_size > p.k_padded)) {
    return refuse("group_size", "such that all groups are k to k_padded rows", p.group_size);
  }
  struct Rows {
    char const* name;
    int64_t count, columns, stride;
  };
  for (auto const& [name, count, columns, stride] :
       {Rows{"ldx", p.m, p.k, p.ldx}, Rows{"ldy", p.m, p.n, p.ldy}, Rows{"ld_scales", p.groups, p.n, p.ld_scales},
        Rows{"ld_zeros", p.zeros == nullptr ? 1 : p.groups, p.n, p.ld_zeros}}) {
    if (stride < 0 || (count > 1 && stride < columns)) return refuse(name, "at least the columns of a row", stride);
    if (stride > (int64_t(1) << 56) / count) return refuse(name, "such that all rows are within 2^56 elements", stride);
  }
  struct Address {
    char const* name;
    void const* value;
    unsigned bytes;
    bool is_needed;
  };
  unsigned const elem = p.type == kFp32 ? 4 : 2;
  bool const has_codes = p.format == kCode4;
  for (auto const& [name, value, bytes, is_needed] :
       {Address{"x", p.x, elem, true}, Address{"weight", p.weight, 4, true}, Address{"scales", p.scales, elem, true},
        Address{"y", p.y, elem, true}, Address{"zeros", p.zeros, elem, false}, Address{"bias", p.bias, elem, false},
        Address{"codebook", p.codebook, 4, has_codes}}) {
    if ((is_needed && value == nullptr) || reinterpret_cast<uintptr_t>(value) % bytes != 0) {
      return refuse(name, bytes == 4 ? "a 4-byte aligned address" : "a 2-byte aligned address", (long long)value);
    }
  }
  if (!is_integer(p.format) && p.zeros != nullptr) {
    return refuse("zeros", "null, as codes have none", (long long)p.zeros);
  }
  return p.block_order == nullptr || check_blocks(p);
}

}  // namespace weightonly::cpu
