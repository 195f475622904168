// Activations, to a few units in the last place of fp32. A number's result is that of its value alone: it depends neither
// on its lane nor on its neighbours.
#pragma once

#include "../../cutlass_ext/epilogue/activation.h"
#include "vec.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

/// x / (1 + e^-x)
inline Floats silu(Floats x) {
  Floats const e = exp_of_negative(sub(zero(), abs(x)));
  return div(where_negative(x, mul(x, e), x), add(broadcast(1.f), e));
}

/// x times the normal distribution's part below x. The part above a > 0 is e^(-a^2 / 2) times a polynomial in
/// 1 / (1 + 0.3 a), fitted to a relative error of 2^-24 up to where it leaves fp32.
inline Floats gelu(Floats x) {
  constexpr float kPolynomial[] = {-0.003705968614667654f, 0.05759097635746002f,  -0.2120833396911621f,
                                   0.28273841738700867f,   -0.11875716596841812f, 0.16370731592178345f,
                                   0.08789471536874771f,   0.12326104938983917f,  0.11933990567922592f,
                                   1.4094492144067772e-05f};
  Floats const a = min(broadcast(16.f), abs(x)), square = mul(a, a);
  Floats const lost = fma(a, a, sub(zero(), square));  // in rounding the square
  Floats const t = div(broadcast(1.f), fma(broadcast(0.3f), a, broadcast(1.f)));
  Floats sum = zero();
  for (float const coefficient : kPolynomial) sum = fma(sum, t, broadcast(coefficient));
  Floats above = mul(exp_of_negative(mul(broadcast(-0.5f), square)), sum);
  above = fnma(mul(broadcast(0.5f), lost), above, above);
  return mul(x, where_negative(x, above, sub(broadcast(1.f), above)));
}

inline Floats activate(Floats y, int activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kRelu:
      return max(zero(), y);  // the second one where it is no number
    case Activation::kGelu:
      return gelu(y);
    case Activation::kSilu:
      return silu(y);
    default:
      return y;
  }
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
