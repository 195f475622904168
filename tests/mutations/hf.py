"""transformers and PEFT: what becomes of a model's layers, what is read and saved, what is refused."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "weightonly/hf/config.py",
        "hf_quantize_errors hf_from_pretrained hf_quantize",
        [
            ("another version", "        check_version(self.format_version)\n", ""),
            ("entries that nobody knows", "        if layer_options:\n", "        if layer_options is None:\n"),
            ("groups that no kernel takes", "            recipe.check_k(self.group_size * 2)", "            recipe  "),
            ("weights come to config.json", 'hidden = ("weights", "folder", *', 'hidden = ("folder", *'),
            ("the config is read again", "            config.folder = dict(found)\n", "            pass\n"),
        ],
    ),
    *of(
        "weightonly/hf/loader.py",
        "hf_load_model hf_gpt_oss hf_experts",
        [
            (
                "code of a folder is asked for",
                'kwargs.setdefault("trust_remote_code", False)',
                'kwargs.setdefault("trust_remote_code", None)',
            ),
            (
                "code of a folder runs",
                'kwargs.setdefault("trust_remote_code", False)',
                'kwargs.setdefault("trust_remote_code", True)',
            ),
            ("arch packs nothing again", "if weights.pack_arch is None:", "if weights.pack_arch != 0:"),
            ("headers are read again", "open_checkpoint(shards)", "open_checkpoint(folder)"),
            ("config.json is read again", "    shards.configs[CONFIG] = _entries(config)\n", ""),
            ("the dtype of the tensors", "config.dtype or weights.plain_dtype or", "config.dtype or"),
            ("a tensor that is missing", "    if missing:\n", "    if len(missing) > 1:\n"),
            ("experts that cannot be stacked", "except SeparateExpertsError:", "except ZeroDivisionError:"),
        ],
    ),
    *of(
        "weightonly/hf/files.py",
        "hf_load_model hf_from_pretrained hf_quantize_errors hf_experts hf_gpt_oss",
        [
            ("tied weights are asked for", "and weight not in tied and not is_head:", "and not is_head:"),
            ("heads are asked for", "and weight not in tied and not is_head:", "and weight not in tied:"),
            (
                "layers of the base model are not asked for",
                'bool(prefix) and not name.startswith(f"{prefix}.")',
                "bool(prefix)",
            ),
            ("a packed layer that is said to be dense", "    if wrong:\n", "    if len(wrong) > 1:\n"),
            (
                "experts that are missing",
                "if weight not in plan.stacks and weight not in found and",
                "if weight in plan.stacks and weight not in found and",
            ),
        ],
    ),
    *of(
        "weightonly/hf/checkpoint.py",
        "hf_load_model hf_mxfp4 hf_experts hf_gpt_oss",
        [
            (
                "scales that their dtype does not hold",
                "                check_scales_as(value, dtype, shape.format)\n",
                "                pass\n",
            ),
            (
                "a packed folder is packed again",
                "keeps_layout = arch is None and METHOD in",
                "keeps_layout = arch is not None and METHOD in",
            ),
            (
                "experts in another order",
                "if in_turns else self.checkpoint.record_of",
                "if False else self.checkpoint.record_of",
            ),
            ("two layers at a time", "        with self._lock:\n", "        if self._lock:\n"),
            ("the bias", 'inside += ["bias"] if has_bias else []', "inside += []"),
            ("zero points", 'inside += ["zeros"] if shape.symmetric is False else []', "inside += []"),
            ("the permutation is a float", '"perm": torch.int32, "codebook"', '"perm": torch.float32, "codebook"'),
            ("dense weights are not transposed", "return record.dequantize().t()", "return record.dequantize()"),
            ("names of the file", "found.add(names.of_tensor(tensor))", "found.add(tensor)"),
            (
                "codes have the layout of integers",
                "find = record_code_layout if shape.format in CODE_FORMATS else layout_for_arch",
                "find = layout_for_arch",
            ),
        ],
    ),
    *of(
        "weightonly/hf/names.py",
        "hf_from_pretrained hf_load_model hf_experts hf_quantize",
        [
            (
                "a layer that has its name already",
                "        if found not in self.tensors and name in self.tensors:\n",
                "        if name is None:\n",
            ),
            (
                "a tensor that has its name already",
                "return name if found not in self.tensors and name in self.tensors else found",
                "return found",
            ),
        ],
    ),
    *of(
        "weightonly/hf/experts.py",
        "hf_experts hf_gpt_oss",
        [
            ("an expert that is missing", "if (expert, part) not in layers:", "if expert is None:"),
            (
                "biases that the model lacks",
                "elif {layer in biased for layer in layers.values()} != {bool(module.has_bias)}:",
                "elif module is None:",
            ),
            ("blocks in another order", "gates_first(read(tensor), 1))", "read(tensor))"),
            ("packed layers in another order", "QuantizedLayer.of(layer, in_order(record, gates_first))", "record"),
            ("fewer experts than the model has", "if shape.experts != count:", "if shape.experts > count:"),
            ("experts of several columns", "or shape.n != like.n:", "or shape.n < 0:"),
            (
                "zero points of some experts",
                "all(shape.symmetric is not False for shape in everyone)",
                "any(shape.symmetric is not False for shape in everyone)",
            ),
            (
                "the order of some experts",
                "any(shape.act_order for shape in everyone)",
                "all(shape.act_order for shape in everyone)",
            ),
            ("zero points that change weights", "zeros = torch.zeros_like(scales)", "zeros = torch.ones_like(scales)"),
            (
                "an order that changes weights",
                "dtype=torch.int32, device=scales.device)\n    plain",
                "dtype=torch.int32, device=scales.device).flip(0)\n    plain",
            ),
            ("a codebook for each expert", 'if shape.format == "code4":', 'if shape.format == "nf4":'),
        ],
    ),
    *of(
        "weightonly/hf/modules.py",
        "hf_from_pretrained hf_quantize hf_experts hf_quantize_errors shown hf_load_model parallel_hf",
        [
            ("subclasses of Linear", "if type(module) is torch.nn.Linear:", "if isinstance(module, torch.nn.Linear):"),
            ("a gate", "elif shape is not None and shape[1] == 1:", "elif shape is not None and shape[1] == 0:"),
            ("layers to leave", "if not all(should_convert_module(", "if not any(should_convert_module("),
            ("N of another model", "    if found != (shape.k, shape.n):\n", "    if found[0] != shape.k:\n"),
            ("zero points", '"symmetric": shape.symmetric is not False,', '"symmetric": True,'),
            ("names that do not print", "        if not name.isprintable():\n", "        if name is None:\n"),
            (
                "an offloaded weight is made dense",
                "if any(parameter.is_meta for parameter in module.parameters()):",
                "if module is None:",
            ),
            (
                "a dense weight is transposed",
                "torch.nn.Parameter(w.t().contiguous())",
                "torch.nn.Parameter(w.contiguous())",
            ),
            ("experts that are left are packed", "        self.stacks.clear()\n", ""),
            ("a group size that does not fit", "            recipe.check_k(k)\n", "            pass\n"),
        ],
    ),
    *of(
        "weightonly/hf/quantizer.py",
        "hf_from_pretrained hf_quantize_errors hf_quantize hf_experts quantize_model hf_load_model parallel_hf",
        [
            ("dtypes without kernels", "        if dtype not in WEIGHT_DTYPES:\n", "        if dtype is None:\n"),
            ("shapes are not compared", "        check_layers(model, self.plan)\n", ""),
            ("the output embedding", "add_default_skips=True", "add_default_skips=False"),
            (
                "codes have the layout of integers",
                "if config.format in CODE_FORMATS else layout_for_arch(arch)",
                "if config.format is None else layout_for_arch(arch)",
                "where the layouts differ, the layer that is made for this arch raises the same error",
            ),
            ("experts in several shapes", "        check_stacked(self.plan, checkpoint)\n", ""),
            (
                "conversions of packed layers stay",
                "or [] if not _is_of_packed(c)]\n        model",
                "or []]\n        model",
            ),
            ("another method's model", "if not isinstance(quantizer, WeightOnlyQuantizer):", "if quantizer is cls:"),
            ("Conv1D of earlier calls", "quantizer.conv1d = quantizer.conv1d | conv1d", "quantizer.conv1d = conv1d"),
            ("no guard in config.json", 'model.config.fusion_config = guard["fusion_config"]', "pass"),
            (
                "the guard of a dequantized model",
                "        model.config.fusion_config = unguarded(model.config.fusion_config)\n",
                "",
            ),
            (
                "names of the model in config.json",
                'return apply_renamings(f"{name}.qweight", renamings).removesuffix(".qweight")',
                "return name",
            ),
            ("Conv1D on several ranks", "return WHOLE if name in self.conv1d else DENSE", "return DENSE"),
            (
                "folders of others on several ranks",
                "self._reads_files and self._is_parallel and not is_packed:",
                "self._reads_files and model is None:",
            ),
        ],
    ),
    *of(
        "weightonly/hf/conversions.py",
        "hf_from_pretrained hf_quantize hf_experts hf_gpt_oss hf_mxfp4 hf_quantize_errors parallel_hf",
        [
            (
                "biases in another order",
                'if inside == "bias" and in_turns_in_files(model, name):',
                "if False:",
            ),
            ("dense weights in another order", "gates_first if in_turns_in_files(model, name) else None", "None"),
            ("packed layers in another order", "            if in_turns:\n", "            if False:\n"),
            ("saved in another order", "        if in_turns_in_files(model, stack):\n", "        if False:\n"),
            (
                "scales are saved in another order",
                'elif tensor in ("scales", "zeros", "bias"):',
                'elif tensor == "bias":',
            ),
            (
                "experts that are transposed",
                "weight if is_transposed else weight.transpose(1, 2)",
                "weight.transpose(1, 2) if is_transposed else weight",
            ),
            ("Conv1D", "weight = weight.t() if name in self.hf_quantizer.conv1d else weight", "weight = weight"),
            (
                "weights of another shape",
                "        if weight.shape != (n, k):\n",
                "        if weight.numel() != n * k:\n",
            ),
            (
                "scales that their dtype does not hold",
                "        check_scales_as(only.scales, dtype, only.weight.format)\n",
                "",
            ),
            ("the dtype of the file", "value.to(dtype) if value.is_floating_point() else value for", "value for"),
            (
                "packed tensors are converted",
                'if module in self.targets.modules and tensor != "weight":',
                "if module is None:",
            ),
            (
                "names with a prefix",
                'bare[0]: bare[1], f"{prefix}.{bare[0]}": f"{prefix}.{bare[1]}"}',
                "bare[0]: bare[1]}",
            ),
            ("a rank without a part", "        if not weight.numel():  #", "        if weight is None:  #"),
            (
                "errors do not name the layer",
                '            raise type(error)(f"{name}: {error}") from error\n        rows',
                "            raise error\n        rows",
            ),
        ],
    ),
    *of(
        "weightonly/hf/tensors.py",
        "parallel_hf hf_from_pretrained hf_load_model",
        [
            (
                "tensors of other modules",
                "if layer not in self.layers or tensor != self.tensor:",
                "if tensor != self.tensor:",
            ),
            (
                "a part is cut again",
                "isinstance(layer, ParallelLinear) and not layer.comes_cut(inside)",
                "isinstance(layer, ParallelLinear)",
            ),
            ("tied tensors are gathered twice", "if id(tensor) not in gathered:", "if state is not None:"),
            ("parts are saved", "found = layers[owner].gather().state_dict()", "found = layers[owner].state_dict()"),
        ],
    ),
    *of(
        "weightonly/hf/parallel.py",
        "parallel_hf",
        [
            (
                "a packed layer by transformers' style",
                "        if not isinstance(module, Linear):\n            found",
                "        if module is not None:\n            found",
            ),
            (
                "fused layers as one",
                "Exchange(mesh, Replicate(), Shard(-1), True), parts)",
                "Exchange(mesh, Replicate(), Shard(-1), True), None)",
            ),
            (
                "the layer is not named",
                '            raise ValueError(f"layer {module.layer_name!r}: {error}") from error',
                "            raise error",
            ),
        ],
    ),
    *of(
        "weightonly/hf/peft.py",
        "peft",
        [
            ("an activation", 'if inside.activation not in (None, "identity"):', 'if inside.activation == "none":'),
            ("DoRA", "        if config.use_dora:\n", "        if config is None:\n"),
            ("initializations", "if config.init_lora_weights not in _INITIALIZATIONS:", "if config is None:"),
            (
                "the state before the second merge",
                "self._unmerged = self._unmerged or copy.deepcopy(",
                "self._unmerged = copy.deepcopy(",
            ),
            (
                "a bias without its scale",
                "self.lora_B[name].bias.float() * self.scaling[name]",
                "self.lora_B[name].bias.float()",
            ),
            (
                "a bias of adapters that has no place",
                "                if bias is None:\n",
                "                if name is None:\n",
            ),
            ("merged biases", "            base.bias.copy_(bias)\n", "            pass\n"),
            (
                "NaN is not looked for",
                "if safe_merge and not all(torch.isfinite(tensor).all() for tensor in tensors):",
                "if safe_merge and tensors is None:",
            ),
            ("aLoRA is merged", "if any(name in self.lora_variant for name in names):", "if names is None:"),
            ("output embeddings get adapters", "and module is not output and", "and"),
        ],
    ),
    *of(
        "weightonly/hf/run.py",
        "hf_load_model",
        [
            ("no new tokens", "if options.max_new_tokens < 1:", "if options.max_new_tokens < 0:"),
            ("code of a tokenizer", "from_pretrained(folder, trust_remote_code=False)", "from_pretrained(folder)"),
            (
                "text as it is",
                'print(shown(text[len(self._printed) :], keep="\\n\\t")',
                "print(text[len(self._printed) :]",
            ),
            ("logs as they are", "        handler.setFormatter(_Shown(handler.formatter))\n", "        pass\n"),
            ("half of a letter", 'if not text.endswith("\\N{REPLACEMENT CHARACTER}"):', "if text:"),
        ],
    ),
]
