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
            (
                "ranges without columns",
                "        if begin < end:\n            ranges",
                "        if ranks:\n            ranges",
            ),
            ("a cut that leaves no groups", "    if rank is not None:\n", "    if rank == ranks:\n"),
            ("a next K that does not work", "count(k, group_size)", "count(k + 1)"),
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
                "y is always local",
                "if layout == self.output_layout and self.use_local_output:",
                "if layout == self.output_layout:",
            ),
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
            ("slices change places", "return torch.cat(sums)", "return torch.cat(sums[::-1])"),
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
            (
                "parts as a DTensor",
                "(self.output_layouts[0] != Shard(-1) or not use_local_output):",
                "self.output_layouts[0] != Shard(-1):",
            ),
            (
                "no slices",
                "or not isinstance(slices, int) or slices < 1:",
                "or not isinstance(slices, int) or slices < 0:",
            ),
            ("slices that are True", "if isinstance(slices, bool) or not", "if not"),
            ("slices in another layout", "if slices > 1 and self.output", "if slices < 0 and self.output"),
            ("slices of another module", "            if self.slices > 1:\n", "            if self.slices < 0:\n"),
            ("a layer that is cut already", "if isinstance(layer, ParallelLinear):", "if layer is None:"),
            ("a mesh of two dimensions", "if mesh.ndim != 1:", "if mesh.ndim > 2:"),
            ("each rank keeps its tensors", "if src_data_rank is None or", "if src_data_rank is not None or"),
            (
                "ranks that keep their tensors get others",
                "if src_data_rank is None or mesh",
                "src_data_rank = src_data_rank or 0\n    if mesh",
            ),
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
            ("another module", "if not isinstance(module, Experts):", "if module is None:"),
            ("experts that are cut already", "if isinstance(module, ParallelExperts):", "if module is None:"),
            (
                "experts are not the same on all",
                "            same_on_all(layer, device_mesh, self.src_data_rank)\n",
                "            pass\n",
            ),
            ("experts of the first rank", "weight = whole.weight[begin:end]", "weight = whole.weight[: end - begin]"),
            ("the first expert of parts", "        return 0\n", "        return rank\n"),
            ("rows in act-order", "if down.perm is not None:", "if down.perm is None and module is None:"),
            ("groups that a cut splits", "        check_rows(inner, inner // down.scales.shape[-2], ranks)\n", ""),
            (
                "gate and up that alternate",
                "columns = both if is_concatenated else [(2 * begin, 2 * end)]",
                "columns = both",
            ),
            ("experts without a gate", "        if module.between.has_gate:\n", "        if module.between:\n"),
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
                "no activation after the sum",
                "y = activation_of(self.activation).function(y.float()).to(y.dtype)",
                "y = y.to(y.dtype)",
            ),
            (
                "the order of the first rank",
                "None if layer.perm is None else layer.perm[begin:end]",
                "None if layer.perm is None else layer.perm[: end - begin]",
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
            ("dense fused parts as one", "return Shard(0) if self.parts is None else None", "return Shard(0)"),
            ("scales of smaller groups", "device=tensor.device) // group)", "device=tensor.device) // rows)"),
            (
                "scales of the first group",
                "parts[rank][(first - begin) * len(parts[rank]) // (end - begin)]",
                "parts[rank][0]",
            ),
            ("a weight of another shape", 'if tensor.shape != self.full_shape("qweight"):', "if tensor.dim() != 2:"),
            ("a state of the whole layer says a part", "            metadata[METADATA] |= {", "            _ = {"),
            (
                "a DTensor is loaded as a whole",
                "state[key] = tensor.to_local()",
                "state[key] = tensor.full_tensor()",
            ),
            (
                "the state of a whole layer",
                "isinstance(tensor, torch.Tensor) and self.differs(name) and",
                "isinstance(tensor, torch.Tensor) and tensor is None and",
            ),
            ("a part comes whole", "self.reads == OWN or not self.differs(name) or", "not self.differs(name) or"),
            ("a whole comes cut", "if self.reads in (WHOLE, OWN):", "if self.reads == OWN:"),
            ("a dense weight is cut as a packed one", '(name, self.reads) == ("qweight", DENSE)', "name is None"),
            (
                "scales per channel of a part",
                'self.placement("scales") and Shard(1) if self.differs("scales") else None',
                "Shard(1)",
            ),
            ("cuts inside of tiles", "if begin % align and begin != size:", "if begin % align and begin == size:"),
            (
                "cuts of stored rows",
                "chunk(stored, ranks, rank) != (begin * per_unit // unit, padded * per_unit // unit)",
                "padded < 0",
            ),
            (
                "the rows of a group",
                "layer.in_features // layer.scales.shape[0]\n    layer.exchange",
                "layer.in_features\n    layer.exchange",
            ),
            ("columns of fused parts", "first += end - begin\n", "first += 0\n"),
            ("sums in slices of their own", "rows.chunk(self.slices)", "rows.chunk(self.slices)[:1]"),
            (
                "an empty part is repacked",
                "return self if self.is_empty else super().repack(arch)",
                "return super().repack(arch)",
            ),
        ],
    ),
]
