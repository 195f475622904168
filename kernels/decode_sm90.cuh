// Decode on Hopper: 1 to 8 tokens, weights in the layout "tiled" as the A operand of mma.sync m16n8k16.
//
// Bound by memory, so everything serves the stream of weights: each SM gets the same number of them, they are asked for
// kDepth pieces ahead (cutlass_ext/weight_ring.h) and used without arithmetic (cutlass_ext/unscaled_fragment.h).
//
// Partition. A cluster of `split_k` CTAs computes a run of consecutive units of kUnitColumns columns; its CTAs share K, so
// that each holds only its own slice of x. In a CTA the warps take turns along K, a piece at a time:
//
//   K ->       CTA 0 of the cluster          CTA 1
//   unit 0   | warp 0 | warp 1 | warp 0 .. | warp 0 | warp 1 | ..
//   unit 1   | warp 0 | warp 1 | warp 0 .. | ..
//
// The copies of a warp run on over the end of a unit. x stays in shared memory; since a warp meets the same k in every
// unit, it copies its own k of x with its first pieces, and no barrier stands between warps until a
// unit ends. Then the warps' sums meet in shared memory, those of the CTAs in the shared memory of the CTA that owns the
// columns, each in a place of its own; they are added in the order of warps and CTAs, so the result does not depend on who
// was first. A CTA looks for the others' sums of a unit after its products of the next one.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass_ext/decode_mma.h"
#include "cutlass_ext/epilogue.h"
#include "kernels/launch_sm90.h"
#include "kernels/registry.h"

namespace weightonly {

/// GemmParams and what the host works out once, so that no thread divides.
struct DecodeParams : GemmParams {
  int32_t units;
  int32_t units_per_cluster;
  int32_t pieces;  // of K
  int32_t pieces_per_cta;
  int32_t x_row_bytes;  // of x in shared memory
  int32_t groups_per_piece;
  int32_t quads_per_cta;  // of a unit's columns, that a CTA of the cluster finishes; the last may have fewer
};

/// Config: Element, Weight, kScaleMode, kTokenTiles (of 8), kRowTiles (of 16 columns), kWarpsK, kDepth.
template <class Config>
struct Decode {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr int kTokenTiles = Config::kTokenTiles;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kWarpsK = Config::kWarpsK;
  static constexpr int kDepth = Config::kDepth;
  template <int kGroups>
  using Ring = WeightRing<Element, Weight, Config::kScaleMode, kRowTiles, kGroups, kDecodePieceBlocks<Weight>>;
  using Mma = DecodeMma<Element, Weight, Config::kScaleMode, kTokenTiles, kRowTiles>;
  using Sums = typename Mma::Sums;

  static constexpr bool kHasScales = Ring<1>::kHasScales;
  static constexpr int kPieceK = Ring<1>::kPieceK;
  static constexpr int kMaxGroups = kHasScales ? kPieceK / 32 : 1;  // in a piece
  static constexpr int kThreads = 32 * kWarpsK;
  static constexpr int kUnitColumns = 16 * kRowTiles;
  static constexpr int kUnitsPerStripe = Layout::kPieces / kRowTiles;
  static constexpr int kQuads = kUnitColumns / 4;  // sums are finished by four neighbouring columns
  static constexpr int kLaneColumns = 2 * kRowTiles;  // neighbours, too
  static_assert(kUnitsPerStripe >= 1, "a unit lies in one stripe");
  static_assert(kLaneColumns % 4 == 0, "a quad is made of neighbours");

  /// Shared memory: two barriers, the ring, the warps' sums [warp along K][token][column], two buffers of the CTAs' sums
  /// [CTA][token][owned column], x [token][k of the CTA].
  struct Smem {
    static constexpr int kBarrierBytes = 128;
    char* base;

    CUTLASS_HOST_DEVICE static constexpr int slot_bytes(int groups) {
      return groups == 4 ? Ring<4>::kSlotBytes : groups == 2 ? Ring<2>::kSlotBytes : Ring<1>::kSlotBytes;
    }
    CUTLASS_HOST_DEVICE static int ring_bytes(int groups) { return kDepth * kWarpsK * slot_bytes(groups); }
    CUTLASS_HOST_DEVICE static int sums_bytes(int m) { return kWarpsK * m * kUnitColumns * int(sizeof(float)); }
    CUTLASS_HOST_DEVICE static int part_bytes(DecodeParams const& p) {
      return p.split_k == 1 ? 0 : p.split_k * p.m * p.quads_per_cta * int(sizeof(float4));
    }
    CUTLASS_HOST_DEVICE static int bytes(DecodeParams const& p) {
      return kBarrierBytes + ring_bytes(p.groups_per_piece) + sums_bytes(p.m) + 2 * part_bytes(p) + p.m * p.x_row_bytes;
    }

