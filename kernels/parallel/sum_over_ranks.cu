// Sums over GPUs that share memory: see sum_over_ranks.h.
//
// A rank writes its term into the memory of all others, then adds what they write into its own. There are no flags: a
// word of memory that was not written yet has all bits set, which no word of a term has. A call of rank A clears what the
// call before brought, and there are three places in turn, so that nobody writes where another one still reads or clears:
//
//   call       | t        | t + 1      | t + 2                     | t + 3
//   A reads    | place 0  | 1          | 2                         | 0
//   A clears   | 2        | 0          | 1                         | 2
//   B writes   | 0        | 1          | 2, when A has begun t + 1 | 0, when A has begun t + 2: it has cleared it in t + 1
#include <cstdio>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "kernels/api/on_device.h"
#include "kernels/convert/conversions.h"
#include "kernels/gemm/launch.h"
#include "kernels/parallel/sum_over_ranks.h"

namespace weightonly {
namespace sum_over_ranks_cu {

constexpr int kVector = 8;  // elements of 16 bytes
constexpr int kThreads = 256;
constexpr uint32_t kEmpty = 0xffffffff;
[[maybe_unused]] constexpr uint32_t kNan = 0x7fff7fff;  // in its place, should a term have it: two NaNs as well
constexpr int kPlaces = 3;

template <class Element>
struct alignas(16) Vector {
  Element values[kVector];
};

CUTLASS_DEVICE void store_shared_with_gpus(void* target, uint4 const& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/// Waits until another GPU has written all four words.
CUTLASS_DEVICE uint4 wait_for(void const* source) {
  uint4 v;
  do {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source)
                 : "memory");
  } while (v.x == kEmpty || v.y == kEmpty || v.z == kEmpty || v.w == kEmpty);
  return v;
}

template <class Element>
struct Sum {
  SumOverRanksParams const& p;
  uint32_t place, vectors;

  CUTLASS_DEVICE char* memory(int of_rank, uint32_t place, int from_rank, uint32_t i) const {
    return static_cast<char*>(p.memory[of_rank]) + (int64_t(place) * p.ranks + from_rank) * p.capacity +
           int64_t(i) * int64_t(sizeof(uint4));
  }

  CUTLASS_DEVICE bool is_whole(uint32_t i) const { return (int64_t(i) + 1) * kVector <= p.count; }

  /// This rank's term, without words that are kEmpty; zeros beyond it.
  CUTLASS_DEVICE uint4 load(uint32_t i) const {
    auto const* const y = static_cast<Element const*>(p.y) + int64_t(i) * kVector;
    Vector<Element> v;
    if (is_whole(i)) {
      v = *reinterpret_cast<Vector<Element> const*>(y);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kVector; ++e) v.values[e] = int64_t(i) * kVector + e < p.count ? y[e] : Element(0.f);
    }
    uint4 words = *reinterpret_cast<uint4 const*>(&v);
    for (uint32_t* word : {&words.x, &words.y, &words.z, &words.w}) *word = *word == kEmpty ? kNan : *word;
    return words;
  }

  CUTLASS_DEVICE void store(uint32_t i, float const (&sums)[kVector]) const {
    auto* const y = static_cast<Element*>(p.y) + int64_t(i) * kVector;
    Vector<Element> v;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kVector; ++e) v.values[e] = Element(sums[e]);
    if (is_whole(i)) {
      *reinterpret_cast<Vector<Element>*>(y) = v;
    } else {
      for (int e = 0; e < kVector && int64_t(i) * kVector + e < p.count; ++e) y[e] = v.values[e];
    }
  }

  /// Calls visit(i) for this thread's vectors of so many.
  template <class Visit>
  CUTLASS_DEVICE static void for_each(uint32_t count, Visit const& visit) {
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) visit(i);
  }

  CUTLASS_DEVICE void run(uint32_t vectors_before) const {
    for_each(vectors, [&](uint32_t i) {
      uint4 const mine = load(i);
      for (int rank = 0; rank < p.ranks; ++rank) {
        if (rank != p.rank) store_shared_with_gpus(memory(rank, place, p.rank, i), mine);
      }
    });
    for_each(vectors_before, [&](uint32_t i) {
      for (int rank = 0; rank < p.ranks; ++rank) {
        if (rank == p.rank) continue;
        auto* const old = memory(p.rank, (place + kPlaces - 1) % kPlaces, rank, i);
        store_shared_with_gpus(old, uint4{kEmpty, kEmpty, kEmpty, kEmpty});
      }
    });
    for_each(vectors, [&](uint32_t i) {
      float sums[kVector];
      for (int rank = 0; rank < p.ranks; ++rank) {
        uint4 const words = rank == p.rank ? load(i) : wait_for(memory(p.rank, place, rank, i));
        auto const& term = reinterpret_cast<Vector<Element> const&>(words);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kVector; ++e) sums[e] = rank == 0 ? float(term.values[e]) : sums[e] + float(term.values[e]);
      }
      store(i, sums);
    });
  }
};

