// Activations: a number and a formula each, and the choice of one at run time. A new activation is a formula and a case in
// both switches here.
#pragma once

namespace weightonly {

/// On GPUs and CPUs, and in weightonly/activations.py.
enum class Activation : int { kIdentity = 0, kRelu = 1, kGelu = 2, kSilu = 3, kCount };

}  // namespace weightonly

#if defined(__CUDACC__)
#include "cutlass/cutlass.h"

namespace weightonly {

template <Activation kActivation>
CUTLASS_DEVICE float activate(float v) {
  if constexpr (kActivation == Activation::kRelu) return v > 0.f || v != v ? v : 0.f;  // NaN stays NaN
  if constexpr (kActivation == Activation::kGelu) return 0.5f * v * (1.f + erff(v * 0.70710678f));
  if constexpr (kActivation == Activation::kSilu) return __fdividef(v, 1.f + __expf(-v));
  return v;
}

/// For one value. The switch stands here and not in with_activation alone, which would change gemv's machine code.
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

/// For many values: calls apply(f) with the function f of the activation, not at all for the identity. With a switch on
/// each of 128 accumulators the path that is taken would be scattered over 128 copies of every activation (9500
/// instructions instead of 5900).
template <class Apply>
CUTLASS_DEVICE void with_activation(int activation, Apply const& apply) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kRelu:
      return apply(activate<Activation::kRelu>);
    case Activation::kGelu:
      return apply(activate<Activation::kGelu>);
    case Activation::kSilu:
      return apply(activate<Activation::kSilu>);
    default:
      return;
  }
}

template <int kCount>
CUTLASS_DEVICE void activate(float (&values)[kCount], int activation) {
  with_activation(activation, [&](auto const& f) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = f(values[i]);
  });
}

}  // namespace weightonly
#endif