    CUTLASS_DEVICE uint64_t& barrier(int i) const { return reinterpret_cast<uint64_t*>(base)[i]; }
    CUTLASS_DEVICE char* ring() const { return base + kBarrierBytes; }
    CUTLASS_DEVICE float* sums(int groups) const { return reinterpret_cast<float*>(ring() + ring_bytes(groups)); }
    CUTLASS_DEVICE float4* part(DecodeParams const& p, int groups, int i) const {
      return reinterpret_cast<float4*>(ring() + ring_bytes(groups) + sums_bytes(p.m) + i * part_bytes(p));
    }
    CUTLASS_DEVICE char* x(DecodeParams const& p, int groups) const {
      return reinterpret_cast<char*>(part(p, groups, 2));
    }
  };

  /// What this CTA and this warp work on.
  struct Place {
    int warp, lane;
    int rank;  // in the cluster
    int first_piece, end_piece;  // of K, for the CTA
    int first_unit, end_unit;

    CUTLASS_DEVICE Place(DecodeParams const& p) {
      warp = threadIdx.x / 32;
      lane = threadIdx.x % 32;
      rank = blockIdx.x;
      first_piece = rank * p.pieces_per_cta;
      end_piece = min(p.pieces, first_piece + p.pieces_per_cta);
      first_unit = blockIdx.y * p.units_per_cluster;
      end_unit = min(p.units, first_unit + p.units_per_cluster);
    }
  };

  /// Copies x of one piece, half a row (16 chunks of 16 bytes at most) per half warp.
  /// Beyond K it is zero, whatever the weights there are.
  CUTLASS_DEVICE static void fetch_x(uint32_t smem_x, DecodeParams const& p, Place const& place, int piece) {
    constexpr int kChunks = kPieceK / 8;
    constexpr int kRows = 32 / kChunks;  // per copy of a warp
    int const offset = place.lane % kChunks * 8;
    int const k = piece * kPieceK + offset;
    int const bytes = k < p.k ? 16 : 0;
    int const first_token = place.lane / kChunks;
    uint32_t target =
        smem_x + first_token * p.x_row_bytes + ((piece - place.first_piece) * kPieceK + offset) * int(sizeof(Element));
    auto const* source = static_cast<Element const*>(p.x) + first_token * p.ldx + (bytes > 0 ? k : 0);
    for (int token = first_token; token < p.m; token += kRows) {
      copy_async_or_zero(target, source, bytes);
      target += kRows * p.x_row_bytes;
      source += kRows * p.ldx;
    }
  }

  /// The warp's copies, kDepth pieces ahead of its products.
  template <int kGroups>
  struct Stream {
    using R = Ring<kGroups>;
    DecodeParams const& p;
    Place const& place;
    uint32_t smem_x;
    int first;  // piece of K, in every unit
    int unit, piece;
    typename R::Source source;

    CUTLASS_DEVICE Stream(DecodeParams const& p, Place const& place, uint32_t smem_x)
        : p(p),
          place(place),
          smem_x(smem_x),
          first(place.first_piece + place.warp),
          unit(first < place.end_piece ? place.first_unit : place.end_unit),
          piece(first),
          source(p, tile(place.first_unit), place.lane) {}

    CUTLASS_DEVICE int tile(int of_unit) const { return of_unit * kRowTiles; }

    CUTLASS_DEVICE void prefetch() const {
      if (unit >= place.end_unit) return;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        if (first + i * kWarpsK < place.end_piece) R::prefetch(source, p, first + i * kWarpsK, place.lane);
      }
    }

    /// One commit, of the next piece or of nothing.
    CUTLASS_DEVICE void fetch_next(uint32_t slot) {
      __syncwarp();  // all lanes have read what was there
      if (unit < place.end_unit) {
        if (unit == place.first_unit) fetch_x(smem_x, p, place, piece);
        R::fetch(slot, source, p, piece, place.lane);
        piece += kWarpsK;
        if (piece >= place.end_piece) {
          piece = first;
          ++unit;
          source = typename R::Source(p, tile(min(unit, place.end_unit - 1)), place.lane);
        }
      }
      commit_copies();
    }
  };

