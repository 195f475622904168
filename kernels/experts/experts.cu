// Small kernels around the two grouped products of a layer of experts: see experts.h.
#include "kernels/experts/experts.h"

#include <climits>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_ext/epilogue/activation.h"
#include "kernels/api/on_device.h"
#include "kernels/convert/conversions.h"

namespace weightonly {
namespace experts_cu {

constexpr int kMaxExperts = 512;
constexpr int kVector = 8;  // elements of a 16-byte load
constexpr int kThreads = 256;

/// What every kernel does first: its operands are written by the kernel in front.
__device__ void wait_for_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// ---- Routing ----
//
// Every CTA sorts all choices by itself: there are few, and the rows that it gathers follow from them. A thread has one
// expert and looks at every choice, so that the order within an expert is that of the choices.

constexpr int kRouteThreads = kMaxExperts;

/// Prefix sums of one number of each thread of a CTA: those of the threads before. sums: [kRouteThreads / 32].
__device__ int sum_before(int value, int* sums) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    int const before = __shfl_up_sync(0xffffffff, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = sum - value;
  for (int w = 0; w < warp; ++w) before += sums[w];
  return before;
}

__global__ void __launch_bounds__(kRouteThreads) route_kernel(__grid_constant__ RouteParams const p) {
  __shared__ alignas(16) int16_t experts[kMaxChoices];  // of each choice; p.experts for none
  __shared__ int16_t sources[kMaxChoices];  // of each sorted row: its choice
  __shared__ int sums[kRouteThreads / 32];
  wait_for_kernel_in_front();
  int const choices = p.tokens * p.top_k, padded = (choices + 7) / 8 * 8;
  for (int i = threadIdx.x; i < padded; i += kRouteThreads) {
    int64_t id = -1;
    if (i < choices) id = p.is_int64 ? static_cast<int64_t const*>(p.ids)[i] : static_cast<int32_t const*>(p.ids)[i];
    bool const is_expert = id >= 0 && id < p.experts;
    experts[i] = int16_t(is_expert ? id : p.experts);
  }
  __syncthreads();
  int const expert = threadIdx.x;
  auto const for_each_choice = [&](auto const& visit) {
    for (int i = 0; i < padded; i += 8) {
      uint4 const eight = *reinterpret_cast<uint4 const*>(experts + i);
      uint32_t const words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (int(words[j / 2] >> (16 * (j % 2)) & 0xffff) == expert) visit(i + j);
      }
    }
  };
  int count = 0;
  if (expert < p.experts) for_each_choice([&](int) { ++count; });
  int row = sum_before(count, sums);
  if (blockIdx.x == 0 && expert < p.experts) p.offs[expert] = row + count;
  auto const place = [&](int choice) {
    if (choice >= choices) return;
    sources[row] = int16_t(choice);
    if (blockIdx.x == 0) p.places[choice] = row;
    ++row;
  };
  if (expert < p.experts) for_each_choice(place);
  __syncthreads();
  // Choices of no expert come last, in their order: one thread places them.
  if (expert == kRouteThreads - 1) {
    row = 0;
    for (int i = 0; i < choices; ++i) row += experts[i] < p.experts;
    for (int i = 0; i < choices; ++i) {
      if (experts[i] == p.experts) place(i);
    }
  }
  __syncthreads();
  auto const* const x = static_cast<uint16_t const*>(p.x);
  auto* const sorted = static_cast<uint16_t*>(p.sorted);
  for (int i = blockIdx.x; i < choices; i += gridDim.x) {
    auto const* const source = reinterpret_cast<uint4 const*>(x + int64_t(sources[i] / p.top_k) * p.ldx);
    auto* const target = reinterpret_cast<uint4*>(sorted + int64_t(i) * p.columns);
    for (int v = threadIdx.x; v < p.columns / kVector; v += kRouteThreads) target[v] = source[v];
  }
}

// ---- Between the products ----

template <class Element>
struct alignas(16) Vector {
  Element values[kVector];
};

template <class Element>
__global__ void __launch_bounds__(kThreads) gate_kernel(__grid_constant__ GateParams const p) {
  wait_for_kernel_in_front();
  int const vectors = p.columns / kVector;  // of a row of y
  int const v = blockIdx.x * kThreads + threadIdx.x;
  if (v >= vectors) return;
  for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
    auto const* const source = static_cast<Vector<Element> const*>(p.gate_up) + int64_t(row) * 2 * vectors + v;
    Vector<Element> const gate = source[0], up = source[vectors];
    float gates[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) gates[i] = float(gate.values[i]);
    activate(gates, p.activation);
    Vector<Element> y;
#pragma unroll
    for (int i = 0; i < kVector; ++i) y.values[i] = Element(float(Element(gates[i])) * float(up.values[i]));
    static_cast<Vector<Element>*>(p.y)[int64_t(row) * vectors + v] = y;
  }
}

// ---- The sum over experts ----

