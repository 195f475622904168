// kernels/convert/codebook_search.h as a shared object: what it makes on the host, and what the lanes of a warp do with
// it, one number at a time.
#include <cmath>

#include "kernels/convert/codebook_search.h"

/// The code of each x: `codebook` is [16], |x| is 1 at most. Returns the most thresholds of a cell.
extern "C" int search_codes(float const* codebook, float const* x, long count, unsigned char* codes) {
  using weightonly::CodebookSearch;
  CodebookSearch const search = CodebookSearch::make(codebook);
  for (long i = 0; i < count; ++i) {
    int const lane = CodebookSearch::cell(x[i]) & 31;
    int rank = search.below[lane];
    for (int pass = 0; pass < search.passes; ++pass) rank += std::signbit(search.thresholds[pass][lane] - x[i]);
    codes[i] = search.codes[rank / 4] >> (8 * (rank % 4));
  }
  return search.passes;
}
