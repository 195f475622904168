// Rows of x by matrix tiles (AMX): bf16 operands, fp32 sums, and no rounding before the sum.
//
// An integer weight q, or an 8-bit float, is a bf16 number as it is. A number of x is a sum of bf16 numbers: one for bf16, two for fp16, three
// for fp32, each with the next eight bits. So every product is exact. A number of a codebook is such a sum, too. The sums
// of a group are of unscaled weights and leave the tiles when the group ends; then its scales are applied in fp32.
//
//     x tile       16 rows m x 32 k                          [16][32] bf16, 1 KiB
//     weight tile  16 pairs of k x 16 columns x 2            [16][16][2] bf16, 1 KiB: a step of the layout is 2 or 4 pairs
//     sums         16 rows m x 16 columns                    fp32, 1 KiB
#pragma once

#include <algorithm>

#include "operands.h"
#include "parallel.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

constexpr int kTileRows = 16, kTileDepth = 32, kTileElems = kTileRows * kTileDepth;
constexpr int kChunkRows = 512;  // rows of the weight that are bf16 at a time: 32 KiB in each panel
constexpr int kFewPanels = 2, kManyPanels = 8;  // columns of a ticket for few rows of x and for many

/// A piece of K: within one group, at most kChunkRows, a multiple of 32 rows.
struct Segment {
  int64_t begin, end, group;
};

/// The next eight bits of each number; leaves the rest of it in `a`. Numbers that are not finite have no rest.
inline __m512i take_part(Floats& a) {
  __m512i bits = _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0xffff0000)));
  __mmask16 const nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
  __m512 const rest = _mm512_sub_ps(a.v, _mm512_castsi512_ps(bits));
  a.v = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest, rest, _CMP_ORD_Q), rest);
  return _mm512_srli_epi32(bits, 16);
}

/// Tiles of x [k / 32][parts][16][32]: rows first .. first + 15 of it, zeros beyond m and k. Returns the largest
/// magnitudes, by lanes.
template <int kParts>
Floats load_x_tiles(GemmParams const& p, int64_t first, uint16_t* out) {
  Floats largest = zero();
  for (int r = 0; r < kTileRows; ++r) {
    int64_t const row = first + r;
    for (int64_t k = 0; k < p.k_padded; k += kTileDepth) {
      uint16_t* to = out + k * kTileRows * kParts + r * kTileDepth;
      for (int half = 0; half < 2; ++half) {
        int64_t const at = k + half * kLanes;
        int const count = row >= p.m || at >= p.k ? 0 : least(kLanes, p.k - at);
        Floats a = count == 0 ? zero() : load_any(p.x, row * p.ldx + at, p.type, count);
        largest = max(abs(a), largest);
        for (int part = 0; part < kParts; ++part) {
          __m256i const bits = _mm512_cvtepi32_epi16(take_part(a));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + part * kTileElems + half * kLanes), bits);
        }
      }
    }
  }
  return largest;
}

/// Parts of the numbers of codes as bf16, or -16 .. 15 modulo 32. Look-ups take five bits; of codes the fifth is the next
/// one's.
inline void make_tables(GemmParams const& p, __m512i* tables, int parts) {
  alignas(64) float numbers[32];
  for (int i = 0; i < 32; ++i) numbers[i] = p.format == kCode4 ? p.codebook[i % 16] : float(i < 16 ? i : i - 32);
  Floats low = load(numbers), high = load(numbers + kLanes);
  for (int part = 0; part < parts; ++part) {
    __m256i const first = _mm512_cvtepi32_epi16(take_part(low)), second = _mm512_cvtepi32_epi16(take_part(high));
    tables[part] = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
}

/// Two rows of int8 or fp8: byte kByte of each half of a word, as pairs of bf16 numbers.
template <int kFormat, int kByte>
inline __m512i pairs_of_bytes(Words w, Offsets<kFormat> const& offsets) {
  __m512i const even = _mm512_castps_si512(row_of_step<kFormat, 2 * kByte>(w, Table{}, offsets).v);
  __m512i const odd =
      _mm512_castps_si512(row_of_step<kFormat, 2 * kByte + 1>(w, Table{}, offsets).v);  // lower half: zeros
  return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
}

/// The pairs of rows of int4, as indices of a table of -16 .. 15 modulo 32. offsets: 8 + zero points, in each byte.
inline void int4_pairs(Words w, __m512i offsets, __m512i* pairs) {
  __m512i const nibble = _mm512_set1_epi8(15);
  pairs[0] = _mm512_sub_epi8(_mm512_and_si512(w.v, nibble), offsets);
  pairs[1] = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w.v, 4), nibble), offsets);
  pairs[2] = _mm512_srli_epi16(pairs[0], 8);
  pairs[3] = _mm512_srli_epi16(pairs[1], 8);
}

