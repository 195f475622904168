"""What chooses a kernel: problems, legality, the cost model, launches, the kernel families."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "heuristics/problem.py",
        "heuristics expected_operands arguments",
        [
            ("K is not padded", "return -(-k // K_ALIGNMENT) * K_ALIGNMENT", "return k"),
            ("groups of 96", "(group_size < 64 or group_size % 64 != 0)", "(group_size < 64 or group_size % 32 != 0)"),
            ("groups that do not divide K", "if k % group_size != 0:", "if k < group_size:"),
            ("codes of another layout", "if self.layout not in CODE_LAYOUTS:", "if self.layout not in LAYOUTS:"),
            (
                "codes per channel",
                'self.format != "code4" and self.group_size in (-1, self.k)',
                "self.group_size in (-1, self.k)",
            ),
        ],
    ),
    *of(
        "heuristics/legal.py",
        "legal two_launches choice",
        [
            ("kernels of older GPUs", "return problem.arch <= config.rules.last_arch and", "return"),
            (
                "what no kernel computes",
                "config.rules.last_arch and why_not(config, problem) is None",
                "config.rules.last_arch",
            ),
            ("one launch of two is legal", "if not has_tail(config, problem):", "if False:"),
        ],
    ),
    *of(
        "heuristics/legal.py",
        "groups_of_16 microscaling",
        [
            ("groups of 16", "if group_size == 16 != k and", "if group_size == 15 != k and"),
            (
                "groups of 16 on Volta",
                "(arch is None or c.rules.first_arch <= arch <= c.rules.last_arch)",
                "(arch is None or arch <= c.rules.last_arch)",
            ),
            ("groups of 16 in another layout", "if layout in (None, c.layout) and", "if"),
            ("some groups of 16", "c.unfused and c.groups_of_16 and c.is_verified", "c.groups_of_16 and c.is_verified"),
        ],
    ),
    *of(
        "heuristics/families/base.py",
        "choice legal generate heuristics families groups_of_16",
        [
            (
                "a part of K without work",
                "return (split_k - 1) * -(-k_tiles // split_k) >= k_tiles",
                "return split_k > k_tiles",
            ),
            ("too much shared memory", "        if needed <= limit:\n", "        if needed <= 2 * limit:\n"),
            ("all of shared memory", "        if needed <= limit:\n", "        if needed < limit:\n"),
            ("too many rows", "        if p.m > config.max_m:\n", "        if p.m > config.max_m + 1:\n"),
            (
                "bf16 on kernels of fp16",
                "if dtype is not None and dtype not in self.dtypes:",
                "if dtype is None and dtype not in self.dtypes:",
            ),
            (
                "Hopper alone",
                "if self.first_arch == self.last_arch < p.arch:",
                "if self.first_arch == self.last_arch + 1 < p.arch:",
            ),
            (
                "a format that is not compiled",
                "        if p.format not in config.formats:\n",
                "        if not config.formats:\n",
            ),
            (
                "groups of 16 by other kernels",
                "if config.groups_of_16 != (p.group_step == 16):",
                "if config.groups_of_16 and p.group_step != 16:",
            ),
            ("too many parts", "if not 1 <= config.split_k <= config.max_split_k:", "if not 1 <= config.split_k:"),
            ("90 has 90a", 'and (not self.shares_cluster or arch.endswith("a"))', ""),
        ],
    ),
    *of(
        "heuristics/families/waves.py",
        "heuristics families choices",
        [
            ("the system's shared memory", "config, format) + 1024)", "config, format))"),
            ("registers in steps of 8", "(-(-registers // 8) * 8)", "registers"),
            ("the last wave is full", "(left > 0) * (fixed_us +", "(fixed_us +"),
        ],
    ),
    *of(
        "heuristics/families/decode_sm90.py",
        "heuristics_sm90 heuristics smem_of_kernels",
        [
            (
                "work units end within n-tiles",
                "return 1 if n_tiles == 1 or of_n_tile % k_tiles == 0 else 2",
                "return 1",
            ),
            (
                "the last work unit",
                "k_tiles = -(-(cluster_n_tiles * of_n_tile) // split_k)",
                "k_tiles = cluster_n_tiles * of_n_tile // split_k",
            ),
            ("x is copied whole", "x_k_tiles = k_tiles if k_tiles < of_n_tile else of_n_tile", "x_k_tiles = k_tiles"),
            (
                "tokens have one buffer",
                "(2 * warps_k + c.split_k - 1)",
                "(warps_k + c.split_k - 1)",
            ),
            ("an n-tile in two panels", "1 if PANEL_COLUMNS % config.block_n == 0 else 2", "1"),
        ],
    ),
    *of(
        "heuristics/families/gemm_sm90.py",
        "heuristics_sm90 heuristics smem_of_kernels",
        [
            ("accumulators in the pipeline's place", "max(pipeline_bytes, accumulators_bytes)", "pipeline_bytes"),
            ("partials of other CTAs", "beside_bytes = (c.split_k - 1) *", "beside_bytes = c.split_k *"),
            ("scales per channel", "0 if per_channel and not zeros else", "0 if per_channel else"),
        ],
    ),
    *of(
        "heuristics/families/dequantize_cublas.py",
        "unfused heuristics choice",
        [
            (
                "K beyond the workspace",
                "        if problem.k <= longest_k():\n",
                "        if problem.k <= 2 * longest_k():\n",
            ),
        ],
    ),
    *of(
        "heuristics/slices.py",
        "unfused heuristics choice",
        [
            ("more than the workspace", "WORKSPACE_BYTES) // (2 * k) //", "WORKSPACE_BYTES) // k //"),
            ("a weight that fits", "    if n <= limit:\n", "    if n < limit:\n"),
            ("slices of odd width", "return -(-n // (slices * step)) * step", "return -(-n // slices)"),
        ],
    ),
    *of(
        "heuristics/cost.py",
        "heuristics families choices",
        [
            (
                "K is not padded",
                "return problem.k_padded * problem.bits // 8 +",
                "return problem.k * problem.bits // 8 +",
            ),
            (
                "a short last group",
                "-(-problem.k // problem.group_size)) *",
                "problem.k // problem.group_size) *",
                "group_size divides K: Problem refuses others",
            ),
            ("zeros are free", "(2 if problem.zeros else 1)", "1"),
            (
                "nothing is hidden",
                "unhidden * (compute_us + memory_us - longer_us)",
                "(compute_us + memory_us - longer_us)",
            ),
        ],
    ),
    *of(
        "heuristics/launches.py",
        "two_launches heuristics",
        [
            (
                "a tail without columns",
                "and 0 < first_columns(config, problem) < problem.n",
                "and 0 < first_columns(config, problem) <= problem.n",
            ),
            ("a tail of a tail", "        and tail.tail is None\n", ""),
            ("a tail of another family", "        and config.family == tail.family\n", ""),
            ("columns of the tail", "replace(problem, n=problem.n - columns)", "replace(problem, n=columns)"),
        ],
    ),
    *of(
        "heuristics/select.py",
        "heuristics two_launches choices",
        [
            (
                "the dearest",
                "is_better = us < best_us or (us == best_us and compute_us < best_compute_us)",
                "is_better = us > best_us",
            ),
            ("of equal times any", "(us == best_us and compute_us < best_compute_us)", "us == best_us"),
            ("what does not fit", "launch.config.rules.why_not_sizes(launch.config, problem) is None", "True"),
            ("cuBLAS for few rows", "if kernel.min_m <= m <= kernel.max_m:", "if m <= kernel.max_m:"),
            ("bounds above times", "_ROUNDING = 1 - 1e-6", "_ROUNDING = 1.1"),
            ("more parts than SMs", "best_us or tiles > launch.most_tiles:", "best_us:"),
            ("two launches for a small gain", "_LEAST_GAIN * us)", "us)"),
            ("no last resort", "return best or _last_resort(", "return best if best else candidates("),
        ],
    ),
    *of(
        "heuristics/configs.py",
        "generate",
        [("codes without a codebook", 'self.scale_mode == "group_zeros" or', 'self.scale_mode == "group_zeros" and')],
    ),
    *of(
        "kernels/api/checks.h",
        "c_interface",
        [
            ("zeros that a kernel reads", "if (kernel.reads_zeros && p.zeros", "if (false && p.zeros"),
            ("groups of 16 by any kernel", "  if (kernel.least_group == 16) {", "  if (false) {"),
            ("rows of scales", "p.k_padded / kernel.least_group", "p.k_padded / 32"),
            ("an unknown activation", "p.activation >= int(Activation::kCount)", "p.activation > 9"),
        ],
    ),
    *of(
        "heuristics/arch.py",
        "arch",
        [
            ("a GPU that nobody knows", "if type(arch) is int and arch in ARCHS:", "if type(arch) is int:"),
            ("a minor version of two digits", "and 0 <= arch[1] <= 9:", "and 0 <= arch[1]:"),
            ("text around it", "_TEXT.fullmatch(arch)", "_TEXT.search(arch)"),
            (
                "true is a number",
                "all(type(part) is int for part in arch)",
                "all(isinstance(part, int) for part in arch)",
            ),
        ],
    ),
]
