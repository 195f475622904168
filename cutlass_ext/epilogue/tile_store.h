// Epilogue of a CTA whose warps hold m16n8 accumulators: to y through shared memory, or to the split-K partials.
#pragma once

#include "cutlass/array.h"
#include "cutlass_ext/epilogue/column.h"
#include "cutlass_ext/fragment/scale_mode.h"

namespace weightonly {

template <class Element, ScaleMode kScaleMode, int kBlockM, int kBlockN, int kTilesM, int kTilesN, int kThreads>
struct TileEpilogue {
  using Accumulators = float[kTilesM][kTilesN][4];  // rows lane / 4 and + 8, columns 2 * (lane % 4) and + 1

  static constexpr int kVector = 8;                       // elements of a 16-byte store
  static constexpr int kPitch = kBlockN + kVector;        // elements; the extra 16 bytes spread rows over the banks
  static constexpr int kSmemBytes = kBlockM * kPitch * int(sizeof(Element));

  /// Stores the fp32 partials of this CTA's part of K, which splitk_reduce.cu sums. Writes columns up to n_padded.
  CUTLASS_DEVICE static void store_partials(GemmParams const& p, Accumulators const& accumulators, int part, int m0,
                                            int n0) {
    int const lane = threadIdx.x % 32;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTilesM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTilesN; ++j) {
        int const column = n0 + 8 * j + 2 * (lane % 4);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          int const row = m0 + 16 * i + 8 * half + lane / 4;
          if (row < p.m && column < p.n_padded) {
            float* const target = p.partials + (int64_t(part) * p.m + row) * p.n_padded + column;
            *reinterpret_cast<float2*>(target) =
                make_float2(accumulators[i][j][2 * half], accumulators[i][j][2 * half + 1]);
          }
        }
      }
    }
  }

  /// Applies channel scale, bias and activation, in place.
  CUTLASS_DEVICE static void scale_and_activate(GemmParams const& p, Accumulators& accumulators, int n0) {
    int const lane = threadIdx.x % 32;
    if (kScaleMode == ScaleMode::kChannel || p.bias != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTilesN; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          auto const column =
              ColumnEpilogue::load<Element>(p, n0 + 8 * j + 2 * (lane % 4) + e, kScaleMode == ScaleMode::kChannel);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kTilesM; ++i) {
            accumulators[i][j][e] = column.affine(accumulators[i][j][e]);
            accumulators[i][j][2 + e] = column.affine(accumulators[i][j][2 + e]);
          }
        }
      }
    }
    with_activation(p.activation, [&](auto const& f) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kTilesN; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < 4; ++e) accumulators[i][j][e] = f(accumulators[i][j][e]);
        }
      }
    });
  }

  /// m0, n0: the first row and column of the CTA's tile; warp_m, warp_n: of the warp's tile in it. smem: shared memory
  /// that no warp reads any more.
  CUTLASS_DEVICE static void store(GemmParams const& p, Accumulators& accumulators, char* smem, int m0, int n0,
                                   int warp_m, int warp_n) {
    scale_and_activate(p, accumulators, n0 + warp_n);
    int const lane = threadIdx.x % 32;
    auto* const tile = reinterpret_cast<Element*>(smem);  // [kBlockM][kPitch]
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTilesN; ++j) {
      int const column = warp_n + 8 * j + 2 * (lane % 4);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          int const row = warp_m + 16 * i + 8 * half + lane / 4;
          cutlass::AlignedArray<Element, 2> pair;
          pair[0] = Element(accumulators[i][j][2 * half]);
          pair[1] = Element(accumulators[i][j][2 * half + 1]);
          *reinterpret_cast<cutlass::AlignedArray<Element, 2>*>(tile + row * kPitch + column) = pair;
        }
      }
    }
    __syncthreads();

    constexpr int kVectorsPerRow = kBlockN / kVector;
    bool const vectors = vector_stores(p);
    auto* const y = static_cast<Element*>(p.y);
    for (int v = threadIdx.x; v < kBlockM * kVectorsPerRow; v += kThreads) {
      int const row = v / kVectorsPerRow;
      int const column = v % kVectorsPerRow * kVector;
      if (m0 + row >= p.m || n0 + column >= p.n) continue;
      Element const* const source = tile + row * kPitch + column;
      Element* const target = y + (m0 + row) * p.ldy + n0 + column;
      if (vectors) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4 const*>(source);
      } else {
        for (int i = 0; i < kVector && n0 + column + i < p.n; ++i) target[i] = source[i];
      }
    }
  }
};

}  // namespace weightonly
