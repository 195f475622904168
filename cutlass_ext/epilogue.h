// What happens to the fp32 sums: channel scale, bias, activation, rounding, store. Used by every kernel family.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_ext/scale_mode.h"
#include "kernels/params.h"

namespace weightonly {

template <Activation kActivation>
CUTLASS_DEVICE float activate(float v) {
  if constexpr (kActivation == Activation::kRelu) return v > 0.f || v != v ? v : 0.f;  // NaN stays NaN
  if constexpr (kActivation == Activation::kGelu) return 0.5f * v * (1.f + erff(v * 0.70710678f));
  if constexpr (kActivation == Activation::kSilu) return __fdividef(v, 1.f + __expf(-v));
  return v;
}

/// The same, chosen at run time: for kernels with few sums per thread.
CUTLASS_DEVICE float activate(float v, int activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kRelu:
      return activate<Activation::kRelu>(v);
    case Activation::kGelu:
      return activate<Activation::kGelu>(v);
    case Activation::kSilu:
      return activate<Activation::kSilu>(v);
    default:
      return v;
  }
}

/// All values alike, with one look at which.
template <int kCount>
CUTLASS_DEVICE void activate(float (&values)[kCount], int activation) {
  auto const all = [&](auto const& apply) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = apply(values[i]);
  };
  switch (static_cast<Activation>(activation)) {
    case Activation::kRelu:
      return all(activate<Activation::kRelu>);
    case Activation::kGelu:
      return all(activate<Activation::kGelu>);
    case Activation::kSilu:
      return all(activate<Activation::kSilu>);
    default:
      return;
  }
}

/// The constants of one output column.
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

  CUTLASS_DEVICE float affine(float sum) const { return sum * scale + bias; }

  CUTLASS_DEVICE float apply(float sum, int activation) const { return activate(affine(sum), activation); }
};

/// The constants of two neighbouring output columns, as they lie in memory: few registers, to be asked for early.
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

/// Two neighbouring columns of a token, the first an even one.
template <class Element>
struct alignas(2 * sizeof(Element)) ColumnPair {
  Element values[2];

  /// Whether y takes both in one store.
  CUTLASS_DEVICE static bool is_one_store(GemmParams const& p, int column) {
    return column + 2 <= p.n && (p.ldy * sizeof(Element) | reinterpret_cast<uintptr_t>(p.y)) % sizeof(ColumnPair) == 0;
  }

  CUTLASS_DEVICE void store(Element* y) const { *reinterpret_cast<ColumnPair*>(y) = *this; }

  /// Those of them that exist.
  CUTLASS_DEVICE void store_each(GemmParams const& p, Element* y, int column) const {
    for (int i = 0; i < 2 && column + i < p.n; ++i) y[i] = values[i];
  }
};

/// Stores two neighbouring columns of one token, the first an even one. values: all but the activation is done.
template <class Element>
CUTLASS_DEVICE void store_pair(GemmParams const& p, int token, int column, float2 values) {
  float finished[2] = {values.x, values.y};
  activate(finished, p.activation);
  ColumnPair<Element> const pair = {Element(finished[0]), Element(finished[1])};
  Element* const y = static_cast<Element*>(p.y) + token * p.ldy + column;
  if (pair.is_one_store(p, column)) {
    pair.store(y);
  } else {
    pair.store_each(p, y, column);
  }
}

/// 16-byte stores of y are possible: every row starts and ends at a multiple of 8 elements.
CUTLASS_DEVICE bool vector_stores(GemmParams const& p) {
  return p.n % 8 == 0 && p.ldy % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
}

}  // namespace weightonly
