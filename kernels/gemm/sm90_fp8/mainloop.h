// The main loop of gemm_sm90_fp8.
//
// Tensor cores keep some 14 bits of a sum. So a warpgroup multiplies 128 k, or a smaller group, into `partial`, and adds
// that to its accumulators, times the scales of the group. A job is one such sum of some tokens. Where registers allow,
// the next job is issued before one is waited for, and weights are converted while jobs are under way.
//
//   tensor cores    | job 0         | job 1         | job 2         |
//   warpgroup       issue 1, convert | add 0, issue 2 | add 1, issue 3, convert
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_ext/arch/barrier.h"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/ld_shared.h"
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
  static constexpr int kBuffers = Traits::kBuffers;
  using Accum = decltype(cute::partition_fragment_C(TiledMma{}, typename Traits::ShapeC{}));  // (V,1,kChunks)
  using Partial = decltype(cute::partition_fragment_C(TiledMma{}, typename Traits::ShapeChunk{}));  // (V,1,1)
  using Fragment = decltype(cute::make_tensor<typename Traits::XElement>(
      cute::partition_shape_A(TiledMma{}, typename Traits::ShapeA{})));  // (V,1,4): MMA, m64, k32
  using Words = uint32_t[Traits::kWarpgroupKBlocks * Layout::kLaneWords];

  struct Reader {
    uint32_t weights, scales, full, empty;  // shared memory addresses, in stage 0
    bool releases;
    int first_x;  // to the warpgroup's x, in descriptor units
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
      asm volatile("" : "+r"(weights), "+r"(scales), "+r"(full), "+r"(empty));
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
    /// Of the lane's two columns, times the unit of weights.
    CUTLASS_DEVICE float2 read_scales(int row) const {
      if constexpr (!Traits::kHasScales) return {kFp8WeightUnit, kFp8WeightUnit};
      uint32_t pair[1];
      read_shared(pair, scales + stage * Traits::kScaleStageBytes + row * Traits::kScaleRowBytes);
      return {float(Element::bitcast(uint16_t(pair[0]))) * kFp8WeightUnit,
              float(Element::bitcast(uint16_t(pair[0] >> 16))) * kFp8WeightUnit};
    }
  };

  /// accum = w x of all k_tiles of a work tile. x: the B fragment of stage 0.
  template <class XFragment>
  CUTLASS_DEVICE static void run(Params const& p, sm90::WorkTile const& work, Reader& reader, XFragment const& x,
                                 Accum& accum) {
    cute::clear(accum);
    Pass<XFragment> pass{p, reader, x, work.k_tile_end - work.k_tile_begin};
    if (pass.left <= 0) return;
    reader.wait();
    reader.read_words(pass.words);
    if constexpr (Traits::kHasScales && Traits::kLeastGroup == 32) {
      if (p.scale_k < 128) return mma_one_by_one<4>(pass, accum);
    }
    if constexpr (kBuffers == 2) {
      mma(pass, accum);
    } else {
      mma_one_by_one<1>(pass, accum);
    }
  }

private:
  CUTLASS_DEVICE static void convert(Words const& words, Fragment& w) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      load_fp8_fragment(reinterpret_cast<uint32_t const(&)[2]>(words[2 * i]),
                        reinterpret_cast<uint32_t*>(&w(0)) + 4 * i);
    }
  }

  CUTLASS_DEVICE static void add(float2 scales, Partial& partial, Accum& accum, int chunk) {
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

    CUTLASS_DEVICE void begin_k_tile() {
      x_stage = x.data().desc_;
      x_stage.reg32_[0] += reader.x_units();
    }
    CUTLASS_DEVICE void read_next() {
      reader.advance();
      if (--left <= 0) return;
      reader.wait();
      reader.read_words(words);
    }
    /// Issues partial = w x, or partial += w x from the second step on, of `count` k32 steps and one chunk of tokens.
    template <int kBegin, int kCount>
    CUTLASS_DEVICE void issue(Fragment& w, int chunk, bool clears, Partial& partial) const {
      using namespace cute;
      TiledMma tiled_mma;
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = kBegin; i < kBegin + kCount; ++i) {
        tiled_mma.accumulate_ = clears && i == kBegin ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        GmmaDescriptor descriptor = x_stage;
        descriptor.reg32_[0] += (32 * i + chunk * Traits::kChunkM * Traits::kXRowBytes) / Traits::kDescriptorBytes;
        gemm(tiled_mma, w(_, _, i), make_tensor(GMMA::DescriptorIterator{descriptor}, x(_, _, 0).layout()), partial);
      }
      warpgroup_commit_batch();
    }
  };

  /// Groups of 128 k and more.
  template <class XFragment>
  CUTLASS_DEVICE static void mma(Pass<XFragment>& pass, Accum& accum) {
    using namespace cute;
    static_assert(kChunks % 2 == 0);
    Reader& reader = pass.reader;
    Fragment w;
    Partial partial[2];
    convert(pass.words, w);
    clear(partial[1]);  // the job before the first adds nothing
    float2 scales = {0.f, 0.f};
    CUTLASS_PRAGMA_NO_UNROLL
    while (pass.left > 0) {
      int const stage = reader.stage;
      float2 const next_scales = reader.read_scales(0);
      pass.begin_k_tile();
      CUTLASS_PRAGMA_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        Partial &current = partial[chunk % 2], &previous = partial[1 - chunk % 2];
        if (chunk == kChunks - 1) pass.read_next();
        pass.template issue<0, kSteps / 2>(w, chunk, true, current);
        warpgroup_wait<1>();
        pass.template issue<kSteps / 2, kSteps / 2>(w, chunk, false, current);
        add(scales, previous, accum, (chunk + kChunks - 1) % kChunks);
        if (chunk == 0) scales = next_scales;
        warpgroup_wait<1>();
      }
      warpgroup_wait<0>();
      reader.release(stage);
      convert(pass.words, w);
    }
    add(scales, partial[1], accum, kChunks - 1);
  }

  /// Groups of 32 and 64 k, and where registers are few: a job at a time. kGroups: sums of 128 k.
  template <int kGroups, class XFragment>
  CUTLASS_DEVICE static void mma_one_by_one(Pass<XFragment>& pass, Accum& accum) {
    using namespace cute;
    Fragment w;
    Partial partial;
    convert(pass.words, w);
    CUTLASS_PRAGMA_NO_UNROLL
    while (pass.left > 0) {
      int const stage = pass.reader.stage;
      pass.begin_k_tile();
      for_each(make_int_sequence<kGroups>{}, [&](auto group) {
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          bool const is_last = group == kGroups - 1 && chunk == kChunks - 1;
          pass.template issue<kSteps / kGroups * group, kSteps / kGroups>(w, chunk, true, partial);
          int const row = kGroups == 1 ? 0 : pass.p.scale_k == 64 ? group / 2 : int(group);
          float2 const scales = pass.reader.read_scales(row);
          if (is_last) pass.read_next();
          warpgroup_wait<0>();
          if (is_last) {
            pass.reader.release(stage);
            convert(pass.words, w);
          }
          add(scales, partial, accum, chunk);
        }
      });
    }
  }
};

}  // namespace weightonly::sm90_fp8
