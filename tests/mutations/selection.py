"""What chooses a kernel: problems, legality, the cost model, launches, the kernel families."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "heuristics/problem.py",
        "heuristics expected_operands arguments",
        [
            ("K is not padded", "padded_k", "-(-k // K_ALIGNMENT) * K_ALIGNMENT", "k"),
            ("groups of 96", "check_group_size", "% 64", "% 32"),
            ("groups that do not divide K", "check_group_size", "% group_size != 0", "< group_size"),
            (
                "codes of another layout",
                "Problem.__post_init__",
                "(*CODE_LAYOUTS, FP8_LAYOUT)",
                "(*LAYOUTS, FP8_LAYOUT)",
            ),
            ("codes per channel", "Problem.per_channel", ".format not in CODEBOOK_FORMATS and self", ""),
        ],
    ),
    *of(
        "heuristics/legal.py",
        "legal two_launches choice",
        [
            ("kernels of older GPUs", "legal", "problem.arch <= config.rules.last_arch and ", ""),
            ("what no kernel computes", "legal", " and why_not(config, problem) is None", ""),
            ("one launch of two is legal", "why_not", "not has_tail(config, problem)", "False"),
        ],
    ),
    *of(
        "heuristics/legal.py",
        "groups_of_16 microscaling",
        [
            ("groups of 16", "check_kernel_group_size", "16 !=", "15 !="),
            ("groups of 16 on Volta", "computes_groups_of_16", "c.rules.first_arch <= ", ""),
            ("groups of 16 in another layout", "computes_groups_of_16", "layout in (None, c.layout) and ", ""),
            ("some groups of 16", "computes_groups_of_16", ".unfused and c", ""),
        ],
    ),
    *of(
        "heuristics/legal.py",
        "floats",
        [
            ("floats in groups of 16", "has_kernels", "group_size % 32 == 0", "group_size % 16 == 0"),
            ("floats that no GPU has run", "has_kernels", "c.is_verified and ", ""),
            ("floats in another layout", "has_kernels", " and c.layout == layout", ""),
        ],
    ),
    *of(
        "heuristics/families/base.py",
        "floats",
        [
            ("floats before a GPU has run them", "KernelConfig.is_verified", " and of_floats", ""),
            ("floats by a name of others", "KernelConfig.kernel", "self.has_floats", "False"),
        ],
    ),
    *of(
        "kernels/generate.py",
        "floats generate",
        [("floats without their header", "unit_text", "config.has_floats", "False")],
    ),
    *of(
        "heuristics/families/base.py",
        "choice legal generate heuristics families groups_of_16",
        [
            (
                "a part of K without work",
                "has_empty_part",
                "(split_k - 1) * -(-k_tiles // split_k) >= k_tiles",
                "split_k > k_tiles",
            ),
            ("too much shared memory", "Family._why_not_smem", "limit:", "2 * limit:"),
            ("all of shared memory", "Family._why_not_smem", "<=", "<"),
            ("too many rows", "Family.why_not_sizes", "max_m:", "max_m + 1:"),
            ("bf16 on kernels of fp16", "Family.why_unsupported", "is not None", "is None"),
            ("Hopper alone", "Family.why_unsupported", "< p", "+ 1 < p"),
            ("a format that is not compiled", "Family.why_unsupported", "p.format not in", "not"),
            (
                "groups of 16 by other kernels",
                "Family.why_unsupported",
                "!= (p.group_step == 16)",
                "and p.group_step != 16",
            ),
            ("too many parts", "Family.why_unsupported", " <= config.max_split_k", ""),
            ("90 has 90a", "Family.compiled_for", 'and (not self.shares_cluster or arch.endswith("a"))', ""),
        ],
    ),
    *of(
        "heuristics/families/waves.py",
        "heuristics families choices",
        [
            (
                "the system's shared memory",
                "ctas_per_sm",
                "// (family.cta_smem_bytes(config, format) + 1024)  # the system keeps 1 KB",
                "// (family.cta_smem_bytes(config, format))  # the system keeps 1 KB",
            ),
            (
                "registers in steps of 8",
                "ctas_per_sm",
                "// (32 * warps * (-(-registers // 8) * 8))",
                "// (32 * warps * registers)",
            ),
            ("the last wave is full", "waves_us", " (left > 0) *", ""),
        ],
    ),
    *of(
        "heuristics/families/decode_sm90.py",
        "heuristics_sm90 heuristics smem_of_kernels",
        [
            ("work units end within n-tiles", "ends_of", " if n_tiles == 1 or of_n_tile % k_tiles == 0 else 2", ""),
            (
                "the last work unit",
                "work_unit",
                "-(-(cluster_n_tiles * of_n_tile) // split_k)",
                "cluster_n_tiles * of_n_tile // split_k",
            ),
            ("x is copied whole", "work_unit", " if k_tiles < of_n_tile else of_n_tile", ""),
            ("tokens have one buffer", "DecodeSm90.smem_bytes", "2 * ", ""),
            (
                "an n-tile in two panels",
                "DecodeSm90._pipeline_bytes",
                " if PANEL_COLUMNS % config.block_n == 0 else 2",
                "",
            ),
        ],
    ),
    *of(
        "heuristics/families/gemm_sm90.py",
        "heuristics_sm90 heuristics smem_of_kernels",
        [
            (
                "accumulators in the pipeline's place",
                "GemmSm90.cta_smem_bytes",
                "max(pipeline_bytes, accumulators_bytes)",
                "pipeline_bytes",
            ),
            ("partials of other CTAs", "GemmSm90.cta_smem_bytes", "(c.split_k - 1)", "c.split_k"),
            ("scales per channel", "GemmSm90.stage_bytes", "and not zeros ", ""),
        ],
    ),
    *of(
        "heuristics/families/dequantize_cublas.py",
        "unfused heuristics choice",
        [
            ("K beyond the workspace", "DequantizeCublas.why_not_sizes", "<= longest_k", "<= 2 * longest_k"),
        ],
    ),
    *of(
        "heuristics/slices.py",
        "unfused heuristics choice",
        [
            ("more than the workspace", "slice_columns", "// (2 * k) // _ALIGN * _ALIGN", "// k // _ALIGN * _ALIGN"),
            ("a weight that fits", "slice_columns", "<=", "<"),
            ("slices of odd width", "slice_columns", "(-n // (slices * step)) * step", "(-n // slices)"),
        ],
    ),
    *of(
        "heuristics/cost.py",
        "heuristics families choices",
        [
            ("K is not padded", "column_bytes", "k_padded", "k"),
            (
                "a short last group",
                "column_bytes",
                "-(-problem.k // problem.group_size)) * (2 if problem.zeros else 1)",
                "problem.k // problem.group_size) * (2 if problem.zeros else 1)",
                "group_size divides K: Problem refuses others",
            ),
            (
                "zeros are free",
                "column_bytes",
                "// problem.group_size)) * (2 if problem.zeros else 1)",
                "// problem.group_size)) * 1",
            ),
            ("nothing is hidden", "total_us", "unhidden * ", ""),
        ],
    ),
    *of(
        "heuristics/launches.py",
        "two_launches heuristics",
        [
            ("a tail without columns", "has_tail", "< problem", "<= problem"),
            ("a tail of a tail", "has_tail", "and tail.tail is None\n", ""),
            ("a tail of another family", "has_tail", "and config.family == tail.family\n", ""),
            ("columns of the tail", "launches", "problem.n - ", ""),
        ],
    ),
    *of(
        "heuristics/select.py",
        "heuristics two_launches choices",
        [
            ("the dearest", "quickest", "< best_us or (us == best_us and compute_us < best_compute_us)", "> best_us"),
            ("of equal times any", "quickest", "(us == best_us and compute_us < best_compute_us)", "us == best_us"),
            (
                "what does not fit",
                "quickest",
                "launch.config.rules.why_not_sizes(launch.config, problem) is None",
                "True",
            ),
            ("cuBLAS for few rows", "quickest", "kernel.min_m <= ", ""),
            ("bounds above times", "_ROUNDING", "1 - 1e-6", "1.1"),
            ("more parts than SMs", "quickest", "tiles > launch.most_tiles", "False"),
            ("two launches for a small gain", "_best", "_LEAST_GAIN * ", ""),
            ("no last resort", "select", "or _last_resort", "if best else candidates"),
        ],
    ),
    *of(
        "heuristics/configs.py",
        "generate",
        [("codes without a codebook", "TypeConfig.reads_zeros", "or self", "and self")],
    ),
    *of(
        "kernels/api/checks.h",
        "c_interface",
        [
            ("zeros that a kernel reads", "check_params", "kernel.reads_zeros", "false"),
            ("groups of 16 by any kernel", "check_params", "kernel.least_group == 16", "false"),
            ("rows of scales", "check_params", "kernel.least_group,", "32,"),
            ("an unknown activation", "check_params", ">= int(Activation::kCount)", "> 9"),
        ],
    ),
    *of(
        "heuristics/arch.py",
        "arch",
        [
            ("a GPU that nobody knows", "parse_arch", " and arch in ARCHS", ""),
            ("a minor version of two digits", "parse_arch", " <= 9", ""),
            ("text around it", "parse_arch", "fullmatch", "search"),
            ("true is a number", "parse_arch", "type(part) is int", "isinstance(part, int)"),
        ],
    ),
]
