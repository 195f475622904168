// What every product needs: scales as floats, rows of x, panels of a weight, and the end of a tile of y.
#pragma once

#include "activations.h"
#include "params.h"
#include "vec.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

inline int least(int64_t a, int64_t b) {
  return int(a < b ? a : b);  // one of them is an int
}

/// The numbers that codes stand for: integers of 4 bits may be looked up, too.
inline Table table_of(GemmParams const& p) {
  static constexpr float kIntegers[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return make_table(p.format == kCode4 ? p.codebook : kIntegers);
}

/// Panels of a ticket: `most`, or half as many and again, down to 2, where threads would get fewer than four tickets each.
inline int panels_of_ticket(GemmParams const& p, int most) {
  while (most > 2 && divide_up(panels_of(p), most) < 4 * p.threads) most /= 2;
  return most;
}

/// Scales or zeros of a panel as floats [groups][32], zeros beyond column n. stride: elements between groups.
inline void load_panel(GemmParams const& p, void const* source, int64_t stride, int panel, float* out) {
  for (int64_t g = 0; g < p.groups; ++g) {
    for (int half = 0; half < 2; ++half) {
      int const column = panel * kPanel + half * kLanes;
      int const count = column >= p.n ? 0 : least(kLanes, p.n - column);
      store(out + g * kPanel + half * kLanes, load_any(source, g * stride + column, p.type, count));
    }
  }
}

/// y[row][32 columns of a panel] = act(sums + bias)
inline void store_row(GemmParams const& p, int64_t row, int panel, float const* sums) {
  for (int half = 0; half < 2; ++half) {
    int const column = panel * kPanel + half * kLanes;
    if (column >= p.n) return;
    int const count = least(kLanes, p.n - column);
    Floats y = load(sums + half * kLanes);
    if (p.bias != nullptr) y = add(y, load_any(p.bias, column, p.type, count));
    store_any(p.y, row * p.ldy + column, p.type, activate(y, p.activation), count);
  }
}

/// sums[g] = the sum over the rows of the weight begin .. end of x[row], 0 beyond k.
inline float sum_of_row(GemmParams const& p, int64_t row, int64_t begin, int64_t end) {
  Floats sum = zero();
  end = least(end, p.k);
  for (int64_t k = begin; k < end; k += kLanes) {
    sum = add(sum, load_any(p.x, row * p.ldx + k, p.type, least(kLanes, end - k)));
  }
  float lanes[kLanes];
  store(lanes, sum);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

/// Row `row` of x as column `column` of [k_padded][columns], zeros beyond k. Raises `largest` to the magnitudes, by lanes.
inline void load_x_column(GemmParams const& p, int64_t row, int column, int columns, float* out, Floats& largest) {
  for (int64_t k = 0; k < p.k_padded; k += kLanes) {
    Floats const part = load_any(p.x, row * p.ldx + k, p.type, k >= p.k ? 0 : least(kLanes, p.k - k));
    largest = max(abs(part), largest);
    if (columns == 1) {
      store(out + k, part);
    } else {
      float lanes[kLanes];
      store(lanes, part);
      for (int i = 0; i < kLanes; ++i) out[(k + i) * columns + column] = lanes[i];
    }
  }
}

/// The integers of zero points, as far as a weight can equal them.
inline Floats whole_part(int format, Floats zero_point) {
  float const most = float(1 << (bits_of(format) - 1));
  return round(min(broadcast(most), max(broadcast(-most), zero_point)));
}

/// Zero points of a panel in one group: whole parts go with the integers, the rest is what is left of them.
template <int kFormat>
struct ZeroPoints {
  Offsets<kFormat> offsets[2] = {Offsets<kFormat>(zero()), Offsets<kFormat>(zero())};
  Floats rest[2] = {zero(), zero()};

  /// zeros: [32]
  void load_group(float const* zeros) {
    for (int half = 0; half < 2; ++half) {
      Floats const all = load(zeros + half * kLanes), whole = whole_part(kFormat, all);
      offsets[half] = Offsets<kFormat>(whole);
      rest[half] = sub(all, whole);
    }
  }

  bool are_whole() const {
    float lanes[2 * kLanes];
    for (int half = 0; half < 2; ++half) store(lanes + half * kLanes, rest[half]);
    bool are = true;
    for (float const lane : lanes) are &= lane == 0;
    return are;
  }
};

/// Whether sums of weights without their scale, times x of such magnitudes, stay within fp32: weights below 2^17.
inline bool is_within_range(GemmParams const& p, Floats largest) {
  float lanes[kLanes];
  store(lanes, largest);
  float const most = 0x1p110f / float(p.k_padded);
  bool is_within = true;
  for (float const lane : lanes) is_within &= lane <= most;
  return is_within;
}

/// Panels `first` .. `first + count` - 1 of a weight in layout "cpu": in place, or brought into it in `scratch`.
/// For another layout `first` and `count` are even: its blocks are 64 columns wide.
inline uint32_t const* panels_at(GemmParams const& p, int first, int count, uint8_t* scratch) {
  int64_t const panel = panel_bytes(p);
  if (p.block_order == nullptr) return reinterpret_cast<uint32_t const*>(p.weight + first * panel);
  int const bits = bits_of(p.format), block_bytes = 64 * kPanel * bits / 8;  // of a panel
  uint8_t elems[64 * 64];
  for (int pair = 0; pair < count / 2; ++pair) {
    for (int64_t block_k = 0; block_k < p.k_padded / 64; ++block_k) {
      uint8_t const* from = p.weight + block_k * p.block_stride_k + (first / 2 + pair) * p.block_stride_n;
      uint8_t* to = elems;
      for (int s = 0; s < p.segments; ++s) {
        uint8_t const* bytes = from + s * p.segment_stride;
        if (bits == 8) {
          std::memcpy(to, bytes, size_t(p.segment_bytes));
          to += p.segment_bytes;
        } else {
          for (int i = 0; i < p.segment_bytes; ++i) {
            to[2 * i] = bytes[i] & 15;
            to[2 * i + 1] = uint8_t(bytes[i] >> 4);
          }
          to += 2 * p.segment_bytes;
        }
      }
      uint16_t const* order = p.block_order;
      for (int half = 0; half < 2; ++half) {
        uint8_t* out = scratch + (2 * pair + half) * panel + block_k * block_bytes;
        if (bits == 8) {
          for (int i = 0; i < block_bytes; ++i) out[i] = elems[order[i]];
        } else {
          for (int i = 0; i < block_bytes; ++i) out[i] = uint8_t(elems[order[2 * i]] | elems[order[2 * i + 1]] << 4);
        }
        order += 64 * kPanel;
      }
    }
  }
  return reinterpret_cast<uint32_t const*>(scratch);
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
