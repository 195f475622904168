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
KernelEntry const table[] = {
    {{"gemv_f16_int4_group", 4, 0, false, 32, 2, false}, &count_launch},
    {{"gemm_sm80_f16_int8_group_zeros", 1 << 30, 0, true, 32, 2, false}, &count_launch},
    {{"decode_sm90_f16_code4_group", 16, 8, true, 32, 2, false}, &count_launch},
    {{"gemm_sm80_g16_f16_int4_group", 1 << 30, 0, false, 16, 2, false}, &count_launch},
    {{"gemm_sm90_fp8_f16_int4_group", 1 << 20, 8, false, 128, 1, false}, &count_launch},
    {{"gemm_sm90_f16_int4_group", 1 << 30, 8, false, 32, 2, true}, &count_launch},
};

cudaError_t count_grouped_launch(weightonly::GroupedGemmParams const&, cudaStream_t) {
  ++launches;
  return cudaSuccess;
}

using weightonly::GroupedEntry;
constexpr int kAnyM = INT_MAX;
GroupedEntry const grouped_table[] = {
    {{"grouped_sm90_f16_int4_group", kAnyM, 1, false, 32, 2, false}, &count_grouped_launch, false, true},
    {{"grouped_sm80_f16_int8_channel", kAnyM, 0, false, 32, 2, false}, &count_grouped_launch, false, false},
    {{"grouped_decode_sm90_f16_int4_group", kAnyM, 1, false, 32, 2, false}, &count_grouped_launch, true, true},
    {{"grouped_sm90_fp8_f16_int4_group", kAnyM, 1, false, 32, 1, false}, &count_grouped_launch, false, true},
};

}  // namespace

namespace weightonly {

KernelEntry const* const kKernels = table;
int const kKernelCount = 6;
GroupedEntry const* const kGroupedKernels = grouped_table;
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
