// AutoAWQ's words to 16-bit floats. The bytes moved decide the speed, and four fifths of them are the result. So each
// store of a warp is 512 contiguous bytes, and a lane loads one word of 8 columns. Wider loads would spread the 16-byte
// stores of a lane, and every 32-byte sector of the result would be written in two halves.
#include <type_traits>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/integer_subbyte.h"
#include "cutlass_ext/convert/numeric_conversion.h"
#include "kernels/convert/conversions.h"
#include "cutlass_ext/convert/float_pairs.h"
#include "kernels/gemm/launch.h"
#include "kernels/api/on_device.h"

namespace weightonly {
inline namespace awq_dequantize_cu {  // not anonymous, as in generate.py

constexpr int kThreads = 128;
constexpr int kTileRows = 16;  // rows that a thread has in flight; they share scales and zeros

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class Element>
inline constexpr bool kHasPackedMath = std::is_same_v<Element, cutlass::half_t>;
#else
template <class Element>
inline constexpr bool kHasPackedMath = true;
#endif

/// Scales and zeros of the 8 columns of a word; dequantizes words of these columns.
///
/// AWQ's order of nibbles is the order that ConvertWord takes, which gives u - 8 as floats: the difference to z - 8 is
/// u - z, an integer within +-15 and therefore exact.
template <class Element>
class BitTrickColumns {
  using Convert = detail::ConvertWord<Element, cutlass::uint4b_t>;
  using Math = PackedMath<Element>;

 public:
  __device__ BitTrickColumns(uint4 scales, uint32_t zeros) : scales_{scales.x, scales.y, scales.z, scales.w} {
    Convert::apply(zeros, zeros_);
  }

  __device__ uint4 dequantize(uint32_t word) const {
    uint32_t pairs[4];
    Convert::apply(word, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = Math::mul(Math::sub(pairs[i], zeros_[i]), scales_[i]);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

 private:
  uint32_t scales_[4];
  uint32_t zeros_[4];
};

/// The same with integers, and products in fp32: 11 bits of a scale times 5 of u - z are exact there.
template <class Element>
class ArithmeticColumns {
 public:
  __device__ ArithmeticColumns(uint4 scales, uint32_t zeros) : zeros_(zeros) {
    uint32_t const pairs[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) scales_[i] = unpack_pair<Element>(pairs[i]);
  }

  __device__ uint4 dequantize(uint32_t word) const {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const low = nibble(word, i) - nibble(zeros_, i);
      int const high = nibble(word, i + 4) - nibble(zeros_, i + 4);
      pairs[i] = pack_pair<Element>(float(low) * scales_[i].x, float(high) * scales_[i].y);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

 private:
  __device__ static int nibble(uint32_t word, int i) { return int(word >> (4 * i)) & 15; }

  float2 scales_[4];
  uint32_t zeros_;
};

/// Each thread dequantizes 8 columns of the rows of a tile, which lies in one group. blockIdx.y and threadIdx.y count
/// tiles.
template <class Element, bool kBitTricks>
__global__ void __launch_bounds__(kThreads)
    awq_dequantize_kernel(__grid_constant__ AwqDequantizeParams const p, uint32_t tiles_per_group, int tile_rows) {
  using Columns =
      std::conditional_t<kBitTricks && kHasPackedMath<Element>, BitTrickColumns<Element>, ArithmeticColumns<Element>>;
  int const words = p.n / 8;
  int const column = blockIdx.x * blockDim.x + threadIdx.x;  // of words
  if (column >= words) return;
  int const group_size = p.k / p.groups;
  uint32_t const tiles = tiles_per_group * p.groups;

  for (uint32_t tile = blockIdx.y * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.y * blockDim.y) {
    uint32_t const group = tile / tiles_per_group;
    int const first = int(tile - group * tiles_per_group) * tile_rows;  // row of the group
    int const rows = min(tile_rows, group_size - first);
    // Of this thread's column:
    int64_t const at = int64_t(group) * words + column;
    int64_t const begin = (int64_t(group) * group_size + first) * words + column;
    auto const* word = static_cast<uint32_t const*>(p.qweight) + begin;
    auto* target = static_cast<uint4*>(p.w) + begin;
    auto const columns = [&] {
      return Columns(__ldg(static_cast<uint4 const*>(p.scales) + at),
                     __ldg(static_cast<uint32_t const*>(p.qzeros) + at));
    };
    if (rows == kTileRows) {
      uint32_t in_flight[kTileRows];
#pragma unroll
      for (int i = 0; i < kTileRows; ++i, word += words)
        in_flight[i] = __ldcs(word);  // read once: the first that caches may drop
      Columns const all = columns();
#pragma unroll
      for (int i = 0; i < kTileRows; ++i, target += words) *target = all.dequantize(in_flight[i]);
    } else {
      Columns const all = columns();
      for (int i = 0; i < rows; ++i, word += words, target += words) *target = all.dequantize(__ldcs(word));
    }
  }
}

template <class Element>
cudaError_t launch(AwqDequantizeParams const& p, cudaStream_t stream, bool bit_tricks) {
  int const words = p.n / 8, group_size = p.k / p.groups;
  int const tiles_per_group = divide_up(group_size, kTileRows);
  int const tile_rows = divide_up(group_size, tiles_per_group);
  // Whole CTAs along a row where its words allow it, else warps.
  int width = 32;
  while (width < kThreads && words % (2 * width) == 0) width *= 2;
  dim3 const threads(width, kThreads / width);
  int64_t const tiles = int64_t(tiles_per_group) * p.groups;
  int64_t const rows_of_ctas = (tiles + threads.y - 1) / threads.y;
  dim3 const grid(divide_up(words, width), unsigned(rows_of_ctas < 65535 ? rows_of_ctas : 65535));
  auto const kernel = bit_tricks ? awq_dequantize_kernel<Element, true> : awq_dequantize_kernel<Element, false>;
  kernel<<<grid, threads, 0, stream>>>(p, tiles_per_group, tile_rows);
  return cudaGetLastError();
}

bool check(AwqDequantizeParams const& p, char* message, int message_bytes) {
  auto fail = [&](char const* name, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "awq_dequantize: %s must be %s, got %lld", name, expected, got);
    return false;
  };
  auto wrong = [](void const* pointer, int alignment) {
    return pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % alignment != 0;
  };
  if (wrong(p.qweight, 4)) return fail("qweight", "a 4-byte aligned address", (long long)p.qweight);
  if (wrong(p.scales, 16)) return fail("scales", "a 16-byte aligned address", (long long)p.scales);
  if (wrong(p.qzeros, 4)) return fail("qzeros", "a 4-byte aligned address", (long long)p.qzeros);
  if (wrong(p.w, 16)) return fail("w", "a 16-byte aligned address", (long long)p.w);
  if (p.k < 1) return fail("k", "at least 1", p.k);
  if (p.n < 8 || p.n % 8 != 0) return fail("n", "a multiple of 8", p.n);
  if (p.k > 0x7fffffff - 4095) return fail("k", "less than 2^31 - 4096", p.k);
  if (p.n > 0x7fffffff - 4095) return fail("n", "less than 2^31 - 4096", p.n);
  if (p.groups < 1 || p.k % p.groups != 0) return fail("groups", "a divisor of k", p.groups);
  if (p.type != int(FloatType::kF16) && p.type != int(FloatType::kBf16)) return fail("type", "0 or 1", p.type);
  if (p.path < 0 || p.path > int(AwqPath::kBitTricks)) return fail("path", "0 to 2", p.path);
  return true;
}

}  // namespace awq_dequantize_cu
}  // namespace weightonly

using namespace weightonly;

int wo_awq_dequantize(AwqDequantizeParams const* params, int device, void* stream, char* message, int message_bytes) {
  Message const place(message, message_bytes);
  if (!check_address("awq_dequantize", params, place)) return 1;
  AwqDequantizeParams const& p = *params;
  if (!check(p, place.text, place.bytes)) return 1;
  return run_on_device("awq_dequantize", device, place.text, place.bytes, [&] {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) return error;
    bool const bf16 = p.type == int(FloatType::kBf16);
    bool const can = 10 * major + minor >= (bf16 ? 80 : 75);
    if (p.path == int(AwqPath::kBitTricks) && !can) return cudaErrorNotSupported;
    bool const bit_tricks = can && p.path != int(AwqPath::kArithmetic);
    return (bf16 ? launch<cutlass::bfloat16_t> : launch<cutlass::half_t>)(p, static_cast<cudaStream_t>(stream),
                                                                          bit_tricks);
  });
}
