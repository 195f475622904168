// Small kernels around the two grouped products of a layer of experts: see experts.h.
#include <climits>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "kernels/api/on_device.h"
#include "kernels/convert/conversions.h"
#include "kernels/experts/route.cuh"
#include "kernels/gemm/launch.h"

namespace weightonly {
namespace experts_cu {

constexpr int kVector = 8;  // elements of a 16-byte load
constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

template <class Element>
struct alignas(16) Vector {
  Element values[kVector];
};

// ---- Rows in the order of experts ----

__global__ void __launch_bounds__(kThreads) gather_kernel(__grid_constant__ GatherParams const p) {
#if __CUDA_ARCH__ >= 900
  int const vectors = p.columns / kVector, v = blockIdx.x * kThreads + threadIdx.x;
  bool const exists = v < vectors;
  auto const load = [&](int token) {
    return reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(p.x) + token * p.ldx)[v];
  };
  bool const has_scale = p.scales != nullptr && v == 0;
  uint4 row = {};
  float scale = 0;
  if (exists) row = load(blockIdx.y);
  if (has_scale) scale = p.scales[blockIdx.y];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (!exists) return;
  int const end = p.offs[p.experts - 1];
  for (int token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    if (token > int(blockIdx.y)) {
      row = load(token);
      if (has_scale) scale = p.scales[token];
    }
#pragma unroll 4
    for (int j = 0; j < p.top_k; ++j) {
      int const place = p.places[int64_t(token) * p.top_k + j];
      if (place >= end) continue;
      static_cast<uint4*>(p.sorted)[int64_t(place) * vectors + v] = row;
      if (has_scale) p.sorted_scales[place] = scale;
    }
  }
#endif
}

// ---- The sum over experts ----

template <class Element>
__global__ void __launch_bounds__(kThreads) combine_kernel(__grid_constant__ CombineParams const p) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  constexpr int kAhead = 8;  // rows that are loaded at once
  int const vectors = p.columns / kVector, v = blockIdx.x * kThreads + threadIdx.x;
  if (v >= vectors) return;
  int const end = *p.rows_end;
  for (int token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    float sums[kVector] = {};
    for (int first = 0; first < p.top_k; first += kAhead) {
      Vector<Element> rows[kAhead];
      float weights[kAhead];
      bool counts[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        int64_t const choice = int64_t(token) * p.top_k + first + j;
        int const place = first + j < p.top_k ? p.places[choice] : end;
        counts[j] = place < end;
        if (!counts[j]) continue;
        weights[j] = p.weights[choice];
        rows[j] = static_cast<Vector<Element> const*>(p.rows)[int64_t(place) * vectors + v];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (!counts[j]) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[i] += weights[j] * float(rows[j].values[i]);
      }
    }
    Vector<Element> result;
#pragma unroll
    for (int i = 0; i < kVector; ++i) result.values[i] = Element(sums[i]);
    static_cast<Vector<Element>*>(p.y)[int64_t(token) * vectors + v] = result;
  }
#endif
}

// ---- The gradients of that sum ----

/// A warp for each choice.
template <class Element>
__global__ void __launch_bounds__(kThreads) spread_kernel(__grid_constant__ SpreadParams const p) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  int const vectors = p.columns / kVector, lane = threadIdx.x % kWarp, choices = p.tokens * p.top_k;
  int const end = *p.rows_end;
  for (int choice = blockIdx.x * kWarps + threadIdx.x / kWarp; choice < choices; choice += gridDim.x * kWarps) {
    int const place = p.places[choice];
    bool const counts = place < end;
    float const weight = p.weights[choice];
    auto const* const grad = static_cast<Vector<Element> const*>(p.grad) + int64_t(choice / p.top_k) * vectors;
    auto const* const row = static_cast<Vector<Element> const*>(p.rows) + int64_t(place) * vectors;
    auto* const of_row = static_cast<Vector<Element>*>(p.of_rows) + int64_t(place) * vectors;
    bool const has_sum = counts && p.of_weights != nullptr;
    float sum = 0;
#pragma unroll 4
    for (int v = lane; v < vectors; v += kWarp) {
      Vector<Element> const of_token = grad[v];
      Vector<Element> result = {}, factor = {};
      if (has_sum) factor = row[v];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sum += float(of_token.values[i]) * float(factor.values[i]);
        if (counts) result.values[i] = Element(weight * float(of_token.values[i]));
      }
      if (p.of_rows != nullptr) of_row[v] = result;
    }
    if (p.of_weights == nullptr) continue;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane == 0) p.of_weights[choice] = has_sum ? sum : 0;
  }
