// The epilogue of an output column: channel scale, bias, activation, rounding, store. Used by every kernel family.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_ext/epilogue/activation.h"
#include "cutlass_ext/gemm_params.h"

namespace weightonly {

/// Channel scale and bias of one output column.
struct ColumnEpilogue {
  float scale;
  float bias;

  template <class Element>
  CUTLASS_DEVICE static ColumnEpilogue load(GemmParams const& p, int column, bool channel_scale) {
    ColumnEpilogue c{1.f, 0.f};
    if (column < p.n) {
      if (channel_scale) c.scale = float(static_cast<Element const*>(p.scales)[column]);
      if (p.bias != nullptr) c.bias = float(static_cast<Element const*>(p.bias)[column]);
    }
    return c;
  }

  CUTLASS_DEVICE float affine(float accumulator) const { return accumulator * scale + bias; }

  CUTLASS_DEVICE float apply(float accumulator, int activation) const {
    return activate(affine(accumulator), activation);
  }
};

/// Channel scales and biases of two neighbouring output columns, as they lie in memory: one register each, so that a
/// kernel can load them early.
template <class Element>
struct ColumnPairConstants {
  uint32_t scales = 0, biases = 0;

  ColumnPairConstants() = default;
  CUTLASS_DEVICE ColumnPairConstants(GemmParams const& p, int column, bool channel_scale) {
    auto const load = [&](void const* row, int i) {
      return uint32_t(static_cast<uint16_t const*>(row)[column + i]) << (16 * i);
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (column + i >= p.n) break;
      if (channel_scale) scales |= load(p.scales, i);
      if (p.bias != nullptr) biases |= load(p.bias, i);
    }
  }

  /// i: 0 or 1, which of the two.
  CUTLASS_DEVICE ColumnEpilogue column(int i, bool channel_scale) const {
    auto const value = [&](uint32_t pair) { return float(Element::bitcast(uint16_t(pair >> (16 * i)))); };
    return {channel_scale ? value(scales) : 1.f, value(biases)};
  }
};

/// Results in two neighbouring columns of a token; the first column is even.
template <class Element>
struct alignas(2 * sizeof(Element)) ColumnPair {
  Element values[2];

  /// Whether both exist, and one store is aligned.
  CUTLASS_DEVICE static bool is_one_store(GemmParams const& p, int column) {
    return column + 2 <= p.n && (p.ldy * sizeof(Element) | reinterpret_cast<uintptr_t>(p.y)) % sizeof(ColumnPair) == 0;
  }

  CUTLASS_DEVICE void store(Element* y) const { *reinterpret_cast<ColumnPair*>(y) = *this; }

  /// Stores those that exist.
  CUTLASS_DEVICE void store_each(GemmParams const& p, Element* y, int column) const {
    for (int i = 0; i < 2 && column + i < p.n; ++i) y[i] = values[i];
  }
};

/// Applies the activation and stores the results in two neighbouring columns of a token; the first column is even.
template <class Element>
CUTLASS_DEVICE void store_pair(GemmParams const& p, int token, int column, float2 values) {
  float activated[2] = {values.x, values.y};
  activate(activated, p.activation);
  ColumnPair<Element> const pair = {Element(activated[0]), Element(activated[1])};
  Element* const y = static_cast<Element*>(p.y) + token * p.ldy + column;
  if (pair.is_one_store(p, column)) {
    pair.store(y);
  } else {
    pair.store_each(p, y, column);
  }
}

/// Whether y takes 16-byte stores: every row starts and ends at a multiple of 8 elements.
CUTLASS_DEVICE bool vector_stores(GemmParams const& p) {
  return p.n % 8 == 0 && p.ldy % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
}

}  // namespace weightonly