  /// This warp's sums of a unit.
  CUTLASS_DEVICE static void put(Sums const (&sums)[kRowTiles], DecodeParams const& p, Place const& place,
                                 float* buffer) {
    int const g = place.lane / 4, t = place.lane % 4;
    float* const base = buffer + place.warp * p.m * kUnitColumns + g * kLaneColumns;
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) {
        int const token = 8 * tile + 2 * t + e;
        if (token >= p.m) continue;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
          float2 const pair = {sums[i][tile][e], sums[i][tile][e + 2]};
          *reinterpret_cast<float2*>(base + token * kUnitColumns + 2 * i) = pair;
        }
      }
    }
  }

  CUTLASS_DEVICE static int column_of(int unit, int quad) {
    int const column = 4 * quad;  // in the order of the buffers: a lane's columns lie together
    return unit / kUnitsPerStripe * Layout::kStripe + column / kLaneColumns * 8 +
           unit % kUnitsPerStripe * kLaneColumns + column % kLaneColumns;
  }

  CUTLASS_DEVICE static void add(float4& a, float4 const& b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
  }

  template <int kGroups, bool kIsCluster>
  CUTLASS_DEVICE static void run(DecodeParams const& p, char* smem_base) {
    using R = Ring<kGroups>;
    Smem const smem{smem_base};
    Place const place(p);
    uint32_t const smem_x = cute::cast_smem_ptr_to_uint(smem.x(p, kGroups));
    uint32_t const first_slot = cute::cast_smem_ptr_to_uint(smem.ring()) + place.warp * kDepth * R::kSlotBytes;
    uint32_t const last_slot = first_slot + (kDepth - 1) * R::kSlotBytes;
    Stream<kGroups> stream(p, place, smem_x);
    // Weights may be on their way to the L2 while the kernels before this one still run. Nothing may be used: a neighbour
    // may be writing x, or the weights themselves.
    if (p.overlap) stream.prefetch();
    cudaGridDependencySynchronize();
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t slot = first_slot; slot <= last_slot; slot += R::kSlotBytes) stream.fetch_next(slot);
    cudaTriggerProgrammaticLaunchCompletion();
    if constexpr (kIsCluster) {
      if (threadIdx.x == 0) {
        cute::initialize_barrier(smem.barrier(0), 1);
        cute::initialize_barrier(smem.barrier(1), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
      cute::cluster_arrive_relaxed();  // a CTA writes into another one's memory once that has come this far
    }

    // Tokens from M on are given the row of M - 1: their sums are not stored.
    uint32_t x_rows[kTokenTiles];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      int const token = min(8 * tile + place.lane % 8, p.m - 1);
      x_rows[tile] = smem_x + token * p.x_row_bytes + place.lane / 8 * 16;
    }

    // Quads of columns that this CTA stores.
    int const quads_per_cta = p.quads_per_cta;
    int const first_quad = place.rank * quads_per_cta;
    int const owned = min(quads_per_cta, kQuads - first_quad);
    auto const finish = [&](int unit) {
      cute::wait_barrier(smem.barrier(unit % 2), (unit - place.first_unit) / 2 % 2);
      asm volatile("" ::: "memory");  // what follows is read after it
      float4 const* const parts = smem.part(p, kGroups, unit % 2);
      for (int i = threadIdx.x; i < p.m * owned; i += kThreads) {
        int const token = i / owned, quad = i % owned;
        float4 sum = {};
        for (int rank = 0; rank < p.split_k; ++rank) add(sum, parts[(rank * p.m + token) * quads_per_cta + quad]);
        store_quad<Element>(p, token, column_of(unit, first_quad + quad), sum, !kHasScales);
      }
    };

    uint32_t slot = first_slot;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int u = place.first_unit; u < place.end_unit; ++u) {
      uint32_t const scale_offset = R::scale_offset(stream.tile(u), place.lane);
      Sums sums[kRowTiles], sum_x;
      Mma::clear(sums);
      Mma::clear(sum_x);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int piece = stream.first; piece < place.end_piece; piece += kWarpsK) {
        wait_for_copies<kDepth - 1>();
        __syncwarp();  // scales, and x in the first unit, were copied by other lanes
        Mma::template accumulate<kGroups>(sums, sum_x, slot, scale_offset, place.lane, x_rows,
                                          (piece - place.first_piece) * (kPieceK * int(sizeof(Element))));
        stream.fetch_next(slot);
        slot = slot == last_slot ? first_slot : slot + R::kSlotBytes;
      }
      if constexpr (!kHasScales) Mma::correct_channel(sums, sum_x);

      if constexpr (kIsCluster) {
        if (threadIdx.x == 0) {
          cute::set_barrier_transaction_bytes(smem.barrier(u % 2), p.split_k * p.m * owned * int(sizeof(float4)));
        }
        // After this, nobody here reads the parts that the others are about to write: those of two units ago. And they do
        // not write them sooner, because each waits for this CTA's sums of the last unit: hence every CTA owns some columns.
        if (u == place.first_unit) {
          __syncwarp();
          cute::cluster_wait();
        } else {
          finish(u - 1);
        }
      }
      float* const buffer = smem.sums(kGroups);
      put(sums, p, place, buffer);
      __syncthreads();
      int const count = p.m * kQuads;
      for (int i = threadIdx.x; i < count; i += kThreads) {
        int const token = i / kQuads, quad = i % kQuads;
        float4 sum = {};
        CUTLASS_PRAGMA_UNROLL
        for (int w = 0; w < kWarpsK; ++w) add(sum, reinterpret_cast<float4 const*>(buffer)[w * count + i]);
        if constexpr (kIsCluster) {
          int const owner = quad / quads_per_cta;
          float4* const part = smem.part(p, kGroups, u % 2) + (place.rank * p.m + token) * quads_per_cta +
                               (quad - owner * quads_per_cta);
          send(part, smem.barrier(u % 2), owner, sum);
        } else {
          store_quad<Element>(p, token, column_of(u, quad), sum, !kHasScales);
        }
      }
      if (u + 1 < place.end_unit) __syncthreads();  // the buffer is free again
    }
    if constexpr (kIsCluster) finish(place.end_unit - 1);
  }

  /// Writes to the same address in another CTA of the cluster, and counts the bytes on its barrier.
  CUTLASS_DEVICE static void send(float4* target, uint64_t& barrier, int rank, float4 v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     cute::set_block_rank(cute::cast_smem_ptr_to_uint(target), rank)),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
                 "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), rank))
                 : "memory");
  }

  static DecodeParams prepare(GemmParams const& p, int clusters) {
    DecodeParams d{p};
    d.units = divide_up(p.n_padded, kUnitColumns);
    d.units_per_cluster = divide_up(d.units, clusters);
    d.pieces = divide_up(p.k_padded, kPieceK);
    d.pieces_per_cta = divide_up(d.pieces, p.split_k);
    // 16 bytes more than a multiple of 128: the rows that ldmatrix reads together fall into different banks.
    d.x_row_bytes = d.pieces_per_cta * kPieceK * int(sizeof(Element)) + 16;
    int const group_k = !kHasScales || p.group_size % kPieceK == 0 ? kPieceK : p.group_size % 64 == 0 ? 64 : 32;
    d.groups_per_piece = kPieceK / group_k;
    d.quads_per_cta = divide_up(kQuads, p.split_k);
    return d;
  }
};

