// Floats to bitsandbytes' blocks of codes. A thread holds four vectors of a tile in registers, so that they are read once:
// for the largest magnitudes of their blocks, then for their codes. CTAs go on to further tiles, and ask for a vector of the
// next one as soon as the registers of its predecessor are free.
#include <algorithm>

#include "kernels/blocks_4bit.h"
#include "kernels/code_search.h"
#include "kernels/launch.h"
#include "kernels/on_device.h"

namespace weightonly {
namespace {

constexpr int kTileElements = 4096;  // the largest block
constexpr int kRuns = 4;  // vectors of a thread. A run: a vector of every lane of a warp, one after another
constexpr float kSmallest = 1e-38f;  // bitsandbytes divides by no less
constexpr unsigned kAllLanes = 0xffffffffu;

/// a if first, else b; ?: would become branches around the shuffles that follow.
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

/// One thread's work on the tiles of its CTA. kLanes: lanes that hold a block between them; 32 where a block is a run or
/// several.
template <class Element, int kLanes>
class Quantizer {
  using Vector = FloatVector<Element>;
  static constexpr int kElements = Vector::kElements;
  static constexpr int kRunElements = 32 * kElements;
  static constexpr int kTileRuns = kTileElements / kRunElements;

 public:
  static constexpr int kThreads = kTileElements / (kRuns * kElements);
  // All that are resident, as each goes on until the end. Blocks of several runs take a few registers more than 64.
  static constexpr int kThreadsPerSm = kLanes == 32 ? 896 : 1024;
  static constexpr int kCtasPerSm = kThreadsPerSm / kThreads;

  struct Shared {
    float absmax[2][kTileRuns];  // of runs, for blocks of several; of this tile and the one before it
  };

  __device__ Quantizer(Blocks4bitParams const& p, CodeSearcher const& search, int log2_blocksize, int64_t tile,
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

  /// Quantizes so many whole tiles, `step` of them apart. All threads call it together.
  __device__ void quantize(int tiles, int step) {
    int64_t const step_elements = int64_t(step) * kTileElements;
    bool const writes = writes_absmax();
#pragma unroll
    for (int r = 0; r < kRuns; ++r) vectors_[r] = load(r);
    for (; tiles > 0; --tiles) {
      float const absmax = reduce(tiles % 2);
      if (writes) *absmax_ = absmax;
      float const reciprocal = __frcp_rn(fmaxf(absmax, kSmallest));
      w_ += step_elements;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        float x[kElements];
        Vector::unpack(vectors_[r], x);
        float const factor = of_run(reciprocal, r);
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = __fmul_rn(x[i], factor);  // rounded: no part of an fma
        uint32_t const codes = search_.template codes<kElements>(x);
        *reinterpret_cast<typename Vector::Codes*>(packed_ + r * kRunElements / 2) = codes;
        if (tiles > 1) vectors_[r] = load(r);
      }
      packed_ += step_elements / 2;
      absmax_ += step_elements >> log2_blocksize_;
    }
  }

 private:
  /// In elements from the start of the tile: the thread's vector in its warp's first run.
  __device__ int first() const { return warp_ * kRuns * kRunElements + lane_ * kElements; }

  /// The first element of the block, or of its part in a run, whose statistics the thread looks after: in one run of its
  /// warp, between the lanes that share that block with it.
  __device__ int own() const { return own_run() * kRunElements + lane_ / kLanes * kLanes * kElements; }
  __device__ int own_run() const { return warp_ * kRuns + lane_ % kRuns; }

  __device__ bool writes_absmax() const { return lane_ % kLanes < kRuns && (own() & (blocksize_ - 1)) == 0; }

  __device__ uint4 load(int run) const {
    return __ldcs(reinterpret_cast<uint4 const*>(w_ + run * kRunElements));  // read once: first out of caches
  }

