// The parameters of every GEMM kernel: addresses and sizes, no type of any framework.
#pragma once

#include <cstdint>

namespace weightonly {

/// Programmatic dependent launch (PDL): what a kernel may do before the kernel in front of it in the stream has ended.
/// decode_sm90 and gemm_sm90 read it.
enum class PdlMode : int {
  kNone = 0,             // nothing: the kernel starts when the one in front of it has ended
  kPrefetch = 1,         // start, and prefetch the first weights into the L2 cache
  kConstantWeights = 2,  // also load weights, scales and zeros into shared memory: no kernel in front may write them
};

/// The index of the group that k lies in, without a division.
///
/// With i = k / 32 and g = group_size / 32, floor(k / group_size) = floor((2i + 1) / 2g). The multiplication by
/// ceil(2^31 / g) gives it exactly as long as K * group_size < 2^40. `counted` names 2i + 1, which a loop can add to.
///
/// Kernels for groups of 16 count in steps of kStep = 16: i = k / 16 and g = 1, so that the group is i.
struct GroupIndex {
  uint32_t multiplier;
  int32_t last;  // the group of every k from K on (padding)

  static GroupIndex make(int32_t k, int32_t group_size) {
    uint32_t const g = group_size == 16 ? 1 : uint32_t(group_size) / 32;
    return {(0x80000000u + g - 1) / g, (k - 1) / group_size};
  }

#if defined(__CUDACC__)
  template <int kStep = 32>
  __device__ static uint32_t counted(int k) {
    return 2 * (uint32_t(k) / kStep) + 1;
  }
  /// How much `counted` grows when k grows by kDistance, a multiple of kStep.
  template <int kDistance, int kStep = 32>
  static constexpr uint32_t kCounts = 2 * kDistance / kStep;
  template <int kStep = 32>
  __device__ static int first_k(uint32_t counted) {
    return int(counted - 1) * (kStep / 2);
  }

  __device__ int of_counted(uint32_t counted) const { return min(int(__umulhi(counted, multiplier)), last); }
  template <int kStep = 32>
  __device__ int of(int k) const {
    return of_counted(counted<kStep>(k));
  }
#endif
};

/// y[m, n] = act(sum_k x[m, k] * w[k, n] + bias[n]), w[k, n] = scales[k / group_size, n] * (q[k, n] - zeros[k /
/// group_size, n])
///
/// T is the 16-bit float type of x, scales, zeros, bias and y. Plain C layout: it crosses the library's C interface.
struct GemmParams {
  void const* x;        // T [m, k], rows ldx elements apart, each row 16-byte aligned
  void const* weight;   // packed bytes of [k_padded, n_padded], 16-byte aligned
  void const* scales;   // T [groups, n_padded], rows ld_scales elements apart, each row 16-byte aligned
  void const* zeros;    // like scales, or null; for code4 the codebook, T [16]
  void const* bias;     // T [n], or null
  void* y;              // T [m, n], rows ldy elements apart
  // [split_k, m, n_padded], used when split_k > 1 and the CTAs that share K form no cluster; or a tile for each CTA of the
  // grid, where persistent tiles follow the order of several CTAs of several warpgroups (kSumsInSmem of gemm_sm90)
  float* partials;
  int64_t ldx;  // elements
  int64_t ldy;  // elements
  int64_t ld_scales;  // elements, at least n_padded: values beyond n are read, and affect no stored column
  int32_t m;
  int32_t n;
  int32_t k;  // columns of x, a multiple of 8; kernels read zeros from here to k_padded
  int32_t n_padded;
  int32_t k_padded;  // a multiple of 64
  int32_t group_size;  // 16 for the kernels of such groups; for others 32 or a multiple of 64, k_padded: one group
  GroupIndex group;  // derived from k and group_size by wo_gemm
  int32_t split_k;  // how many CTAs share the K of one output tile; their partials are summed in a fixed order
  int32_t activation;  // enum Activation of epilogue/activation.h
  uint16_t clusters;  // clusters of split_k CTAs that the GPU runs at once: the grid where CTAs compute several tiles
  // For gemm_sm90: its sums over K are added as a kernel does whose K is shared by order_split CTAs of order_warpgroups
  // warpgroups, and scales multiply weights. 0 and 0: as it is quickest; other kernels take no other.
  uint8_t order_split;
  uint8_t order_warpgroups;
  int32_t pdl_mode;  // enum PdlMode
};

/// y[m, n] = act(x_scales[m] * sum_k x[m, k] * w[k, n] + bias[n]): x is E4M3, and k and ldx are multiples of 16; T is the
/// type of all others.
struct Fp8GemmParams : GemmParams {
  float const* x_scales;  // [m], 4-byte aligned
};

}  // namespace weightonly
