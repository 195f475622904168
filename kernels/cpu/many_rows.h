// Many rows of x without matrix instructions: blocks of the weight become floats once, in memory that the L2 cache
// holds, and tiles of kRows x 32 are summed in registers.
#pragma once

#include <algorithm>

#include "operands.h"
#include "parallel.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

constexpr int kBlockRows = 512;    // of the weight: 64 KiB as floats in each panel
constexpr int kMostPanels = 4;  // of a ticket, 128 columns: a block of x is read once for all of them

/// w [rows][32]: rows k_begin .. k_begin + rows - 1 of a panel, scaled; (q - z) * s as the equation has it.
template <int kFormat>
void dequantize_block(GemmParams const& p, uint32_t const* words, float const* scales, float const* zeros,
                      int64_t k_begin, int rows, float* w) {
  constexpr int kSteps = kStepRows<kFormat>;
  Table const table = table_of(p);
  ZeroPoints<kFormat> zero_points;
  words += k_begin / kSteps * kPanel;
  for (int64_t k = k_begin; k < k_begin + rows;) {
    int64_t const g = k / p.group_size, end = std::min(k_begin + rows, (g + 1) * p.group_size);
    Floats const scale[2] = {load(scales + g * kPanel), load(scales + g * kPanel + kLanes)};
    if (zeros != nullptr) zero_points.load_group(zeros + g * kPanel);
    auto const to_floats = [&](auto whole) __attribute__((always_inline)) {
      for (; k < end; k += kSteps) {
        for (int half = 0; half < 2; ++half) {
          Words const part = load_words(words + half * kLanes);
          unroll<kSteps>([&](auto e) __attribute__((always_inline)) {
            Floats q = row_of_step<kFormat, e.value>(part, table, zero_points.offsets[half]);
            if constexpr (!whole) q = sub(q, zero_points.rest[half]);
            store(w + e.value * kPanel + half * kLanes, mul(q, scale[half]));
          });
        }
        words += kPanel;
        w += kSteps * kPanel;
      }
    };
    if (zeros == nullptr || zero_points.are_whole()) {
      to_floats(std::true_type{});
    } else {
      to_floats(std::false_type{});
    }
  }
}

/// sums [kRows][32] += x [rows][kRows] ^T @ w [rows][32]
template <int kRows>
void multiply_tile(float const* x, float const* w, int rows, bool add_to, float* sums) {
  Floats part[kRows][2];
  for (int m = 0; m < kRows; ++m) {
    for (int half = 0; half < 2; ++half) part[m][half] = add_to ? load(sums + m * kPanel + half * kLanes) : zero();
  }
  for (int k = 0; k < rows; ++k) {
    Floats const w0 = load(w + k * kPanel), w1 = load(w + k * kPanel + kLanes);
    for (int m = 0; m < kRows; ++m) {
      Floats const xm = broadcast(x[k * kRows + m]);
      part[m][0] = fma(w0, xm, part[m][0]);
      part[m][1] = fma(w1, xm, part[m][1]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int half = 0; half < 2; ++half) store(sums + m * kPanel + half * kLanes, part[m][half]);
  }
}

using DequantizeBlock = void (*)(GemmParams const&, uint32_t const*, float const*, float const*, int64_t, int, float*);
using MultiplyTile = void (*)(float const*, float const*, int, bool, float*);

inline DequantizeBlock dequantize_block_of(int format) {
  return format == kInt4   ? dequantize_block<kInt4>
         : format == kInt8 ? dequantize_block<kInt8>
         : format == kFp8  ? dequantize_block<kFp8>
                           : dequantize_block<kCode4>;
}

/// multiply_tile for 1 .. kMaxTileRows rows.
template <int... kRows>
MultiplyTile multiply_tile_of(int rows, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyTile kTiles[] = {multiply_tile<kRows + 1>...};
  return kTiles[rows - 1];
}

/// Rows first .. first + rows - 1 of y, at most kMaxRows.
inline Outcome many_rows(GemmParams const& p, int64_t first, int rows) {
  int const tiles = int(divide_up(rows, kMaxTileRows)), tile_rows = int(divide_up(rows, tiles));
  MultiplyTile const multiply = multiply_tile_of(tile_rows, std::make_integer_sequence<int, kMaxTileRows>{});
  DequantizeBlock const dequantize = dequantize_block_of(p.format);
  auto* x = scratch_of<float>(kX, int64_t(tiles) * tile_rows * p.k_padded);  // [tile][k][tile_rows]
  if (x == nullptr) return Outcome::kNoMemory;
  parallel_for(tiles, p.threads, [&](int64_t tile) {
    Floats unread = zero();
    for (int m = 0; m < tile_rows; ++m) {  // rows beyond the last one repeat it, and are not stored
      int const row = least(int(tile) * tile_rows + m, rows - 1);
      load_x_column(p, first + row, m, tile_rows, x + tile * tile_rows * p.k_padded, unread);
    }
  });
  int64_t const depth_of_all = rows_of(p);
  std::atomic<bool> ok{true};
  int const panels = panels_of(p), ticket_panels = panels_of_ticket(p, kMostPanels);
  parallel_for(divide_up(panels, ticket_panels), p.threads, [&](int64_t ticket) {
    int const begin = int(ticket) * ticket_panels, count = least(ticket_panels, panels - begin);
    int64_t const bytes = p.block_order == nullptr ? 0 : ticket_panels * panel_bytes(p);
    int64_t const of_scales = p.groups * kPanel, of_sums = int64_t(tiles) * tile_rows * kPanel;
    auto* blocks = scratch_of<uint8_t>(kWeight, bytes + 1);
    auto* scales = scratch_of<float>(kScales, 2 * count * of_scales);
    auto* w = scratch_of<float>(kBlock, int64_t(kBlockRows) * kPanel);
    auto* sums = scratch_of<float>(kSums, count * of_sums);
    if (blocks == nullptr || scales == nullptr || w == nullptr || sums == nullptr) {
      ok = false;
      return;
    }
    float* zeros = scales + count * of_scales;
    for (int i = 0; i < count; ++i) {
      load_panel(p, p.scales, p.ld_scales, begin + i, scales + i * of_scales);
      if (p.zeros != nullptr) load_panel(p, p.zeros, p.ld_zeros, begin + i, zeros + i * of_scales);
    }
    uint32_t const* words = panels_at(p, begin, (count + 1) / 2 * 2, blocks);
    for (int64_t k = 0; k < depth_of_all; k += kBlockRows) {
      int const depth = least(kBlockRows, depth_of_all - k);
      for (int i = 0; i < count; ++i) {
        float const* zero_points = p.zeros == nullptr ? nullptr : zeros + i * of_scales;
        dequantize(p, words + i * panel_bytes(p) / 4, scales + i * of_scales, zero_points, k, depth, w);
        for (int tile = 0; tile < tiles; ++tile) {
          int64_t const row = int64_t(tile) * tile_rows;
          multiply(x + row * p.k_padded + k * tile_rows, w, depth, k > 0, sums + i * of_sums + row * kPanel);
        }
      }
    }
    for (int i = 0; i < count; ++i) {
      for (int m = 0; m < rows; ++m) store_row(p, first + m, begin + i, sums + i * of_sums + int64_t(m) * kPanel);
    }
  });
  return ok ? Outcome::kDone : Outcome::kNoMemory;
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
