// Sorts choices by expert: a count, a scan and a placement, in one launch.
//
// The CTAs of one cluster, and their warps, have each a part of the choices. A warp counts its choices of each expert,
// 32 at a time: lanes with the same expert find each other, so that each knows how many of the part come before it. Then
// the counts of the warps before, of the CTAs before, and of the experts before are added up:
//
//   row of a choice = rows of smaller experts + choices in CTAs before + in warps before + in the part before
//
// So the order within an expert is that of the choices, and the time is linear in them.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/util.hpp"
#include "cutlass_ext/grouped_params.h"
#include "kernels/experts/experts.h"

namespace weightonly::route {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kMaxCtas = 8;  // of a cluster
constexpr int kCtaChoices = 4096;  // from which on another CTA is worth a wait of the cluster
static_assert(kMaxGroupedExperts <= kThreads, "a thread has one expert");

/// Shared memory: counts [kWarps][slots], sums [slots] of the CTA, and those of warps in a scan. The last slot is that of
/// choices of no expert.
struct Smem {
  int32_t* counts;
  int32_t* sums;
  int32_t* warp_sums;
  int slots;

  __device__ Smem(char* base, int experts)
      : counts(reinterpret_cast<int32_t*>(base)),
        sums(counts + kWarps * (experts + 1)),
        warp_sums(sums + experts + 1),
        slots(experts + 1) {}
  static constexpr int bytes(int experts) { return int(sizeof(int32_t)) * ((kWarps + 1) * (experts + 1) + kWarps); }
};

/// Prefix sums of one number of each thread of the CTA: those of the threads before.
__device__ inline int sum_before(int value, int32_t* warp_sums) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto const scan = [&](int sum) {
    for (int distance = 1; distance < 32; distance *= 2) {
      int const before = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += before;
    }
    return sum;
  };
  int const sum = scan(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = scan(warp_sums[lane]);
  __syncthreads();
  return sum - value + (warp > 0 ? warp_sums[warp - 1] : 0);
}

__global__ void __launch_bounds__(kThreads, 1) kernel(__grid_constant__ RouteParams const p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char smem_bytes[];
  Smem const smem(smem_bytes, p.experts);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, ctas = gridDim.x, rank = blockIdx.x;
  int32_t* const counts = smem.counts + warp * smem.slots;
  for (int slot = lane; slot < smem.slots; slot += 32) counts[slot] = 0;
  __syncwarp();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  // Parts of whole 32 choices.
  int const part = (p.choices + ctas * kThreads - 1) / (ctas * kThreads) * 32;
  int const first = (rank * kWarps + warp) * part, last = min(p.choices, first + part);
  constexpr int kAhead = 4;  // choices of a lane that are loaded at once
  int ids[kAhead], ranks[kAhead];
  auto const load = [&](int begin) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      ids[j] = -1;
      int const i = begin + 32 * j;
      if (i >= last) continue;
      int64_t const given = p.is_int64 ? static_cast<int64_t const*>(p.ids)[i] : static_cast<int32_t const*>(p.ids)[i];
      ids[j] = given >= 0 && given < p.experts ? int(given) : p.experts;
    }
  };
  bool const is_kept = part <= 32 * kAhead;  // all choices of the lane stay in registers
  for (int begin = first; begin < last; begin += 32 * kAhead) {
    load(begin + lane);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      unsigned const same = __match_any_sync(0xffffffff, ids[j]);
      if (ids[j] >= 0) ranks[j] = counts[ids[j]] + __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (ids[j] >= 0 && lane == __ffs(same) - 1) counts[ids[j]] += __popc(same);
      __syncwarp();
      if (ids[j] >= 0 && !is_kept) p.places[begin + lane + 32 * j] = ranks[j];
    }
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < smem.slots; slot += kThreads) {
    int sum = 0;
#pragma unroll 8
    for (int w = 0; w < kWarps; ++w) {
      int32_t& count = smem.counts[w * smem.slots + slot];
      int const of_warp = count;
      count = sum;
      sum += of_warp;
    }
    smem.sums[slot] = sum;
  }
  // Every CTA adds up the sums of all, and then knows where its choices of each expert begin.
  auto const synchronize_cluster = [] {
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
  };
  synchronize_cluster();
  int before_cta = 0, all = 0, before_cta_of_none = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    auto const sum_of = [&](int slot) {
      uint32_t const address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(smem.sums + slot), cta);
      int32_t sum;
      asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(sum) : "r"(address));
      return sum;
    };
    if (int(threadIdx.x) < p.experts) {
      int const sum = sum_of(threadIdx.x);
      if (cta < rank) before_cta += sum;
      all += sum;
    }
    if (threadIdx.x == 0 && cta < rank) before_cta_of_none += sum_of(p.experts);
  }
  synchronize_cluster();  // all have read the sums
  int const begin = sum_before(all, smem.warp_sums);
  if (int(threadIdx.x) < p.experts) {
    if (rank == 0) p.offs[threadIdx.x] = begin + all;
    smem.sums[threadIdx.x] = begin + before_cta;
  }
  if (threadIdx.x == 0) smem.sums[p.experts] = smem.warp_sums[kWarps - 1] + before_cta_of_none;
  __syncthreads();
  for (int begin = first + lane; begin - lane < last; begin += 32 * kAhead) {
    if (!is_kept) load(begin);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      int const i = begin + 32 * j;
      if (ids[j] < 0) continue;
      p.places[i] = (is_kept ? ranks[j] : p.places[i]) + smem.sums[ids[j]] + counts[ids[j]];
    }
  }
#endif
}

}  // namespace weightonly::route
