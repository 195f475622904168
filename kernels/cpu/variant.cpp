// The kernels in the instruction set that this file is compiled for; WEIGHTONLY_VARIANT names it.

#include "many_rows.h"
#if defined(__AMX_BF16__)
#include "matrix_tiles.h"
#else
#include "few_rows.h"
#endif

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

/// What computes that many rows at a time. Invariant, all rows take many_rows: there a row is a chain of additions along
/// K of its own, whatever tile it is in, and the range of other rows does not count.
Kernel kernel_of([[maybe_unused]] GemmParams const& p, [[maybe_unused]] int64_t rows) {
#if defined(__AMX_BF16__)
  return kMatrixTiles;
#else
  return rows <= kMaxTileRows && p.invariant == 0 ? kFewRows : kManyRows;
#endif
}

Outcome gemm(GemmParams const& p) {
  for (int64_t first = 0; first < p.m; first += kMaxRows) {
    int const rows = least(kMaxRows, p.m - first);
    Outcome outcome = Outcome::kBeyondRange;
#if defined(__AMX_BF16__)
    outcome = rows_in_tiles(p, first, rows);
#else
    if (kernel_of(p, rows) == kFewRows) outcome = few_rows(p, first, rows);
#endif
    if (outcome == Outcome::kBeyondRange) outcome = many_rows(p, first, rows);
    if (outcome != Outcome::kDone) return outcome;
  }
  return Outcome::kDone;
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
