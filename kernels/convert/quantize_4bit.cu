// Floats to bitsandbytes' blocks of codes. A thread holds four vectors of a tile in registers, so that they are loaded
// once: for the largest magnitudes of their blocks, then for their codes. A CTA computes several tiles, and loads a
// vector of the next tile as soon as the registers of its predecessor are free.
#include <algorithm>

#include "kernels/convert/blocks_4bit.h"
#include "kernels/convert/codebook_search.h"
#include "kernels/gemm/launch.h"
#include "kernels/api/on_device.h"

namespace weightonly {
inline namespace quantize_4bit_cu {  // not anonymous, as in generate.py

constexpr int kTileElements = 4096;  // the largest block
constexpr int kRows = 4;  // vectors of a thread. A row: one vector of each lane of a warp, contiguous in memory
constexpr float kSmallest = 1e-38f;  // the least that bitsandbytes divides by
constexpr unsigned kAllLanes = 0xffffffffu;

/// a if first, else b. From ?: the compiler would make branches around the shuffles that follow.
__device__ float select(bool first, float a, float b) {
  float result;
  asm("{.reg .pred p; setp.ne.s32 p, %3, 0; selp.f32 %0, %1, %2, p;}" : "=f"(result) : "f"(a), "f"(b), "r"(int(first)));
  return result;
}

/// The largest of 32 lanes' numbers, which are 0 or more.
__device__ float largest_of_warp(float value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

/// One thread's work on the tiles of its CTA. kLanes: lanes that hold a block between them; 32 where a block is a row
/// or several.
template <class Element, int kLanes>
class Quantizer {
  using Vector = FloatVector<Element>;
  static constexpr int kElements = Vector::kElements;
  static constexpr int kRowElements = 32 * kElements;
  static constexpr int kTileRows = kTileElements / kRowElements;

 public:
  static constexpr int kThreads = kTileElements / (kRows * kElements);
  // All CTAs are resident, as each runs until the end. Blocks of several rows take a few registers more than 64.
  static constexpr int kThreadsPerSm = kLanes == 32 ? 896 : 1024;
  static constexpr int kCtasPerSm = kThreadsPerSm / kThreads;

  struct Shared {
    float absmax[2][kTileRows];  // of rows, for blocks of several; of this tile and the one before it
  };

  __device__ Quantizer(Blocks4bitParams const& p, CodebookSearcher const& search, int log2_blocksize, int64_t tile,
                       Shared& shared)
      : search_(search),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        blocksize_(p.blocksize),
        log2_blocksize_(log2_blocksize) {
    int64_t const begin = tile * kTileElements;
    w_ = static_cast<Element const*>(p.w) + begin + first();
    packed_ = p.packed + (begin + first()) / 2;
    absmax_ = p.absmax + ((begin + own()) >> log2_blocksize);
  }

  /// Quantizes `tiles` whole tiles, each `step` tiles after the one before. All threads call it together.
  __device__ void quantize(int tiles, int step) {
    int64_t const step_elements = int64_t(step) * kTileElements;
    bool const writes = writes_absmax();
#pragma unroll
    for (int r = 0; r < kRows; ++r) vectors_[r] = load(r);
    for (; tiles > 0; --tiles) {
      float const absmax = reduce(tiles % 2);
      if (writes) *absmax_ = absmax;
      float const reciprocal = __frcp_rn(fmaxf(absmax, kSmallest));
      w_ += step_elements;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float x[kElements];
        Vector::unpack(vectors_[r], x);
        float const factor = of_row(reciprocal, r);
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = __fmul_rn(x[i], factor);  // rounded: must not become part of an fma
        uint32_t const codes = search_.template codes<kElements>(x);
        *reinterpret_cast<typename Vector::Codes*>(packed_ + r * kRowElements / 2) = codes;
        if (tiles > 1) vectors_[r] = load(r);
      }
      packed_ += step_elements / 2;
      absmax_ += step_elements >> log2_blocksize_;
    }
  }

 private:
  /// In elements from the start of the tile: the thread's vector in its warp's first row.
  __device__ int first() const { return warp_ * kRows * kRowElements + lane_ * kElements; }

  /// The first element of the block, or of its part in a row, whose absmax this thread computes: in one row of its
  /// warp, among the lanes that share that block with it.
  __device__ int own() const { return own_row() * kRowElements + lane_ / kLanes * kLanes * kElements; }
  __device__ int own_row() const { return warp_ * kRows + lane_ % kRows; }

  __device__ bool writes_absmax() const { return lane_ % kLanes < kRows && (own() & (blocksize_ - 1)) == 0; }

  __device__ uint4 load(int row) const {
    return __ldcs(
        reinterpret_cast<uint4 const*>(w_ + row * kRowElements));  // read once: the first that caches may drop
  }

  /// The absmax of the block that this thread computes it for. parity: 0 and 1 in turn.
  __device__ float reduce(int parity) {
    float values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r] = Vector::absmax(vectors_[r]);
    // Two lanes share the work on two rows: each gives the other what it has of one, and keeps the other.
#pragma unroll
    for (int distance = 1, rows = kRows; distance < kRows; distance *= 2, rows /= 2) {
      bool const upper = lane_ & distance;
#pragma unroll
      for (int i = 0; i < rows; i += 2) {
        float const keep = select(upper, values[i + 1], values[i]), give = select(upper, values[i], values[i + 1]);
        values[i / 2] = larger(keep, __shfl_xor_sync(kAllLanes, give, distance));
      }
    }
    float value = values[0];
#pragma unroll
    for (int distance = kRows; distance < kLanes; distance *= 2) {
      value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return kLanes == 32 && blocksize_ > kRowElements ? reduce_rows(value, parity) : value;
  }

  /// For blocks of several rows: the absmax of a row to that of its block.
  __device__ float reduce_rows(float value, int parity) {
    float* const all = shared_.absmax[parity];  // a warp may be one tile ahead of another, not two
    if (lane_ < kRows) all[own_row()] = value;
    __syncthreads();
    float of_block = all[lane_ % kTileRows];
    for (int rows = 1; rows < blocksize_ / kRowElements; rows *= 2) {
      of_block = larger(of_block, __shfl_xor_sync(kAllLanes, of_block, rows));
    }
    return __shfl_sync(kAllLanes, of_block, own_row());
  }

  /// The value of the lane that computes the absmax of this lane's block in a row.
  __device__ float of_row(float value, int row) const {
    return __shfl_sync(kAllLanes, value, (lane_ & ~(kRows - 1)) + row);
  }

  CodebookSearcher const& search_;
  Shared& shared_;
  int const lane_, warp_;
  int const blocksize_;
  int const log2_blocksize_;
  Element const* w_;  // the thread's vector in its warp's first row, in the tile to read next
  uint8_t* packed_;  // its codes, in the tile to write next
  float* absmax_;  // of the block whose absmax the thread computes, in the tile to write next
  uint4 vectors_[kRows];
};

/// The last tile if the end of the weight cuts it: `count` elements from w on. A warp quantizes a block, element by
/// element.
template <class Element>
__device__ void quantize_cut_tile(Element const* w, uint8_t* packed, float* absmax, int count, int blocksize,
                                  CodebookSearcher const& search) {
  int const lane = threadIdx.x % 32;
  for (int begin = threadIdx.x / 32 * blocksize; begin < count; begin += blockDim.x / 32 * blocksize) {
    int const end = min(begin + blocksize, count);
    float largest = 0;
    for (int i = begin + lane; i < end; i += 32) largest = larger(largest, fabsf(float(w[i])));
    largest = largest_of_warp(largest);
    // bitsandbytes divides by the absmax of a block that is cut, which it lets be no less than kSmallest; elsewhere it
    // multiplies by the reciprocal.
    bool const cut = end < begin + blocksize;
    if (cut) largest = larger(largest, kSmallest);
    if (lane == 0) absmax[begin / blocksize] = largest;
    float const reciprocal = __frcp_rn(fmaxf(largest, kSmallest));
    for (int pairs = begin; pairs < end; pairs += 64) {
      float x[2];
      for (int i = 0; i < 2; ++i) {
        int const at = pairs + 2 * lane + i;
        float const value = at < end ? float(w[at]) : 0.f;  // fills the last byte up
        x[i] = cut ? __fdiv_rn(value, largest) : __fmul_rn(value, reciprocal);
      }
      uint32_t const codes = search.codes<2>(x);
      if (pairs + 2 * lane < end) packed[pairs / 2 + lane] = codes;
    }
  }
}

template <class Element, int kLanes>
__global__ void __launch_bounds__(Quantizer<Element, kLanes>::kThreads, Quantizer<Element, kLanes>::kCtasPerSm)
    quantize_4bit_kernel(__grid_constant__ Blocks4bitParams const p, __grid_constant__ CodebookSearch const cells,
                         int log2_blocksize) {
  __shared__ typename Quantizer<Element, kLanes>::Shared shared;
  int const whole_tiles = int(p.count / kTileElements), left = int(p.count % kTileElements);
  int const ctas = gridDim.x - (left != 0), cta = blockIdx.x;  // one more for a tile that is cut
  CodebookSearcher const search(cells);
  if (cta < ctas) {
    Quantizer<Element, kLanes> quantizer(p, search, log2_blocksize, cta, shared);
    quantizer.quantize((whole_tiles - cta - 1) / ctas + 1, ctas);
  } else {
    int64_t const begin = int64_t(whole_tiles) * kTileElements;
    quantize_cut_tile(static_cast<Element const*>(p.w) + begin, p.packed + begin / 2,
                      p.absmax + (begin >> log2_blocksize), left, p.blocksize, search);
  }
}

template <class Element, int kLanes>
cudaError_t launch(Blocks4bitParams const& p, int device, cudaStream_t stream) {
  using Quantizer = Quantizer<Element, kLanes>;
  int sms = 0;
  if (cudaError_t const error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  int const whole_tiles = int(p.count / kTileElements), cut_tiles = p.count % kTileElements != 0;
  int const ctas = std::min(whole_tiles, sms * Quantizer::kCtasPerSm) + cut_tiles;
  quantize_4bit_kernel<Element, kLanes>
      <<<ctas, Quantizer::kThreads, 0, stream>>>(p, CodebookSearch::make(p.codebook), log2_of(p.blocksize));
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch(Blocks4bitParams const& p, int device, cudaStream_t stream) {
  constexpr int kFewestLanes = 32 / FloatVector<Element>::kElements;  // of the smallest block
  switch (p.blocksize / 32) {
    case 1:
      return launch<Element, kFewestLanes>(p, device, stream);
    case 2:
      return launch<Element, 2 * kFewestLanes>(p, device, stream);
    case 4:
      return launch<Element, std::min(32, 4 * kFewestLanes)>(p, device, stream);
    default:
      return launch<Element, 32>(p, device, stream);
  }
}

}  // namespace quantize_4bit_cu
}  // namespace weightonly

using namespace weightonly;

int wo_quantize_4bit(Blocks4bitParams const* params, int device, void* stream, char* message, int message_bytes) {
  Message const place(message, message_bytes);
  if (!check_address("quantize_4bit", params, place)) return 1;
  Blocks4bitParams const& p = *params;
  if (!check_params("quantize_4bit", p, place.text, place.bytes)) return 1;
  return run_on_device("quantize_4bit", device, place.text, place.bytes, [&] {
    auto const s = static_cast<cudaStream_t>(stream);
    switch (FloatType(p.type)) {
      case FloatType::kF16:
        return launch<cutlass::half_t>(p, device, s);
      case FloatType::kBf16:
        return launch<cutlass::bfloat16_t>(p, device, s);
      default:
        return launch<float>(p, device, s);
    }
  });
}
