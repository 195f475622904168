// What grouped_sm90 knows at compile time, and the arguments of its kernel.
//
// A tile of kTileM rows may have fewer, and the rows of an expert rarely fill one: the MMA of a tile is as wide as its
// rows need, in steps of kWidthStep. So one kernel serves few rows and many, and a row's result does not depend on them.
// Tiles of 16 rows have one width, as a wgmma of 8 tokens takes as long as one of 16: 13 cycles of an SM.
#pragma once

#include "cutlass/fast_math.h"
#include "cutlass_ext/grouped_params.h"
#include "cutlass_ext/grouped_schedule.h"
#include "kernels/gemm/sm90/arguments.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90/traits.h"

namespace weightonly::sm90 {

/// Widths of the MMA that a kernel has, at most.
inline constexpr int kMaxWidths = 8;

/// The arguments of the grouped kernel.
struct GroupedParams : Params {
  CUtensorMap x_maps[kMaxWidths];  // in boxes of the rows of each width
  int32_t const* offs;
  int32_t experts;
  int32_t is_gated;
  int32_t is_in_layer;
  int32_t columns;  // of y
  cutlass::FastDivmod n_tiles;
  Gate gate;
};

/// A tile of one expert. Its column panels are in two halves: those from column_begin on, and from second_column on,
/// which of a gated product are gates and what they are multiplied with.
struct GroupedWork : WorkTile {
  int expert;
  int row_end;
  int second_column;
  int width;  // the MMA has width + 1 steps of kWidthStep tokens
  int y_column;  // of the first half; of a product without gates that of the second half follows

  CUTLASS_DEVICE int token_end(Params const&) const { return row_end; }
  CUTLASS_DEVICE GemmParams operands(Params const& p) const {
    GemmParams of_expert = p;
    of_expert.scales = static_cast<uint16_t const*>(p.scales) + int64_t(expert) * p.groups * p.ld_scales;
    if (p.bias != nullptr) of_expert.bias = static_cast<uint16_t const*>(p.bias) + int64_t(expert) * p.n;
    return of_expert;
  }
};

/// Persistent CTAs. The epilogue has shared memory of its own, so that the stages take the next tile meanwhile:
///
///   | mbarriers | x | weights | scales and zeros | codebook | staged y | records | schedule |
///
/// kScalesPartials_: see Traits. With other groups in one kernel ptxas would make every wgmma wait for the one before.
template <class Config, bool kScalesPartials_ = false, class Base_ = Traits<Config>,
          int kWidthStep_ = Base_::kTileM <= 16 ? Base_::kTileM : cutlass::const_max(8, Base_::kTileM / kMaxWidths)>
struct GroupedTraits : Base_ {
  using Base = Base_;
  using Element = typename Base::Element;
  static constexpr bool kMayPersist = true;
  static constexpr bool kMayMulticastX = Base::kTileM >= 128;
  static constexpr bool kMayFollow = false, kSumsInSmem = false;
  static constexpr int kHalfPanels = Base::kWarpgroupsN / 2;  // of a half of the columns
  static constexpr int kHalfColumns = kHalfPanels * kPanelColumns;
  static constexpr int kWidthStep = kWidthStep_;  // tokens
  static constexpr int kWidths = Base::kTileM / kWidthStep;
  static_assert(Base::kWarpgroupsK == 1 && Base::kWarpgroupsN % 2 == 0 && kWidthStep % 8 == 0 &&
                (kWidths == 1 || kWidths == 4 || kWidths == 8 || Base::kHasXScales));

  // Scales lie as their boxes bring them: of the first half of the columns, kMaxScaleRows rows, then of the second half.
  static constexpr int kScaleRowBytes = kHalfColumns * int(sizeof(Element));
  static constexpr int kHalfScaleBytes = Base::kMaxScaleRows * kScaleRowBytes;

