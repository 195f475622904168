// Zeros in rows of y that no tile covers: those of no expert, in a grouped GEMM.
#pragma once

#include "cutlass_ext/epilogue/column.h"

namespace weightonly {

/// Sets y to zeros in rows first_row, first_row + row_step, ... below p.m. Called by all threads of a CTA; each one's
/// number is `thread`.
template <class Element>
CUTLASS_DEVICE void clear_rows(GemmParams const& p, int first_row, int row_step, int thread, int threads) {
  bool const is_vector = vector_stores(p);
  int const step = is_vector ? 8 : 1;  // elements
  for (int64_t row = first_row; row < p.m; row += row_step) {
    Element* const y = static_cast<Element*>(p.y) + row * p.ldy;
    for (int column = step * thread; column < p.n; column += step * threads) {
      if (is_vector) {
        *reinterpret_cast<uint4*>(y + column) = uint4{0, 0, 0, 0};
      } else {
        y[column] = Element(0.f);
      }
    }
  }
}

}  // namespace weightonly
