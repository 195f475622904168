// Few rows of x (M up to kMaxTileRows): the weight is read once, and becomes floats in registers.
//
// Every lane is a column. A row of the weight costs a shift and a look-up for 16 columns, and then one FMA for each row
// of x. Sums of a group are of weights without their scale, which is applied once, in fp32, when the group ends. Whole
// parts of zero points go with the weight, so that q - z is zero where it should be; the rest goes with the sum of x.
#pragma once

#include "operands.h"
#include "parallel.h"

namespace weightonly::cpu::WEIGHTONLY_VARIANT {

/// Words from those that are computed to those that are asked for: the hardware's own prefetch ends with each page.
constexpr int kAhead = 64 * kPanel;

/// sums [kRows][32] of one panel. x: [k_padded][kRows]; x_sums: [groups][kRows], read where there are zeros.
template <int kFormat, int kRows>
void few_rows_panel(GemmParams const& p, uint32_t const* words, float const* x, float const* scales, float const* zeros,
                    float const* x_sums, float* sums) {
  constexpr int kInFlight = 4;  // an FMA takes four cycles, and two begin in each
  constexpr int kSums = kRows * kRegisters < kInFlight ? kInFlight / (kRows * kRegisters) : 1;
  constexpr int kSteps = kStepRows<kFormat>;
  Table const table = table_of(p);
  Floats total[kRows][2];
  for (auto& row : total) row[0] = row[1] = zero();
  int const steps = int(p.group_size / kSteps);
  ZeroPoints<kFormat> zero_points;
  for (int64_t g = 0; g < p.groups; ++g) {
    if (is_integer(kFormat) && zeros != nullptr) zero_points.load_group(zeros + g * kPanel);
    Floats part[kSums][kRows][2];
    for (auto& some : part) {
      for (auto& row : some) row[0] = row[1] = zero();
    }
    for (int step = 0; step < steps; ++step) {
      __builtin_prefetch(words + kAhead);
      __builtin_prefetch(words + kAhead + kLanes);
      Words const low = load_words(words), high = load_words(words + kLanes);
      unroll<kSteps>([&](auto e) __attribute__((always_inline)) {
        Floats const w0 = row_of_step<kFormat, e.value>(low, table, zero_points.offsets[0]);
        Floats const w1 = row_of_step<kFormat, e.value>(high, table, zero_points.offsets[1]);
        for (int m = 0; m < kRows; ++m) {
          Floats const xm = broadcast(x[e.value * kRows + m]);
          auto& to = part[e.value % kSums][m];
          to[0] = fma(w0, xm, to[0]);
          to[1] = fma(w1, xm, to[1]);
        }
      });
      words += kPanel;
      x += kSteps * kRows;
    }
    for (int half = 0; half < 2; ++half) {
      Floats const scale = load(scales + g * kPanel + half * kLanes);
      for (int m = 0; m < kRows; ++m) {
        Floats sum = part[0][m][half];
        for (int i = 1; i < kSums; ++i) sum = add(sum, part[i][m][half]);
        if (is_integer(kFormat) && zeros != nullptr)
          sum = fnma(zero_points.rest[half], broadcast(x_sums[g * kRows + m]), sum);
        total[m][half] = fma(scale, sum, total[m][half]);
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int half = 0; half < 2; ++half) store(sums + m * kPanel + half * kLanes, total[m][half]);
  }
}

using FewRowsPanel = void (*)(GemmParams const&, uint32_t const*, float const*, float const*, float const*,
                              float const*, float*);

/// few_rows_panel for 1 .. kMaxTileRows rows.
template <int kFormat, int... kRows>
FewRowsPanel few_rows_of(int rows, std::integer_sequence<int, kRows...>) {
  static constexpr FewRowsPanel kPanels[] = {few_rows_panel<kFormat, kRows + 1>...};
  return kPanels[rows - 1];
}

inline FewRowsPanel few_rows_of(int format, int rows) {
  constexpr std::make_integer_sequence<int, kMaxTileRows> kAll;
  if (format == kInt4) return few_rows_of<kInt4>(rows, kAll);
  if (format == kFp8) return few_rows_of<kFp8>(rows, kAll);
  return format == kInt8 ? few_rows_of<kInt8>(rows, kAll) : few_rows_of<kCode4>(rows, kAll);
}

/// Rows first .. first + rows - 1 of y, at most kMaxTileRows.
inline Outcome few_rows(GemmParams const& p, int64_t first, int rows) {
  auto* x = scratch_of<float>(kX, p.k_padded * rows);
  auto* x_sums = scratch_of<float>(kSumsOfX, p.groups * rows);
  if (x == nullptr || x_sums == nullptr) return Outcome::kNoMemory;
  Floats largest = zero();
  for (int m = 0; m < rows; ++m) load_x_column(p, first + m, m, rows, x, largest);
  if (!is_within_range(p, largest)) return Outcome::kBeyondRange;
  for (int m = 0; p.zeros != nullptr && m < rows; ++m) {
    for (int64_t g = 0; g < p.groups; ++g) {
      x_sums[g * rows + m] = sum_of_row(p, first + m, g * p.group_size, (g + 1) * p.group_size);
    }
  }
  int const ticket_panels = panels_of_ticket(p, 4);
  bool const as_codes = kLooksUpInt4 && p.format == kInt4 && p.zeros == nullptr;
  FewRowsPanel const multiply = few_rows_of(as_codes ? kCode4 : p.format, rows);
  std::atomic<bool> ok{true};
  int const panels = panels_of(p);
  parallel_for(divide_up(panels, ticket_panels), p.threads, [&](int64_t ticket) {
    int const begin = int(ticket) * ticket_panels, end = least(begin + ticket_panels, panels);
    int64_t const bytes = p.block_order == nullptr ? 0 : ticket_panels * panel_bytes(p);
    auto* blocks = scratch_of<uint8_t>(kWeight, bytes + 1);
    auto* scales = scratch_of<float>(kScales, 2 * p.groups * kPanel);
    if (blocks == nullptr || scales == nullptr) {
      ok = false;
      return;
    }
    float* zeros = p.zeros == nullptr ? nullptr : scales + p.groups * kPanel;
    uint32_t const* words = panels_at(p, begin, (end - begin + 1) / 2 * 2, blocks);
    for (int panel = begin; panel < end; ++panel) {
      load_panel(p, p.scales, p.ld_scales, panel, scales);
      if (zeros != nullptr) load_panel(p, p.zeros, p.ld_zeros, panel, zeros);
      float sums[kMaxTileRows * kPanel];
      multiply(p, words, x, scales, zeros, x_sums, sums);
      for (int m = 0; m < rows; ++m) store_row(p, first + m, panel, sums + m * kPanel);
      words += panel_bytes(p) / 4;
    }
  });
  return ok ? Outcome::kDone : Outcome::kNoMemory;
}

}  // namespace weightonly::cpu::WEIGHTONLY_VARIANT
