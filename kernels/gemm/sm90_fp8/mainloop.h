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
      if (p.scale_k < 128) return mma<4>(pass, accum);
    }
    mma<1>(pass, accum);
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
    /// Issues partial = w x of k32 steps and a chunk of tokens.
    template <int kBegin, int kCount>
    CUTLASS_DEVICE void issue(Fragment& w, int chunk, Partial& partial) const {
      using namespace cute;
      TiledMma tiled_mma;
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = kBegin; i < kBegin + kCount; ++i) {
        tiled_mma.accumulate_ = i == kBegin ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        GmmaDescriptor descriptor = x_stage;
        descriptor.reg32_[0] += (32 * i + chunk * Traits::kChunkM * Traits::kXRowBytes) / Traits::kDescriptorBytes;
        gemm(tiled_mma, w(_, _, i), make_tensor(GMMA::DescriptorIterator{descriptor}, x(_, _, 0).layout()), partial);
      }
      warpgroup_commit_batch();
    }
  };

  /// kGroups: sums of 128 k, 1 or 4: groups of 64 are two of four.
  template <int kGroups, class XFragment>
  CUTLASS_DEVICE static void mma(Pass<XFragment>& pass, Accum& accum) {
    using namespace cute;
    constexpr int kJobs = kGroups * kChunks, kGroupSteps = kSteps / kGroups;
    static_assert(kJobs % kBuffers == 0);
    Reader& reader = pass.reader;
    Fragment w;
    Partial partial[kBuffers];
    float2 scales = {0.f, 0.f};  // of the job before
    convert(pass.words, w);
    clear(partial[kBuffers - 1]);  // the job before the first adds nothing
    CUTLASS_PRAGMA_NO_UNROLL
    while (pass.left > 0) {
      int const stage = reader.stage;
      float2 group_scales;
      pass.begin_k_tile();
      for_each(make_int_sequence<kJobs>{}, [&](auto job) {
        constexpr int kBuffer = job % kBuffers, kGroup = job / kChunks, kChunk = job % kChunks;
        constexpr int kBefore = kBuffers - 1 - kBuffer;
        constexpr bool kIsLast = job == kJobs - 1;
        if (kChunk == 0) {
          group_scales = reader.read_scales(kGroups == 4 && pass.p.scale_k == 64 ? kGroup / 2 : kGroup);
        }
        if (kIsLast) pass.read_next();
        pass.template issue<kGroup * kGroupSteps, kGroupSteps>(w, kChunk, partial[kBuffer]);
        if constexpr (kBuffers == 2) {
          warpgroup_wait<1>();
          add(scales, partial[kBefore], accum, (kJobs + kChunk - 1) % kChunks);
          scales = group_scales;
        }
        if (kIsLast || kBuffers == 1) warpgroup_wait<0>();
        if (kIsLast) {
          reader.release(stage);
          convert(pass.words, w);
        }
        if constexpr (kBuffers == 1) add(group_scales, partial[0], accum, kChunk);
      });
    }
    if constexpr (kBuffers == 2) add(scales, partial[1], accum, kChunks - 1);
  }
};

}  // namespace weightonly::sm90_fp8
