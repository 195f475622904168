// Packed weights to 16-bit floats [K, N]: what wo.dequantize returns, and what cuBLAS multiplies by.
//
// Two bytes are written for each half byte that is read, so the stores decide the speed. A lane computes eight
// neighbouring columns: one 16-byte store for each of its rows, and eight lanes side by side are a line of 128 bytes.
//
//   one store of a warp, tiled  columns 0-7 | 8-15 | ... | 56-63        lane 8 r + c: columns 8 c to 8 c + 7
//   row of part r = 0              lane 0   |   1  | ... |   7                        of a row of part r
//   row of part r = 1              lane 8   |   9  | ... |  15
//   ...
//
// Both layouts give a lane all of its eight columns by 16-byte loads, tiled one load of each of the four fragments of a
// k_block, interleaved one chunk of each of eight columns. A converted register holds two neighbours along k; a byte
// permute of those of two columns makes two neighbours along n. In memory, however, the parts r are neighbours, not the
// columns: what lane 4 c + r loads, lane 8 r + c stores. The packed words are shuffled in between. (Interleaved there
// are two parts, and 16 lanes side by side.)
//
// Without zero points w = q * s is rounded once by a 16-bit multiplication, as q is exact; otherwise it takes fp32, so
// that the bits are those of weightonly/reference.py in every case.
#include "kernels/convert/dequantize.h"

#include <type_traits>

#include "cutlass/arch/memory.h"
#include "cutlass_ext/fragment/weight_format.h"
#if defined(WEIGHTONLY_FP8)
#include "cutlass_ext/fragment/e4m3_weight.h"
#endif
#include "cutlass_ext/layout/interleaved.h"
#include "cutlass_ext/convert/numeric_conversion.h"
#include "cutlass_ext/layout/tiled.h"
#include "cutlass_ext/convert/float_pairs.h"
#include "kernels/gemm/launch.h"
#include "kernels/api/on_device.h"

namespace weightonly {
inline namespace dequantize_cu {  // not anonymous, as in generate.py

enum class Values { kIntegers, kIntegersAndZeros, kCodebook };

constexpr int kWarps = 8;

/// Loads 16 bytes. Lanes use parts of a cache line, so Hopper keeps it (1 to 2% quicker); elsewhere nvcc would spill
/// registers.
CUTLASS_DEVICE uint4 load_weights(void const* source) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __ldg(static_cast<uint4 const*>(source));
#else
  return __ldcs(static_cast<uint4 const*>(source));
#endif
}

/// Exchanges the words between the lanes that load and those that store: see the top of the file.
template <int kParts, int kRows, int kWords>
CUTLASS_DEVICE void columns_side_by_side(uint32_t (&words)[kRows][kWords], int lane) {
  constexpr int kLanes = 32 / kParts;  // side by side
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRows * kWords; ++i) {
    uint32_t& word = words[i / kWords][i % kWords];
    word = __shfl_sync(0xffffffffu, word, kParts * (lane % kLanes) + lane / kLanes);
  }
}

/// A k_block. Row of step s (16 k), pair i and e: 64 block + 16 s + 8 i + 2 part + e. kLeastGroup: rows of the smallest
/// groups, 32 or 16.
template <class Weight, int kLeastGroup_>
struct TiledReader {
  using Layout = TiledLayout<Weight>;
  static constexpr int kParts = 4;
  static constexpr int kWarpK = Layout::kBlockK;
  static constexpr int kPartK = 2;
  static constexpr int kStepK = 16;
  static constexpr int kPairs = 2;
  static constexpr int kLeastGroup = kLeastGroup_;
  static constexpr int kGroups = kWarpK / kLeastGroup;  // that the k of a lane may lie in
  static constexpr int kStepWords = Layout::kLaneWords / 4;

  uint32_t words[Layout::kFragments][Layout::kLaneWords];

  /// Which of its groups a pair of a step lies in.
  CUTLASS_DEVICE static constexpr int group(int step, int) { return step * kGroups / 4; }

