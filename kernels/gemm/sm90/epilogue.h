// How the accumulators of a tile become y: through epilogue_store.h where it serves, else through epilogue_reduce.h.
#pragma once

#include "cutlass_ext/arch/prefetch_l2.h"
#include "kernels/gemm/sm90/epilogue_reduce.h"
#include "kernels/gemm/sm90/epilogue_store.h"

namespace weightonly::sm90 {

template <class Traits>
struct Epilogue {
  using Store = StagedStore<Traits>;
  using Reduce = ClusterReduce<Traits>;

  /// Prefetches the channel scales of a tile into the L2: they come from memory, and are needed when the main loop has
  /// ended.
  CUTLASS_DEVICE static void prefetch(Params const& p, WorkTile const& work) {
    int const column = work.column_begin + Traits::kWarpgroupN * int(threadIdx.x);
    if (threadIdx.x < Traits::kWarpgroupsN && column < p.n) {
      prefetch_line(static_cast<typename Traits::Element const*>(p.scales) + column);
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void reduce(Params const& p, Reduce& reduction, Accumulators const& accum) {
    reduction.store_partials(accum);
    p.activation == int(Activation::kIdentity) ? reduction.template reduce<true>() : reduction.template reduce<false>();
  }
};

}  // namespace weightonly::sm90