/// Weight tiles [k / 32][parts][2][16 x 32] of rows begin .. end of a panel, without scales; the integers of zero points
/// are subtracted. tables: of codes, or of -16 .. 15.
template <int kFormat, int kParts>
void load_weight_tiles(GemmParams const& p, uint32_t const* words, float const* zeros, int64_t begin, int64_t end,
                       __m512i const* tables, uint16_t* out) {
  constexpr int kSteps = kStepRows<kFormat>, kPairs = kSteps / 2;
  words += begin / kSteps * kPanel;
  Offsets<kFormat> offsets[2] = {Offsets<kFormat>(zero()), Offsets<kFormat>(zero())};
  __m512i bytes[2] = {_mm512_set1_epi8(8), _mm512_set1_epi8(8)};
  int64_t group = begin / p.group_size, group_end = begin;
  for (int64_t k = begin; k < end; k += kTileDepth) {
    if (is_integer(kFormat) && zeros != nullptr && k == group_end) {
      for (int half = 0; half < 2; ++half) {
        Floats const whole = whole_part(kFormat, load(zeros + group * kPanel + half * kLanes));
        offsets[half] = Offsets<kFormat>(whole);
        __m512i const numbers = _mm512_cvtps_epi32(add(whole, broadcast(8.f)).v);
        bytes[half] = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(0x01010101));
      }
      group_end = ++group * p.group_size;
    }
    for (int step = 0; step < kTileDepth / kSteps; ++step) {
      for (int half = 0; half < 2; ++half) {
        Words const w = load_words(words + half * kLanes);
        uint16_t* to = out + half * kTileElems + step * kPairs * kTileDepth;
        if constexpr (bits_of(kFormat) == 8) {
          _mm512_store_si512(to, pairs_of_bytes<kFormat, 0>(w, offsets[half]));
          _mm512_store_si512(to + kTileDepth, pairs_of_bytes<kFormat, 1>(w, offsets[half]));
        } else if (kFormat == kInt4) {
          __m512i pairs[kPairs];
          int4_pairs(w, bytes[half], pairs);
          for (int pair = 0; pair < kPairs; ++pair) {
            _mm512_store_si512(to + pair * kTileDepth, _mm512_permutexvar_epi16(pairs[pair], tables[0]));
          }
        } else {
          for (int part = 0; part < kParts; ++part) {
            unroll<kPairs>([&](auto pair) __attribute__((always_inline)) {
              __m512i const index = _mm512_srli_epi16(w.v, 4 * pair.value);
              _mm512_store_si512(to + part * 2 * kTileElems + pair.value * kTileDepth,
                                 _mm512_permutexvar_epi16(index, tables[part]));
            });
          }
        }
      }
      words += kPanel;
    }
    out += 2 * kParts * kTileElems;
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Which products of parts are computed: u + v up to this. The one left out, of two third parts, is below 2^-28.
constexpr int kLastOrder = 3;

/// Sums over the weight tiles of a segment, to `out` [4][16][16]: those of two x tiles (x0, x1) by two weight tiles; or,
/// where x1 is null, of x0 by two weight tiles, as two terms. Four products in flight keep the unit busy.
template <int kParts, int kWeightParts, bool kTwo>
void multiply_tiles(uint16_t const* x0, uint16_t const* x1, uint16_t const* w, int depths, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  auto const depth = [&](auto odd) __attribute__((always_inline)) {
    unroll<kWeightParts>([&](auto v) __attribute__((always_inline)) {
      _tile_loadd(4, w + v.value * 2 * kTileElems, 64);
      _tile_loadd(5, w + v.value * 2 * kTileElems + kTileElems, 64);
      unroll<kParts>([&](auto u) __attribute__((always_inline)) {
        if constexpr (u.value + v.value <= kLastOrder) {
          _tile_loadd(6, x0 + u.value * kTileElems, 64);
          if constexpr (kTwo || (u.value + v.value + odd.value) % 2 == 0) {
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 6, 5);
          } else {
            _tile_dpbf16ps(2, 6, 4);
            _tile_dpbf16ps(3, 6, 5);
          }
          if constexpr (kTwo) {
            _tile_loadd(7, x1 + u.value * kTileElems, 64);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
          }
        }
      });
    });
    x0 += kParts * kTileElems;
    if (kTwo) x1 += kParts * kTileElems;
    w += kWeightParts * 2 * kTileElems;
  };
  int d = 0;
  for (; d + 1 < depths; d += 2) unroll<2>(depth);
  if (d < depths) unroll<1>(depth);
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  _tile_stored(2, out + 512, 64);
  _tile_stored(3, out + 768, 64);
}