template <class Element>
__global__ void __launch_bounds__(kThreads) combine_kernel(__grid_constant__ CombineParams const p) {
  wait_for_kernel_in_front();
  int const vectors = p.columns / kVector;
  int const v = blockIdx.x * kThreads + threadIdx.x;
  if (v >= vectors) return;
  int const end = p.offs[p.experts - 1];
  for (int token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    float sums[kVector] = {};
    for (int j = 0; j < p.top_k; ++j) {
      int const row = p.places[token * p.top_k + j];
      if (row >= end) continue;
      float const weight = p.weights[token * p.top_k + j];
      Vector<Element> const y = static_cast<Vector<Element> const*>(p.rows)[int64_t(row) * vectors + v];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += weight * float(y.values[i]);
    }
    Vector<Element> result;
#pragma unroll
    for (int i = 0; i < kVector; ++i) result.values[i] = Element(sums[i]);
    static_cast<Vector<Element>*>(p.y)[int64_t(token) * vectors + v] = result;
  }
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
  bool words(char const* field, void const* address) const {
    bool const is_right = address != nullptr && reinterpret_cast<uintptr_t>(address) % 4 == 0;
    return is_right || fail(field, "a 4-byte aligned address", (long long)address);
  }
  bool within(char const* field, int64_t value, int64_t least, int64_t most, char const* expected) const {
    return (value >= least && value <= most) || fail(field, expected, value);
  }
  bool columns(int columns) const {
    return (columns >= kVector && columns % kVector == 0 && columns <= INT_MAX / 2) ||
           fail("columns", "a multiple of 8", columns);
  }
  bool type(int type) const {
    return within("type", type, int(FloatType::kF16), int(FloatType::kBf16), "0 (fp16) or 1 (bf16)");
  }
};

inline bool check(Check const& c, RouteParams const& p) {
  return c.words("ids", p.ids) && c.vectors("x", p.x) && c.vectors("sorted", p.sorted) && c.words("offs", p.offs) &&
         c.words("places", p.places) && c.columns(p.columns) &&
         c.within("experts", p.experts, 1, kMaxExperts, "1 to 512") &&
         c.within("top_k", p.top_k, 1, kMaxChoices, "1 to 4096") &&
         c.within("tokens", p.tokens, 1, kMaxChoices / p.top_k, "such that tokens * top_k is 1 to 4096") &&
         c.within("is_int64", p.is_int64, 0, 1, "0 or 1") &&
         (p.ldx % kVector == 0 || c.fail("ldx", "a multiple of 8", p.ldx)) &&
         c.within("ldx", p.ldx, p.tokens > 1 ? p.columns : 0, int64_t(1) << 46, "at least columns");
}

inline bool check(Check const& c, GateParams const& p) {
  return c.vectors("gate_up", p.gate_up) && c.vectors("y", p.y) && c.columns(p.columns) && c.type(p.type) &&
         c.within("rows", p.rows, 1, INT_MAX, "at least 1") &&
         c.within("activation", p.activation, 0, int(Activation::kSilu), "0 to 3");
}

inline bool check(Check const& c, CombineParams const& p) {
  return c.vectors("rows", p.rows) && c.vectors("y", p.y) && c.words("weights", p.weights) &&
         c.words("places", p.places) && c.words("offs", p.offs) && c.columns(p.columns) && c.type(p.type) &&
         c.within("experts", p.experts, 1, kMaxExperts, "1 to 512") &&
         c.within("top_k", p.top_k, 1, INT_MAX, "at least 1") &&
         c.within("tokens", p.tokens, 1, INT_MAX / p.top_k, "1 or more, with tokens * top_k in 32 bits");
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), Params const& p, dim3 grid, int threads, void* stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = p.pdl_mode == int(PdlMode::kNone) ? 0 : 1;
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
    constexpr int kMaxCtas = 264;
    int const choices = p.tokens * p.top_k;
    return launch(route_kernel, p, dim3(choices < kMaxCtas ? choices : kMaxCtas), kRouteThreads, stream);
  });
}

int wo_gate(GateParams const* params, int device, void* stream, char* message, int message_bytes) {
  return run("gate", params, device, message, message_bytes, [&](GateParams const& p) {
    bool const is_f16 = p.type == int(FloatType::kF16);
    auto* const kernel = is_f16 ? gate_kernel<cutlass::half_t> : gate_kernel<cutlass::bfloat16_t>;
    return launch(kernel, p, row_grid(p.columns, p.rows), kThreads, stream);
  });
}

int wo_combine(CombineParams const* params, int device, void* stream, char* message, int message_bytes) {
  return run("combine", params, device, message, message_bytes, [&](CombineParams const& p) {
    bool const is_f16 = p.type == int(FloatType::kF16);
    auto* const kernel = is_f16 ? combine_kernel<cutlass::half_t> : combine_kernel<cutlass::bfloat16_t>;
    return launch(kernel, p, row_grid(p.columns, p.tokens), kThreads, stream);
  });
}
