// Decode on Hopper: 1 to 8 tokens, weights in the layout "tiled" as the A operand of mma.sync m16n8k16.
//
// Bound by memory, so everything serves the stream of weights: each SM gets the same number of them, they are asked for
// kDepth pieces ahead (cutlass_ext/weight_ring.h) and used without arithmetic (cutlass_ext/unscaled_fragment.h). Which CTA and
// which warp has what: decode_sm90_place.h.
//
// When a unit ends its warps leave their sums in shared memory and go on; they are added after the products of the next
// unit, when all are there. A unit that is shared is finished by the CTA that began it, which the others send their sums
// to, each to a place of its own. All are added in the order of warps and CTAs: the result does not depend on who was first.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass_ext/decode_mma.h"
#include "cutlass_ext/epilogue.h"
#include "kernels/decode_sm90_stream.h"
#include "kernels/launch_sm90.h"
#include "kernels/prefetch_sm90.h"
#include "kernels/registry.h"

namespace weightonly {

/// Config: Element, Weight, kScaleMode, kRowTiles (of 16 columns), kWarpsK, kDepth.
template <class Config>
struct Decode {
  using Element = typename Config::Element;
  using Weight = typename Config::Weight;
  using Layout = TiledLayout<Weight>;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kWarpsK = Config::kWarpsK;
  static constexpr int kDepth = Config::kDepth;
  template <int kGroups>
  using Ring = WeightRing<Element, Weight, Config::kScaleMode, kRowTiles, kGroups, kDecodePieceBlocks<Weight>>;
  using Mma = DecodeMma<Element, Weight, Config::kScaleMode, kRowTiles>;
  using Sums = typename Mma::Sums;
  template <bool kIsCluster>
  using Place = DecodePlace<kWarpsK, kIsCluster>;
  template <int kGroups, bool kIsCluster>
  using Stream = DecodeStream<Decode, kGroups, kIsCluster>;

  using Table = PairTable<true>;
  static constexpr int kTableBytes = kIsCode<Weight> ? Table::kBytes : 0;
  static constexpr bool kHasScales = Ring<1>::kHasScales;
  static constexpr int kPieceK = Ring<1>::kPieceK;
  static constexpr int kPieceXBytes = kPieceK * int(sizeof(Element));  // of one token
  static constexpr int kMaxGroups = kHasScales ? kPieceK / 32 : 1;  // in a piece
  static constexpr int kThreads = 32 * kWarpsK;
  static constexpr int kUnitColumns = 16 * kRowTiles;
  static constexpr int kPairs = kUnitColumns / 2;  // sums are finished by two neighbouring columns
  static constexpr int kLaneColumns = 2 * kRowTiles;  // neighbours, too
  static_assert(8 * kPairs <= kThreads, "a thread finishes a pair");

  /// Shared memory: two barriers, the table of codes, the ring, x [token][k], the sums that other CTAs send [CTA][token][column], two buffers of
  /// the warps' sums [warp][token][column].
  struct Smem {
    static constexpr int kBarrierBytes = 128;
    char* base;

    CUTLASS_HOST_DEVICE static constexpr int slot_bytes(int groups) {
      return groups == 4 ? Ring<4>::kSlotBytes : groups == 2 ? Ring<2>::kSlotBytes : Ring<1>::kSlotBytes;
    }
    CUTLASS_HOST_DEVICE static int ring_bytes(int groups) { return kDepth * kWarpsK * slot_bytes(groups); }
    CUTLASS_HOST_DEVICE static int part_bytes(int m) { return m * kUnitColumns * int(sizeof(float)); }
    CUTLASS_HOST_DEVICE static int sums_bytes(int m) { return kWarpsK * part_bytes(m); }  // of a unit
    CUTLASS_HOST_DEVICE static int bytes(DecodeParams const& p) {
      return kBarrierBytes + kTableBytes + ring_bytes(p.groups_per_piece) + p.m * p.x_row_bytes +
             (p.split_k - 1) * part_bytes(p.m) + 2 * sums_bytes(p.m);
    }

