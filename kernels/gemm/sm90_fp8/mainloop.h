// The main loop of gemm_sm90_fp8.
//
// Tensor cores keep some 14 bits of a sum. So a warpgroup multiplies 128 k, or a smaller group, into `partial`, and adds
// that to its accumulators, times the scales of the group. A job is one such sum of a chunk of tokens. Where registers
// allow, the next job is issued before one is added.
//
//   tensor cores   | job 0 | job 1 | job 2 | job 3 |         | job 0 | ...
//   warpgroup              | add 0 | add 1 | add 2 | convert | add 3 | ...
//
// While a warpgroup converts the next weights, the tensor cores work for the other one. (nvcc 13.0 makes every wgmma wait
// for the one before if jobs are under way from one turn of the loop to the next.)
//
// Of weights with folded scales a turn adds the groups of 128 k that could be converted together. Where groups are left,
// the next turn stays with this k_tile.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/ld_shared.h"
#include "cutlass_ext/arch/vote.h"
#include "cutlass_ext/fragment/fp8_weight.h"
#include "kernels/gemm/sm90/tile_scheduler.h"
#include "kernels/gemm/sm90_fp8/traits.h"

namespace weightonly::sm90_fp8 {

template <class Traits>
struct Mainloop {
  using Smem = typename Traits::Smem;
  using Params = sm90::Params;
  using Element = typename Traits::Element;
  using Layout = typename Traits::Layout;
  using TiledMma = typename Traits::TiledMma;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kSteps = Traits::kWarpgroupK / 32;
  static constexpr int kChunks = Traits::kChunks;
  using Accum = decltype(cute::partition_fragment_C(TiledMma{}, typename Traits::ShapeC{}));  // (V,1,kChunks)
  template <int kTokens>
  using Partial =
      decltype(cute::partition_fragment_C(typename Traits::template ChunkMma<kTokens>{},
                                          cute::Shape<typename Traits::MmaM, cute::Int<kTokens>>{}));  // (V,1,1)
  using Fragment = decltype(cute::make_tensor<typename Traits::XElement>(
      cute::partition_shape_A(TiledMma{}, typename Traits::ShapeA{})));  // (V,1,4): MMA, m64, k32
  using Words = uint32_t[Traits::kWarpgroupKBlocks * Layout::kLaneWords];

  struct Reader {
    uint32_t weights, scales, full, empty;  // shared memory addresses, in stage 0
    int releases;
    int first_x;  // to the warpgroup's x, in descriptor units
    E2m1Bytes bytes = E2m1Bytes::of_numbers();  // where scales are not folded
    int stage = 0, phase = 0;

    CUTLASS_DEVICE Reader(Params const& p, Smem const& smem) {
      int const warpgroup = __shfl_sync(0xffffffff, int(threadIdx.x / 128), 0);
      int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
      int const panel = warpgroup % Traits::kWarpgroupsN, k_part = warpgroup / Traits::kWarpgroupsN;
      first_x = k_part * p.x_rows * (Traits::kXRowBytes / Traits::kDescriptorBytes);
      weights = cute::cast_smem_ptr_to_uint(smem.weights()) +
                (panel * Traits::kKBlocks + k_part * Traits::kWarpgroupKBlocks) * Layout::kBlockBytes +
                warp * Layout::kFragmentBytes + lane * 16;
      scales = cute::cast_smem_ptr_to_uint(smem.scales()) +
               (panel * Traits::kWarpgroupN + lane / 4 * 8 + warp * 2) * int(sizeof(Element)) +
               k_part * Traits::kWarpgroupK / p.scale_k * Traits::kScaleRowBytes;
      full = cute::cast_smem_ptr_to_uint(smem.full());
      empty = cute::cast_smem_ptr_to_uint(smem.empty());
      releases = lane < p.multicast_ctas;
      if constexpr (Traits::kMayMulticastX) {
        empty = cute::set_block_rank(empty, sm90::rank_in_cluster() ^ (lane & (p.multicast_ctas - 1)));
      }
      asm volatile("" : "+r"(weights), "+r"(scales), "+r"(full), "+r"(empty), "+r"(releases));
      // + 0, which ptxas cannot see: it would make a register of the constant for each use.
      if constexpr (Traits::kIsE2m1 && !Traits::kFoldsScales) bytes.low += weights >> 31;
    }