  static constexpr bool kHasWidths = true;
  static constexpr bool kScalesPartials = kScalesPartials_;
  template <int kTokens>
  using MmaOf = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<typename Base::MmaM, cute::Int<kTokens>, typename Base::MmaK>>()));

  /// The arrive and the commit stand in each branch: ptxas does not find them across branches, and would make every
  /// wgmma wait for the one before.
  template <class Accumulators, class Issue>
  CUTLASS_DEVICE static void with_mma(int width, Accumulators& accum, Issue const& issue) {
    auto const issue_width = [&](auto steps) {
      constexpr int kTokens = decltype(steps)::value * kWidthStep;
      MmaOf<kTokens> tiled_mma;
      auto const shape = cute::partition_shape_C(tiled_mma, cute::Shape<typename Base::MmaM, cute::Int<kTokens>>{});
      cute::Tensor part = cute::make_tensor(accum.data(), shape);  // (V,1,1): of the first kTokens
      issue(tiled_mma, part);
    };
    // Bit by bit: a switch would become an indirect branch, which ptxas takes for a divergent one.
    auto const issue_two = [&](auto below) {
      constexpr int kBelow = decltype(below)::value;
      width & 1 ? issue_width(cute::Int<kBelow + 2>{}) : issue_width(cute::Int<kBelow + 1>{});
    };
    auto const issue_four = [&](auto below) {
      constexpr int kBelow = decltype(below)::value;
      width & 2 ? issue_two(cute::Int<kBelow + 2>{}) : issue_two(below);
    };
    if constexpr (kWidths == 8) {
      width & 4 ? issue_four(cute::Int<4>{}) : issue_four(cute::Int<0>{});
    } else if constexpr (kWidths == 4) {
      issue_four(cute::Int<0>{});
    } else {
      issue_width(cute::Int<1>{});
    }
  }

  /// Tokens that go through shared memory to y at a time, and the buffer of a warpgroup for them.
  static constexpr int kStoredTokens = cutlass::const_min(64, Base::kTileM);
  static constexpr int kStoredElements = kStoredTokens * Base::kStagedRowElements;
  static constexpr int kEpilogueBytes = Base::kWarpgroups * kStoredElements * int(sizeof(Element));
  static constexpr int kXScalesOffset = Base::kStagesBytes + kEpilogueBytes;  // from x, of each warpgroup its own
  static constexpr int kXScalesBytes = Base::kHasXScales ? Base::kWarpgroups * Base::kTileM * int(sizeof(float)) : 0;
  static constexpr int kRecordsOffset = kXScalesOffset + kXScalesBytes;
  /// Producers are up to kStages tiles ahead, and write one more, while consumers still read that of their epilogue.
  static constexpr int kRecords = Base::kStages + 2;
  static constexpr int kScheduleOffset = kRecordsOffset + kRecords * int(sizeof(GroupedWork));

  static constexpr int smem_bytes(int experts) {
    return Base::kBarrierBytes + kScheduleOffset + 2 * int(sizeof(int32_t)) * experts;
  }
  static_assert(smem_bytes(kMaxGroupedExperts) <= kMaxSmemBytesSm90);
  static_assert(kRecordsOffset % 16 == 0);

  struct Smem : Base::Smem {
    CUTLASS_DEVICE auto* staged_y() const { return reinterpret_cast<Element*>(this->x() + Base::kStagesBytes); }
    CUTLASS_DEVICE float* x_scales(int warpgroup) const {
      return reinterpret_cast<float*>(this->x() + kXScalesOffset) + warpgroup * Base::kTileM;
    }
    CUTLASS_DEVICE GroupedWork* records() const { return reinterpret_cast<GroupedWork*>(this->x() + kRecordsOffset); }
    CUTLASS_DEVICE GroupedSchedule schedule(int experts) const {
      auto* const ends = reinterpret_cast<int32_t*>(this->x() + kScheduleOffset);
      return {ends, ends + experts, experts};
    }
  };
};

}  // namespace weightonly::sm90