#endif
}

/// CTAs for rows of so many columns, a thread for each vector.
inline dim3 row_grid(int columns, int rows) {
  constexpr int kMaxRows = 65535;
  return dim3((columns / kVector + kThreads - 1) / kThreads, rows < kMaxRows ? rows : kMaxRows);
}

/// Says of a call what is wrong with it.
struct Check {
  char const* name;
  Message const& message;

  bool fail(char const* field, char const* expected, long long got) const {
    std::snprintf(message.text, message.bytes, "%s: %s must be %s, got %lld", name, field, expected, got);
    return false;
  }
  bool vectors(char const* field, void const* address) const {
    bool const is_right = address != nullptr && reinterpret_cast<uintptr_t>(address) % 16 == 0;
    return is_right || fail(field, "a 16-byte aligned address", (long long)address);
  }
  bool words(char const* field, void const* address, int bytes = 4) const {
    bool const is_right = address != nullptr && reinterpret_cast<uintptr_t>(address) % bytes == 0;
    return is_right ||
           fail(field, bytes == 8 ? "an 8-byte aligned address" : "a 4-byte aligned address", (long long)address);
  }
  bool optional_words(char const* field, void const* address) const {
    return address == nullptr || words(field, address);
  }
  bool within(char const* field, int64_t value, int64_t least, int64_t most, char const* expected) const {
    return (value >= least && value <= most) || fail(field, expected, value);
  }
  bool columns(int columns) const {
    return (columns >= kVector && columns % kVector == 0 && columns <= INT_MAX / 2) ||
           fail("columns", "a multiple of 8", columns);
  }
  bool experts(int experts) const { return within("experts", experts, 1, kMaxGroupedExperts, "1 to 1024"); }
  bool choices(int tokens, int top_k) const {
    return within("top_k", top_k, 1, kMaxChoices, "1 to 2097152") &&
           within("tokens", tokens, 1, kMaxChoices / top_k, "such that tokens * top_k is 1 to 2097152");
  }
};

inline bool check(Check const& c, RouteParams const& p) {
  return c.within("is_int64", p.is_int64, 0, 1, "0 or 1") && c.words("ids", p.ids, p.is_int64 ? 8 : 4) &&
         c.words("offs", p.offs) && c.words("places", p.places) && c.experts(p.experts) &&
         c.within("choices", p.choices, 1, kMaxChoices, "1 to 2097152");
}

inline bool check(Check const& c, GatherParams const& p) {
  return c.vectors("x", p.x) && c.vectors("sorted", p.sorted) && c.words("offs", p.offs) &&
         c.words("places", p.places) && c.columns(p.columns) && c.experts(p.experts) && c.choices(p.tokens, p.top_k) &&
         c.optional_words("scales", p.scales) && c.optional_words("sorted_scales", p.sorted_scales) &&
         c.within("sorted_scales", p.sorted_scales != nullptr, p.scales != nullptr, p.scales != nullptr,
                  "there if scales are, else null") &&
         (p.ldx % kVector == 0 || c.fail("ldx", "a multiple of 8", p.ldx)) &&
         c.within("ldx", p.ldx, p.tokens > 1 ? p.columns : 0, int64_t(1) << 40, "at least columns");
}

