// kernels/api/*.cu for the host alone, with kernels that launch nothing, so that the checks of the C interface
// are tested without a GPU and without a build of the kernels.
#include "kernels/api/api.cu"
#include "kernels/api/grouped.cu"

namespace {

int launches = 0;

cudaError_t count_launch(weightonly::GemmParams const&, cudaStream_t) {
  ++launches;
  return cudaSuccess;
}

using weightonly::KernelEntry;
KernelEntry const gemv = {"gemv_f16_int4_group", &count_launch, 4, 0};
KernelEntry const gemm = {"gemm_sm80_f16_int8_group_zeros", &count_launch, 1 << 30, 0};
KernelEntry const decode = {"decode_sm90_f16_code4_group", &count_launch, 16, 8};
KernelEntry const of_16 = {"gemm_sm80_g16_f16_int4_group", &count_launch, 1 << 30, 0};
KernelEntry const* const table[] = {&gemv, &gemm, &decode, &of_16};

cudaError_t count_grouped_launch(weightonly::GroupedGemmParams const&, cudaStream_t) {
  ++launches;
  return cudaSuccess;
}

using weightonly::GroupedEntry;
GroupedEntry const grouped = {"grouped_sm90_f16_int4_group", &count_grouped_launch, 1, false, true, true};
GroupedEntry const interleaved = {"grouped_sm80_f16_int8_channel", &count_grouped_launch, 0, false, false, false};
GroupedEntry const sorting = {"grouped_decode_sm90_f16_int4_group", &count_grouped_launch, 1, true, true, true};
GroupedEntry const panels = {
    "grouped_sm90_of_three_panels_f16_int8_group", &count_grouped_launch, 1, false, false, true};
GroupedEntry const* const grouped_table[] = {&grouped, &interleaved, &sorting, &panels};

}  // namespace

namespace weightonly {

KernelEntry const* const* const kKernels = table;
int const kKernelCount = 4;
GroupedEntry const* const* const kGroupedKernels = grouped_table;
int const kGroupedKernelCount = 4;
char const* const kArchs = "80,90a";

}  // namespace weightonly

extern "C" {

int launches_so_far() {
  return launches;
}

// Of the CUDA runtime: one device, and one of an older driver.
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : device == 35 ? cudaErrorInsufficientDriver : cudaErrorInvalidDevice;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  *version = 12040;
  return cudaSuccess;
}
char const* CUDARTAPI cudaGetErrorString(cudaError_t) {
  return "invalid device ordinal";
}
char const* CUDARTAPI cudaGetErrorName(cudaError_t) {
  return "cudaErrorInvalidDevice";
}
}