    CUTLASS_DEVICE uint64_t& sums_barrier() const { return reinterpret_cast<uint64_t*>(base)[0]; }
    CUTLASS_DEVICE uint64_t& parts_barrier() const { return reinterpret_cast<uint64_t*>(base)[1]; }
    CUTLASS_DEVICE char* pairs() const { return base + kBarrierBytes; }
    CUTLASS_DEVICE char* ring() const { return pairs() + kTableBytes; }
    CUTLASS_DEVICE char* x(int groups) const { return ring() + ring_bytes(groups); }
    CUTLASS_DEVICE float2* parts(DecodeParams const& p, int groups) const {
      return reinterpret_cast<float2*>(x(groups) + p.m * p.x_row_bytes);
    }
    CUTLASS_DEVICE float* sums(DecodeParams const& p, int groups, int buffer) const {
      char* const first = x(groups) + p.m * p.x_row_bytes + (p.split_k - 1) * part_bytes(p.m);
      return reinterpret_cast<float*>(first + buffer * sums_bytes(p.m));
    }
  };

  /// This warp's sums of a unit.
  CUTLASS_DEVICE static void put(Sums const (&sums)[kRowTiles], DecodeParams const& p, int warp, int lane,
                                 float* buffer) {
    int const g = lane / 4, t = lane % 4;
    float* const base = buffer + warp * p.m * kUnitColumns + g * kLaneColumns;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 2; ++e) {
      int const token = 2 * t + e;
      if (token >= p.m) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        float2 const pair = {sums[i][e], sums[i][e + 2]};
        *reinterpret_cast<float2*>(base + token * kUnitColumns + 2 * i) = pair;
      }
    }
  }

  /// The unit's first tile of 16 columns. Where units do not divide a stripe the last one ends with N, and may begin in the one
  /// before.
  CUTLASS_DEVICE static int first_tile(DecodeParams const& p, int unit) {
    int const first = unit * kRowTiles;
    return Ring<1>::kStripes == 1 ? first : min(first, p.n_padded / 16 - kRowTiles);
  }

  CUTLASS_DEVICE static void add(float2& a, float2 const& b) {
    a.x += b.x;
    a.y += b.y;
  }

  /// A thread's part in the end of a unit: adds the warps' sums of two columns of a token and, if this CTA began the unit, those
  /// of the CTAs that share it, and stores or sends them. Warps take turns at it: `turn` counts the units of the run.
  template <int kGroups, bool kIsCluster>
  struct Finish {
    DecodeParams const& p;
    bool is_mine;
    int stride;  // between the sums of two warps, of two CTAs
    float2 const* sums;
    float2* parts;
    int senders;  // CTAs whose parts are added
    int token, column;
    bool is_stored;  // by this unit, not by the one before
    ColumnPairConstants<Element> constants;  // per channel; else there is but a bias, if any
    bool is_plain;  // no bias to be asked for, no activation, and y takes both columns at a time
    Element* y;

    /// What does not need the sums.
    CUTLASS_DEVICE Finish(DecodeParams const& p, Place<kIsCluster> const& place, Smem const& smem, int turn) : p(p) {
      stride = p.m * kPairs;
      int const i = ((place.warp - turn * divide_up(stride, 32)) & (kWarpsK - 1)) * 32 + place.lane;
      is_mine = i < stride;
      sums = reinterpret_cast<float2 const*>(smem.sums(p, kGroups, turn % 2)) + i;
      parts = smem.parts(p, kGroups) + i;
      senders = kIsCluster && place.first_unit + turn == place.last_unit ? place.senders : 0;
      token = i / kPairs;
      // In the order of the buffers: a lane's columns lie together.
      int const unit = place.first_unit + turn, g = i % kPairs / kRowTiles;
      int const tile = first_tile(p, unit) + i % kPairs % kRowTiles;
      column = tile / Layout::kPieces * Layout::kStripe + 8 * g + tile % Layout::kPieces * 2;
      is_stored = Ring<1>::kStripes == 1 || tile >= unit * kRowTiles;
      y = static_cast<Element*>(p.y) + token * p.ldy + column;
      // The activation and the bias of a group are looked at when there is one: their code is long, and far.
      if (!kHasScales && is_mine) constants = {p, column, true};
      is_plain = (!kHasScales || p.bias == nullptr) && p.activation == int(Activation::kIdentity) &&
                 ColumnPair<Element>::is_one_store(p, column);
    }

    CUTLASS_DEVICE float2 sum() const {
      // Four chains, for the latency.
      float2 chains[4];
      CUTLASS_PRAGMA_UNROLL
      for (int w = 0; w < kWarpsK; ++w) {
        if (w < 4) {
          chains[w] = sums[w * stride];
        } else {
          add(chains[w % 4], sums[w * stride]);
        }
      }
      add(chains[0], chains[1]);
      add(chains[2], chains[3]);
      add(chains[0], chains[2]);
      return chains[0];
    }

    /// When the warps' sums are there.
    CUTLASS_DEVICE void store(Smem const& smem) const {
      if (!is_mine) return;
      float2 total = sum();
      if (kIsCluster && senders > 0) {
        cute::wait_barrier(smem.parts_barrier(), 0);
        asm volatile("" ::: "memory");  // what follows is read after it
        for (int part = 0; part < senders; ++part) add(total, parts[part * stride]);
      }
      if (!is_stored) return;
      if constexpr (!kHasScales) finish(total, constants);
      if (is_plain) {
        ColumnPair<Element>{Element(total.x), Element(total.y)}.store(y);
        return;
      }
      if (kHasScales && p.bias != nullptr) finish(total, {p, column, false});
      store_pair<Element>(p, token, column, total);
    }

    CUTLASS_DEVICE static void finish(float2& total, ColumnPairConstants<Element> const& constants) {
      total = {constants.column(0, !kHasScales).affine(total.x), constants.column(1, !kHasScales).affine(total.y)};
    }

    CUTLASS_DEVICE void send(Place<kIsCluster> const& place, Smem const& smem) const {
      if (is_mine)
        Decode::send(parts + (place.rank - place.owner - 1) * stride, smem.parts_barrier(), place.owner, sum());
    }
  };

  /// What the run begins with, before this CTA knows more of it. Neighbours have parts of the same bytes: each asks for as many of a
  /// stripe's as it has columns of it.
  template <int kGroups, bool kIsCluster>
  CUTLASS_DEVICE static void prefetch_first(DecodeParams const& p) {
    int const warp = threadIdx.x / 32;
    if (warp > (Ring<1>::kHasZeros ? 2 : 1)) return;  // at once: all warps have much to do
    int const begin = kIsCluster ? blockIdx.x * p.run_pieces : 0, units = kIsCluster ? p.units_in(begin) : 0;
    int const unit = blockIdx.y * p.units_per_cluster + units;
    if (kIsCluster && unit >= p.units) return;
    int piece = begin - units * p.pieces + int(__umulhi(blockIdx.y, p.rotation_multiplier));
    if (piece >= p.pieces) piece -= p.pieces;
    int const tile = first_tile(p, unit), stripe = tile / Layout::kPieces, in_stripe = tile % Layout::kPieces;
    if (threadIdx.x == 0) {
      // Before the kernels in front have ended there is time for all of the ring.
      constexpr int kRingBytes = kDepth * kWarpsK * Ring<kGroups>::kWeightsBytes;
      int const all = p.overlap == int(Overlap::kPrefetch) ? kRingBytes : p.m == 1 ? 24 * 1024 : 16 * 1024;
      int const bytes = all / kRowTiles / 16 * 16;  // of a tile
      int const tiles = min(kRowTiles, Layout::kPieces - in_stripe);
      int const block = piece * kDecodePieceBlocks<Weight>;
      prefetch_stripe<Weight>(p, stripe, block, in_stripe * bytes, tiles * bytes);
      if (tiles < kRowTiles) prefetch_stripe<Weight>(p, stripe + 1, block, 0, (kRowTiles - tiles) * bytes);
    }
    constexpr int kStripes = Ring<1>::kStripes;
    if (kHasScales && warp == 1) prefetch_groups<Element, kStripes>(p, p.scales, stripe, piece * kPieceK);
    if (Ring<1>::kHasZeros && warp == 2) prefetch_groups<Element, kStripes>(p, p.zeros, stripe, piece * kPieceK);
  }

  /// Fills the ring for the first time, when the kernels before this one have ended: they may be writing x. Weights come before that,
  /// if nobody is writing them. Returns this lane's code.
  template <int kGroups, bool kIsCluster>
  CUTLASS_DEVICE static uint32_t fetch_first(DecodeParams const& p, Stream<kGroups, kIsCluster>& stream,
                                             uint32_t first_slot, uint32_t last_slot) {
    constexpr int kSlotBytes = Ring<kGroups>::kSlotBytes;
    uint32_t code = 0;
    auto const wait = [&] {
      cudaGridDependencySynchronize();
      if constexpr (kIsCode<Weight>) code = Table::fetch_code(p.zeros);
    };
    if (p.overlap == int(Overlap::kConstantWeights)) {
      Stream<kGroups, kIsCluster> x_stream = stream;
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t slot = first_slot; slot <= last_slot; slot += kSlotBytes) stream.fetch_next_weights(slot);
      wait();
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t slot = first_slot; slot <= last_slot; slot += kSlotBytes) x_stream.fetch_next_x();
    } else {
      wait();
      CUTLASS_PRAGMA_NO_UNROLL
      for (uint32_t slot = first_slot; slot <= last_slot; slot += kSlotBytes) stream.fetch_next(slot);
    }
    return code;
  }

  /// Those of a unit's channels into the L2: they are needed last.
  CUTLASS_DEVICE static void prefetch_scales(DecodeParams const& p, int unit, int last_unit) {
    if (unit > last_unit) return;
    auto const prefetch = [&](int tile) {
      prefetch_line(static_cast<char const*>(p.scales) + tile / Layout::kPieces * Ring<1>::kScaleRowBytes);
    };
    prefetch(first_tile(p, unit));
    if (Ring<1>::kStripes > 1) prefetch(first_tile(p, unit) + kRowTiles - 1);
  }

  template <int kGroups, bool kIsCluster>
  CUTLASS_DEVICE static void run(DecodeParams const& p, char* smem_base) {
    using R = Ring<kGroups>;
    prefetch_first<kGroups, kIsCluster>(p);
    Smem const smem{smem_base};
    Place<kIsCluster> place(p);
    uint32_t const smem_x = cute::cast_smem_ptr_to_uint(smem.x(kGroups));
    uint32_t const first_slot = cute::cast_smem_ptr_to_uint(smem.ring()) + place.warp * kDepth * R::kSlotBytes;
    uint32_t const last_slot = first_slot + (kDepth - 1) * R::kSlotBytes;
    Stream<kGroups, kIsCluster> stream(p, place, smem_x);
    uint32_t const code = fetch_first(p, stream, first_slot, last_slot);
    cudaTriggerProgrammaticLaunchCompletion();
    if constexpr (kIsCode<Weight>) Table::fill(smem.pairs(), code, kThreads);
    Table const table(cute::cast_smem_ptr_to_uint(smem.pairs()), place.lane);
    if (threadIdx.x == 0) {
      cute::initialize_barrier(smem.sums_barrier(), kThreads);
      if constexpr (kIsCluster) {
        cute::initialize_barrier(smem.parts_barrier(), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
    }
    __syncthreads();
    if constexpr (kIsCluster) {
      cute::cluster_arrive_relaxed();  // others may write here once all have come this far
      place.find_sharers(p);
      if (threadIdx.x == 0) {
        cute::set_barrier_transaction_bytes(smem.parts_barrier(), place.senders * Smem::part_bytes(p.m));
      }
    }

    if constexpr (!kHasScales) prefetch_scales(p, place.first_unit + int(threadIdx.x), place.last_unit);

    // Tokens from M on are given the row of M - 1: their sums are not stored.
    uint32_t x_row = smem_x + min(place.lane % 8, p.m - 1) * p.x_row_bytes + place.lane / 8 * 16;
    asm volatile("" : "+r"(x_row));  // not to be computed anew for every piece

    uint32_t slot = first_slot;
    int turn = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int unit = place.first_unit; unit <= place.last_unit; ++unit, ++turn) {
      typename R::ScaleOffsets const scales(first_tile(p, unit), place.lane);
      uint32_t x = x_row + (place.first(unit) + place.x_base(p, unit)) * kPieceXBytes;
      Sums sums[kRowTiles], sum_x;
      Mma::clear(sums);
      Mma::clear(sum_x);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int left = place.count(p, unit); left > 0; --left) {
        wait_for_copies<kDepth - 1>();
        __syncwarp();  // scales and x were copied by other lanes
        using Piece = typename Mma::template Piece<kGroups>;
        Piece piece;
        piece.load(slot, scales, place.lane);
        auto const refill = [&] {
          __syncwarp();  // all lanes have read the slot
          stream.fetch_next(slot);
        };
        if constexpr (Piece::kFreesSlot) refill();
        Mma::template accumulate<kGroups>(sums, sum_x, piece, table, x);
        if constexpr (!Piece::kFreesSlot) refill();
        slot = slot == last_slot ? first_slot : slot + R::kSlotBytes;
        x += kWarpsK * kPieceXBytes;
      }
      if constexpr (!kHasScales) Mma::correct_channel(sums, sum_x);
      if (turn > 0) {
        // With this the buffer of two units ago is free: it has been read before the sums of the last unit were left.
        cute::wait_barrier(smem.sums_barrier(), (turn - 1) % 2);
        asm volatile("" ::: "memory");  // what follows is read after it
        if (!(place.sends() && turn == 1)) Finish<kGroups, kIsCluster>(p, place, smem, turn - 1).store(smem);
      }
      put(sums, p, place.warp, place.lane, smem.sums(p, kGroups, turn % 2));
      if (kIsCluster && turn == 0) {
        cute::cluster_wait();
        if (place.sends()) {  // another CTA waits for it
          __syncthreads();
          Finish<kGroups, kIsCluster>(p, place, smem, 0).send(place, smem);
        }
      }
      if (unit < place.last_unit) cute::arrive_barrier(smem.sums_barrier());
    }
    if (kIsCluster && turn == 0) cute::cluster_wait();
    if (turn > (place.sends() ? 1 : 0)) {
      Finish<kGroups, kIsCluster> const finish(p, place, smem, turn - 1);
      __syncthreads();
      finish.store(smem);
    }
  }

  /// Writes to the same address in another CTA of the cluster, and counts the bytes on its barrier.
  CUTLASS_DEVICE static void send(float2* target, uint64_t& barrier, int rank, float2 v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     cute::set_block_rank(cute::cast_smem_ptr_to_uint(target), rank)),
                 "f"(v.x), "f"(v.y), "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), rank))
                 : "memory");
  }

  static DecodeParams prepare(GemmParams const& p, int clusters) {
    DecodeParams d{p};
    d.units = divide_up(p.n_padded, kUnitColumns);
    d.units_per_cluster = divide_up(d.units, clusters);
    d.pieces = divide_up(p.k_padded, kPieceK);
    d.pieces_multiplier = uint32_t(((uint64_t(1) << 32) + d.pieces - 1) / d.pieces);
    d.run_pieces = divide_up(d.units_per_cluster * d.pieces, p.split_k);
    // One token has too little x for it to matter.
    d.rotation_multiplier =
        p.m == 1 ? 0 : uint32_t((uint64_t(d.pieces) << 32) / divide_up(d.units, d.units_per_cluster));
    // 16 bytes more than a multiple of 128: the rows that ldmatrix reads together fall into different banks.
    d.x_row_bytes = min(d.pieces, d.run_pieces) * kPieceXBytes + 16;
    int const group_k = !kHasScales || p.group_size % kPieceK == 0 ? kPieceK : p.group_size % 64 == 0 ? 64 : 32;
    d.groups_per_piece = kPieceK / group_k;
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
                         dim3(p.split_k, divide_up(p.units, p.units_per_cluster)), dim3(p.split_k), Kernel::kThreads,
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
  bool const needs_zeros = Kernel::template Ring<1>::kHasZeros || kIsCode<typename Kernel::Weight>;
  if (needs_zeros && p.zeros == nullptr) return cudaErrorInvalidValue;
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