  /// The largest magnitude of the block that the thread looks after. parity: 0 and 1 in turn.
  __device__ float reduce(int parity) {
    float values[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) values[r] = Vector::absmax(vectors_[r]);
    // Two lanes share the work on two runs: each gives the other what it has of one, and keeps the other.
#pragma unroll
    for (int distance = 1, runs = kRuns; distance < kRuns; distance *= 2, runs /= 2) {
      bool const upper = lane_ & distance;
#pragma unroll
      for (int i = 0; i < runs; i += 2) {
        float const keep = select(upper, values[i + 1], values[i]), give = select(upper, values[i], values[i + 1]);
        values[i / 2] = larger(keep, __shfl_xor_sync(kAllLanes, give, distance));
      }
    }
    float value = values[0];
#pragma unroll
    for (int distance = kRuns; distance < kLanes; distance *= 2) {
      value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return kLanes == 32 && blocksize_ > kRunElements ? reduce_runs(value, parity) : value;
  }

  /// For blocks of several runs: the absmax of a run to that of its block.
  __device__ float reduce_runs(float value, int parity) {
    float* const all = shared_.absmax[parity];  // a warp may be one tile ahead of another, not two
    if (lane_ < kRuns) all[own_run()] = value;
    __syncthreads();
    float of_block = all[lane_ % kTileRuns];
    for (int runs = 1; runs < blocksize_ / kRunElements; runs *= 2) {
      of_block = larger(of_block, __shfl_xor_sync(kAllLanes, of_block, runs));
    }
    return __shfl_sync(kAllLanes, of_block, own_run());
  }

  /// The value of the lane that looks after this lane's block in a run.
  __device__ float of_run(float value, int run) const {
    return __shfl_sync(kAllLanes, value, (lane_ & ~(kRuns - 1)) + run);
  }

  CodeSearcher const& search_;
  Shared& shared_;
  int const lane_, warp_;
  int const blocksize_;
  int const log2_blocksize_;
  Element const* w_;  // the thread's vector in its warp's first run, in the tile to read next
  uint8_t* packed_;  // its codes, in the tile to write next
  float* absmax_;  // of the block that the thread looks after, in the tile to write next
  uint4 vectors_[kRuns];
};

/// The last tile where the end of the weight cuts it: `count` elements from w on. A warp does a block, element by element.
template <class Element>
__device__ void quantize_cut_tile(Element const* w, uint8_t* packed, float* absmax, int count, int blocksize,
                                  CodeSearcher const& search) {
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
        float const value = at < end ? float(w[at]) : 0.f;  // what fills the last byte up
        x[i] = cut ? __fdiv_rn(value, largest) : __fmul_rn(value, reciprocal);
      }
      uint32_t const codes = search.codes<2>(x);
      if (pairs + 2 * lane < end) packed[pairs / 2 + lane] = codes;
    }
  }
}

template <class Element, int kLanes>
__global__ void __launch_bounds__(Quantizer<Element, kLanes>::kThreads, Quantizer<Element, kLanes>::kCtasPerSm)
    quantize_4bit_kernel(__grid_constant__ Blocks4bitParams const p, __grid_constant__ CodeSearch const table,
                         int log2_blocksize) {
  __shared__ typename Quantizer<Element, kLanes>::Shared shared;
  int const whole_tiles = int(p.count / kTileElements), left = int(p.count % kTileElements);
  int const ctas = gridDim.x - (left != 0), cta = blockIdx.x;  // one more for a tile that is cut
  CodeSearcher const search(table);
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
      <<<ctas, Quantizer::kThreads, 0, stream>>>(p, CodeSearch::make(p.table), log2_of(p.blocksize));
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

}  // namespace
}  // namespace weightonly

using namespace weightonly;

int wo_quantize_4bit(Blocks4bitParams const* params, int device, void* stream, char* message, int message_bytes) {
  Blocks4bitParams const& p = *params;
  if (!check_params("quantize_4bit", p, message, message_bytes)) return 1;
  return run_on_device("quantize_4bit", device, message, message_bytes, [&] {
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