/// sums [16][32] (+)= scale * (tiles - rest of the zero points * x_sum) for one group. tiles: [2][16][16]; other: a second
/// term, or null.
inline void add_scaled(int format, float const* tiles, float const* other, float const* scales, float const* zeros,
                       float const* x_sums, bool add_to, float* sums) {
  for (int half = 0; half < 2; ++half) {
    Floats const scale = load(scales + half * kLanes);
    Floats rest = zero();
    if (zeros != nullptr) {
      Floats const zero_point = load(zeros + half * kLanes);
      rest = sub(zero_point, whole_part(format, zero_point));
    }
    for (int m = 0; m < kTileRows; ++m) {
      Floats part = load(tiles + half * 256 + m * kLanes);
      if (other != nullptr) part = add(part, load(other + half * 256 + m * kLanes));
      if (zeros != nullptr) part = fnma(rest, broadcast(x_sums[m]), part);
      float* to = sums + m * kPanel + half * kLanes;
      store(to, add_to ? fma(scale, part, load(to)) : mul(scale, part));
    }
  }
}

/// How many bf16 numbers are one of x and one of the weight, and the functions for so many.
struct Parts {
  int of_x, of_weight;
  Floats (*load_x)(GemmParams const&, int64_t, uint16_t*);
  void (*load_weight)(GemmParams const&, uint32_t const*, float const*, int64_t, int64_t, __m512i const*, uint16_t*);
  void (*multiply_two)(uint16_t const*, uint16_t const*, uint16_t const*, int, float*);
  void (*multiply_one)(uint16_t const*, uint16_t const*, uint16_t const*, int, float*);
};

template <int kFormat, int kParts, int kWeightParts>
Parts parts_for() {
  return {kParts,
          kWeightParts,
          load_x_tiles<kParts>,
          load_weight_tiles<kFormat, kWeightParts>,
          multiply_tiles<kParts, kWeightParts, true>,
          multiply_tiles<kParts, kWeightParts, false>};
}

template <int kFormat>
Parts integer_parts(int type) {
  return type == kBf16   ? parts_for<kFormat, 1, 1>()
         : type == kFp16 ? parts_for<kFormat, 2, 1>()
                         : parts_for<kFormat, 3, 1>();
}

/// A number of a codebook has three parts, too: sums that are small beside their terms show what two leave out.
inline Parts parts_of(GemmParams const& p) {
  if (p.format == kInt4) return integer_parts<kInt4>(p.type);
  if (p.format == kInt8) return integer_parts<kInt8>(p.type);
  if (p.format == kFp8) return integer_parts<kFp8>(p.type);
  return p.type == kBf16   ? parts_for<kCode4, 1, 3>()
         : p.type == kFp16 ? parts_for<kCode4, 2, 3>()
                           : parts_for<kCode4, 3, 3>();
}

