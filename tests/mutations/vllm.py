"""The plug-in for vLLM: how tensors are loaded, cut for a rank, packed and multiplied, and what is left to vLLM."""

from __future__ import annotations

from .mutation import of

_REFUSED = "vLLM from 0.30 on refuses such a config itself; its tests run with older versions, too"

MUTATIONS = [
    *of(
        "weightonly/vllm/support.py",
        "plugins",
        [
            ("a weight for each call", "if self._made is None or self._made[0] != places:", "if places:"),
            (
                "the weight before a reload",
                "if self._made is None or self._made[0] != places:",
                "if self._made is None:",
            ),
        ],
    ),
    *of(
        "weightonly/vllm/__init__.py",
        "vllm_kernel vllm_experts",
        [
            (
                "the kernel is the last",
                "kernels.insert(0, WeightOnlyLinearKernel)",
                "kernels.append(WeightOnlyLinearKernel)",
            ),
            ("the kernel is there twice", "if WeightOnlyLinearKernel not in kernels:", "if True:"),
            (
                "another vLLM stops all",
                "except (ImportError, AttributeError) as error:",
                "except ImportError as error:",
            ),
            ("experts are taken without being asked", "        if wanted:\n", "        if True:\n"),
        ],
    ),
    *of(
        "weightonly/vllm/rows.py",
        "vllm_folders vllm_experts",
        [
            (
                "nibbles change places",
                "unsigned[:, ::2] | unsigned[:, 1::2] << 4",
                "unsigned[:, 1::2] | unsigned[:, ::2] << 4",
            ),
            ("nibbles beside each other", "(rows & 15, rows >> 4), dim=2)", "(rows & 15, rows >> 4), dim=1)"),
            ("codes are signed", "columns if format in CODE_FORMATS else", 'columns if format == "nf4" else'),
            (
                "what another loader brings",
                "qweight.dtype != torch.uint8 or qweight.dim() != 2",
                "qweight.dtype != torch.uint8 and qweight.dim() != 2",
            ),
        ],
    ),
    *of(
        "weightonly/vllm/support.py",
        "vllm_experts vllm_kernel vllm_folders",
        [
            ("any value asks for experts", 'if value not in ("on", "off"):', "if not value:"),
            ("groups that no kernel takes", "        check_kernel_group_size(group_size, k)\n", ""),
            ("any dtype on a CPU", "return None if dtype in CPU_DTYPES else", "return None if dtype else"),
        ],
    ),
    *of(
        "weightonly/vllm/linear_method.py",
        "vllm_folders",
        [
            ("row_groups of the first rank", "begin = self.tp_rank * self.data.shape[-1]", "begin = 0"),
            (
                "row_groups of merged layers in one place",
                'self._load(self._shard_id_as_int(kwargs["shard_id"]), loaded_weight)',
                "self._load(0, loaded_weight)",
            ),
            ("row_groups of another length", "if rows.shape != target.shape:", "if rows.dim() != target.dim():"),
            ("another K", "if input_size != shape.k:", "if input_size < shape.k:"),
            ("formats that rows do not hold", "if shape.format not in LOADED_FORMATS:", 'if shape.format == "int3":'),
            (
                "groups that are cut",
                "not shape.act_order and k % shape.group_size == 0",
                "not shape.act_order",
            ),
            (
                "act-order is whole groups",
                "not shape.act_order and k % shape.group_size == 0",
                "k % shape.group_size == 0",
            ),
            (
                "padding is not counted",
                "k_padded = -(-k // group_size) * group_size if group_size == _CHUNK else k",
                "k_padded = k",
            ),
            ("scales of a part alone", "groups = (k if self.is_whole else shape.k) //", "groups = k //"),
            ("scales are not cut", "groups = (k if self.is_whole else shape.k) //", "groups = shape.k //"),
            ("zeros are not loaded", '("scales", "zeros") if has_zeros else ("scales",)', '("scales",)'),
            ("a layer that no kernel computes", "        if reason is not None:\n", "        if reason is None:\n"),
            (
                "zeros of groups that are cut",
                "None if zeros is None else zeros[source]\n",
                "None if zeros is None else zeros[: len(source)]\n",
            ),
            (
                "one act-order of several",
                "if not bool((parts == parts[0]).all()):",
                "if not bool((parts == parts[0]).any()):",
            ),
            ("groups of the first rank", "first = self.tp_rank * self.k", "first = 0"),
            ("rows are not sorted", "return grouping.sort(rows), source, perm", "return rows, source, perm"),
            ("an order that is an identity is dropped", "if perm is None and self.shape.act_order:", "if False:"),
            (
                "the column of zeros is the first",
                "torch.nn.functional.pad(x, (0, 1))",
                "torch.nn.functional.pad(x, (1, 0))",
            ),
            ("padding meets x", "perm = torch.full((total,), k, dtype", "perm = torch.full((total,), 0, dtype"),
            ("a short chunk is lost", "chunks = -(-counts // _CHUNK)", "chunks = counts // _CHUNK"),
            (
                "scales of padded groups",
                "repeat_interleave(chunks), perm",
                "repeat_interleave(counts)[:len(chunks)], perm",
            ),
            ("the order of x", 'getattr(layer, "zeros", None), perm)', 'getattr(layer, "zeros", None), None)'),
            ("the bias", "gemm(x, w, bias=bias)", "gemm(x, w)"),
            ("the zeros", 'getattr(layer, "zeros", None), perm)', "None, perm)"),
            (
                "blocks are packed again",
                "        if self.takes_blocks:\n            assert",
                "        if False:\n            assert",
            ),
        ],
    ),
    *of(
        "weightonly/vllm/blocks.py",
        "vllm_folders",
        [
            (
                "what another loader brings",
                "loaded_weight.dtype != torch.uint8 or loaded_weight.dim() != dims",
                "loaded_weight.dtype != torch.uint8 and loaded_weight.dim() != dims",
            ),
            ("columns inside of a block", "all(part % align == 0 for part in parts)", "True"),
            ("rows inside of a block", "(k == whole[0] or k % K_ALIGN == 0)", "True"),
            ("the columns of a block", "packed_factor=blocks.columns", "packed_factor=1"),
        ],
    ),
    *of(
        "weightonly/vllm/linear_kernel.py",
        "vllm_kernel",
        [
            ("AWQ is left to others", "    (scalar_types.uint4, True): 4,\n", ""),
            (
                "zero points of another type",
                "_TYPES.get((c.weight_type, c.zero_points))",
                "_TYPES.get((c.weight_type, False))",
            ),
            ("results that depend on the batch", "if envs.VLLM_BATCH_INVARIANT:", "if False:"),
            ("what no kernel computes", "return reason is None, reason", "return True, reason"),
            (
                "zero points are unsigned",
                "zeros = to_signed(unpack_words(words, bits, dim=1)[:, :n], bits).to(c.act_type)",
                "zeros = unpack_words(words, bits, dim=1)[:, :n].to(c.act_type)",
            ),
            (
                "weights of words along N",
                "getattr(layer, self.w_q_name), packed_dim=0)",
                "getattr(layer, self.w_q_name), packed_dim=1)",
            ),
            (
                "the dtype of scales",
                "getattr(layer, self.w_s_name)).to(c.act_type)",
                "getattr(layer, self.w_s_name)).float()",
            ),
            ("no scales", "if len(scales) == 0:", "if len(scales) < 0:"),
            ("the bias", "perm), bias=bias)", "perm))"),
            ("the zeros", "scales, zeros, perm), bias", "scales, None, perm), bias"),
            ("zeros stay words", "        _replace(layer, self.w_zp_name, zeros)\n", ""),
            ("a parameter that is dropped stays", "        layer.register_parameter(name, None)\n", "        return\n"),
        ],
    ),
    *of(
        "weightonly/vllm/experts.py",
        "vllm_experts vllm_folders",
        [
            ("gate and up change places", '1 if shard_id == "w3" else 0', '1 if shard_id == "w1" else 0'),
            (
                "experts of other ranks are said to be loaded",
                "return False if return_success else None",
                "return True if return_success else None",
            ),
            (
                "each rank adds the bias",
                'part if stem == "w13" or self.tp_rank == 0 else torch.zeros_like(part)',
                "part",
            ),
            (
                "the bias of the first columns",
                "loaded_weight[shard.first_column :][:columns]",
                "loaded_weight[:columns]",
            ),
            ("groups out of order", 'name.endswith("g_idx") and not bool(', 'name.endswith("gidx") and not bool('),
            ("too few columns", "or len(read) < shard.full_n or", "or"),
            ("too few groups", "or read.shape[1] < full:", "or read.shape[1] < 0:"),
            (
                "the columns of the first rank",
                "read[shard.first_column :][:columns, begin:end]",
                "read[:columns, begin:end]",
            ),
            (
                "groups that are cut",
                "data = data if shard.source is None else data[:, shard.source.to(data.device)]",
                "data = data if shard.source is None else data[:, : len(shard.source)]",
            ),
            ("experts that are on no rank", "torch.where(topk_ids < 0, -1, places)", "places"),
            ("router weights count twice", "            topk_weights = torch.ones_like(topk_weights)\n", ""),
            ("LoRA", '"LoRA": moe.is_lora_enabled,', '"LoRA": False,'),
            ("balanced experts", "parallel.enable_eplb,", "False,"),
            ("all-to-all", "parallel.use_all2all_kernels,", "False,"),
            (
                "router weights on the input",
                "layer.apply_router_weight_on_input and layer.top_k > 1,",
                "layer.apply_router_weight_on_input and layer.top_k > 2,",
            ),
            ("a limit that vLLM leaves away", '(limit is not None and value != "silu")', "False"),
            ("no limit", 'removesuffix("_no_mul"), limit,', 'removesuffix("_no_mul"), None,'),
            ("a gate where there is none", "if is_first and gate_of(moe).has_gate else 1", "if is_first else 1"),
            ("the limits of situ", "moe.activation_situ_linear_beta, moe.activation_situ_beta)", "None, 4.0)"),
            ("no shift", "alpha, shift=beta or 0.0)", "alpha)"),
            ("weights are made for each call", "if self._made is None or self._made[0] != places:", "if places:"),
            (
                "results that depend on the batch",
                '"VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,',
                '"VLLM_BATCH_INVARIANT": False,',
            ),
            ("columns that alternate", "if value not in names:", 'if value not in (*names, "swigluoai"):'),
            (
                "rows and columns of a rank",
                "(0, int(begin)) if is_first else (int(begin), 0)",
                "(int(begin), 0) if is_first else (0, int(begin))",
            ),
            ("a last group that is cut", "-(-end // size))", "end // size)"),
            ("the bias is dropped", "            if stem not in self.loaded_biases:\n", "            if stem:\n"),
            (
                "every expert is the first",
                "            stacked[expert] = packed.data\n",
                "            stacked[0] = packed.data\n",
            ),
            ("experts that are not for us", "if isinstance(tensors, str):", "if tensors is None:"),
        ],
    ),
    *of(
        "weightonly/vllm/expert_tensors.py",
        "vllm_experts",
        [
            (
                "act-order",
                "if config.desc_act and config.group_size != -1:",
                "if config.desc_act and config.group_size == 0:",
                _REFUSED,
            ),
            (
                "act-order per channel is refused",
                "if config.desc_act and config.group_size != -1:",
                "if config.desc_act:",
                "vLLM's override_config says desc_act=False there",
            ),
            ("GPTQ with zero points", "    if not config.is_sym:\n", "    if config.is_sym is None:\n", _REFUSED),
            ("bits of one layer", "    override_config(config, prefix)\n", ""),
            (
                "experts that are not quantized",
                "if get_dynamic_override(config, prefix) is False:",
                "if config is None:",
            ),
            (
                "AWQ's layers that are not quantized",
                "if any(name in prefix for name in config.modules_to_not_convert):",
                "if config is None:",
            ),
            ("AWQ's zeros are unsigned", "to_signed(unpack_awq(t).t(), 4)", "unpack_awq(t).t()"),
            (
                "several ways",
                "if any(other != scheme for other in schemes):",
                "if any(other is None for other in schemes):",
            ),
            (
                "act-order of compressed-tensors",
                'or weights.actorder == "group":',
                'or weights.actorder == "never":',
                _REFUSED,
            ),
            ("one scale a column", "group = weights.group_size or -1", "group = weights.group_size or 128"),
            (
                "zero points along K",
                "to_signed(unpack_words(t, bits, 0), bits)",
                "to_signed(unpack_words(t, bits, 1), bits)",
            ),
            (
                "zero points of the symmetric",
                'zeros = None if weights.symmetric else "weight_zero_point"',
                "zeros = None",
            ),
        ],
    ),
    *of(
        "weightonly/vllm/folders.py",
        "vllm_folders",
        [
            ("folders that nobody asked for", "return METHOD if user_quant == METHOD else None", "return METHOD"),
            (
                "a part that is not quantized",
                "if first is None or len(kinds) > 1:\n            got",
                "if len(kinds) > 2:\n            got",
            ),
            (
                "parts of several group sizes",
                "(p.format, p.k, p.group_size, p.symmetric is True, p.act_order) for p in parts",
                "(p.format, p.k, p.symmetric is True, p.act_order) for p in parts",
            ),
            ("names of the folder", "hf_to_vllm_mapper.apply_list([name])", "[name]"),
            ("headers are read again", "self._checkpoint or open_checkpoint(folder)", "open_checkpoint(folder)"),
            (
                "rows of every layer",
                "loadable(weight, checkpoint.shapes[layer.name], layer.name in packed)",
                "loadable(weight, checkpoint.shapes[layer.name])",
            ),
            ("layouts side by side", "first = dataclasses.replace(first, layout=None)", "pass"),
            ("a layer that is fused in the file", "if prefix in self.shapes:", "if prefix in ():"),
            ("experts without being asked", "if not experts_wanted():", "if experts_wanted() is None:"),
            ("experts in act-order", "or first.act_order or down.act_order:", "or first.act_order is None:"),
            (
                "experts of several kinds",
                "(p.format, p.k, p.n, p.group_size, p.symmetric is True, p.act_order)",
                "(p.format, p.k, p.n, p.symmetric is True, p.act_order)",
            ),
            ("the bias", "            if bias is not None:\n", "            if bias is None:\n"),
            ("the middle of int8", "1 << FORMATS[shape.format] - 1", "1 << 4 - 1"),
            (
                "codes are moved",
                "middle = 0 if shape.format in CODE_FORMATS else",
                "middle = 0 if shape.format is None else",
            ),
            ("rows stay in the order of groups", "unsort_rows(q, perm)", "unsort_rows(q, None)"),
            (
                "zero points that the config denies",
                "if zeros is not None and shape.symmetric:",
                "if zeros is None and shape.symmetric is None:",
            ),
            ("zero points of 0 are left out", "    if shape.symmetric is not True:\n", "    if zeros is not None:\n"),
            (
                "row_groups in the order of the weight",
                "torch.empty_like(groups).index_copy_(0, perm.long(), groups)",
                "groups[perm.long()]",
            ),
            (
                "scales in the order of the file",
                '"scales": weight.scales.t().contiguous()}',
                '"scales": weight.scales.contiguous()}',
            ),
        ],
    ),
]