  CUTLASS_DEVICE void load(DequantizeParams const& p, int column, int k0, int lane) {
    auto const* block =
        static_cast<char const*>(p.weight) + 16 * lane +
        Layout::block_offset(column / Layout::kPanelColumns, k0 / Layout::kBlockK, p.k_padded / Layout::kBlockK);
    CUTLASS_PRAGMA_UNROLL
    for (int f = 0; f < Layout::kFragments; ++f) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Layout::kLoads; ++i) {
        auto const* const source = block + f * Layout::kFragmentBytes + i * Layout::kLoadBytes;
        *reinterpret_cast<uint4*>(words[f] + 4 * i) = load_weights(source);
      }
    }
  }

  /// pairs[c][i]: q of column c, rows e = 0 and 1.
  template <class Element>
  CUTLASS_DEVICE void convert(int step, uint32_t (&pairs)[8][kPairs]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int f = 0; f < Layout::kFragments; ++f) {
      uint32_t values[4];  // (i, column 2 f or 2 f + 1), the A fragment of an MMA
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStepWords; ++i) {
        detail::ConvertWord<Element, Weight>::apply(words[f][step * kStepWords + i], values + i * (4 / kStepWords));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) pairs[2 * f + i % 2][i / 2] = values[i];
    }
  }

  /// codebook[code] of column c, pair i and e. The lanes hold the codebook: lane l has value l % 16.
  CUTLASS_DEVICE float look_up(float codebook, int step, int c, int i, int e) const {
    uint32_t const word = words[c / 2][step];
    return __shfl_sync(0xffffffffu, codebook, word >> (4 * (e + 2 * (c % 2) + 4 * i)), 16);
  }
};

/// Two chunks along k of 128 columns: the longer the rows and the fewer they are, the quicker they are written. Row of
/// step s, pair h and e: k of the part's chunk + 8 h + 2 s + e.
template <class Weight, int kLeastGroup_>
struct InterleavedReader {
  using Layout = InterleavedLayout<Weight>;
  static constexpr int kParts = 2;
  static constexpr int kWarpK = kParts * Layout::kChunkK;
  static constexpr int kPartK = Layout::kChunkK;
  static constexpr int kStepK = 2;
  static constexpr int kPairs = Layout::kWordElements / 2;
  static constexpr int kLeastGroup = kLeastGroup_;
  static constexpr int kGroups = kPartK > kLeastGroup ? kPartK / kLeastGroup : 1;

  uint32_t words[8][4];

  /// As in TiledReader.
  CUTLASS_DEVICE static constexpr int group(int, int pair) { return pair * kGroups / kPairs; }

  CUTLASS_DEVICE void load(DequantizeParams const& p, int column, int k0, int lane) {
    int const n = column + 8 * (lane / kParts);
    int const k = k0 + kPartK * (lane % kParts);
    bool const inside = n < p.n_end && k < p.k_padded;
    int64_t const line_bytes = int64_t(p.k_padded / kLineBlockK) * kLineBlockBytes;
    auto const* const chunk = static_cast<char const*>(p.weight) + n / Layout::kColumnsPerLine * line_bytes +
                              k / kLineBlockK * kLineBlockBytes + k % kLineBlockK / kPartK * kChunkBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 8; ++c) {
      auto const* const source = chunk + c / Layout::kColumnsPerLine * line_bytes +
                                 c % Layout::kColumnsPerLine * Layout::kChunksPerColumn * kChunkBytes;
      uint4 const loaded = inside ? load_weights(source) : uint4{};
      *reinterpret_cast<uint4*>(words[c]) = loaded;
    }
  }

  template <class Element>
  CUTLASS_DEVICE void convert(int step, uint32_t (&pairs)[8][kPairs]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 8; ++c) detail::ConvertWord<Element, Weight>::apply(words[c][step], pairs[c]);
  }

  /// As in TiledReader.
  CUTLASS_DEVICE float look_up(float codebook, int step, int c, int i, int e) const {
    return __shfl_sync(0xffffffffu, codebook, words[c][step] >> (4 * (2 * i + e)), 16);
  }
};

/// Scales or zeros of a lane's eight columns, two in a register.
template <int kGroups, int kLeastGroup>
struct Groups {
  uint32_t pairs[kGroups][4];

  CUTLASS_DEVICE void load(void const* rows, DequantizeParams const& p, int k, int n) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      auto const* const row =
          static_cast<uint16_t const*>(rows) + p.group.of<kLeastGroup>(k + kLeastGroup * i) * p.ld_scales + n;
      *reinterpret_cast<uint4*>(pairs[i]) = n < p.n_end ? __ldg(reinterpret_cast<uint4 const*>(row)) : uint4{};
    }
  }
};

