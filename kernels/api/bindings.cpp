// The Python binding of api.h: it takes addresses and integers, and knows nothing of PyTorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/api/api.h"
#include "kernels/convert/dequantize.h"
#include "kernels/convert/conversions.h"
#include "kernels/experts/experts.h"
#include "kernels/parallel/sum_over_ranks.h"

namespace {

using weightonly::GemmParams;
using weightonly::GroupedGemmParams;
using weightonly::PdlMode;

/// What set_pdl_mode set. Each launch reads it, so that it holds for plans that exist already.
std::atomic<int> current_pdl_mode{int(PdlMode::kPrefetch)};

using Failure = char[512];

void throw_if(int status, Failure const& message) {
  if (status != 0) throw std::runtime_error(message);
}

/// A kernel with all that stays the same from call to call. `launch` is the host's work of every decode step, and takes
/// as few arguments as it can.
class Plan {
 public:
  /// is_tail: the launch in front of this one belongs to the same call. sizes: GemmParams less what `launch` gives.
  Plan(int kernel, int device, bool is_tail, GemmParams const& sizes)
      : kernel_(kernel), device_(device), is_tail_(is_tail), sizes_(sizes) {}

  void launch(uintptr_t x, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t y,
              uintptr_t partials, int64_t ldx, int64_t ldy, uintptr_t stream, bool scales_in_place) const {
    GemmParams params = sizes_;
    fill(params, x, weight, scales, zeros, bias, y, partials, ldx, ldy, scales_in_place);
    Failure message;
    throw_if(wo_gemm(kernel_, &params, device_, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
  }

  /// Of a kernel that takes x in 8 bits.
  void launch_fp8(uintptr_t x, uintptr_t x_scales, uintptr_t weight, uintptr_t scales, uintptr_t bias, uintptr_t y,
                  int64_t ldx, int64_t ldy, uintptr_t stream, bool scales_in_place) const {
    weightonly::Fp8GemmParams params = {sizes_, reinterpret_cast<float const*>(x_scales)};
    fill(params, x, weight, scales, 0, bias, y, 0, ldx, ldy, scales_in_place);
    Failure message;
    throw_if(wo_gemm_fp8(kernel_, &params, device_, reinterpret_cast<void*>(stream), message, sizeof(message)),
             message);
  }

 private:
  void fill(GemmParams& params, uintptr_t x, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t bias,
            uintptr_t y, uintptr_t partials, int64_t ldx, int64_t ldy, bool scales_in_place) const {
    params.x = reinterpret_cast<void const*>(x);
    params.weight = reinterpret_cast<void const*>(weight);
    params.scales = reinterpret_cast<void const*>(scales);
    params.zeros = reinterpret_cast<void const*>(zeros);
    params.bias = reinterpret_cast<void const*>(bias);
    params.y = reinterpret_cast<void*>(y);
    params.partials = reinterpret_cast<float*>(partials);
    params.ldx = ldx;
    params.ldy = ldy;
    params.pdl_mode = pdl_mode(scales_in_place);
  }

  int pdl_mode(bool scales_in_place) const {
    // The weight of a tail was complete before the launch in front of it, which is of the same call.
    if (is_tail_) return int(PdlMode::kConstantWeights);
    int const mode = current_pdl_mode.load(std::memory_order_relaxed);
    // Scales that are not the caller's own are written by the kernel in front of this one, which copies them.
    return scales_in_place ? mode : std::min(mode, int(PdlMode::kPrefetch));
  }

  int kernel_;
  int device_;
  bool is_tail_;
  GemmParams sizes_;
};

Plan make_plan(int kernel, int device, bool is_tail, int m, int n, int k, int n_padded, int k_padded, int group_size,
               int64_t ld_scales, int split_k, uint16_t clusters, int activation, std::pair<uint8_t, uint8_t> order) {
  GemmParams sizes = {};
  sizes.m = m;
  sizes.n = n;
  sizes.k = k;
  sizes.n_padded = n_padded;
  sizes.k_padded = k_padded;
  sizes.group_size = group_size;
  sizes.ld_scales = ld_scales;
  sizes.split_k = split_k;
  sizes.clusters = clusters;
  std::tie(sizes.order_split, sizes.order_warpgroups) = order;
  sizes.activation = activation;
  return Plan(kernel, device, is_tail, sizes);
}

/// What a kernel may do that needs the results of the one in front: start.
int overlap() {
  return std::min(current_pdl_mode.load(std::memory_order_relaxed), int(PdlMode::kPrefetch));
}

/// A grouped kernel with all that stays the same from call to call, as Plan has it for one product.
class GroupedPlan {
 public:
  GroupedPlan(int kernel, int device, int experts, int m, int n, int k, int n_padded, int k_padded, int group_size,
              int64_t ld_scales, uint16_t clusters, bool is_gated, std::tuple<int, float, float, float> const& gate,
              int top_k, bool is_int64, bool is_in_layer)
      : kernel_(kernel), device_(device), fixed_{} {
    fixed_.gemm.m = m;
    fixed_.gemm.n = n;
    fixed_.gemm.k = k;
    fixed_.gemm.n_padded = n_padded;
    fixed_.gemm.k_padded = k_padded;
    fixed_.gemm.group_size = group_size;
    fixed_.gemm.ld_scales = ld_scales;
    fixed_.gemm.split_k = 1;
    fixed_.gemm.clusters = clusters;
    fixed_.experts = experts;
    fixed_.is_gated = is_gated;
    std::tie(fixed_.gate.function, fixed_.gate.alpha, fixed_.gate.limit, fixed_.gate.shift) = gate;
    fixed_.is_in_layer = is_in_layer;
    fixed_.top_k = top_k;
    fixed_.is_int64 = is_int64;
  }

  void launch(uintptr_t x, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t y,
              uintptr_t offs, int64_t ldx, int64_t ldy, uintptr_t stream, uintptr_t x_scales) const {
    weightonly::Fp8GroupedGemmParams params = {fixed_, reinterpret_cast<float const*>(x_scales)};
    params.offs = reinterpret_cast<int32_t const*>(offs);
    fill(params, x, weight, scales, zeros, bias, y, ldx, ldy);
    x_scales == 0 ? enqueue<wo_grouped_gemm>(&params, stream) : enqueue<wo_grouped_gemm_fp8>(&params, stream);
  }

  void launch_choices(uintptr_t x, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t y,
                      uintptr_t ids, uintptr_t places, uintptr_t rows, int64_t ldx, int64_t ldy,
                      uintptr_t stream) const {
    GroupedGemmParams params = fixed_;
    params.ids = reinterpret_cast<void const*>(ids);
    params.places = reinterpret_cast<int32_t*>(places);
    params.rows = reinterpret_cast<int32_t*>(rows);
    fill(params, x, weight, scales, zeros, bias, y, ldx, ldy);
    enqueue<wo_grouped_gemm>(&params, stream);
  }

 private:
  static void fill(GroupedGemmParams& params, uintptr_t x, uintptr_t weight, uintptr_t scales, uintptr_t zeros,
                   uintptr_t bias, uintptr_t y, int64_t ldx, int64_t ldy) {
    params.gemm.x = reinterpret_cast<void const*>(x);
    params.gemm.weight = reinterpret_cast<void const*>(weight);
    params.gemm.scales = reinterpret_cast<void const*>(scales);
    params.gemm.zeros = reinterpret_cast<void const*>(zeros);
    params.gemm.bias = reinterpret_cast<void const*>(bias);
    params.gemm.y = reinterpret_cast<void*>(y);
    params.gemm.ldx = ldx;
    params.gemm.ldy = ldy;
    // What a layer launches after its first kernel starts early all the same, as a tail does.
    params.gemm.pdl_mode = params.is_in_layer ? int(PdlMode::kPrefetch) : overlap();
  }

  template <auto kLaunch, class Params>
  void enqueue(Params const* params, uintptr_t stream) const {
    Failure message;
    throw_if(kLaunch(kernel_, params, device_, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
  }

  int kernel_;
  int device_;
  GroupedGemmParams fixed_;
};

void awq_dequantize(int device, int type, int path, int k, int n, int groups, uintptr_t qweight, uintptr_t scales,
                    uintptr_t qzeros, uintptr_t w, uintptr_t stream) {
  weightonly::AwqDequantizeParams params = {};
  params.qweight = reinterpret_cast<void const*>(qweight);
  params.scales = reinterpret_cast<void const*>(scales);
  params.qzeros = reinterpret_cast<void const*>(qzeros);
  params.w = reinterpret_cast<void*>(w);
  params.k = k;
  params.n = n;
  params.groups = groups;
  params.type = type;
  params.path = path;
  Failure message;
  throw_if(wo_awq_dequantize(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

/// convert: wo_quantize_4bit or wo_dequantize_4bit.
template <auto convert>
void blocks_4bit(int device, int type, int64_t count, int blocksize, std::array<float, 16> const& codebook, uintptr_t w,
                 uintptr_t packed, uintptr_t absmax, uintptr_t stream) {
  weightonly::Blocks4bitParams params = {};
  params.w = reinterpret_cast<void*>(w);
  params.packed = reinterpret_cast<uint8_t*>(packed);
  params.absmax = reinterpret_cast<float*>(absmax);
  params.count = count;
  params.blocksize = blocksize;
  params.type = type;
  std::copy(codebook.begin(), codebook.end(), params.codebook);
  Failure message;
  throw_if(convert(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void quantize_activations(int device, int type, int m, int k, uintptr_t x, int64_t ldx, uintptr_t x8,
                          uintptr_t x_scales, uintptr_t rows_end, uintptr_t stream) {
  weightonly::QuantizeActivationsParams params = {};
  params.x = reinterpret_cast<void const*>(x);
  params.x8 = reinterpret_cast<void*>(x8);
  params.x_scales = reinterpret_cast<float*>(x_scales);
  params.ldx = ldx;
  params.m = m;
  params.k = k;
  params.type = type;
  params.rows_end = reinterpret_cast<int32_t const*>(rows_end);
  Failure message;
  throw_if(wo_quantize_activations(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)),
           message);
}

void dequantize(int device, int bits, int type, int layout, int k, int k_padded, int n_begin, int n_end, int n_padded,
                int group_size, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t codebook, uintptr_t w,
                int64_t ld_scales, int64_t ldw, uintptr_t stream, bool is_float) {
  weightonly::DequantizeParams params = {};
  params.weight = reinterpret_cast<void const*>(weight);
  params.scales = reinterpret_cast<void const*>(scales);
  params.zeros = reinterpret_cast<void const*>(zeros);
  params.codebook = reinterpret_cast<float const*>(codebook);
  params.w = reinterpret_cast<void*>(w);
  params.ld_scales = ld_scales;
  params.ldw = ldw;
  params.k = k;
  params.k_padded = k_padded;
  params.n_begin = n_begin;
  params.n_end = n_end;
  params.n_padded = n_padded;
  params.group_size = group_size;
  params.bits = bits;
  params.type = type;
  params.layout = layout;
  params.is_float = is_float;
  Failure message;
  throw_if(wo_dequantize(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void route(int device, int choices, int experts, bool is_int64, uintptr_t ids, uintptr_t offs, uintptr_t places,
           uintptr_t stream) {
  weightonly::RouteParams params = {};
  params.ids = reinterpret_cast<void const*>(ids);
  params.offs = reinterpret_cast<int32_t*>(offs);
  params.places = reinterpret_cast<int32_t*>(places);
  params.choices = choices;
  params.experts = experts;
  params.is_int64 = is_int64;
  params.pdl_mode = overlap();
  Failure message;
  throw_if(wo_route(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void gather(int device, int tokens, int top_k, int experts, int columns, uintptr_t x, int64_t ldx, uintptr_t scales,
            uintptr_t offs, uintptr_t places, uintptr_t sorted, uintptr_t sorted_scales, uintptr_t stream) {
  weightonly::GatherParams params = {};
  params.x = reinterpret_cast<void const*>(x);
  params.sorted = reinterpret_cast<void*>(sorted);
  params.offs = reinterpret_cast<int32_t const*>(offs);
  params.places = reinterpret_cast<int32_t const*>(places);
  params.ldx = ldx;
  params.tokens = tokens;
  params.top_k = top_k;
  params.experts = experts;
  params.columns = columns;
  params.pdl_mode = int(PdlMode::kPrefetch);
  params.scales = reinterpret_cast<float const*>(scales);
  params.sorted_scales = reinterpret_cast<float*>(sorted_scales);
  Failure message;
  throw_if(wo_gather(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void combine(int device, int type, int tokens, int top_k, int columns, uintptr_t rows, uintptr_t weights,
             uintptr_t places, uintptr_t rows_end, uintptr_t y, uintptr_t stream) {
  weightonly::CombineParams params = {};
  params.rows = reinterpret_cast<void const*>(rows);
  params.weights = reinterpret_cast<float const*>(weights);
  params.places = reinterpret_cast<int32_t const*>(places);
  params.rows_end = reinterpret_cast<int32_t const*>(rows_end);
  params.y = reinterpret_cast<void*>(y);
  params.tokens = tokens;
  params.top_k = top_k;
  params.columns = columns;
  params.type = type;
  params.pdl_mode = int(PdlMode::kPrefetch);
  Failure message;
  throw_if(wo_combine(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void spread(int device, int type, int tokens, int top_k, int columns, uintptr_t grad, uintptr_t rows, uintptr_t weights,
            uintptr_t places, uintptr_t rows_end, uintptr_t of_rows, uintptr_t of_weights, uintptr_t stream) {
  weightonly::SpreadParams params = {};
  params.grad = reinterpret_cast<void const*>(grad);
  params.rows = reinterpret_cast<void const*>(rows);
  params.weights = reinterpret_cast<float const*>(weights);
  params.places = reinterpret_cast<int32_t const*>(places);
  params.rows_end = reinterpret_cast<int32_t const*>(rows_end);
  params.of_rows = reinterpret_cast<void*>(of_rows);
  params.of_weights = reinterpret_cast<float*>(of_weights);
  params.tokens = tokens;
  params.top_k = top_k;
  params.columns = columns;
  params.type = type;
  params.pdl_mode = int(PdlMode::kPrefetch);
  Failure message;
  throw_if(wo_spread(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void sum_over_ranks(int device, int type, int64_t count, uintptr_t y, std::vector<uintptr_t> const& memory, int rank,
                    int64_t capacity, uintptr_t state, uintptr_t stream) {
  weightonly::SumOverRanksParams params = {};
  params.y = reinterpret_cast<void*>(y);
  params.ranks = int(std::min<size_t>(memory.size(), weightonly::kMaxRanks + 1));
  for (int i = 0; i < std::min(params.ranks, weightonly::kMaxRanks); ++i) {
    params.memory[i] = reinterpret_cast<void*>(memory[i]);
  }
  params.rank = rank;
  params.capacity = capacity;
  params.state = reinterpret_cast<uint32_t*>(state);
  params.count = count;
  params.type = type;
  params.pdl_mode = overlap();
  Failure message;
  throw_if(wo_sum_over_ranks(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

template <auto count, auto name>
std::vector<std::string> names() {
  std::vector<std::string> found;
  for (int i = 0; i < count(); ++i) found.emplace_back(name(i));
  return found;
}

}  // namespace

/// Throws unless the library beside this module is of the same build: it reads the structs that are filled here.
void check_library() {
  int const expected[] = {int(sizeof(GemmParams)),
                          int(sizeof(weightonly::AwqDequantizeParams)),
                          int(sizeof(weightonly::Blocks4bitParams)),
                          int(sizeof(weightonly::DequantizeParams)),
                          int(sizeof(GroupedGemmParams)),
                          int(sizeof(weightonly::RouteParams)),
                          int(sizeof(weightonly::GatherParams)),
                          int(sizeof(weightonly::CombineParams)),
                          int(sizeof(weightonly::Fp8GemmParams)),
                          int(sizeof(weightonly::QuantizeActivationsParams)),
                          int(sizeof(weightonly::Fp8GroupedGemmParams)),
                          int(sizeof(weightonly::SpreadParams))};
  bool same = wo_abi_version() == WEIGHTONLY_ABI_VERSION;
  for (int i = 0; same && i < 12; ++i) same = wo_struct_bytes(i) == expected[i];
  if (!same)
    throw pybind11::import_error("weightonly._C and libweightonly_kernels.so are of different builds (interface " +
                                 std::to_string(WEIGHTONLY_ABI_VERSION) + " and " + std::to_string(wo_abi_version()) +
                                 "): build both again, with `make kernels binding` or pip install");
}

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  check_library();
  module.doc() = "Compiled kernels of weightonly. Internal: use weightonly.gemm.";
  module.def("kernel_names", &names<wo_kernel_count, wo_kernel_name>,
             "Names of all compiled kernels but grouped ones. A kernel's number is its index in this list.");
  module.def("grouped_kernel_names", &names<wo_grouped_kernel_count, wo_grouped_kernel_name>,
             "Names of all grouped kernels. A kernel's number is its index in this list.");
  module.def("archs", [] { return std::string(wo_archs()); }, "Architectures of the build, e.g. '80,90a'.");
  module.def(
      "set_pdl_mode", [](int mode) { current_pdl_mode.store(mode, std::memory_order_relaxed); }, py::arg("mode"),
      "What later launches may do before the kernel in front of them has ended: enum PdlMode of gemm_params.h.");
  module.def("awq_dequantize", &awq_dequantize, py::arg("device"), py::arg("type"), py::arg("path"), py::arg("k"),
             py::arg("n"), py::arg("groups"), py::arg("qweight"), py::arg("scales"), py::arg("qzeros"), py::arg("w"),
             py::arg("stream"),
             "Enqueues kernels/convert/awq_dequantize.cu; the numbers of type and path are conversions.h's.");
  auto const def_blocks_4bit = [&](char const* name, auto function, char const* doc) {
    module.def(name, function, py::arg("device"), py::arg("type"), py::arg("count"), py::arg("blocksize"),
               py::arg("codebook"), py::arg("w"), py::arg("packed"), py::arg("absmax"), py::arg("stream"), doc);
  };
  def_blocks_4bit("quantize_4bit", &blocks_4bit<wo_quantize_4bit>, "Enqueues kernels/convert/quantize_4bit.cu.");
  def_blocks_4bit("dequantize_4bit", &blocks_4bit<wo_dequantize_4bit>, "Enqueues kernels/convert/dequantize_4bit.cu.");
  module.def("dequantize", &dequantize, py::kw_only(), py::arg("device"), py::arg("bits"), py::arg("type"),
             py::arg("layout"), py::arg("k"), py::arg("k_padded"), py::arg("n_begin"), py::arg("n_end"),
             py::arg("n_padded"), py::arg("group_size"), py::arg("weight"), py::arg("scales"), py::arg("zeros"),
             py::arg("codebook"), py::arg("w"), py::arg("ld_scales"), py::arg("ldw"), py::arg("stream"),
             py::arg("is_float") = false,
             "Enqueues the conversion of some columns of a packed weight: struct DequantizeParams of dequantize.h.");
  module.def("quantize_activations", &quantize_activations, py::arg("device"), py::arg("type"), py::arg("m"),
             py::arg("k"), py::arg("x"), py::arg("ldx"), py::arg("x8"), py::arg("x_scales"), py::arg("rows_end"),
             py::arg("stream"), "Enqueues kernels/convert/quantize_activations.cu.");
  module.def("dequantizes_groups_of_16", [] { return wo_dequantizes_groups_of_16() != 0; });
  module.def("dequantizes_fp8", [] { return wo_dequantizes_fp8() != 0; });
  module.def("route", &route, "Enqueues wo_route of kernels/experts/experts.h.");
  module.def("gather", &gather, "Enqueues wo_gather of kernels/experts/experts.h.");
  module.def("combine", &combine, "Enqueues wo_combine of kernels/experts/experts.h.");
  module.def("spread", &spread, "Enqueues wo_spread of kernels/experts/experts.h.");
  module.def("sum_over_ranks", &sum_over_ranks, "Enqueues wo_sum_over_ranks of kernels/parallel/sum_over_ranks.h.");
  py::class_<Plan>(module, "Plan")
      .def(py::init(&make_plan), py::kw_only(), py::arg("kernel"), py::arg("device"), py::arg("is_tail"), py::arg("m"),
           py::arg("n"), py::arg("k"), py::arg("n_padded"), py::arg("k_padded"), py::arg("group_size"),
           py::arg("ld_scales"), py::arg("split_k"), py::arg("clusters"), py::arg("activation"),
           py::arg("order") = std::make_pair(0, 0),
           "A kernel by its number, and the fields of GemmParams (gemm_params.h) that hold for all its launches.")
      .def(
          "launch", &Plan::launch,
          "Enqueues the kernel. Positional, as that is quicker: the addresses of x, weight, scales, zeros, bias, y and "
          "partials, the row strides of x and y in elements, the stream, and whether scales and zeros are the "
          "caller's own, not copies that the kernel in front of this one makes.")
      .def("launch_fp8", &Plan::launch_fp8,
           "The same of a kernel that takes x in 8 bits: x_scales after x, no zeros and no partials.");
  py::class_<GroupedPlan>(module, "GroupedPlan")
      .def(py::init<int, int, int, int, int, int, int, int, int, int64_t, uint16_t, bool,
                    std::tuple<int, float, float, float> const&, int, bool, bool>(),
           py::kw_only(), py::arg("kernel"), py::arg("device"), py::arg("experts"), py::arg("m"), py::arg("n"),
           py::arg("k"), py::arg("n_padded"), py::arg("k_padded"), py::arg("group_size"), py::arg("ld_scales"),
           py::arg("clusters"), py::arg("is_gated") = false, py::arg("gate") = std::make_tuple(0, 1.f, INFINITY, 0.f),
           py::arg("top_k") = 0, py::arg("is_int64") = false, py::arg("is_in_layer") = false,
           "A grouped kernel by its number, and the fields of GroupedGemmParams that hold for all its launches.")
      .def("launch", &GroupedPlan::launch,
           "Enqueues the kernel. Positional: the addresses of x, weight, scales, zeros, bias, y and offs, the row "
           "strides of x and y in elements, the stream, and the address of x_scales, 0 for x in 16 bits.")
      .def("launch_choices", &GroupedPlan::launch_choices,
           "The same of a kernel that sorts: ids, places and rows in the place of offs.");
}
