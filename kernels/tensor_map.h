// Tensor maps for TMA, made on the host for every launch (x moves from call to call).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace weightonly {

/// A row-major matrix of 16-bit elements, to be copied in boxes of box_rows x 64 elements (128 bytes) into shared memory with
/// the 128-byte swizzle. What lies outside of the matrix arrives as zero.
inline cudaError_t make_tensor_map(CUtensorMap* map, void const* data, bool is_bf16, int64_t rows, int64_t columns,
                                   int64_t row_stride, int box_rows) {
  // The driver's function is asked for at run time: the library links against no libcuda, and loads without a GPU.
  static auto const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t const sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  cuuint64_t const strides[1] = {cuuint64_t(row_stride) * 2};
  cuuint32_t const box[2] = {64, cuuint32_t(box_rows)};
  cuuint32_t const steps[2] = {1, 1};
  CUresult const result =
      encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace weightonly