/// What a warp dequantizes: kColumns columns, Reader::kWarpK rows.
template <class Element, class Reader_, Values kValues>
struct Block {
  using Reader = Reader_;
  static constexpr int kLanes = 32 / Reader::kParts;  // side by side
  static constexpr int kColumns = 8 * kLanes;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  using Integer = cutlass::half_t;  // there is no arithmetic on bf16
#else
  using Integer = Element;
#endif

  Reader reader;
  Groups<Reader::kGroups, Reader::kLeastGroup> scales, zeros;
  float codebook;

  CUTLASS_DEVICE void load(DequantizeParams const& p, int column, int k0, int lane) {
    reader.load(p, column, k0, lane);
    int const n = column + 8 * (lane % kLanes);
    constexpr bool kPartHasGroups = Reader::kPartK >= Reader::kLeastGroup || Reader::kGroups == 1;  // of its own
    int const k = kPartHasGroups ? k0 + Reader::kPartK * (lane / kLanes) : k0;
    scales.load(p.scales, p, k, n);
    if constexpr (kValues == Values::kIntegersAndZeros) zeros.load(p.zeros, p, k, n);
    if constexpr (kValues == Values::kCodebook) codebook = __ldg(p.codebook + lane % 16);
    columns_side_by_side<Reader::kParts>(reader.words, lane);  // last, as it waits for the loads
  }

  /// store(row, w): eight columns, in four registers, of each of a lane's rows, counted from its first one.
  template <class Store>
  CUTLASS_DEVICE void for_each_row(Store&& store) const {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < 4; ++step) {
      uint32_t pairs[8][Reader::kPairs];
      if constexpr (kValues != Values::kCodebook) reader.template convert<Integer>(step, pairs);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Reader::kPairs; ++i) {
        int const group = Reader::group(step, i);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          uint32_t w[4];
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 4; ++c) {
            if constexpr (kValues == Values::kCodebook) {
              float const low = reader.look_up(codebook, step, 2 * c, i, e);
              float const high = reader.look_up(codebook, step, 2 * c + 1, i, e);
              w[c] = scaled(low, high, scales.pairs[group][c]);
            } else {
              uint32_t const even = pairs[2 * c][i], odd = pairs[2 * c + 1][i];
              uint32_t const q = e == 0 ? permute_bytes<0x5410>(even, odd) : permute_bytes<0x7632>(even, odd);
              if constexpr (kValues == Values::kIntegersAndZeros) {
                float2 const value = unpack_pair<Integer>(q), zero = unpack_pair<Element>(zeros.pairs[group][c]);
                w[c] = scaled(value.x - zero.x, value.y - zero.y, scales.pairs[group][c]);
              } else if constexpr (std::is_same_v<Integer, Element>) {
                w[c] = PackedMath<Element>::mul(q, scales.pairs[group][c]);
              } else {
                float2 const value = unpack_pair<Integer>(q);
                w[c] = scaled(value.x, value.y, scales.pairs[group][c]);
              }
            }
          }
          store(Reader::kStepK * step + 8 * i + e, w);
        }
      }
    }
  }

 private:
  CUTLASS_DEVICE static uint32_t scaled(float low, float high, uint32_t scale) {
    float2 const s = unpack_pair<Element>(scale);
    return pack_pair<Element>(low * s.x, high * s.y);
  }
};

/// One store: from the assignment of a uint4 nvcc 13 made four here.
CUTLASS_DEVICE void store_16_bytes(uint16_t* to, uint32_t const* w) {
  cutlass::arch::global_store<uint4, 16>(make_uint4(w[0], w[1], w[2], w[3]), to, true);
}