/// state: the place of this call, the vectors of the one before, and the CTAs of this one that have ended.
template <class Element>
__global__ void __launch_bounds__(kThreads) sum_over_ranks_kernel(__grid_constant__ SumOverRanksParams const p) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  auto* const state = const_cast<uint32_t volatile*>(p.state);
  uint32_t const vectors = uint32_t((p.count + kVector - 1) / kVector), place = state[0];
  Sum<Element>{p, place, vectors}.run(state[1]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(p.state + 2, 1u) != gridDim.x - 1) return;
  state[0] = (place + 1) % kPlaces;
  state[1] = vectors;
  state[2] = 0;
#endif
}

bool check(SumOverRanksParams const& p, Message const& message) {
  auto const fail = [&](char const* name, char const* expected, long long got) {
    std::snprintf(message.text, message.bytes, "sum_over_ranks: %s must be %s, got %lld", name, expected, got);
    return false;
  };
  auto const is_aligned = [](void const* address, int bytes) {
    return address != nullptr && reinterpret_cast<uintptr_t>(address) % bytes == 0;
  };
  if (!is_aligned(p.y, 16)) return fail("y", "a 16-byte aligned address", (long long)p.y);
  if (!is_aligned(p.state, 4)) return fail("state", "a 4-byte aligned address", (long long)p.state);
  if (p.ranks < 2 || p.ranks > kMaxRanks) return fail("ranks", "2 to 8", p.ranks);
  if (p.rank < 0 || p.rank >= p.ranks) return fail("rank", "one of the ranks", p.rank);
  for (int rank = 0; rank < p.ranks; ++rank) {
    if (!is_aligned(p.memory[rank], 16)) return fail("memory", "16-byte aligned addresses", (long long)p.memory[rank]);
  }
  if (p.capacity < 16 || p.capacity % 16 != 0 || p.capacity > (int64_t(1) << 32))
    return fail("capacity", "a multiple of 16 up to 2^32", p.capacity);
  if (p.count < 1 || p.count > p.capacity / 2) return fail("count", "1 to what capacity holds", p.count);
  if (p.type != int(FloatType::kF16) && p.type != int(FloatType::kBf16)) return fail("type", "0 or 1", p.type);
  if (p.pdl_mode < 0 || p.pdl_mode > int(PdlMode::kConstantWeights)) return fail("pdl_mode", "0 to 2", p.pdl_mode);
  return true;
}

cudaError_t launch(SumOverRanksParams const& p, int device, cudaStream_t stream) {
  int sms = 0;
  cudaError_t const error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  auto* const kernel = p.type == int(FloatType::kF16) ? sum_over_ranks_kernel<cutlass::half_t>
                                                      : sum_over_ranks_kernel<cutlass::bfloat16_t>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  constexpr int kElements = kVector * kThreads;  // of a CTA at a time
  int64_t const ctas = (p.count + kElements - 1) / kElements;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(ctas < 4 * sms ? ctas : 4 * sms));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.pdl_mode == int(PdlMode::kNone) ? 0 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace sum_over_ranks_cu
}  // namespace weightonly

int wo_sum_over_ranks(weightonly::SumOverRanksParams const* params, int device, void* stream, char* message,
                      int message_bytes) {
  using namespace weightonly;
  Message const place(message, message_bytes);
  if (!check_address("sum_over_ranks", params, place) || !sum_over_ranks_cu::check(*params, place)) return 1;
  return run_on_device("sum_over_ranks", device, place.text, place.bytes,
                       [&] { return sum_over_ranks_cu::launch(*params, device, static_cast<cudaStream_t>(stream)); });
}
