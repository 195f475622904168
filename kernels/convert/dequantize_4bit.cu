// bitsandbytes' blocks to floats. A lane turns one word of codes into 16 bytes of the result, so that the store of a
// warp is 512 contiguous bytes. The lanes hold the codebook, and a lookup is a shuffle, which has no bank conflicts.
#include "kernels/convert/blocks_4bit.h"
#include "kernels/gemm/launch.h"
#include "kernels/api/on_device.h"

namespace weightonly {
inline namespace dequantize_4bit_cu {  // not anonymous, as in generate.py

constexpr int kThreads = 256;
constexpr int kSteps = 4;  // vectors that a thread has in flight

template <class Element>
struct Tile {
  using Vector = FloatVector<Element>;
  static constexpr int kStep = kThreads * Vector::kElements;  // elements between the vectors of a thread
  static constexpr int kElements = kSteps * kStep;
};

/// The codes of a vector from element `begin` on, which the end of the weight may cut; 0 beyond the end.
template <class Codes>
__device__ uint32_t load_cut_codes(Blocks4bitParams const& p, int64_t begin) {
  uint32_t codes = 0;
  for (int i = 0; i < int(sizeof(Codes)) && begin + 2 * i < p.count; ++i) {
    codes |= uint32_t(p.packed[begin / 2 + i]) << (8 * i);
  }
  return codes;
}

/// value: this lane's of the codebook. first: the first element of the thread's first vector. kWhole: no vector of the
/// tile is cut by the end of the weight.
template <class Element, bool kWhole>
__device__ void dequantize_tile(Blocks4bitParams const& p, int log2_blocksize, float value, int64_t first) {
  using Vector = FloatVector<Element>;
  using Codes = typename Vector::Codes;
  constexpr int kElements = Vector::kElements, kStep = Tile<Element>::kStep;
  uint32_t codes[kSteps];
  float scales[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    int64_t const begin = first + s * kStep;
    if constexpr (kWhole) {
      codes[s] =
          __ldcs(reinterpret_cast<Codes const*>(p.packed + begin / 2));  // read once: the first that caches may drop
    } else {
      codes[s] = load_cut_codes<Codes>(p, begin);
    }
    scales[s] = kWhole || begin < p.count ? __ldg(p.absmax + (begin >> log2_blocksize)) : 0.f;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float values[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      // A shuffle among 16 lanes reads the low four bits of the lane number.
      values[i] = __shfl_sync(0xffffffffu, value, codes[s] >> code_shift(i), 16) * scales[s];
    }
    int64_t const begin = first + s * kStep;
    auto* const w = static_cast<Element*>(p.w) + begin;
    uint4 const bytes = Vector::pack(values);
    if constexpr (kWhole) {
      *reinterpret_cast<uint4*>(w) = bytes;
    } else {
      auto const* const elements = reinterpret_cast<Element const*>(&bytes);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (begin + i < p.count) w[i] = elements[i];
      }
    }
  }
}

/// One tile a CTA.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    dequantize_4bit_kernel(__grid_constant__ Blocks4bitParams const p, int log2_blocksize) {
  int64_t const tile = int64_t(blockIdx.x) * Tile<Element>::kElements;
  int64_t const first = tile + threadIdx.x * FloatVector<Element>::kElements;
  float const value = p.codebook[threadIdx.x % 16];
  if (tile + Tile<Element>::kElements <= p.count) {
    dequantize_tile<Element, true>(p, log2_blocksize, value, first);
  } else {
    dequantize_tile<Element, false>(p, log2_blocksize, value, first);
  }
}

template <class Element>
cudaError_t launch(Blocks4bitParams const& p, cudaStream_t stream) {
  int64_t const tiles = (p.count + Tile<Element>::kElements - 1) / Tile<Element>::kElements;
  dequantize_4bit_kernel<Element><<<unsigned(tiles), kThreads, 0, stream>>>(p, log2_of(p.blocksize));
  return cudaGetLastError();
}

}  // namespace dequantize_4bit_cu
}  // namespace weightonly

using namespace weightonly;

int wo_dequantize_4bit(Blocks4bitParams const* params, int device, void* stream, char* message, int message_bytes) {
  Message const place(message, message_bytes);
  if (!check_address("dequantize_4bit", params, place)) return 1;
  Blocks4bitParams const& p = *params;
  if (!check_params("dequantize_4bit", p, place.text, place.bytes)) return 1;
  return run_on_device("dequantize_4bit", device, place.text, place.bytes, [&] {
    auto const s = static_cast<cudaStream_t>(stream);
    switch (FloatType(p.type)) {
      case FloatType::kF16:
        return launch<cutlass::half_t>(p, s);
      case FloatType::kBf16:
        return launch<cutlass::bfloat16_t>(p, s);
      default:
        return launch<float>(p, s);
    }
  });
}