template <class Block>
CUTLASS_DEVICE void dequantize_block(DequantizeParams const& p, int column, int k0, int lane) {
  using Reader = typename Block::Reader;
  Block block;
  block.load(p, column, k0, lane);
  int const n = column + 8 * (lane % Block::kLanes);
  int const k = k0 + Reader::kPartK * (lane / Block::kLanes);
  auto* const first = static_cast<uint16_t*>(p.w) + k * p.ldw + (n - p.n_begin);
  bool const aligned = p.ldw % 8 == 0 && reinterpret_cast<uintptr_t>(p.w) % 16 == 0;
  if (aligned && column + Block::kColumns <= p.n_end && k0 + Reader::kWarpK <= p.k) {
    block.for_each_row([&](int row, uint32_t const* w) { store_16_bytes(first + row * p.ldw, w); });
  } else {
    int const columns = p.n_end - n;
    block.for_each_row([&](int row, uint32_t const* w) {
      if (k + row >= p.k) return;
      uint16_t* const to = first + row * p.ldw;
      if (aligned && columns >= 8) {
        store_16_bytes(to, w);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 8; ++c) {
          if (c < columns) to[c] = uint16_t(w[c / 2] >> (16 * (c % 2)));
        }
      }
    });
  }
}

/// blockIdx.x counts blocks along the columns, so that CTAs that run together write whole rows.
/// CTAs on an SM that a kernel asks for; 0: as many as nvcc finds. It finds four here, for which it spills registers.
template <class Reader, Values kValues>
inline constexpr int kMinCtas = Reader::kParts == 2 && kValues == Values::kCodebook ? 3 : 0;

template <class Element, class Reader, Values kValues>
__global__ void __launch_bounds__(32 * kWarps, kMinCtas<Reader, kValues>)
    dequantize_kernel(__grid_constant__ DequantizeParams const p) {
  using WarpBlock = Block<Element, Reader, kValues>;
  int const column = p.n_begin + WarpBlock::kColumns * (kWarps * blockIdx.x + threadIdx.x / 32);
  if (column >= p.n_end) return;
  dequantize_block<WarpBlock>(p, column, Reader::kWarpK * blockIdx.y, threadIdx.x % 32);
}

template <class Element, class Reader, Values kValues>
cudaError_t launch(DequantizeParams const& p, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  constexpr int kColumns = kWarps * Block<Element, Reader, kValues>::kColumns;
  config.gridDim = dim3(divide_up(p.n_end - p.n_begin, kColumns), divide_up(p.k, Reader::kWarpK));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, dequantize_kernel<Element, Reader, kValues>, p);
}

template <class Element, class Reader>
cudaError_t launch_integers(DequantizeParams const& p, cudaStream_t stream) {
  return p.zeros == nullptr ? launch<Element, Reader, Values::kIntegers>(p, stream)
                            : launch<Element, Reader, Values::kIntegersAndZeros>(p, stream);
}

template <class Element, int kLeastGroup>
cudaError_t launch_for_groups(DequantizeParams const& p, cudaStream_t stream) {
  if (p.codebook != nullptr) {
    return p.layout == int(PackedLayout::kTiled)
               ? launch<Element, TiledReader<Int4, kLeastGroup>, Values::kCodebook>(p, stream)
               : launch<Element, InterleavedReader<Int4, kLeastGroup>, Values::kCodebook>(p, stream);
  }
  if (p.layout == int(PackedLayout::kTiled)) {
    return p.bits == 4 ? launch_integers<Element, TiledReader<Int4, kLeastGroup>>(p, stream)
                       : launch_integers<Element, TiledReader<Int8, kLeastGroup>>(p, stream);
  }
  return p.bits == 4 ? launch_integers<Element, InterleavedReader<Int4, kLeastGroup>>(p, stream)
                     : launch_integers<Element, InterleavedReader<Int8, kLeastGroup>>(p, stream);
}

template <class Element>
cudaError_t launch_as(DequantizeParams const& p, cudaStream_t stream) {
#if defined(WEIGHTONLY_FP8)
  if (p.is_float) {
    return p.layout == int(PackedLayout::kTiled)
               ? launch<Element, TiledReader<Fp8, 32>, Values::kIntegers>(p, stream)
               : launch<Element, InterleavedReader<Fp8, 32>, Values::kIntegers>(p, stream);
  }
#endif
#if defined(WEIGHTONLY_GROUPS_OF_16)
  if (p.group_size == 16) return launch_for_groups<Element, 16>(p, stream);
#endif
  return launch_for_groups<Element, 32>(p, stream);
}

