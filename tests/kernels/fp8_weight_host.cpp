// cutlass_ext/fragment/fp8_weight.h on the host: what a lane makes of two words of a column, or of two columns.
#include <algorithm>
#include <cstdint>
#include <cstring>

using std::max;
using std::min;

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t of_halves(uint32_t a, uint32_t b, uint32_t const& (*pick)(uint32_t const&, uint32_t const&)) {
  return pick(a >> 16, b >> 16) << 16 | pick(a & 0xffff, b & 0xffff);
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return of_halves(a, b, std::max<uint32_t>);
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return of_halves(a, b, std::min<uint32_t>);
}

#include "cutlass_ext/fragment/fp8_weight.h"

using namespace weightonly;

extern "C" {

/// One turn over 128 k of two columns. words [4][2], scales [2][4]: of fp32, those that are folded become 0. Fills
/// a [4][4], the A registers of four k32 steps, and base [2].
void wo_fold(uint32_t const (*words)[2], uint32_t (*scales)[4], uint32_t (*a)[4], float* base) {
  FoldedScales const columns[2] = {FoldedScales(scales[0]), FoldedScales(scales[1])};
  for (int i = 0; i < 4; ++i) {
    load_e2m1_fragment<0>(words[i], columns[0].bytes[i], a[i]);
    load_e2m1_fragment<1>(words[i], columns[1].bytes[i], a[i]);
  }
  for (int h = 0; h < 2; ++h) base[h] = columns[h].base * kUnitOfFolded;
}

/// Whether all is folded at once by NearScales: then fills a, and most with the largest scales. pairs [4]: of both columns,
/// in 16 bits.
bool wo_near(uint32_t const (*words)[2], uint32_t const (&pairs)[4], int mantissa, uint32_t (*a)[4], uint32_t* most) {
  NearScales const near(pairs, mantissa);
  for (int i = 0; i < 4; ++i) {
    load_e2m1_fragment<0>(words[i], near.bytes(i, 0), a[i]);
    load_e2m1_fragment<1>(words[i], near.bytes(i, 1), a[i]);
  }
  *most = near.most;
  return near.is_all;
}

void wo_integers(uint32_t const (*words)[2], uint32_t (*a)[4]) {
  for (int i = 0; i < 4; ++i) load_fp8_fragment(words[i], a[i]);
}

/// E2M1 without scales.
void wo_codes(uint32_t const (*words)[2], uint32_t (*a)[4]) {
  for (int i = 0; i < 4; ++i) load_e2m1_fragment(words[i], E2m1Bytes::of_numbers(), a[i]);
}
}
