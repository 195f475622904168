"""Tensor parallel layers: which rows and columns are whose, what is sent between ranks, and states."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "weightonly/parallel/ranges.py",
        "parallel",
        [
            ("the rest is nobody's", "chunk", "-(-size // ranks)", "size // ranks"),
            ("parts that do not add up", "columns_of", "!=", "<"),
            ("fused parts lie close", "columns_of", "+= columns", "+= end - begin"),
            ("a cut that leaves no groups", "check_rows", "is not None", "== ranks"),
        ],
    ),
    *of(
        "weightonly/parallel/exchange.py",
        "parallel",
        [
            (
                "the gradient of x is one rank's",
                "Exchange.enter",
                "=[Partial()] if layout == Replicate() else None",
                "=None",
            ),
            (
                "x of all ranks has no gradient of theirs",
                "Exchange.enter",
                "and not (layout == Replicate() and _has_gradient(x))",
                "",
            ),
            ("y is never local", "Exchange.finish", "isinstance(y, DTensor)", "y is None"),
            ("the bias is added by each rank", "Exchange.replicated", "Replicate", "Partial"),
            ("columns are not counted", "Exchange.enter", "self._check_columns(x, columns)\n", ""),
            ("columns of an uneven cut", "Exchange._check_columns", "end - begin", "-(-columns // self.mesh.size())"),
            (
                "all ranks have as many columns",
                "Exchange._spread",
                "[:-1], columns",
                "[:-1], x.shape[-1] * self.mesh.size()",
            ),
        ],
    ),
    *of(
        "weightonly/parallel/exchange.py",
        "parallel",
        [
            ("sums that autograd does not see", "Exchange.adds", " and not _has_gradient(term)", ""),
            ("terms of another layout are added up", "Exchange.redistribute", "layout == Partial() and ", ""),
        ],
    ),
    *of(
        "weightonly/parallel/sums.py",
        "parallel",
        [
            ("a term is written over", "_sum", "term.clone(memory_format=torch.contiguous_format)", "term"),
            ("terms are not added", "_add", "distributed.all_reduce(term, group=group)", "pass"),
            (
                "products are not added",
                "_sum_of_products",
                "_add(compute(args), _group_of(group_name))",
                "compute(args)",
            ),
        ],
    ),
    *of(
        "weightonly/parallel/styles.py",
        "parallel",
        [
            (
                "parts in another layout",
                "ColwiseParallel.__init__",
                "(self.output_layouts[0] != Shard(-1) or not use_local_output)",
                "not use_local_output",
            ),
            ("a layer that is cut already", "_prepare", "isinstance(layer, ParallelLinear)", "layer is None"),
            ("a mesh of two dimensions", "same_on_all", "!= 1", "> 2"),
            ("each rank keeps its tensors", "same_on_all", "None or", "not None or"),
            (
                "each rank keeps its act-order",
                "same_on_all",
                "(*layer.parameters(recurse=False), *layer.buffers(recurse=False))",
                "layer.parameters(recurse=False)",
            ),
        ],
    ),
    *of(
        "weightonly/parallel/experts.py",
        "parallel",
        [
            (
                "experts of the ranks behind",
                "ParallelExperts.forward",
                "(ids >= 0) & (ids < self.num_experts)",
                "ids >= 0",
            ),
            ("experts count from 0 on each rank", "ParallelExperts.forward", "self.first_expert", "0"),
            (
                "weights have no gradient of an empty rank",
                "ParallelExperts.forward",
                "y = y + (weights * 0).sum(-1, keepdim=True).to(y.dtype)\n",
                "",
            ),
            ("y is not added up", "ParallelExperts.forward", "Partial", "Replicate"),
            (
                "experts that are cut already",
                "ExpertParallel._apply",
                "isinstance(module, ParallelExperts)",
                "module is None",
            ),
            ("experts of the first rank", "_experts", "packed[begin:end]", "packed[: end - begin]"),
            ("rows in act-order", "ExpertTensorParallel._cut", "is not", "is None and module is"),
            (
                "groups that a cut splits",
                "ExpertTensorParallel._cut",
                "check_rows(inner, down.operand.group_rows, ranks)\n",
                "",
            ),
            (
                "gate and up are not cut alike",
                "ExpertTensorParallel._cut",
                "columns_of(2 * inner, (inner, inner), ranks, rank)",
                "[(2 * begin, 2 * end)]",
            ),
            (
                "each rank adds the bias",
                "ExpertTensorParallel._cut",
                " if rank == 0 or down.bias is None else torch.zeros_like(down.bias)",
                "",
            ),
        ],
    ),
    *of(
        "weightonly/parallel/linear.py",
        "parallel parallel_hf",
        [
            ("the bias is never added", "RowwiseLinear.forward", "self.bias.to(y.dtype)", "0 * self.bias"),
            (
                "each rank adds the bias",
                "RowwiseLinear._gemm",
                "return self._product(x, None,",
                "return self._product(x, self.bias,",
            ),
            (
                "the activation comes before the sum",
                "RowwiseLinear._gemm",
                "return self._product(x, None, None)",
                "return self._product(x, None, self.activation)",
            ),
            (
                "rows of the weight twice in order",
                "RowwiseLinear._order",
                "None  # x is permuted and cut before the product",
                "self.perm",
            ),
            ("a bias that is not cut", "ColwiseLinear.differs", ', "bias"', ""),
            (
                "scales per channel are cut",
                "RowwiseLinear.differs",
                "self.full_group_size != self.full_in_features",
                "True",
            ),
            ("scales are cut along groups", "ColwiseLinear.placement", '1 if name in ("scales", "zeros") else ', ""),
            (
                "fused parts as one",
                "ColwiseLinear.placement",
                "if self.parts is not None:\n            return None\n",
                "",
            ),
            ("scales of smaller groups", "RowwiseLinear._cut_small", "// group)", "// rows)"),
            (
                "scales of the first group",
                "RowwiseLinear._whole",
                "[(first - begin) * len(parts[rank]) // (end - begin)])",
                "[0])",
            ),
            ("a weight of another shape", "ParallelLinear.cut", 'shape != self.full_shape("qweight")', "dim() != 2"),
            ("a DTensor is loaded as a whole", "ParallelLinear._load_from_state_dict", "to_local", "full_tensor"),
            ("a part comes whole", "ParallelLinear.comes_cut", "self.reads == OWN or ", ""),
            ("a whole comes cut", "ParallelLinear._placement_in_state", "in (WHOLE, OWN)", "== OWN"),
            (
                "a dense weight is cut as a packed one",
                "ParallelLinear._placement_in_state",
                '(name, self.reads) == ("qweight", DENSE)',
                "name is None",
            ),
            (
                "scales per channel of a part",
                "RowwiseLinear._dense_placement",
                'self.placement("scales") and Shard(1) if self.differs("scales") else None',
                "Shard(1)",
            ),
            ("the rows of a group", "_become", " // layer.scales.shape[0]", ""),
        ],
    ),
]
