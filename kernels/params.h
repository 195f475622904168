// What every kernel is called with: addresses, sizes, and nothing of any framework.
#pragma once

#include <cstdint>

namespace weightonly {

enum class Activation : int { kIdentity = 0, kRelu = 1, kGelu = 2, kSilu = 3 };

/// Of a launch with the kernel before it in the stream; decode_sm90 and gemm_sm90.
enum class Overlap : int {
  kNone = 0,
  kPrefetch = 1,  // starts before that has ended; weights come into the L2, nothing is used until it has
  kConstantWeights = 2,  // weights, scales and zeros come into shared memory: nothing before it may be writing them
};

/// Index of the group that k lies in, without a division: floor(k / group_size) = floor((2i + 1) / 2g) for i = k / 32 and
/// g = group_size / 32, and the multiplication by ceil(2^31 / g) is exact as long as K * group_size < 2^40. 2i + 1 is `counted`.
struct GroupIndex {
  uint32_t multiplier;
  int32_t last;  // k from K on (padding) counts to the last group

  static GroupIndex make(int32_t k, int32_t group_size) {
    uint32_t const g = uint32_t(group_size) / 32;
    return {(0x80000000u + g - 1) / g, (k - 1) / group_size};
  }

#if defined(__CUDACC__)
  __device__ static uint32_t counted(int k) { return 2 * (uint32_t(k) / 32) + 1; }
  /// What `kDistance` of k, a multiple of 32, add to it.
  template <int kDistance>
  static constexpr uint32_t kCounts = kDistance / 16;
  __device__ static int first_k(uint32_t counted) { return int(counted - 1) * 16; }

  __device__ int of_counted(uint32_t counted) const { return min(int(__umulhi(counted, multiplier)), last); }
  __device__ int of(int k) const { return of_counted(counted(k)); }
#endif
};

/// y[m, n] = act(sum_k x[m, k] * w[k, n] + bias[n]), w[k, n] = scales[k / group_size, n] * (q[k, n] - zeros[k / group_size, n])
///
/// T is the 16-bit float type of x, scales, zeros, bias and y. Plain C layout: it crosses the library's C interface.
struct GemmParams {
  void const* x;        // T [m, k], rows ldx elements apart, each row 16-byte aligned
  void const* weight;   // packed bytes of [k_padded, n_padded], 16-byte aligned
  void const* scales;   // T [groups, n_padded], rows ld_scales elements apart, each row 16-byte aligned
  void const* zeros;    // like scales, or null
  void const* bias;     // T [n], or null
  void* y;              // T [m, n], rows ldy elements apart
  float* partials;      // [split_k, m, n_padded], used when split_k > 1 and the CTAs that share K are no cluster
  int64_t ldx;          // elements
  int64_t ldy;          // elements
  int64_t ld_scales;    // elements, at least n_padded: values beyond n are read but meet no stored column
  int32_t m;
  int32_t n;
  int32_t k;            // columns of x, a multiple of 8; those from here to k_padded count as zero
  int32_t n_padded;
  int32_t k_padded;     // a multiple of 64
  int32_t group_size;   // 32 or a multiple of 64; k_padded when there is one group
  GroupIndex group;     // derived from k and group_size by wo_gemm
  int32_t split_k;      // parts of K, each computed by CTAs of its own and summed in a fixed order
  int32_t activation;   // enum Activation
  int32_t clusters;     // of split_k CTAs, as many as are wanted at once; decode_sm90 alone
  int32_t overlap;      // enum Overlap
};

}  // namespace weightonly
