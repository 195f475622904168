// Sixteen fp32 numbers, or sixteen 32-bit words, in the registers of the instruction set that this file is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "params.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

constexpr int kRegisters = 1;  // of 16 numbers
constexpr bool kLooksUpInt4 = true;  // by one instruction
constexpr int kMaxTileRows = 12;  // 24 accumulators of 32 registers

struct Floats {
  __m512 v;
};
struct Words {
  __m512i v;
};
struct Table {
  __m512 v;
};

inline Floats zero() {
  return {_mm512_setzero_ps()};
}
inline Floats load(float const* p) {
  return {_mm512_loadu_ps(p)};
}
inline void store(float* p, Floats a) {
  _mm512_storeu_ps(p, a.v);
}
inline Floats broadcast(float a) {
  return {_mm512_set1_ps(a)};
}
inline Floats add(Floats a, Floats b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Floats sub(Floats a, Floats b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Floats mul(Floats a, Floats b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
/// min, max: b where one of them is NaN.
inline Floats max(Floats a, Floats b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Floats min(Floats a, Floats b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline Floats div(Floats a, Floats b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline Floats abs(Floats a) {
  return {_mm512_abs_ps(a.v)};
}
inline Floats round(Floats a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// a * 2^n
inline Floats scale(Floats a, Floats n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
/// a where the sign of x is set, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) {
  return {_mm512_mask_mov_ps(b.v, _mm512_movepi32_mask(_mm512_castps_si512(x.v)), a.v)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline Floats fms(Floats a, Floats b, Floats c) {
  return {_mm512_fmsub_ps(a.v, b.v, c.v)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
inline Words load_words(uint32_t const* p) {
  return {_mm512_loadu_si512(p)};
}
inline Table make_table(float const* p) {
  return {_mm512_loadu_ps(p)};
}

template <int kShift>
inline Floats lookup(Words w, Table t) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, kShift), t.v)};  // takes the low four bits of each lane
}
inline Words upper_half(Words w) {
  return {_mm512_srli_epi32(w.v, 16)};
}
/// 2^23 + (w & kMask)
template <int kMask>
inline Floats as_mantissa(Words w) {
  __m512i const mask = _mm512_set1_epi32(kMask), exponent = _mm512_set1_epi32(0x4b000000);
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(w.v, mask, exponent, 0xea))};  // w & mask | exponent
}
/// Of E4M3 numbers, for each sign and exponent: what `as_mantissa` of the mantissa in place is to be multiplied with, and
/// what to be added. Exponent 0 has the steps of exponent 1, and no 8 of them more.
template <int kShift>
struct StepsOfE4m3 {
  float step[32] = {}, offset[32] = {};

  constexpr StepsOfE4m3() {
    for (int i = 0; i < 32; ++i) {
      int const exponent = i % 16;
      float const one = (i < 16 ? 0x1p-9f : -0x1p-9f) * float(1 << (exponent == 0 ? 0 : exponent - 1));
      step[i] = one / float(1 << kShift);
      offset[i] = one * ((exponent == 0 ? 0.f : 8.f) - float(1 << (23 - kShift)));
    }
  }
};
template <int kShift>
inline constexpr StepsOfE4m3<kShift> kStepsOfE4m3;
/// The E4M3 numbers in the bytes from bit kShift on, -0 as 0. Nothing on the way is rounded, or a subnormal number, which
/// a process may have flushed.
template <int kShift>
inline Floats floats_of_bytes(Words w) {
  if constexpr (kShift >= 16) {
    return floats_of_bytes<kShift - 16>(upper_half(w));
  } else {
    auto const& of = kStepsOfE4m3<kShift>;
    __m512i const index = _mm512_srli_epi32(w.v, kShift + 3);  // its five low bits choose
    __m512 const step = _mm512_permutex2var_ps(_mm512_loadu_ps(of.step), index, _mm512_loadu_ps(of.step + 16));
    __m512 const offset = _mm512_permutex2var_ps(_mm512_loadu_ps(of.offset), index, _mm512_loadu_ps(of.offset + 16));
    return {_mm512_fmadd_ps(as_mantissa<7 << kShift>(w).v, step, offset)};
  }
}

inline Floats load16(uint16_t const* p, int type) {
  __m256i const v = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p));
  if (type == kFp16) return {_mm512_cvtph_ps(v)};
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16))};
}
inline void store16(uint16_t* p, Floats a, int type) {
  __m256i v;
  if (type == kFp16) {
    v = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    __m512i const bits = _mm512_castps_si512(a.v);
    __m512i const odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 const nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    v = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}

#elif defined(__AVX2__)

constexpr int kRegisters = 2;    // of 16 numbers
constexpr bool kLooksUpInt4 = false;
constexpr int kMaxTileRows = 3;  // 12 accumulators of 16 registers

struct Floats {
  __m256 a, b;
};
struct Words {
  __m256i a, b;
};
struct Table {
  __m256 low, high;
};

inline Floats zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline Floats load(float const* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats broadcast(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline Floats add(Floats x, Floats y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline Floats sub(Floats x, Floats y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline Floats mul(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
/// min, max: y where one of them is NaN.
inline Floats max(Floats x, Floats y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline Floats min(Floats x, Floats y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline Floats div(Floats x, Floats y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline Floats abs(Floats x) {
  __m256 const sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats round(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
/// x * 2^n in two steps: 2^n alone may be below the normal numbers.
inline __m256 scale(__m256 x, __m256 n) {
  __m256i const bias = _mm256_set1_epi32(127), all = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(all, 1);
  __m256i const first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i const second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(all, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline Floats scale(Floats x, Floats n) {
  return {scale(x.a, n.a), scale(x.b, n.b)};
}
/// y where the sign of x is set, else z.
inline Floats where_negative(Floats x, Floats y, Floats z) {
  return {_mm256_blendv_ps(z.a, y.a, x.a), _mm256_blendv_ps(z.b, y.b, x.b)};
}
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats fms(Floats x, Floats y, Floats z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
inline Floats fnma(Floats x, Floats y, Floats z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
inline Words load_words(uint32_t const* p) {
  auto const* q = reinterpret_cast<__m256i const*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Table make_table(float const* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

template <int kShift>
inline __m256 lookup(__m256i w, Table t) {
  __m256i const index = _mm256_srli_epi32(w, kShift);  // its low three bits choose; the fourth one, between the halves
  __m256 const sign = _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - kShift));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, index), _mm256_permutevar8x32_ps(t.high, index), sign);
}
template <int kShift>
inline Floats lookup(Words w, Table t) {
  return {lookup<kShift>(w.a, t), lookup<kShift>(w.b, t)};
}
/// The E4M3 numbers in the bytes from bit kShift on. Exponent 0 means m / 8 * 2^-6, here 2 * (1 + m / 8) * 2^-7 - 2^-6:
/// nothing on the way is a subnormal number, which a process may have flushed.
template <int kShift>
inline __m256 floats_of_bytes(__m256i w) {
  __m256i const top = _mm256_slli_epi32(w, 24 - kShift);
  __m256i const size = _mm256_and_si256(_mm256_srli_epi32(top, 4), _mm256_set1_epi32(0x07f00000));
  __m256 const normal = _mm256_castsi256_ps(_mm256_add_epi32(size, _mm256_set1_epi32(120 << 23)));
  __m256 const is_small = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(1 << 23), size));
  __m256 const small = _mm256_fmsub_ps(normal, _mm256_set1_ps(2.f), _mm256_set1_ps(0x1p-6f));
  __m256 const sign = _mm256_and_ps(_mm256_castsi256_ps(top), _mm256_set1_ps(-0.f));
  return _mm256_or_ps(_mm256_blendv_ps(normal, small, is_small), sign);
}
template <int kShift>
inline Floats floats_of_bytes(Words w) {
  return {floats_of_bytes<kShift>(w.a), floats_of_bytes<kShift>(w.b)};
}
inline Words upper_half(Words w) {
  return {_mm256_srli_epi32(w.a, 16), _mm256_srli_epi32(w.b, 16)};
}
/// 2^23 + (w & kMask)
template <int kMask>
inline Floats as_mantissa(Words w) {
  __m256i const mask = _mm256_set1_epi32(kMask), exponent = _mm256_set1_epi32(0x4b000000);
  return {_mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(w.a, mask), exponent)),
          _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(w.b, mask), exponent))};
}

inline __m256 load8(uint16_t const* p, int type) {
  __m128i const v = _mm_loadu_si128(reinterpret_cast<__m128i const*>(p));
  if (type == kFp16) return _mm256_cvtph_ps(v);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
inline Floats load16(uint16_t const* p, int type) {
  return {load8(p, type), load8(p + 8, type)};
}
inline void store8(uint16_t* p, __m256 x, int type) {
  __m128i v;
  if (type == kFp16) {
    v = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    __m256i const bits = _mm256_castps_si256(x);
    __m256i const odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    v = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
}
inline void store16(uint16_t* p, Floats x, int type) {
  store8(p, x.a, type);
  store8(p + 8, x.b, type);
}

#else  // plain C++: loops over 16 lanes, which a compiler turns into what the machine has

constexpr int kRegisters = 4;  // of 16 numbers, if a register has 16 bytes
constexpr bool kLooksUpInt4 = false;
constexpr int kMaxTileRows = 2;

struct Floats {
  float v[kLanes];
};
struct Words {
  uint32_t v[kLanes];
};
struct Table {
  float v[kLanes];
};

#define WEIGHTONLY_EACH_LANE(expression)                  \
  Floats r;                                               \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r

inline Floats zero() {
  WEIGHTONLY_EACH_LANE(0.f);
}
inline Floats load(float const* p) {
  WEIGHTONLY_EACH_LANE(p[i]);
}
inline void store(float* p, Floats a) {
  std::memcpy(p, a.v, sizeof(a.v));
}
inline Floats broadcast(float a) {
  WEIGHTONLY_EACH_LANE(a);
}
inline Floats add(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] + b.v[i]);
}
inline Floats sub(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] - b.v[i]);
}
inline Floats mul(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] * b.v[i]);
}
/// min, max: b where one of them is NaN.
inline Floats max(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
inline Floats min(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
inline Floats div(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] / b.v[i]);
}
inline Floats abs(Floats a) {
  WEIGHTONLY_EACH_LANE(std::fabs(a.v[i]));
}
/// a where the sign of x is set, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(std::signbit(x.v[i]) ? a.v[i] : b.v[i]);
}
inline Floats round(Floats a) {
  WEIGHTONLY_EACH_LANE(std::nearbyint(a.v[i]));
}
/// e^x of x <= 0
inline Floats exp_of_negative(Floats x) {
  WEIGHTONLY_EACH_LANE(std::exp(x.v[i]));
}
inline Floats fma(Floats a, Floats b, Floats c) {
  WEIGHTONLY_EACH_LANE(a.v[i] * b.v[i] + c.v[i]);
}
inline Floats fms(Floats a, Floats b, Floats c) {
  WEIGHTONLY_EACH_LANE(a.v[i] * b.v[i] - c.v[i]);
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  WEIGHTONLY_EACH_LANE(c.v[i] - a.v[i] * b.v[i]);
}
inline Words load_words(uint32_t const* p) {
  Words w;
  std::memcpy(w.v, p, sizeof(w.v));
  return w;
}
inline Table make_table(float const* p) {
  Table t;
  std::memcpy(t.v, p, sizeof(t.v));
  return t;
}
template <int kShift>
inline Floats lookup(Words w, Table const& t) {
  WEIGHTONLY_EACH_LANE(t.v[w.v[i] >> kShift & 15]);
}
/// The E4M3 number in a byte.
inline float float_of_byte(uint32_t byte) {
  uint32_t const exponent = byte >> 3 & 15, mantissa = byte & 7;
  float const size =
      exponent == 0 ? float(mantissa) * 0x1p-9f : __builtin_bit_cast(float, (exponent + 120) << 23 | mantissa << 20);
  return byte & 128 ? -size : size;
}
template <int kShift>
inline Floats floats_of_bytes(Words w) {
  WEIGHTONLY_EACH_LANE(float_of_byte(w.v[i] >> kShift));
}
inline Words upper_half(Words w) {
  for (auto& word : w.v) word >>= 16;
  return w;
}
/// 2^23 + (w & kMask)
template <int kMask>
inline Floats as_mantissa(Words w) {
  WEIGHTONLY_EACH_LANE(__builtin_bit_cast(float, (w.v[i] & kMask) | 0x4b000000));
}

inline float half_to_float(uint16_t h) {
  uint32_t const sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp(float(mantissa), -24);
  uint32_t const bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t const sign = uint16_t(bits >> 16 & 0x8000);
  uint32_t const size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536
  if (size < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(std::fabs(f), 24))));
  return uint16_t(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}
inline float widen(uint16_t h, int type) {
  if (type == kFp16) return half_to_float(h);
  uint32_t const bits = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t narrow(float f, int type) {
  if (type == kFp16) return float_to_half(f);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return f != f ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline Floats load16(uint16_t const* p, int type) {
  WEIGHTONLY_EACH_LANE(widen(p[i], type));
}
inline void store16(uint16_t* p, Floats a, int type) {
  for (int i = 0; i < kLanes; ++i) p[i] = narrow(a.v[i], type);
}
#undef WEIGHTONLY_EACH_LANE

#endif

#if defined(__AVX2__)
/// e^x of x <= 0: 2^n e^r, and a polynomial for |r| <= ln 2 / 2.
inline Floats exp_of_negative(Floats x) {
  x = max(broadcast(-110.f), x);  // e^-104 is 0 in fp32
  Floats const n = round(mul(x, broadcast(1.44269504f)));
  Floats const r = fnma(n, broadcast(-2.12194440e-4f), fnma(n, broadcast(0.693359375f), x));
  Floats sum = broadcast(1.9875691500e-4f);
  for (float const c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = fma(sum, r, broadcast(c));
  }
  return scale(fma(mul(r, r), sum, add(r, broadcast(1.f))), n);
}
#endif

/// What is subtracted from the integers of a column, for each place that they have in a half of a word.
template <int kFormat>
struct Offsets {
  static constexpr int kBits = bits_of(kFormat), kPlaces = is_integer(kFormat) ? 16 / kBits : 0;

  /// For u - 2^(kBits - 1) - zero_point. zero_point: an integer up to 2^20.
  explicit Offsets(Floats zero_point) {
    for (int i = 0; i < kPlaces; ++i) {
      at[i] = add(broadcast(float((1 << (23 - kBits * i)) + (1 << (kBits - 1)))), zero_point);
    }
  }

  Floats at[kPlaces + 1];
};

/// Row e of a step of integers. One becomes a number where it is, in the mantissa of 2^23: shifts have one port of two,
/// and conversions take as long.
template <int kFormat, int e>
inline Floats integers_of_step(Words w, Offsets<kFormat> const& offsets) {
  constexpr int kBits = Offsets<kFormat>::kBits, kPlace = e / 2, kShift = kBits * kPlace;
  Floats const biased = as_mantissa<((1 << kBits) - 1) << kShift>(e % 2 ? upper_half(w) : w);
  if constexpr (kShift == 0) return sub(biased, offsets.at[0]);
  return fms(biased, broadcast(1.f / float(1 << kShift)), offsets.at[kPlace]);
}

/// Row e of a step: kLanes columns of it as floats. Where its bits are: weightonly/layout/cpu.py.
template <int kFormat, int e>
inline Floats row_of_step(Words w, Table const& table, Offsets<kFormat> const& offsets) {
  if constexpr (kFormat == kCode4) {
    return lookup<4 * (e / 2) + 16 * (e % 2)>(w, table);
  } else if constexpr (kFormat == kFp8) {
    return floats_of_bytes<8 * (e / 2) + 16 * (e % 2)>(w);
  } else {
    return integers_of_step<kFormat, e>(w, offsets);
  }
}

template <int kFormat>
constexpr int kStepRows = 32 / bits_of(kFormat);

/// f(std::integral_constant<int, e>) for e = 0 .. count - 1, unrolled.
template <int kCount, int kFirst = 0, typename F>
inline __attribute__((always_inline)) void unroll(F const& f) {
  if constexpr (kFirst < kCount) {
    f(std::integral_constant<int, kFirst>{});
    unroll<kCount, kFirst + 1>(f);
  }
}

/// `count` <= 16 numbers of any float type from `base[offset]` on, zeros in the other lanes.
inline Floats load_any(void const* base, int64_t offset, int type, int count = kLanes) {
  if (type == kFp32) {
    auto const* p = static_cast<float const*>(base) + offset;
    if (count == kLanes) return load(p);
    float part[kLanes] = {};
    std::memcpy(part, p, size_t(count) * sizeof(float));
    return load(part);
  }
  auto const* p = static_cast<uint16_t const*>(base) + offset;
  if (count == kLanes) return load16(p, type);
  uint16_t part[kLanes] = {};
  std::memcpy(part, p, size_t(count) * sizeof(uint16_t));
  return load16(part, type);
}

inline void store_any(void* base, int64_t offset, int type, Floats a, int count = kLanes) {
  if (type == kFp32) {
    auto* p = static_cast<float*>(base) + offset;
    if (count == kLanes) return store(p, a);
    float part[kLanes];
    store(part, a);
    std::memcpy(p, part, size_t(count) * sizeof(float));
    return;
  }
  auto* p = static_cast<uint16_t*>(base) + offset;
  if (count == kLanes) return store16(p, a, type);
  uint16_t part[kLanes];
  store16(part, a, type);
  std::memcpy(p, part, size_t(count) * sizeof(uint16_t));
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
