// What is between the two products of experts: see Gate of grouped_params.h.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_ext/epilogue/activation.h"
#include "cutlass_ext/grouped_params.h"

namespace weightonly {

/// The least of v and limit; NaN stays NaN.
CUTLASS_DEVICE float at_most(float v, float limit) {
  return v > limit ? limit : v;
}

template <GateFunction kFunction>
CUTLASS_DEVICE float apply(Gate const& gate, float v) {
  if constexpr (kFunction == GateFunction::kRelu) return activate<Activation::kRelu>(v);
  if constexpr (kFunction == GateFunction::kReluSquared) return activate<Activation::kRelu>(v) * v;
  if constexpr (kFunction == GateFunction::kGelu) return activate<Activation::kGelu>(v);
  if constexpr (kFunction == GateFunction::kGeluTanh) {
    return 0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
  }
  if constexpr (kFunction == GateFunction::kSilu) return __fdividef(v, 1.f + __expf(-gate.alpha * v));
  if constexpr (kFunction == GateFunction::kSitu) {
    return gate.alpha * tanhf(__fdividef(v, gate.alpha)) * __fdividef(1.f, 1.f + __expf(-v));
  }
  return v;
}

/// Calls visit(f) with the function f of the gate. The switch stands around all values, not around each.
template <class Visit>
CUTLASS_DEVICE void with_function(Gate const& gate, Visit const& visit) {
  switch (static_cast<GateFunction>(gate.function)) {
    case GateFunction::kRelu:
      return visit([&](float v) { return apply<GateFunction::kRelu>(gate, v); });
    case GateFunction::kGelu:
      return visit([&](float v) { return apply<GateFunction::kGelu>(gate, v); });
    case GateFunction::kSilu:
      return visit([&](float v) { return apply<GateFunction::kSilu>(gate, v); });
    case GateFunction::kGeluTanh:
      return visit([&](float v) { return apply<GateFunction::kGeluTanh>(gate, v); });
    case GateFunction::kReluSquared:
      return visit([&](float v) { return apply<GateFunction::kReluSquared>(gate, v); });
    case GateFunction::kSitu:
      return visit([&](float v) { return apply<GateFunction::kSitu>(gate, v); });
    default:
      return visit([](float v) { return v; });
  }
}

/// z = act(z) of a product without gates.
template <int kCount, class Element>
CUTLASS_DEVICE void activate(Gate const& gate, Element (&z)[kCount]) {
  if (gate.function == int(GateFunction::kIdentity)) return;
  with_function(gate, [&](auto const& f) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) z[i] = Element(f(float(z[i])));
  });
}

/// z = act(z) * up, act(z) rounded.
template <int kCount, class Element>
CUTLASS_DEVICE void apply_gate(Gate const& gate, Element (&z)[kCount], Element const (&up)[kCount]) {
  bool const is_situ = gate.function == int(GateFunction::kSitu);
  float const limit = is_situ ? INFINITY : gate.limit;
  with_function(gate, [&](auto const& f) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      float other = -at_most(-at_most(float(up[i]), limit), limit);
      if (is_situ && gate.limit < INFINITY) other = gate.limit * tanhf(other / gate.limit);
      z[i] = Element(float(Element(f(at_most(float(z[i]), limit)))) * (other + gate.shift));
    }
  });
}

}  // namespace weightonly
