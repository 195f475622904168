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
inline Floats max(Floats a, Floats b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
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
template <int kShift>
inline Floats int4(Words w, Table t) {
  return lookup<kShift>(w, t);
}
/// Shifts have one port of two, so the byte u becomes a number in place: as the low bits of the mantissa of 2^23.
template <int kShift>
inline Floats int8(Words w) {
  __m512i const half = kShift >= 16 ? _mm512_srli_epi32(w.v, 16) : w.v;
  __m512i const mask = _mm512_set1_epi32(0xff << kShift % 16), exponent = _mm512_set1_epi32(0x4b000000);
  __m512 const biased =
      _mm512_castsi512_ps(_mm512_ternarylogic_epi32(half, mask, exponent, 0xea));  // half & mask | exponent
  if (kShift % 16 == 0) return {_mm512_sub_ps(biased, _mm512_set1_ps(8388608.f + 128.f))};
  return {_mm512_fmsub_ps(biased, _mm512_set1_ps(1.f / 256.f), _mm512_set1_ps(32768.f + 128.f))};
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
inline Floats max(Floats x, Floats y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
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
template <int kShift>
inline __m256 int4(__m256i w) {  // the bias of 8 flips the sign bit of a nibble
  __m256i const sign = _mm256_xor_si256(w, _mm256_set1_epi32(int(0x88888888)));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(sign, 28 - kShift), 28));
}
template <int kShift>
inline Floats int4(Words w, Table) {
  return {int4<kShift>(w.a), int4<kShift>(w.b)};
}
template <int kShift>
inline __m256 int8(__m256i w) {
  __m256i const sign = _mm256_xor_si256(w, _mm256_set1_epi32(int(0x80808080)));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(sign, 24 - kShift), 24));
}
template <int kShift>
inline Floats int8(Words w) {
  return {int8<kShift>(w.a), int8<kShift>(w.b)};
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
inline Floats max(Floats a, Floats b) {
  WEIGHTONLY_EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
inline Floats fma(Floats a, Floats b, Floats c) {
  WEIGHTONLY_EACH_LANE(a.v[i] * b.v[i] + c.v[i]);
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
template <int kShift>
inline Floats int4(Words w, Table const&) {
  WEIGHTONLY_EACH_LANE(float(int(w.v[i] >> kShift & 15) - 8));
}
template <int kShift>
inline Floats int8(Words w) {
  WEIGHTONLY_EACH_LANE(float(int(w.v[i] >> kShift & 255) - 128));
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

/// Row e of a step: kLanes columns of it as floats. Where its bits are: weightonly/layout/cpu.py.
template <int kFormat, int e>
inline Floats row_of_step(Words w, Table const& table) {
  if constexpr (kFormat == kInt8) {
    return int8<8 * (e / 2) + 16 * (e % 2)>(w);
  } else if constexpr (kFormat == kInt4) {
    return int4<4 * (e / 2) + 16 * (e % 2)>(w, table);
  } else {
    return lookup<4 * (e / 2) + 16 * (e % 2)>(w, table);
  }
}

template <int kFormat>
constexpr int kStepRows = kFormat == kInt8 ? 4 : 8;

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
