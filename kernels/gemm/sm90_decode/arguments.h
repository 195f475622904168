// The host's side of decode_sm90: parameters from a call's arguments, the choice of the kernel, the launch.
#pragma once

#include "kernels/gemm/launch_cluster.h"
#include "kernels/gemm/sm90_decode/kernel.cuh"

namespace weightonly::sm90_decode {

template <class Traits>
constexpr Params make_params(GemmParams const& p) {
  constexpr int kTileK = Traits::kTileK;
  Params d{p};
  d.n_tiles = divide_up(p.n_padded, Traits::kTileN);
  d.n_tiles_per_cluster = divide_up(d.n_tiles, p.clusters);
  d.k_tiles = divide_up(p.k_padded, kTileK);
  d.k_tiles_multiplier = uint32_t(((uint64_t(1) << 32) + d.k_tiles - 1) / d.k_tiles);
  d.work_unit_k_tiles = divide_up(d.n_tiles_per_cluster * d.k_tiles, p.split_k);
  // x of one token is too small for the rotation to matter.
  d.rotation_multiplier =
      p.m == 1 ? 0 : uint32_t((uint64_t(d.k_tiles) << 32) / divide_up(d.n_tiles, d.n_tiles_per_cluster));
  d.x_row_bytes = Traits::x_row_bytes(d.k_tiles < d.work_unit_k_tiles ? d.k_tiles : d.work_unit_k_tiles);
  int const group_k = !Traits::kHasScales || p.group_size % kTileK == 0 ? kTileK : p.group_size % 64 == 0 ? 64 : 32;
  d.groups_per_k_tile = Traits::kHasGroupsOf16 ? Traits::kMaxGroups : kTileK / group_k;
  return d;
}

/// Each kGroups and kIsCluster is a kernel of its own: one for all cases would need the registers of all of them.
///
/// The template arguments of a kernel name no CUTLASS type: nvcc 13.0 compiles a kernel whose mangled name contains
/// "cutlass" to other machine code.
template <class Traits, int kGroups, bool kIsCluster>
cudaError_t launch_decode_kernel(Params const& p, cudaStream_t stream) {
  using Kernel = sm90_decode::Kernel<Loader<Traits, kGroups, kIsCluster>, typename Traits::Mma,
                                     Epilogue<Traits, kGroups, kIsCluster>, WorkTile<Traits::kWarpsK, kIsCluster>>;
  static std::atomic<uint64_t> devices_done{0};
  // More than half of an SM's shared memory. With PDL the CTAs of the next kernel start early; two on one SM would
  // leave others without any.
  constexpr int kLeastSmemBytes = 116 * 1024;
  int const smem_bytes = Traits::smem_bytes(p.m, p.split_k, p.groups_per_k_tile, p.x_row_bytes);
  return launch_clusters(decode_kernel<Kernel>, devices_done, p,
                         dim3(p.split_k, divide_up(p.n_tiles, p.n_tiles_per_cluster)), dim3(p.split_k),
                         Kernel::kThreads, smem_bytes > kLeastSmemBytes ? smem_bytes : kLeastSmemBytes, stream);
}

template <class Traits, int kGroups>
cudaError_t launch_decode_kernel(Params const& p, cudaStream_t stream) {
  if constexpr (kGroups > Traits::kMaxGroups) {
    return cudaErrorInvalidValue;
  } else {
    return p.split_k > 1 ? launch_decode_kernel<Traits, kGroups, true>(p, stream)
                         : launch_decode_kernel<Traits, kGroups, false>(p, stream);
  }
}

}  // namespace weightonly::sm90_decode

namespace weightonly {

template <class Config>
cudaError_t launch_decode_sm90(GemmParams const& p, cudaStream_t stream) {
  using Traits = sm90_decode::Traits<Config>;
  bool const needs_zeros = Traits::kHasZeros || Traits::kHasCodebook;
  if (needs_zeros && p.zeros == nullptr) return cudaErrorInvalidValue;
  auto const d = sm90_decode::make_params<Traits>(p);
  if constexpr (Traits::kHasGroupsOf16) {
    return sm90_decode::launch_decode_kernel<Traits, Traits::kMaxGroups>(d, stream);
  } else {
    switch (d.groups_per_k_tile) {
      case 1:
        return sm90_decode::launch_decode_kernel<Traits, 1>(d, stream);
      case 2:
        return sm90_decode::launch_decode_kernel<Traits, 2>(d, stream);
      default:
        return sm90_decode::launch_decode_kernel<Traits, 4>(d, stream);
    }
  }
}

}  // namespace weightonly
