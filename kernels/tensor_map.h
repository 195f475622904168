// Tensor maps for TMA, made on the host for every launch (x moves from call to call). What lies outside of a map's tensor
// arrives as zero.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/platform/platform.h"

namespace weightonly {

namespace detail {

inline cudaError_t make_tensor_map(CUtensorMap* map, void const* data, CUtensorMapDataType type, int dimensions,
                                   cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                                   CUtensorMapSwizzle swizzle) {
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
  cuuint32_t const steps[3] = {1, 1, 1};
  CUresult const result =
      encode(map, type, dimensions, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace detail

template <class Element>
inline constexpr CUtensorMapDataType kTensorMapType =
    cutlass::platform::is_same<Element, cutlass::bfloat16_t>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

/// A row-major matrix of Elements of 16 bits, copied in boxes of box_rows x box_columns.
template <class Element>
cudaError_t map_rows(CUtensorMap* map, void const* data, int64_t rows, int64_t columns, int64_t row_stride,
                     int box_rows, int box_columns) {
  cuuint64_t const sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  cuuint64_t const strides[1] = {cuuint64_t(row_stride) * 2};
  cuuint32_t const box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)};
  return detail::make_tensor_map(map, data, kTensorMapType<Element>, 2, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// The same in blocks of 64 columns (128 bytes, with the 128-byte swizzle), a box being box_blocks of box_rows rows. With more
/// than one block a box, coordinates are (0, row, block), and columns must be a multiple of 64; with one, (column, row, 0).
template <class Element>
cudaError_t map_blocks(CUtensorMap* map, void const* data, int64_t rows, int64_t columns, int64_t row_stride,
                       int box_rows, int box_blocks) {
  bool const is_one = box_blocks == 1;
  cuuint64_t const sizes[3] = {is_one ? cuuint64_t(columns) : 64, cuuint64_t(rows),
                               is_one ? 1 : cuuint64_t(columns) / 64};
  cuuint64_t const strides[2] = {cuuint64_t(row_stride) * 2, 128};
  cuuint32_t const box[3] = {64, cuuint32_t(box_rows), cuuint32_t(box_blocks)};
  return detail::make_tensor_map(map, data, kTensorMapType<Element>, 3, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_128B);
}

inline constexpr int kTensorMapUnitBytes = 256 * 8;  // a box is no longer than 256 elements

/// Rows of units, one after another in memory, copied in boxes of box_rows x box_units.
inline cudaError_t map_units(CUtensorMap* map, void const* data, int64_t rows, int64_t row_units, int box_rows,
                             int box_units) {
  cuuint64_t const sizes[3] = {256, cuuint64_t(row_units), cuuint64_t(rows)};
  cuuint64_t const strides[2] = {kTensorMapUnitBytes, cuuint64_t(row_units) * kTensorMapUnitBytes};
  cuuint32_t const box[3] = {256, cuuint32_t(box_units), cuuint32_t(box_rows)};
  return detail::make_tensor_map(map, data, CU_TENSOR_MAP_DATA_TYPE_INT64, 3, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace weightonly