/// Rows first .. first + rows - 1 of y, at most kMaxRows.
inline Outcome rows_in_tiles(GemmParams const& p, int64_t first, int rows) {
  Parts const parts = parts_of(p);
  int const x_parts = parts.of_x, weight_parts = parts.of_weight;
  int64_t const most_segments = p.groups * divide_up(p.group_size, kChunkRows);
  int const blocks = int(divide_up(rows, kTileRows));  // of 16 rows
  int64_t const block_elems = p.k_padded * kTileRows * x_parts;
  auto* x = scratch_of<uint16_t>(kX, blocks * block_elems);
  auto* segments = scratch_of<Segment>(kSegments, most_segments);
  auto* x_sums = scratch_of<float>(kSumsOfX, p.zeros == nullptr ? 1 : most_segments * blocks * kTileRows);
  if (x == nullptr || segments == nullptr || x_sums == nullptr) return Outcome::kNoMemory;
  int64_t count = 0;
  for (int64_t g = 0; g < p.groups; ++g) {
    for (int64_t begin = 0; begin < p.group_size; begin += kChunkRows) {
      segments[count++] = {g * p.group_size + begin, g * p.group_size + std::min(begin + kChunkRows, p.group_size), g};
    }
  }
  std::atomic<bool> is_within{true};
  parallel_for(blocks, p.threads, [&](int64_t block) {
    if (!is_within_range(p, parts.load_x(p, first + block * kTileRows, x + block * block_elems))) is_within = false;
    for (int64_t s = 0; p.zeros != nullptr && s < count; ++s) {
      for (int r = 0; r < kTileRows; ++r) {
        int const row = int(block) * kTileRows + r;
        float const sum = row < rows ? sum_of_row(p, first + row, segments[s].begin, segments[s].end) : 0.f;
        x_sums[(s * blocks + block) * kTileRows + r] = sum;
      }
    }
  });
  if (!is_within) return Outcome::kBeyondRange;
  std::atomic<bool> ok{true};
  int const panels = panels_of(p);
  int const ticket_panels = panels_of_ticket(p, rows > 2 * kTileRows ? kManyPanels : kFewPanels);
  parallel_for(divide_up(panels, ticket_panels), p.threads, [&](int64_t ticket) {
    int const begin = int(ticket) * ticket_panels, width = least(ticket_panels, panels - begin);
    int64_t const bytes = p.block_order == nullptr ? 0 : (width + 1) / 2 * 2 * panel_bytes(p);
    int64_t const of_scales = p.groups * kPanel, of_sums = int64_t(blocks) * kTileRows * kPanel;
    auto* packed = scratch_of<uint8_t>(kWeight, bytes + 1);
    auto* scales = scratch_of<float>(kScales, 2 * width * of_scales);
    auto* w = scratch_of<uint16_t>(kBlock, int64_t(kChunkRows) * kPanel * weight_parts);
    auto* sums = scratch_of<float>(kSums, width * of_sums);
    if (packed == nullptr || scales == nullptr || w == nullptr || sums == nullptr) {
      ok = false;
      return;
    }
    TileConfig const config;
    _tile_loadconfig(&config);
    __m512i tables[3];
    make_tables(p, tables, weight_parts);
    float* zeros = scales + width * of_scales;
    for (int i = 0; i < width; ++i) {
      load_panel(p, p.scales, p.ld_scales, begin + i, scales + i * of_scales);
      if (p.zeros != nullptr) load_panel(p, p.zeros, p.ld_zeros, begin + i, zeros + i * of_scales);
    }
    uint32_t const* words = panels_at(p, begin, (width + 1) / 2 * 2, packed);
    alignas(64) float tiles[4 * 256];
    for (int64_t s = 0; s < count;) {  // a chunk: segments of together at most kChunkRows
      int64_t next = s + 1;
      while (next < count && segments[next].end - segments[s].begin <= kChunkRows) ++next;
      int64_t const chunk = segments[s].begin;
      for (int i = 0; i < width; ++i) {
        uint32_t const* panel = words + i * panel_bytes(p) / 4;
        parts.load_weight(p, panel, p.zeros == nullptr ? nullptr : zeros + i * of_scales, chunk, segments[next - 1].end,
                          tables, w);
        for (int block = 0; block < blocks; block += 2) {
          float* const to = sums + i * of_sums + int64_t(block) * kTileRows * kPanel;
          for (int64_t t = s; t < next; ++t) {
            Segment const& segment = segments[t];
            uint16_t const* x0 = x + block * block_elems + segment.begin * kTileRows * x_parts;
            uint16_t const* from = w + (segment.begin - chunk) * kPanel * weight_parts;
            int const depths = int((segment.end - segment.begin) / kTileDepth);
            float const* scale = scales + i * of_scales + segment.group * kPanel;
            float const* zero_point = p.zeros == nullptr ? nullptr : zeros + i * of_scales + segment.group * kPanel;
            float const* x_sum = x_sums + (p.zeros == nullptr ? 0 : (t * blocks + block) * kTileRows);
            if (block + 1 < blocks) {
              parts.multiply_two(x0, x0 + block_elems, from, depths, tiles);
              add_scaled(p.format, tiles, nullptr, scale, zero_point, x_sum, t > 0, to);
              add_scaled(p.format, tiles + 512, nullptr, scale, zero_point, x_sum + kTileRows, t > 0,
                         to + kTileRows * kPanel);
            } else {
              parts.multiply_one(x0, nullptr, from, depths, tiles);
              add_scaled(p.format, tiles, tiles + 512, scale, zero_point, x_sum, t > 0, to);
            }
          }
        }
      }
      s = next;
    }
    _tile_release();
    for (int i = 0; i < width; ++i) {
      for (int m = 0; m < rows; ++m) store_row(p, first + m, begin + i, sums + i * of_sums + int64_t(m) * kPanel);
    }
  });
  return ok ? Outcome::kDone : Outcome::kNoMemory;
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
