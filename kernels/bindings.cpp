// The Python door: addresses and integers in, nothing of PyTorch. See api.h for what is behind it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/api.h"

namespace {

using weightonly::GemmParams;

/// Whether launches may overlap (GemmParams::overlap); read by each launch, so that no plan is out of date.
std::atomic<bool> launch_overlap{true};

/// One kernel with all sizes of a problem: what stays the same from call to call. Calling it with this call's addresses
/// is the whole host-side work of a decode step, so it takes as few arguments as it can.
class Plan {
 public:
  Plan(int kernel, int device, int m, int n, int k, int n_padded, int k_padded, int group_size, int split_k,
       int clusters, int activation)
      : kernel_(kernel), device_(device) {
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
              uintptr_t partials, int64_t ldx, int64_t ldy, int64_t ld_scales, uintptr_t stream) const {
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
    char message[512];
    if (wo_gemm(kernel_, &params, device_, reinterpret_cast<void*>(stream), message, sizeof(message)) != 0) {
      throw std::runtime_error(message);
    }
  }

 private:
  int kernel_;
  int device_;
  GemmParams params_ = {};
};

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
      "set_launch_overlap", [](bool enabled) { launch_overlap.store(enabled, std::memory_order_relaxed); },
      py::arg("enabled"), "Whether later launches may start while the kernel before them in the stream still runs.");
  py::class_<Plan>(module, "Plan")
      .def(py::init<int, int, int, int, int, int, int, int, int, int, int>(), py::arg("kernel"), py::arg("device"),
           py::arg("m"), py::arg("n"), py::arg("k"), py::arg("n_padded"), py::arg("k_padded"), py::arg("group_size"),
           py::arg("split_k"), py::arg("clusters"), py::arg("activation"))
      .def("launch", &Plan::launch,
           "Enqueues the kernel: addresses of x, weight, scales, zeros, bias, y, partials, "
           "row strides of x, y and scales in elements, stream.");
}
