"""Tensor parallel layers: which rows and columns are whose, what is sent between ranks, and states."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "weightonly/parallel/ranges.py",
        "parallel",
        [
            ("the rest is nobody's", "each = -(-size // ranks)", "each = size // ranks"),
            ("parts that do not add up", "if sum(parts) != n or", "if sum(parts) < n or"),
            ("fused parts lie close", "first += columns\n", "first += end - begin\n"),
            ("a cut that leaves no groups", "    if rank is not None:\n", "    if rank == ranks:\n"),
        ],
    ),
    *of(
        "weightonly/parallel/exchange.py",
        "parallel",
        [
            (
                "the gradient of x is one rank's",
                "grad_placements=[Partial()] if layout == Replicate() else None",
                "grad_placements=None",
            ),
            ("x of all ranks has no gradient of theirs", "and not (layout == Replicate() and _has_gradient(x)):", ":"),
            (
                "y is never local",
                "return y.to_local() if isinstance(y, DTensor) and",
                "return y.to_local() if y is None and",
            ),
            (
                "the bias is added by each rank",
                "return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)",
                "return DTensor.from_local(tensor, self.mesh, [Partial()], run_check=False)",
            ),
            ("columns are not counted", "            self._check_columns(x, columns)\n", ""),
            ("columns of an uneven cut", "columns = end - begin\n", "columns = -(-columns // self.mesh.size())\n"),
            (
                "all ranks have as many columns",
                "(*x.shape[:-1], columns)",
                "(*x.shape[:-1], x.shape[-1] * self.mesh.size())",
            ),
            ("slices are not added", "part, self.mesh, [Partial()]", "part, self.mesh, [Replicate()]"),
        ],
    ),
    *of(
        "weightonly/parallel/styles.py",
        "parallel",
        [
            (
                "parts in another layout",
                "(self.output_layouts[0] != Shard(-1) or not use_local_output):",
                "not use_local_output:",
            ),
            ("slices in another layout", "if slices > 1 and self.output", "if slices < 0 and self.output"),
            ("a layer that is cut already", "if isinstance(layer, ParallelLinear):", "if layer is None:"),
            ("a mesh of two dimensions", "if mesh.ndim != 1:", "if mesh.ndim > 2:"),
            ("each rank keeps its tensors", "if src_data_rank is None or", "if src_data_rank is not None or"),
            (
                "each rank keeps its act-order",
                "(*layer.parameters(recurse=False), *layer.buffers(recurse=False))",
                "layer.parameters(recurse=False)",
            ),
        ],
    ),
    *of(
        "weightonly/parallel/experts.py",
        "parallel",
        [
            ("experts of the ranks behind", "(ids >= 0) & (ids < self.num_experts)", "ids >= 0"),
            ("experts count from 0 on each rank", "ids = ids - self.first_expert", "ids = ids - 0"),
            (
                "weights have no gradient of an empty rank",
                "            y = y + (weights * 0).sum(-1, keepdim=True).to(y.dtype)\n",
                "",
            ),
            (
                "y is not added up",
                "return exchange.leave(y, Partial(), self.hidden)",
                "return exchange.leave(y, Replicate(), self.hidden)",
            ),
            ("experts that are cut already", "if isinstance(module, ParallelExperts):", "if module is None:"),
            ("experts of the first rank", "packed = w.packed[begin:end]", "packed = w.packed[: end - begin]"),
            (
                "rows in act-order",
                "if down.operand.perm is not None:",
                "if down.operand.perm is None and module is None:",
            ),
            ("groups that a cut splits", "        check_rows(inner, down.operand.group_rows, ranks)\n", ""),
            (
                "gate and up are not cut alike",
                "columns = columns_of(2 * inner, (inner, inner), ranks, rank)",
                "columns = [(2 * begin, 2 * end)]",
            ),
            (
                "each rank adds the bias",
                "bias = down.bias if rank == 0 or down.bias is None else torch.zeros_like(down.bias)",
                "bias = down.bias",
            ),
        ],
    ),
    *of(
        "weightonly/parallel/linear.py",
        "parallel parallel_hf",
        [
            ("the bias is never added", "y = y + exchange.replicated(self.bias.to(y.dtype))", "y = y + 0"),
            (
                "each rank adds the bias",
                "return self._product(x, None, None)",
                "return self._product(x, self.bias, None)",
            ),
            (
                "the activation comes before the sum",
                "return self._product(x, None, None)",
                "return self._product(x, None, self.activation)",
            ),
            (
                "rows of the weight twice in order",
                "        return None  # x is permuted and cut before the product\n",
                "        return self.perm\n",
            ),
            (
                "a bias that is not cut",
                'return name in ("qweight", "scales", "zeros", "bias")',
                'return name in ("qweight", "scales", "zeros")',
            ),
            ("scales per channel are cut", "return self.full_group_size != self.full_in_features", "return True"),
            ("scales are cut along groups", 'Shard(1 if name in ("scales", "zeros") else 0)', "Shard(0)"),
            (
                "fused parts as one",
                "        if self.parts is not None:\n            return None\n        if name",
                "        if name",
            ),
            ("scales of smaller groups", "device=tensor.device) // group)", "device=tensor.device) // rows)"),
            (
                "scales of the first group",
                "parts[rank][(first - begin) * len(parts[rank]) // (end - begin)]",
                "parts[rank][0]",
            ),
            ("a weight of another shape", 'if tensor.shape != self.full_shape("qweight"):', "if tensor.dim() != 2:"),
            (
                "a DTensor is loaded as a whole",
                "state[key] = tensor.to_local()",
                "state[key] = tensor.full_tensor()",
            ),
            ("a part comes whole", "self.reads == OWN or not self.differs(name) or", "not self.differs(name) or"),
            ("a whole comes cut", "if self.reads in (WHOLE, OWN):", "if self.reads == OWN:"),
            ("a dense weight is cut as a packed one", '(name, self.reads) == ("qweight", DENSE)', "name is None"),
            (
                "scales per channel of a part",
                'self.placement("scales") and Shard(1) if self.differs("scales") else None',
                "Shard(1)",
            ),
            (
                "the rows of a group",
                "layer.in_features // layer.scales.shape[0]\n    layer.exchange",
                "layer.in_features\n    layer.exchange",
            ),
        ],
    ),
]
