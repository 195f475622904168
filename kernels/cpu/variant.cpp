// The kernels in the instruction set that this file is compiled for; WEIGHTONLY_VARIANT names it.

#if defined(__AMX_BF16__)
#include "matrix_tiles.h"
#else
#include "few_rows.h"
#include "many_rows.h"
#endif

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

/// What computes that many rows at a time.
Kernel kernel_of(int rows) {
#if defined(__AMX_BF16__)
  return kMatrixTiles;
#else
  return rows <= kMaxTileRows ? kFewRows : kManyRows;
#endif
}

/// False where there is no memory.
bool gemm(GemmParams const& p) {
  for (int first = 0; first < p.m; first += kMaxRows) {
    int const rows = least(kMaxRows, p.m - first);
#if defined(__AMX_BF16__)
    bool const ok = rows_in_tiles(p, first, rows);
#else
    bool const ok = kernel_of(rows) == kFewRows ? few_rows(p, first, rows) : many_rows(p, first, rows);
#endif
    if (!ok) return false;
  }
  return true;
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