inline bool check(Check const& c, CombineParams const& p) {
  return c.vectors("rows", p.rows) && c.vectors("y", p.y) && c.words("weights", p.weights) &&
         c.words("places", p.places) && c.words("rows_end", p.rows_end) && c.columns(p.columns) &&
         c.within("type", p.type, int(FloatType::kF16), int(FloatType::kBf16), "0 (fp16) or 1 (bf16)") &&
         c.choices(p.tokens, p.top_k);
}

inline bool check(Check const& c, SpreadParams const& p) {
  return c.vectors("grad", p.grad) && c.words("weights", p.weights) && c.words("places", p.places) &&
         c.words("rows_end", p.rows_end) && c.optional_words("of_weights", p.of_weights) &&
         (p.of_weights == nullptr || c.vectors("rows", p.rows)) &&
         ((p.of_rows == nullptr && p.of_weights != nullptr) || c.vectors("of_rows", p.of_rows)) &&
         c.columns(p.columns) &&
         c.within("type", p.type, int(FloatType::kF16), int(FloatType::kBf16), "0 (fp16) or 1 (bf16)") &&
         c.choices(p.tokens, p.top_k);
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), Params const& p, dim3 grid, int threads, void* stream, int cluster = 1,
                   int smem_bytes = 0) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = p.pdl_mode == int(PdlMode::kNone) ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

/// Checks a call, and launches it.
template <class Params, class Launch>
int run(char const* name, Params const* params, int device, char* message, int message_bytes, Launch const& launch) {
  Message const place(message, message_bytes);
  if (!check_address(name, params, place)) return 1;
  Check const c{name, place};
  if (!check(c, *params)) return 1;
  if (!c.within("pdl_mode", params->pdl_mode, 0, int(PdlMode::kConstantWeights), "0 to 2")) return 1;
  return run_on_device(name, device, place.text, place.bytes, [&] { return launch(*params); });
}

}  // namespace experts_cu
}  // namespace weightonly

using namespace weightonly;
using namespace weightonly::experts_cu;

int wo_route(RouteParams const* params, int device, void* stream, char* message, int message_bytes) {
  return run("route", params, device, message, message_bytes, [&](RouteParams const& p) {
    static std::atomic<uint64_t> devices_done{0};
    constexpr int kMostBytes = route::Smem::bytes(kMaxGroupedExperts);
    if (cudaError_t const error = allow_shared_memory(route::kernel, kMostBytes, devices_done); error != cudaSuccess) {
      return error;
    }
    int ctas = 1;
    while (ctas < route::kMaxCtas && ctas * route::kCtaChoices < p.choices) ctas *= 2;
    return launch(route::kernel, p, dim3(ctas), route::kThreads, stream, ctas, route::Smem::bytes(p.experts));
  });
}

int wo_gather(GatherParams const* params, int device, void* stream, char* message, int message_bytes) {
  return run("gather", params, device, message, message_bytes, [&](GatherParams const& p) {
    return launch(gather_kernel, p, row_grid(p.columns, p.tokens), kThreads, stream);
  });
}

int wo_combine(CombineParams const* params, int device, void* stream, char* message, int message_bytes) {
  return run("combine", params, device, message, message_bytes, [&](CombineParams const& p) {
    bool const is_f16 = p.type == int(FloatType::kF16);
    auto* const kernel = is_f16 ? combine_kernel<cutlass::half_t> : combine_kernel<cutlass::bfloat16_t>;
    return launch(kernel, p, row_grid(p.columns, p.tokens), kThreads, stream);
  });
}

int wo_spread(SpreadParams const* params, int device, void* stream, char* message, int message_bytes) {
  return run("spread", params, device, message, message_bytes, [&](SpreadParams const& p) {
    bool const is_f16 = p.type == int(FloatType::kF16);
    auto* const kernel = is_f16 ? spread_kernel<cutlass::half_t> : spread_kernel<cutlass::bfloat16_t>;
    return launch(kernel, p, dim3((p.tokens * p.top_k + kWarps - 1) / kWarps), kThreads, stream);
  });
}
