"""Products on CPUs: the native kernels, what their C interface refuses, and the way to them from Python."""

from __future__ import annotations

from .mutation import of

_CPP = "cpu_numbers cpu cpu_interface cpu_process"

MUTATIONS = [
    *of(
        "weightonly/cpu/native.py",
        "cpu cpu_interface cpu_numbers cpu_process",
        [
            ("zeros at the distance of scales", "zeros.stride(0),\n        ldy", "scales.stride(0),\n        ldy"),
            (
                "int8 of 32 columns as it is",
                "if qweight.layout != CPU and qweight.n_padded % TILE:",
                "if qweight.layout != CPU and qweight.n_padded % 32:",
            ),
            ("a weight at an odd address", "weight = aligned(qweight.data, 4)", "weight = qweight.data"),
            ("a strided bias", "aligned(bias, bias.element_size())", "bias"),
            ("rows at odd addresses", "is_dense and matrix.data_ptr() % matrix.element_size() == 0", "is_dense"),
            ("rows that overlap", "apart = matrix.stride(0) >= matrix.shape[1] or", "apart = matrix.stride(0) >= 0 or"),
            ("columns apart", "is_dense = apart and (matrix.stride(1) == 1 or", "is_dense = apart and (apart or"),
            ("out is dense", "ldy=out.stride(0) if out.dim() == 2 else n", "ldy=n"),
            ("x is dense", "ldx=rows.stride(0)", "ldx=k"),
            ("no activation", "activation=activation_of(activation).number", "activation=0"),
            (
                "one group is K long",
                "group_size=qweight.k_padded if groups == 1 else k // groups",
                "group_size=k // groups",
            ),
            ("what is refused is no memory", "if status == REFUSED:", "if status == 0:"),
            ("blocks at no distance", '("block_stride_k", "block_stride_n", "segment_stride",', '("block_stride_k",'),
            (
                "one thread",
                "threads=1 if m * n * k < _SMALL else torch.get_num_threads()",
                "threads=1",
                "one thread computes the same, only slower",
            ),
        ],
    ),
    *of(
        "weightonly/cpu/library.py",
        "cpu cpu_interface cpu_table",
        [
            ("any version", "library.wo_cpu_abi_version() == _ABI_VERSION and ", ""),
            ("a level above the CPU's", "if level > highest:", "if level > len(LEVELS):"),
            ("an unknown setting", 'if wanted not in ("auto", "pytorch", *LEVELS):', "if wanted is None:"),
            ("no PyTorch", 'if wanted == "pytorch":', 'if wanted == "torch":'),
            (
                "a level that is missing computes in PyTorch",
                '        if wanted != "auto":\n',
                "        if not wanted:\n",
            ),
            ("the least level", 'level = highest if wanted == "auto" else', 'level = 0 if wanted == "auto" else'),
        ],
    ),
    *of(
        "weightonly/cpu/blocks.py",
        "cpu",
        [
            (
                "blocks along k are neighbours",
                "Blocks(order, size, k // TILE * size, 0, 1, size)",
                "Blocks(order, size, size, 0, 1, size)",
            ),
            ("lines of one column", "columns = 16 // bits", "columns = 8 // bits"),
            (
                "rows of a block are neighbours",
                "row_bytes, n * bits // 8, TILE, row_bytes)",
                "row_bytes, row_bytes, TILE, row_bytes)",
            ),
            ("codes are integers", "_order(bits, w.layout, w.code is not None)", "_order(bits, w.layout, False)"),
        ],
    ),
    *of(
        "weightonly/cpu/table.py",
        "cpu_table",
        [
            ("levels that are not there", "LEVELS[: backend.library.wo_cpu_level() + 1]", "LEVELS"),
            ("formats of any group", "if list(sizes) == [own]]", "if own in sizes]"),
            ("ends that overlap", "*(begin - 1 for begin in begins.values())", "*(begin for begin in begins.values())"),
        ],
    ),
    *of(
        "kernels/cpu/checks.h",
        "cpu_interface cpu_process",
        [
            ("no rows", "if (p.m < 1 ||", "if (p.m < 0 ||"),
            ("rows without an end", "p.m > (int64_t(1) << 48)", "p.m > (int64_t(1) << 62)"),
            ("an unknown type", "p.type > kFp32", "p.type > 9"),
            ("groups that no step fits", "p.group_size % 16 != 0", "p.group_size % 8 != 0"),
            ("a level above the CPU's", "if (p.level > highest)", "if (p.level > kAmx)"),
            ("an unknown format", "p.format > kCode4", "p.format > 9"),
            ("an unknown activation", "p.activation >= int(Activation::kCount)", "p.activation > 9"),
            ("no threads", "if (p.threads < 1 ||", "if (p.threads < 0 ||"),
            ("columns beyond 32 bits", "p.n > most", "p.n > 2 * most"),
            ("padding of less than a block", "p.k_padded % 64 != 0", "p.k_padded % 32 != 0"),
            ("a weight of fewer rows than K", "if (p.k_padded < p.k ||", "if (p.k_padded < 1 ||"),
            (
                "a group beyond K",
                "p.groups == 1 && p.group_size != p.k_padded",
                "p.groups == 1 && p.group_size > p.k_padded",
            ),
            ("groups of less than K", "p.groups * p.group_size < p.k ||", "p.groups * p.group_size < 1 ||"),
            ("groups beyond K", "p.groups * p.group_size > p.k_padded", "p.groups * p.group_size > 2 * p.k_padded"),
            ("rows that overlap", "(count > 1 && stride < columns)", "(count > 1 && stride < 1)"),
            ("a row that is far from itself", "(count > 1 && stride < columns)", "stride < columns"),
            ("distances that overflow", "if (stride > (int64_t(1) << 56) / count)", "if (stride > (int64_t(1) << 62))"),
            ("null", "(is_needed && value == nullptr) ||", "(!is_needed && value == nullptr && false) ||"),
            (
                "odd addresses",
                "reinterpret_cast<uintptr_t>(value) % bytes != 0",
                "reinterpret_cast<uintptr_t>(value) % 2 != 0",
            ),
            (
                "codes without numbers",
                'Address{"codebook", p.codebook, 4, has_codes}',
                'Address{"codebook", p.codebook, 4, false}',
            ),
            ("zeros of codes", "if (has_codes && p.zeros != nullptr)", "if (has_codes && p.zeros == p.x)"),
            ("segments of any length", "p.segment_bytes * int64_t(p.segments) != bytes", "p.segment_bytes > bytes"),
            ("an order beyond a block", "if (largest >= elems)", "if (largest > elems)"),
            ("blocks before the weight", "if (value < 0 || value > most / count)", "if (value > most / count)"),
        ],
    ),
    *of(
        "kernels/cpu/api.cpp",
        "cpu_interface cpu_table",
        [
            ("parameters that are not there", "params != nullptr && reinterpret_cast", "reinterpret_cast"),
            ("parameters at any address", "% alignof(GemmParams) == 0", "% 2 == 0"),
            ("a choice of anything", "!check_address(params) || !check_choice(*params)", "!check_address(params)"),
        ],
    ),
    *of(
        "kernels/cpu/threads.cpp",
        "cpu_process cpu",
        [
            (
                "memory stays",
                "bool const shrink = piece.bytes > kKeptBytes &&",
                "bool const shrink = piece.bytes < 0 &&",
            ),
            (
                "memory that is too small",
                "if (wanted > piece.bytes || shrink)",
                "if (wanted / 2 > piece.bytes || shrink)",
            ),
            ("memory that was not there counts", "piece.memory == nullptr ? 0 : wanted", "wanted"),
            (
                "a message without a place",
                "return memory == nullptr ? nullptr : memory->message",
                "return memory->message",
            ),
            ("the first import in a child", "bool is_child = was_forked();", "bool is_child = false;"),
            ("a child of an importer", "      child.is_child = true;\n", ""),
            ("a grandchild's helper", "      child.has_helper = false;\n", ""),
            ("no place for the memory of a thread", "  if (memory == nullptr) return nullptr;\n  Piece&", "  Piece&"),
        ],
    ),
    *of(
        "kernels/cpu/operands.h",
        _CPP,
        [
            ("bias beyond N", "load_any(p.bias, column, p.type, count)", "load_any(p.bias, column, p.type)"),
            (
                "scales beyond N",
                "load_any(source, g * stride + column, p.type, count)",
                "load_any(source, g * stride + column, p.type)",
            ),
            ("results beyond N", "activate(y, p.activation), count)", "activate(y, p.activation))"),
            ("x beyond K", "k >= p.k ? 0 : least(kLanes, p.k - k)", "k >= p.k ? 0 : kLanes"),
            ("sums of x beyond K", "  end = least(end, p.k);\n", ""),
            ("no end of the range", "0x1p110f / float(p.k_padded)", "0x1p127f"),
            ("zero points of int8 are those of int4", "float(1 << (bits_of(format) - 1))", "8.f"),
            ("zero points of int4 are those of int8", "float(1 << (bits_of(format) - 1))", "128.f"),
            (
                "zero points are whole",
                "return round(min(broadcast(most), max(broadcast(-most), zero_point)));",
                "return min(broadcast(most), max(broadcast(-most), zero_point));",
            ),
            ("no rest of zero points", "rest[half] = sub(all, whole);", "rest[half] = zero();"),
            ("zero points are whole if the last is", "are &= lane == 0", "are = lane == 0"),
            ("the first half of an order twice", "        order += 64 * kPanel;\n", ""),
            ("blocks of the first pair", "(first / 2 + pair) * p.block_stride_n", "pair * p.block_stride_n"),
        ],
    ),
    *of(
        "kernels/cpu/activations.h",
        "cpu_numbers",
        [
            ("ReLU hides NaN", "return max(zero(), y);", "return max(y, zero());"),
            ("SiLU of large negative numbers", "where_negative(x, mul(x, e), x)", "x"),
            ("GELU without what the square lost", "  above = fnma(mul(broadcast(0.5f), lost), above, above);\n", ""),
            ("GELU beyond the range of squares", "min(broadcast(16.f), abs(x))", "abs(x)"),
            (
                "GELU of negative numbers",
                "where_negative(x, above, sub(broadcast(1.f), above))",
                "sub(broadcast(1.f), above)",
            ),
        ],
    ),
    *of(
        "kernels/cpu/few_rows.h",
        _CPP,
        [
            ("no memory in a ticket", "      ok = false;\n", ""),
            ("zero points of the first group", "load_group(zeros + g * kPanel)", "load_group(zeros)"),
            ("sums that leave the range", "  if (!is_within_range(p, largest)) return Outcome::kBeyondRange;\n", ""),
            ("one sum of several", "for (int i = 1; i < kSums; ++i)", "for (int i = 2; i < kSums; ++i)"),
            ("a panel alone of blocks", "(end - begin + 1) / 2 * 2", "(end - begin) / 2 * 2"),
        ],
    ),
    *of(
        "kernels/cpu/many_rows.h",
        _CPP,
        [
            ("no memory in a ticket", "      ok = false;\n", ""),
            ("the rest is of no matter", "if constexpr (!whole) q = sub(q, zero_points.rest[half]);", ""),
            ("each block starts anew", "w, depth, k > 0, sums", "w, depth, false, sums"),
            ("a row beyond the last one", "least(int(tile) * tile_rows + m, rows - 1)", "int(tile) * tile_rows + m"),
            ("groups end with a block", "std::min(k_begin + rows, (g + 1) * p.group_size)", "k_begin + rows"),
        ],
    ),
    *of(
        "kernels/cpu/matrix_tiles.h",
        _CPP,
        [
            ("no memory in a ticket", "      ok = false;\n", ""),
            ("two parts of a number", "parts_for<kFormat, 3, 1>()", "parts_for<kFormat, 2, 1>()"),
            (
                "a group's zero points in the next",
                "group_end = ++group * p.group_size;",
                "group_end = group++ * p.group_size;",
            ),
            (
                "the rest of zero points",
                "rest = sub(zero_point, whole_part(format, zero_point));",
                "rest = zero_point;",
            ),
            (
                "sums that leave the range",
                "x + block * block_elems))) is_within = false;",
                "x + block * block_elems))) is_within = true;",
            ),
            ("rows beyond M", "row >= p.m || at >= p.k ? 0", "at >= p.k ? 0"),
            ("NaN has a rest", "_mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000))", "bits"),
        ],
    ),
    *of(
        "kernels/cpu/vec.h",
        _CPP,
        [
            (
                "bf16 is cut",
                "rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd)",
                "rounded = bits",
            ),
            ("e^x in one step", "_mm256_srai_epi32(all, 1)", "_mm256_setzero_si256()"),
            (
                "numbers of 16 bits beyond the end",
                "  if (count == kLanes) return load16(p, type);\n",
                "  if (count) return load16(p, type);\n",
            ),
        ],
    ),
    *of(
        "kernels/cpu/variant.cpp",
        _CPP,
        [
            (
                "nothing beyond the range",
                "if (outcome == Outcome::kBeyondRange) outcome = many_rows(p, first, rows);",
                "",
            ),
            ("no memory is done", "if (outcome != Outcome::kDone) return outcome;", ""),
        ],
    ),
]