template <class Kernel, int kGroups, bool kIsCluster>
__global__ void __launch_bounds__(Kernel::kThreads, 1) decode_kernel(__grid_constant__ DecodeParams const p) {
  extern __shared__ __align__(128) char smem_bytes[];
  Kernel::template run<kGroups, kIsCluster>(p, smem_bytes);
}

/// Kernels of their own, because one for all cases would need the registers of all of them.
template <class Kernel, int kGroups, bool kIsCluster>
cudaError_t launch_decode_kernel(DecodeParams const& p, cudaStream_t stream) {
  static std::atomic<uint64_t> devices_done{0};
  // More than half of an SM's: two CTAs on one, as the next kernel's come when launches overlap, leave others without.
  constexpr int kLeastSmemBytes = 116 * 1024;
  int const smem_bytes = Kernel::Smem::bytes(p);
  return launch_clusters(decode_kernel<Kernel, kGroups, kIsCluster>, devices_done, p,
                         dim3(p.split_k, divide_up(p.units, p.units_per_cluster)), Kernel::kThreads,
                         smem_bytes > kLeastSmemBytes ? smem_bytes : kLeastSmemBytes, stream);
}

template <class Kernel, int kGroups>
cudaError_t launch_decode_kernel(DecodeParams const& p, cudaStream_t stream) {
  if constexpr (kGroups > Kernel::kMaxGroups) {
    return cudaErrorInvalidValue;
  } else {
    return p.split_k > 1 ? launch_decode_kernel<Kernel, kGroups, true>(p, stream)
                         : launch_decode_kernel<Kernel, kGroups, false>(p, stream);
  }
}

template <class Config>
cudaError_t launch_decode_sm90(GemmParams const& p, cudaStream_t stream) {
  using Kernel = Decode<Config>;
  DecodeParams const d = Kernel::prepare(p, p.clusters);
  // Every CTA must own columns: see run.
  if ((p.split_k - 1) * d.quads_per_cta >= Kernel::kQuads) return cudaErrorInvalidValue;
  if (Kernel::template Ring<1>::kHasZeros && p.zeros == nullptr) return cudaErrorInvalidValue;
  switch (d.groups_per_piece) {
    case 1:
      return launch_decode_kernel<Kernel, 1>(d, stream);
    case 2:
      return launch_decode_kernel<Kernel, 2>(d, stream);
    default:
      return launch_decode_kernel<Kernel, 4>(d, stream);
  }
}

}  // namespace weightonly
