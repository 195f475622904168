"""Products of many experts: which kernel, what a call is checked for, rows of no expert, layers."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "heuristics/grouped.py",
        "grouped_heuristics",
        [
            ("kernels that never ran", "if c.is_verified and c.rules", "if c.rules"),
            ("kernels that were never timed", " and c.rules.is_calibrated(c, problem.format)", ""),
            ("the slowest", "return min(found, key", "return max(found, key"),
            ("lists that are too long", "if row_tiles > MAX_ROW_TILES:", "if row_tiles > MAX_ROW_TILES + 1:"),
            ("an expert's last tile", "min(rows, experts) * (tile_rows - 1)", "min(rows, experts) * tile_rows"),
            ("single products", "if not config.rules.grouped:", "if config.rules is None:"),
            ("two launches", "if config.tail is not None:", "if config.tail is config:"),
            ("an expert more than CTAs count", "if experts > config.rules.max_experts:", "if experts > config.rules.max_experts + 1:"),
            ("an expert less than CTAs count", "if experts > config.rules.max_experts:", "if experts >= config.rules.max_experts:"),
            ("tiles that are not full", "+ min(problem.m, experts) + 1)", "+ 1)"),
            ("the last tile of columns", "-(-problem.n // 64)\n", "(problem.n // 64)\n"),
            ("a tile too few", "if tiles <= MAX_TILES else", "if tiles < MAX_TILES else"),
        ],
    ),
    *of(
        "heuristics/routing.py",
        "grouped_heuristics",
        [
            ("one expert as many", "    if experts == 1:\n", "    if experts == 0:\n"),
            ("half a tile is left over", "rows / tile_m + experts / 2", "rows / tile_m"),
            ("an even share of all", "share = rows / experts", "share = rows"),
            ("a row more than a tile", "while i < j * tile_m:", "while i <= j * tile_m:"),
            ("the sum ends too early", "if left < 1e-6 and i > share:", "if left < 1e-1 and i > share:"),
            ("experts without rows", "experts * (1 - (1 + rows / experts / _ALIKE) ** -_ALIKE)", "experts"),
        ],
    ),
    *of(
        "heuristics/families/hopper_grouped.py",
        "grouped_heuristics",
        [
            ("CTAs alone on an SM", "(p.sm_count * ctas)", "p.sm_count"),
            (
                "a wave begun is none",
                "waves = math.ceil(waves - 0.02) if waves < _FEW_WAVES",
                "waves = waves if waves < _FEW_WAVES",
            ),
            ("every row counts", "(p.m / row_tiles - 1)", "(p.m - 1)"),
            ("all experts are read", "memory_us = active * p.n", "memory_us = p.n"),
        ],
    ),
    *of(
        "heuristics/families/grouped_sm90.py",
        "grouped_heuristics smem_of_kernels",
        [
            ("groups of 32 for four warpgroups", "and warpgroups == 4:", "and warpgroups > 4:"),
            ("groups of 32 for tiles of 16 tokens", "and config.block_m <= 16 and", "and config.block_m <= 8 and"),
            ("ends of experts have no room", " + 2 * 4 * MAX_EXPERTS", ""),
            ("parts of K", "        return 1\n\n    def cta_smem", "        return 2\n\n    def cta_smem"),
        ],
    ),
    *of(
        "weightonly/grouped.py",
        "grouped_gemm nn_grouped",
        [
            ("one weight", "        if experts is None:\n", "        if experts == 0:\n"),
            ("x of three dimensions", "        if x.dim() != 2:\n", "        if x.dim() < 2:\n"),
            ("a scalar to write to", "if self.out.dim() != 2:", "if self.out.dim() > 2:"),
            ("scales of more experts", "or tensor.shape[0] != experts:", "or tensor.shape[0] < experts:"),
            (
                "a dimension more",
                'if tensor.dim() != shape.count(",") + 2 or',
                'if tensor.dim() < shape.count(",") + 2 or',
            ),
            ("nothing but offs is checked", "self.of_expert(0, 0, x.shape[0]).check()", "pass"),
            ("ends of 64 bits", 'require_dtype("offs", offs, (torch.int32,))', 'require_tensor("offs", offs)'),
            ("ends of more experts", "if tuple(offs.shape) != (experts,):", "if offs.numel() < experts:"),
            ("ends elsewhere", 'check_device("offs", offs, x)', "pass"),
            ("ends that descend", "        if end < begin:\n", "        if end < 0:\n"),
            ("ends beyond the rows", "if begin > total or (begin < total", "if (begin < total"),
            ("rows of no expert in a plain call", "(begin < total and not has_rest)", "False"),
            ("rows of no expert are refused in layers", "(begin < total and not has_rest)", "begin < total"),
            ("rows of no expert stay as they were", "args.out[rows[-1][2] if rows else 0 :] = 0", "pass"),
            ("the dtype of ends is not in the key", "offs.shape, offs.dtype, offs.device", "offs.shape, offs.device"),
            ("out is not checked", "        plan.check_out(args)\n", "        pass\n"),
        ],
    ),
    *of(
        "weightonly/experts.py",
        "fused_experts",
        [
            ("x of three dimensions", "    if x.dim() != 2:\n", "    if x.dim() < 2:\n"),
            ("K of the first product", "if first[0].k != x.shape[1]:", "if first[0].k > x.shape[1]:"),
            ("columns of the first product", "if columns != 2 * inner:", "if columns > 2 * inner:"),
            ("columns of the second product", "if second[0].n != x.shape[1] or", "if second[0].n > x.shape[1] or"),
            (
                "experts of the second product",
                " or first[0].experts != second[0].experts:",
                ":",
            ),
            (
                "the scales are checked by the products",
                "            GroupedArgs(rows, weight[0], weight[1], offs, weight[2], weight[3]).check()\n",
                "            pass\n",
            ),
            ("autocast", "x = autocast(x, first[1])", "x = x"),
            ("five of a tuple", "not 2 <= len(weight) <= 4:", "not 2 <= len(weight) <= 5:"),
            ("one weight", "or weight[0].experts is None:", "or weight[0].experts == 0:"),
            ("ids of more rows", "or ids.shape[0] != x.shape[0] or", "or"),
            ("no choice", "or ids.shape[1] == 0:", "or ids.shape[1] < 0:"),
            ("weights of integers", "if not weights.is_floating_point():", "if weights.is_complex():"),
            ("weights of another shape", "if weights.shape != ids.shape:", "if weights.dim() != ids.dim():"),
            ("ids elsewhere", 'check_device("topk_ids", ids, x)', "pass"),
            ("weights elsewhere", 'check_device("topk_weights", weights, x)', "pass"),
        ],
    ),
    *of(
        "weightonly/nn/grouped.py",
        "nn_grouped",
        [
            ("no parts", "        if not parts:\n", "        if parts is None:\n"),
            (
                "parts of several formats",
                'return {"weight": part.weight.fields} | shapes',
                "return shapes",
            ),
            ("parts of several shapes", "list(tensor.shape) for name", "tensor.dim() for name"),
            ("bias is not compared", '("scales", "zeros", "bias", "perm")}\n    shapes', '("scales",)}\n    shapes'),
            ("the scales of other dtypes", 'if name == "scales" and stack is not None:', "if False:"),
            ("act-order in floats", 'if stack is not None and name != "perm" else', "if stack is not None else"),
            (
                "what is given is not checked",
                "        GroupedArgs(x, weight, scales, offs, zeros, bias, perm=perm).check()\n",
                "",
            ),
            ("each expert in the order of the first", "self.perm[expert])", "self.perm[0])"),
            (
                "in the dtype of the scales",
                "scales, zeros = self._operands_in(dtype)",
                "scales, zeros = self.scales, self.zeros",
            ),
            ("states of other layouts", "        self._check_layout(state_dict, prefix)\n", ""),
            ("the codebook from before", "        self._packed = None\n", ""),
        ],
    ),
]
