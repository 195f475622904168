// The Python door: addresses and integers in, nothing of PyTorch. See api.h for what is behind it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/api.h"
#include "kernels/dequantize.h"
#include "kernels/conversions.h"

namespace {

using weightonly::GemmParams;
using weightonly::Overlap;

/// How launches overlap (GemmParams::overlap); read by each launch, so that no plan is out of date.
std::atomic<int> launch_overlap{int(Overlap::kPrefetch)};

using Failure = char[512];

void throw_if(int status, Failure const& message) {
  if (status != 0) throw std::runtime_error(message);
}

/// One kernel with all sizes of a problem: what stays the same from call to call. Calling it with this call's addresses
/// is the whole host-side work of a decode step, so it takes as few arguments as it can.
class Plan {
 public:
  Plan(int kernel, int device, int m, int n, int k, int n_padded, int k_padded, int group_size, int split_k,
       int clusters, int activation, bool follows)
      : kernel_(kernel), device_(device), follows_(follows) {
    params_.m = m;
    params_.n = n;
    params_.k = k;
    params_.n_padded = n_padded;
    params_.k_padded = k_padded;
    params_.group_size = group_size;
    params_.split_k = split_k;
    params_.clusters = clusters;
    params_.activation = activation;
  }

  void launch(uintptr_t x, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t y,
              uintptr_t partials, int64_t ldx, int64_t ldy, int64_t ld_scales, uintptr_t stream,
              bool scales_in_place) const {
    GemmParams params = params_;
    params.x = reinterpret_cast<void const*>(x);
    params.weight = reinterpret_cast<void const*>(weight);
    params.scales = reinterpret_cast<void const*>(scales);
    params.zeros = reinterpret_cast<void const*>(zeros);
    params.bias = reinterpret_cast<void const*>(bias);
    params.y = reinterpret_cast<void*>(y);
    params.partials = reinterpret_cast<float*>(partials);
    params.ldx = ldx;
    params.ldy = ldy;
    params.ld_scales = ld_scales;
    params.overlap = launch_overlap.load(std::memory_order_relaxed);
    if (follows_) {
      // What a call's second launch reads was there before the first, which starts it.
      params.overlap = int(Overlap::kConstantWeights);
    } else if (!scales_in_place) {
      // The kernel before this one copies them.
      params.overlap = std::min(params.overlap, int(Overlap::kPrefetch));
    }
    Failure message;
    throw_if(wo_gemm(kernel_, &params, device_, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
  }

 private:
  int kernel_;
  int device_;
  bool follows_;  // the launch before it is of the same call
  GemmParams params_ = {};
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

/// wo_quantize_4bit or wo_dequantize_4bit.
template <auto convert>
void blocks_4bit(int device, int type, int64_t count, int blocksize, std::array<float, 16> const& table, uintptr_t w,
                 uintptr_t packed, uintptr_t absmax, uintptr_t stream) {
  weightonly::Blocks4bitParams params = {};
  params.w = reinterpret_cast<void*>(w);
  params.packed = reinterpret_cast<uint8_t*>(packed);
  params.absmax = reinterpret_cast<float*>(absmax);
  params.count = count;
  params.blocksize = blocksize;
  params.type = type;
  std::copy(table.begin(), table.end(), params.table);
  Failure message;
  throw_if(convert(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

void dequantize(int device, int bits, int type, int layout, int k, int k_padded, int n_begin, int n_end, int n_padded,
                int group_size, uintptr_t weight, uintptr_t scales, uintptr_t zeros, uintptr_t table, uintptr_t w,
                int64_t ld_scales, int64_t ldw, uintptr_t stream) {
  weightonly::DequantizeParams params = {};
  params.weight = reinterpret_cast<void const*>(weight);
  params.scales = reinterpret_cast<void const*>(scales);
  params.zeros = reinterpret_cast<void const*>(zeros);
  params.table = reinterpret_cast<float const*>(table);
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
  Failure message;
  throw_if(wo_dequantize(&params, device, reinterpret_cast<void*>(stream), message, sizeof(message)), message);
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (int i = 0; i < wo_kernel_count(); ++i) names.emplace_back(wo_kernel_name(i));
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "Compiled kernels of weightonly. Internal: use weightonly.gemm.";
  module.def("kernel_names", &kernel_names, "Names of all compiled kernels; a kernel's number is its place here.");
  module.def("archs", [] { return std::string(wo_archs()); }, "Architectures of the build, e.g. '80,90a'.");
  module.def(
      "set_launch_overlap", [](int overlap) { launch_overlap.store(overlap, std::memory_order_relaxed); },
      py::arg("overlap"),
      "How later launches overlap with the kernel before them in the stream: enum Overlap of params.h.");
  module.def("awq_dequantize", &awq_dequantize, py::arg("device"), py::arg("type"), py::arg("path"), py::arg("k"),
             py::arg("n"), py::arg("groups"), py::arg("qweight"), py::arg("scales"), py::arg("qzeros"), py::arg("w"),
             py::arg("stream"),
             "Enqueues kernels/awq_dequantize.cu; the numbers of type and path are conversions.h's.");
  auto const def_blocks_4bit = [&](char const* name, auto function, char const* doc) {
    module.def(name, function, py::arg("device"), py::arg("type"), py::arg("count"), py::arg("blocksize"),
               py::arg("table"), py::arg("w"), py::arg("packed"), py::arg("absmax"), py::arg("stream"), doc);
  };
  def_blocks_4bit("quantize_4bit", &blocks_4bit<wo_quantize_4bit>, "Enqueues kernels/quantize_4bit.cu.");
  def_blocks_4bit("dequantize_4bit", &blocks_4bit<wo_dequantize_4bit>, "Enqueues kernels/dequantize_4bit.cu.");
  module.def("dequantize", &dequantize, py::kw_only(), py::arg("device"), py::arg("bits"), py::arg("type"),
             py::arg("layout"), py::arg("k"), py::arg("k_padded"), py::arg("n_begin"), py::arg("n_end"),
             py::arg("n_padded"), py::arg("group_size"), py::arg("weight"), py::arg("scales"), py::arg("zeros"),
             py::arg("table"), py::arg("w"), py::arg("ld_scales"), py::arg("ldw"), py::arg("stream"),
             "Enqueues the conversion of some columns of a packed weight: struct DequantizeParams of dequantize.h.");
  py::class_<Plan>(module, "Plan")
      .def(py::init<int, int, int, int, int, int, int, int, int, int, int, bool>(), py::arg("kernel"),
           py::arg("device"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("n_padded"), py::arg("k_padded"),
           py::arg("group_size"), py::arg("split_k"), py::arg("clusters"), py::arg("activation"), py::arg("follows"))
      .def("launch", &Plan::launch,
           "Enqueues the kernel: addresses of x, weight, scales, zeros, bias, y, partials, "
           "row strides of x, y and scales in elements, stream, whether scales and zeros are the caller's own.");
}