bool check(DequantizeParams const& p, char* message, int message_bytes) {
  auto fail = [&](char const* name, char const* expected, long long got) {
    std::snprintf(message, message_bytes, "dequantize: %s must be %s, got %lld", name, expected, got);
    return false;
  };
  auto wrong = [](void const* pointer, int alignment) {
    return pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % alignment != 0;
  };
  bool const tiled = p.layout == int(PackedLayout::kTiled);
  if (wrong(p.weight, 16)) return fail("weight", "a 16-byte aligned address", (long long)p.weight);
  if (wrong(p.scales, 16)) return fail("scales", "a 16-byte aligned address", (long long)p.scales);
  if (p.zeros != nullptr && wrong(p.zeros, 16))
    return fail("zeros", "null or a 16-byte aligned address", (long long)p.zeros);
  if (wrong(p.w, 2)) return fail("w", "an even address", (long long)p.w);
  if (p.layout < 0 || p.layout > int(PackedLayout::kTiled)) return fail("layout", "0 or 1", p.layout);
  if (p.bits != 4 && p.bits != 8) return fail("bits", "4 or 8", p.bits);
  if (p.is_float != 0 && (p.is_float != 1 || p.bits != 8 || p.zeros != nullptr || !wo_dequantizes_fp8()))
    return fail("is_float", "0, or 1 for a weight of 8 bits without zeros in a build that has fp8", p.is_float);
  if (p.type != int(FloatType::kF16) && p.type != int(FloatType::kBf16)) return fail("type", "0 or 1", p.type);
  if (p.codebook != nullptr && (wrong(p.codebook, 4) || p.bits != 4 || p.zeros != nullptr))
    return fail("codebook", "null, or 4-byte aligned for a weight of 4 bits without zeros", (long long)p.codebook);
  if (p.k < 1) return fail("k", "at least 1", p.k);
  if (p.k_padded < p.k || p.k_padded % 64 != 0) return fail("k_padded", "a multiple of 64 from k on", p.k_padded);
  if (p.k_padded > (1 << 20)) return fail("k_padded", "at most 2^20", p.k_padded);
  if (p.n_padded > 0x7fffffff - 4095) return fail("n_padded", "less than 2^31 - 4096", p.n_padded);
  if (p.n_padded % (tiled ? 64 : 32) != 0)
    return fail("n_padded", "a multiple of 32, for tiled weights of 64", p.n_padded);
  if (p.n_begin < 0 || p.n_begin % 64 != 0) return fail("n_begin", "a multiple of 64", p.n_begin);
  if (p.n_end <= p.n_begin || p.n_end > p.n_padded) return fail("n_end", "from n_begin + 1 to n_padded", p.n_end);
  if (p.ldw < p.n_end - p.n_begin) return fail("ldw", "at least the number of columns", p.ldw);
  if (p.ld_scales < p.n_padded || p.ld_scales % 8 != 0)
    return fail("ld_scales", "a multiple of 8 from n_padded on", p.ld_scales);
  bool const of_16 = wo_dequantizes_groups_of_16() && !p.is_float;
  bool const has_small_groups = p.group_size == 32 || (p.group_size == 16 && of_16);
  if (!has_small_groups && (p.group_size < 64 || p.group_size % 64 != 0)) {
    return fail("group_size", of_16 ? "16, 32 or a multiple of 64" : "32 or a multiple of 64", p.group_size);
  }
  return true;
}

}  // namespace dequantize_cu
}  // namespace weightonly

using namespace weightonly;

int wo_dequantizes_groups_of_16() {
#if defined(WEIGHTONLY_GROUPS_OF_16)
  return 1;
#else
  return 0;
#endif
}

int wo_dequantizes_fp8() {
#if defined(WEIGHTONLY_FP8)
  return 1;
#else
  return 0;
#endif
}

int wo_dequantize(DequantizeParams const* params, int device, void* stream, char* message, int message_bytes) {
  Message const place(message, message_bytes);
  if (!check_address("dequantize", params, place)) return 1;
  DequantizeParams p = *params;
  if (!check(p, place.text, place.bytes)) return 1;
  p.group = GroupIndex::make(p.k, p.group_size);
  return run_on_device("dequantize", device, place.text, place.bytes, [&] {
    bool const bf16 = p.type == int(FloatType::kBf16);
    return (bf16 ? launch_as<cutlass::bfloat16_t> : launch_as<cutlass::half_t>)(p, static_cast<cudaStream_t>(stream));
  });
}
