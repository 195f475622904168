// The reduction of split-K: sums the partials in the order of the parts of K, so that results are bit-identical from
// run to run, then applies the epilogue. It is a kernel of its own. The alternative, a counter that the last CTA
// watches, needs memory that is zero beforehand, and would not be safe under concurrent streams and CUDA graphs.
#include "kernels/gemm/splitk_reduce.h"

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_ext/epilogue/column.h"
#include "kernels/gemm/launch.h"

namespace weightonly {

/// Each thread: 4 columns of one row. blockIdx.y is the row.
template <class Element>
__global__ void __launch_bounds__(128) splitk_reduce_kernel(__grid_constant__ GemmParams const p, bool channel_scale) {
  int const column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  ColumnEpilogue epilogue[4];
  for (int i = 0; i < 4; ++i) epilogue[i] = ColumnEpilogue::load<Element>(p, column + i, channel_scale);
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // launched while the kernel that writes the partials still runs
#endif
  if (column >= p.n) return;
  for (int64_t row = blockIdx.y; row < p.m; row += gridDim.y) {
    float accumulators[4] = {0.f, 0.f, 0.f, 0.f};
    for (int part = 0; part < p.split_k; ++part) {
      auto const value =
          *reinterpret_cast<float4 const*>(p.partials + (part * int64_t(p.m) + row) * p.n_padded + column);
      accumulators[0] += value.x;
      accumulators[1] += value.y;
      accumulators[2] += value.z;
      accumulators[3] += value.w;
    }
    Element* const y = static_cast<Element*>(p.y) + row * p.ldy + column;
    alignas(8) Element values[4];
    for (int i = 0; i < 4; ++i) values[i] = Element(epilogue[i].apply(accumulators[i], p.activation));
    if (vector_stores(p)) {
      *reinterpret_cast<uint2*>(y) = *reinterpret_cast<uint2 const*>(values);
    } else {
      for (int i = 0; i < 4 && column + i < p.n; ++i) y[i] = values[i];
    }
  }
}

/// On sm90 the launch overlaps the end of the kernel before it (programmatic dependent launch).
template <class Element>
cudaError_t launch_splitk_reduce(GemmParams const& p, bool channel_scale, cudaStream_t stream) {
  int device = 0, major = 0;
  if (cudaError_t const error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t const error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(divide_up(p.n, 4 * 128), p.m < 65535 ? p.m : 65535);
  config.blockDim = dim3(128);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, splitk_reduce_kernel<Element>, p, channel_scale);
}

template cudaError_t launch_splitk_reduce<cutlass::half_t>(GemmParams const&, bool, cudaStream_t);
template cudaError_t launch_splitk_reduce<cutlass::bfloat16_t>(GemmParams const&, bool, cudaStream_t);

}  // namespace weightonly
