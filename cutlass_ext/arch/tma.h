// Tensor maps for TMA. The host makes them for every launch, because x moves from call to call. A load that reaches
// beyond the tensor of a map delivers zeros there.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/platform/platform.h"

namespace weightonly {

namespace detail {

/// sizes, box: elements of each dimension, the contiguous one first. strides: bytes, of all dimensions but the first.
inline cudaError_t make_tensor_map(CUtensorMap* map, void const* data, CUtensorMapDataType type, int dimensions,
                                   cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                                   CUtensorMapSwizzle swizzle) {
  // The driver's function is looked up at run time, so that the library links against no libcuda and loads without a
  // GPU.
  static auto const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t const element_strides[3] = {1, 1, 1};
  CUresult const result = encode(map, type, dimensions, const_cast<void*>(data), sizes, strides, box, element_strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace detail

template <class Element>
inline constexpr CUtensorMapDataType kTensorMapType =
    sizeof(Element) == 1                                              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
    : cutlass::platform::is_same<Element, cutlass::bfloat16_t>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

/// The columns of a box of map_k_blocks: 128 bytes, the width of the 128-byte swizzle.
template <class Element>
inline constexpr int kSwizzleColumns = 128 / int(sizeof(Element));

/// A row-major matrix of 16-bit Elements in boxes of box_rows x box_columns. row_stride: elements. Coordinates of a
/// box: (column, row).
template <class Element>
cudaError_t map_rows(CUtensorMap* map, void const* data, int64_t rows, int64_t columns, int64_t row_stride,
                     int box_rows, int box_columns) {
  cuuint64_t const sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  cuuint64_t const strides[1] = {cuuint64_t(row_stride) * sizeof(Element)};
  cuuint32_t const box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)};
  return detail::make_tensor_map(map, data, kTensorMapType<Element>, 2, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// Such matrices, one after another, whose rows follow each other at the same distance. Coordinates of a box:
/// (column, row, matrix); beyond the rows of a matrix it has zeros.
template <class Element>
cudaError_t map_matrices(CUtensorMap* map, void const* data, int64_t matrices, int64_t rows, int64_t columns,
                         int64_t row_stride, int box_rows, int box_columns) {
  cuuint64_t const sizes[3] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(matrices)};
  cuuint64_t const row_bytes = cuuint64_t(row_stride) * sizeof(Element);
  cuuint64_t const strides[2] = {row_bytes, cuuint64_t(rows) * row_bytes};
  cuuint32_t const box[3] = {cuuint32_t(box_columns), cuuint32_t(box_rows), 1};
  return detail::make_tensor_map(map, data, kTensorMapType<Element>, 3, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// A matrix of rows as map_rows has it, cut into k_blocks of 64 columns, stored with the 128-byte swizzle. A box is box_k_blocks k_blocks of
/// box_rows rows.
///
/// With box_k_blocks > 1 the coordinates of a box are (0, row, k_block), and columns must be a multiple of 64. With
/// box_k_blocks = 1 they are (column, row, 0), and any number of columns will do.
template <class Element>
cudaError_t map_k_blocks(CUtensorMap* map, void const* data, int64_t rows, int64_t columns, int64_t row_stride,
                         int box_rows, int box_k_blocks) {
  bool const is_one = box_k_blocks == 1;
  cuuint64_t const sizes[3] = {is_one ? cuuint64_t(columns) : kSwizzleColumns<Element>, cuuint64_t(rows),
                               is_one ? 1 : cuuint64_t(columns) / kSwizzleColumns<Element>};
  cuuint64_t const strides[2] = {cuuint64_t(row_stride) * sizeof(Element), kSwizzleColumns<Element> * sizeof(Element)};
  cuuint32_t const box[3] = {kSwizzleColumns<Element>, cuuint32_t(box_rows), cuuint32_t(box_k_blocks)};
  return detail::make_tensor_map(map, data, kTensorMapType<Element>, 3, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_128B);
}

/// A box has at most 256 elements along a dimension, so packed bytes are mapped as lines of 256 elements of 8 bytes.
inline constexpr int kTensorMapLineElements = 256;
inline constexpr int kTensorMapLineBytes = kTensorMapLineElements * int(sizeof(int64_t));

/// Contiguous rows of packed bytes, each row_lines lines, in boxes of box_rows x box_lines. Coordinates of a box:
/// (0, line, row).
inline cudaError_t map_lines(CUtensorMap* map, void const* data, int64_t rows, int64_t row_lines, int box_rows,
                             int box_lines) {
  cuuint64_t const sizes[3] = {kTensorMapLineElements, cuuint64_t(row_lines), cuuint64_t(rows)};
  cuuint64_t const strides[2] = {kTensorMapLineBytes, cuuint64_t(row_lines) * kTensorMapLineBytes};
  cuuint32_t const box[3] = {kTensorMapLineElements, cuuint32_t(box_lines), cuuint32_t(box_rows)};
  return detail::make_tensor_map(map, data, CU_TENSOR_MAP_DATA_TYPE_INT64, 3, sizes, strides, box,
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace weightonly