    CUTLASS_DEVICE void wait() const { mbarrier_wait(full + 8 * stage, phase); }
    CUTLASS_DEVICE void release(int used_stage) const {
      if (releases) mbarrier_arrive<Traits::kMayMulticastX>(empty + 8 * used_stage);
    }
    CUTLASS_DEVICE void advance() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    CUTLASS_DEVICE uint32_t x_units() const {
      return stage * (Traits::kXStageBytes / Traits::kDescriptorBytes) + first_x;
    }
    CUTLASS_DEVICE void read_words(Words& words) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kWarpgroupKBlocks; ++i) {
        read_shared(reinterpret_cast<uint32_t (&)[4]>(words[4 * i]),
                    weights + stage * Traits::kWeightStageBytes + i * Layout::kBlockBytes);
      }
    }
    CUTLASS_DEVICE uint32_t read_scale_pair(int row) const {
      uint32_t pair[1];
      read_shared(pair, scales + stage * Traits::kScaleStageBytes + row * Traits::kScaleRowBytes);
      return pair[0];
    }
    CUTLASS_DEVICE static float scale_of(uint32_t pair, int column) {
      return float(Element::bitcast(uint16_t(pair >> (16 * column))));
    }
    /// Of the lane's two columns, times a unit.
    CUTLASS_DEVICE float2 read_scales(int row, float unit) const {
      if constexpr (!Traits::kHasScales) return {unit, unit};
      uint32_t const pair = read_scale_pair(row);
      return {scale_of(pair, 0) * unit, scale_of(pair, 1) * unit};
    }
  };

  /// accum = w x of all k_tiles of a work tile, of its first kActive chunks of kTokens. x: the B fragment of stage 0.
  template <int kActive = kChunks, int kTokens = Traits::kChunkM, class XFragment>
  CUTLASS_DEVICE static void run(Params const& p, sm90::WorkTile const& work, Reader& reader, XFragment const& x,
                                 Accum& accum) {
    cute::clear(accum);
    Pass<XFragment> pass{p, reader, x, work.k_tile_end - work.k_tile_begin};
    if (pass.left <= 0) return;
    reader.wait();
    if constexpr (!Traits::kFoldsScales) reader.read_words(pass.words);
    if constexpr (Traits::kHasScales && Traits::kLeastGroup == 32 && !Traits::kFoldsScales) {
      if (Traits::kIsE2m1 || p.scale_k == 32) return mma<4, kActive, kTokens>(pass, accum);
      if (p.scale_k == 64) return mma<2, kActive, kTokens>(pass, accum);
    }
    mma<1, kActive, kTokens>(pass, accum);
  }

 private:
  CUTLASS_DEVICE static uint32_t const (&words_of_step(Words const& words, int i))[2] {
    return reinterpret_cast<uint32_t const(&)[2]>(words[2 * i]);
  }
  CUTLASS_DEVICE static uint32_t* step_of(Fragment& w, int i) { return reinterpret_cast<uint32_t*>(&w(0)) + 4 * i; }

  template <class Sum>
  CUTLASS_DEVICE static void add(float2 scales, Sum& partial, Accum& accum, int chunk) {
    cute::warpgroup_fence_operand(partial);
    constexpr int kSize = decltype(cute::size(partial))::value;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) {
      accum(chunk * kSize + i) += (i / 2 % 2 == 0 ? scales.x : scales.y) * partial(i);
    }
  }

  /// What the loops share of one pass over the k_tiles of a work tile.
  template <class XFragment>
  struct Pass {
    Params const& p;
    Reader& reader;
    XFragment const& x;
    int left;  // k_tiles
    Words words;
    cute::GmmaDescriptor x_stage;
    uint32_t folded = 0;  // groups of this k_tile whose scales were folded: bit 4h + i of column h and 32 k
    bool stays = false;  // whether the next turn has the same k_tile, for groups that are left
    float2 base;  // what folded sums are to be multiplied with

    CUTLASS_DEVICE void begin_k_tile() {
      x_stage = x.data().desc_;
      x_stage.reg32_[0] += reader.x_units();
    }
    CUTLASS_DEVICE void read_next() {
      if (stays) return;
      reader.advance();
      if (--left <= 0) return;
      reader.wait();
      if constexpr (!Traits::kFoldsScales) reader.read_words(words);  // early; others wait for scales, too
    }
    CUTLASS_DEVICE void convert(Fragment& w) {
      if constexpr (Traits::kFoldsScales) {
        if (left > 0) fold(w);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          if constexpr (Traits::kIsE2m1) {
            load_e2m1_fragment(words_of_step(words, i), reader.bytes, step_of(w, i));
          } else {
            load_fp8_fragment(words_of_step(words, i), step_of(w, i));
          }
        }
      }
    }
    CUTLASS_DEVICE void fold(Fragment& w) {
      reader.read_words(words);
      uint32_t pairs[kSteps];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) pairs[i] = reader.read_scale_pair(i);
      if (!stays) {
        constexpr int kMantissa = cutlass::platform::is_same<Element, cutlass::half_t>::value ? 10 : 7;
        NearScales const near(pairs, kMantissa);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          load_e2m1_fragment<0>(words_of_step(words, i), near.bytes(i, 0), step_of(w, i));
          load_e2m1_fragment<1>(words_of_step(words, i), near.bytes(i, 1), step_of(w, i));
        }
        base = {Reader::scale_of(near.most, 0) * Traits::kWeightUnit,
                Reader::scale_of(near.most, 1) * Traits::kWeightUnit};
        if (!any_of_warpgroup(!near.is_all)) return;
      }
      base.x = fold_column<0>(pairs, w);
      base.y = fold_column<1>(pairs, w);
      stays = any_of_warpgroup(folded != 0xff);
      if (!stays) folded = 0;
    }
    /// The same for all threads; that it is for those of a warp, the compiler sees by its own vote, and keeps what depends on
    /// it in uniform registers.
    CUTLASS_DEVICE static bool any_of_warpgroup(bool predicate) {
      return __any_sync(0xffffffff, warpgroup_any(BarrierId::kFirstVote + threadIdx.x / 128, predicate));
    }
    template <int kColumn>
    CUTLASS_DEVICE float fold_column(uint32_t const (&pairs)[kSteps], Fragment& w) {
      uint32_t scales[kSteps];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        bool const is_folded = folded >> (4 * kColumn + i) & 1;
        scales[i] = is_folded ? 0 : __float_as_uint(Reader::scale_of(pairs[i], kColumn));
      }
      FoldedScales const of_column(scales);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        load_e2m1_fragment<kColumn>(words_of_step(words, i), of_column.bytes[i], step_of(w, i));
        if (scales[i] == 0) folded |= 1 << (4 * kColumn + i);
      }
      return of_column.base * Traits::kWeightUnit;
    }
    /// Issues partial = w x of k32 steps and a chunk of kTokens.
    template <int kTokens, int kBegin, int kCount>
    CUTLASS_DEVICE void issue(Fragment& w, int chunk, Partial<kTokens>& partial) const {
      using namespace cute;
      typename Traits::template ChunkMma<kTokens> tiled_mma;
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = kBegin; i < kBegin + kCount; ++i) {
        tiled_mma.accumulate_ = i == kBegin ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        GmmaDescriptor descriptor = x_stage;
        descriptor.reg32_[0] += (32 * i + chunk * kTokens * Traits::kXRowBytes) / Traits::kDescriptorBytes;
        gemm(tiled_mma, w(_, _, i), make_tensor(GMMA::DescriptorIterator{descriptor}, x(_, _, 0).layout()), partial);
      }
      warpgroup_commit_batch();
    }
  };

  /// kGroups: sums of 128 k, 1, 2 or 4.
  template <int kGroups, int kActive, int kTokens, class XFragment>
  CUTLASS_DEVICE static void mma(Pass<XFragment>& pass, Accum& accum) {
    using namespace cute;
    constexpr int kJobs = kGroups * kActive, kGroupSteps = kSteps / kGroups;
    constexpr int kBuffers = Traits::buffers(kGroups, kTokens);  // sums under way
    // Whether the last sum is added before the turn ends. While scales are folded there are no registers for it.
    constexpr bool kEnds = kBuffers == 2 && (Traits::kFoldsScales || Traits::kEndsTurns);
    static_assert(kEnds || kJobs % kBuffers == 0);
    // Of many groups the unit of weights costs less at the end.
    constexpr float kUnit = kGroups == 1 ? Traits::kWeightUnit : 1.f;
    Reader& reader = pass.reader;
    Fragment w;
    Partial<kTokens> partial[kBuffers];
    float2 scales = {0.f, 0.f};  // of the job before
    pass.convert(w);
    if (!kEnds) clear(partial[kBuffers - 1]);  // the job before the first adds nothing
    CUTLASS_PRAGMA_NO_UNROLL
    while (pass.left > 0) {
      int const stage = reader.stage;
      float2 group_scales;
      pass.begin_k_tile();
      for_each(make_int_sequence<kJobs>{}, [&](auto job) {
        constexpr int kBuffer = job % kBuffers, kGroup = job / kActive, kChunk = job % kActive;
        constexpr bool kIsLast = job == kJobs - 1;
        if (kChunk == 0) {
          group_scales = Traits::kFoldsScales ? pass.base : reader.read_scales(kGroup, kUnit);
        }
        if (kIsLast) pass.read_next();
        pass.template issue<kTokens, kGroup * kGroupSteps, kGroupSteps>(w, kChunk, partial[kBuffer]);
        if constexpr (kBuffers == 2) {
          if constexpr (!(kEnds && job == 0)) {
            warpgroup_wait<1>();
            add(kEnds && kGroups == 1 ? group_scales : scales, partial[1 - kBuffer], accum,
                (kJobs + kChunk - 1) % kActive);
          }
          scales = group_scales;
        }
        if (kIsLast || kBuffers == 1) warpgroup_wait<0>();
        if (kIsLast) {
          if (!pass.stays) reader.release(stage);
          if constexpr (kEnds) add(group_scales, partial[kBuffer], accum, kChunk);
          pass.convert(w);
        }
        if constexpr (kBuffers == 1) add(group_scales, partial[0], accum, kChunk);
      });
    }
    if constexpr (kBuffers == 2 && !kEnds) add(scales, partial[1], accum, kActive - 1);
    if constexpr (kUnit != Traits::kWeightUnit) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(accum); ++i) accum(i) *= Traits::kWeightUnit;
    }
  }
};

}  // namespace weightonly::sm90_fp8
