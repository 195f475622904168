"""What is read from files, and what is written: headers, JSON, each quantizer's format, patterns, storage."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "weightonly/storage.py",
        "storage linear_reading files",
        [
            ("pipes are opened", "    _check_regular(path, os.stat(path).st_mode)  #", "    os.stat(path)  #"),
            ("names twice in JSON", "if len(value) != len(pairs):", "if len(value) > len(pairs):"),
            ("the name that is there twice", "if name in seen or seen.add(name)", "if seen.add(name) or name in seen"),
            ("dense JSON", "if marks > most:", "if marks > 2 * most:"),
            (
                "a refused lock is had",
                "os.close(lock)\n            continue\n        except OSError:",
                "pass\n        except OSError:",
            ),
            (
                "a folder that is gone",
                "        except FileNotFoundError:\n            continue",
                "        except EOFError:\n            continue",
            ),
            ("a folder that went before its lock", "if folder.exists():", "if True:"),
            ("NaN in a header", "refuse = None if constants else _no_constant", "refuse = None"),
            ("nested JSON", "    except RecursionError:\n", "    except ZeroDivisionError:\n"),
            ("files are not synced", "            sync(file)\n    sync(made)", "            pass\n    sync(made)"),
            ("the folder is not synced", "    sync(target.parent)\n", ""),
            ("leftovers stay", "    _remove_leftovers(target)\n    folder, lock", "    folder, lock"),
            (
                "locked folders are removed",
                "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                shutil",
                "shutil",
            ),
            (
                "leftovers of other targets",
                "{re.escape(f'.{target.name}.')}[0-9a-f]{{32}}",
                "{re.escape('.')}.*[0-9a-f]{{32}}",
            ),
        ],
    ),
    *of(
        "weightonly/formats/shards.py",
        "strange_headers shown formats_errors formats_checkpoint storage",
        [
            ("holes between tensors", "if info.begin != begin:", "if info.begin < begin:"),
            ("overlapping tensors", "if info.begin != begin:", "if info.begin > begin:"),
            ("bytes after the last tensor", "if begin != total_bytes:", "if begin > total_bytes:"),
            ("metadata of numbers", "all(isinstance(text, str) for text in metadata.values())", "True"),
            (
                "true is a size",
                "isinstance(number, int) and not isinstance(number, bool) and number >= 0",
                "isinstance(number, int) and number >= 0",
            ),
            ("negative sizes", "and not isinstance(number, bool) and number >= 0", "and not isinstance(number, bool)"),
            ("a size that is not that of the shape", "if end - begin != size:", "if end - begin < size:"),
            ("truncated data", "if data_begin + end > total_bytes:", "if begin > total_bytes:"),
            ("too many dimensions", "return total if len(shape) <= _MAX_DIMS else None", "return total"),
            ("an overflow behind a 0", "extent * max(size, 1)", "extent * size"),
            ("lone surrogates", 'if b"\\\\ud" in content.lower():', 'if b"\\\\uD" in content:'),
            ("a name in two files", "                if name in self.tensors:\n", "                if name in ():\n"),
            ("tensors that the index leaves out", "if len(found) > len(named):", "if len(found) > len(named) + 1:"),
            ("an index that names other folders", "Path(shard).name != shard", 'Path(shard).name == ""'),
            ("an index that names pickles", 'if Path(shard).suffix != ".safetensors":', 'if Path(shard).suffix == "":'),
            (
                "names of files in a folder",
                "_check_printable(self.folder, file.name)\n            found, self",
                "found, self",
            ),
            ("names of tensors", "    _check_printable(file, name)\n    try:", "    try:"),
            ("names of tensors in an index", "        _check_printable(index, name)\n", ""),
            ("names of files in an index", "        _check_printable(index, shard)\n", ""),
            ("digests are not compared", "sha256 is not None and digest(data) != sha256", 'sha256 == ""'),
        ],
    ),
    *of(
        "weightonly/formats/awq.py",
        "formats_awq strange_configs formats_errors",
        [
            ("-1 of several groups", "group_size == -1 and groups == 1", "group_size == -1"),
            ("other groups than the config says", "if group_size not in (None, rows) and", "if group_size == 0 and"),
            ("other orders", 'if version.lower() != "gemm":', 'if version.lower() == "gemv":'),
            (
                "the order of columns",
                ".view(rows, columns, 2, 4).transpose(2, 3)",
                ".view(rows, columns, 4, 2).transpose(2, 3)",
            ),
            ("groups that do not divide K", "    if k % groups:\n", "    if k < groups:\n"),
        ],
    ),
    *of(
        "weightonly/formats/gptq.py",
        "formats_gptq strange_configs formats_errors formats_checkpoint",
        [
            ("act-order per channel needs g_idx", "act_order and group_size != -1", "act_order"),
            (
                "desc_act without g_idx",
                "if g_idx is None and needs_order:",
                "if g_idx is None and needs_order is None:",
            ),
            (
                "desc_act is not compared",
                "g_idx is not None and act_order is False and",
                "g_idx is not None and act_order is None and",
            ),
            ("version 1 is version 2", "    if version == 2:\n", "    if version >= 1:\n"),
            (
                "symmetric checkpoints of version 1",
                "if symmetric and bool((stored == middle).all()):",
                "if symmetric and bool((stored == middle).any()):",
            ),
            ("patterns keep their sign", 'text.removeprefix("+:")', "text"),
            (
                "Marlin's order",
                'option(options, "is_marlin_format", bool, False)',
                'option(options, "is_marlin", bool, False)',
            ),
            ("3 bits", "if not dynamic and default_bits not in _ONES:", "if not dynamic and default_bits is None:"),
            (
                "groups of the config",
                "    if group_size is not None:\n        even_groups",
                "    if group_size == 0:\n        even_groups",
            ),
            ("qweight of another K", 'expect("qweight", qweight, torch.int32, [words_for(k, bits), n])', "pass"),
        ],
    ),
    *of(
        "weightonly/formats/groups.py",
        "groups formats_gptq strange_configs",
        [
            ("a group that scales lack", "high >= groups:", "high > groups:"),
            ("negative groups", "if low < 0 or high >= groups", "if high >= groups"),
            ("rows that are in order", "(group[1:] >= group[:-1]).all()", "(group[1:] >= group[:-1]).any()"),
            ("groups of several sizes", "rows = math.gcd(*sizes)", "rows = min(sizes)"),
            (
                "the order within a group",
                "torch.argsort(group, stable=True)",
                "torch.argsort(group, stable=True, descending=True).flip(0)",
            ),
            ("groups of 0 rows", "    if size < 1:\n", "    if size < 0:\n"),
            ("more groups than there are", "if groups != expected:", "if groups < expected:"),
        ],
    ),
    *of(
        "weightonly/formats/compressed_tensors.py",
        "formats_compressed_tensors strange_configs formats_errors",
        [
            ("g_idx that is partly set", "bool((g_idx == -1).all())", "bool((g_idx == -1).any())"),
            ("two widths fit", "if len(fitting) != 1:", "if len(fitting) < 1:"),
            (
                "any group of the config",
                "if problems and None not in problems:",
                "if problems and None not in problems[:1]:",
            ),
            (
                "zero points of a symmetric layer",
                "if zeros is not None and symmetric == {True}:",
                "if zeros is not None and symmetric == {None}:",
            ),
            ("sizes of 0", "if min(n, k) < 1:", "if min(n, k) < 0:"),
            ("groups that do not divide K", "        if k % groups:\n", "        if k < groups:\n"),
        ],
    ),
    *of(
        "weightonly/formats/ct_schemes.py",
        "strange_configs formats_compressed_tensors formats_errors",
        [
            ("asymmetric without zero points", "if self.symmetric is False and", "if self.symmetric is None and"),
            (
                "actorder without g_idx",
                "if self.act_order and not is_set:",
                "if self.act_order is None and not is_set:",
            ),
            ("g_idx without actorder", "if self.act_order is False and g_idx", "if self.act_order is None and g_idx"),
            ("the size of groups", "if groups != expected:", "if groups < expected:"),
            ("strategy", 'in ("channel", "tensor")', 'in ("channel",)'),
            ("a rotation", 'if options.get("transform_config"):', 'if options.get("transforms"):'),
            (
                "names before patterns",
                "if layer in self._by_name:",
                "if layer in ():",
            ),
            (
                "patterns before classes",
                "[s for s in self._with_patterns if any(pattern.matches_start(name) for pattern in s.patterns)]",
                "[]",
            ),
            ("any number of groups", "if len(groups) > _MAX_GROUPS:", "if len(groups) < 0:"),
            ("a format of its own", "if form not in _FORMATS:", 'if form == "dense":'),
        ],
    ),
    *of(
        "weightonly/formats/patterns.py",
        "strange_configs linear_reading",
        [
            ("a match anywhere", "bool(self._root(name, name.all) & 1)", "bool(self._root(name, name.all))"),
            (
                "a match of all of it",
                "bool(self._root(name, name.all) & 1)",
                "bool(self._root(name, name.all + 1 >> 1) & 1)",
            ),
            ("steps of a sequence", "name.steps.take(1 + len(parts))", "name.steps.take(0)"),
            ("steps of options", "name.steps.take(len(options))", "name.steps.take(0)"),
            ("any number of patterns", "steps.characters -= len(text) + 1", "steps.characters -= 0"),
            ("wide classes", "if not text.isascii():", "if False:"),
            ("a repeated part loses its shortest match", "found = 0 if low else ends", "found = 0"),
            (
                "one repetition too few",
                "while ends and (high is None or count < high):",
                "while ends and (high is None or count < high - 1):",
            ),
            ("counted repetitions", "            if count >= low:", "            if count >= 0:"),
            ("negative lookaheads", "node = _ahead(self.choice(), False)", "node = _ahead(self.choice(), True)"),
            ("a lookahead goes on", "begins = body(name, name.all)\n", "begins = body(name, ends)\n"),
            (
                "anchors are characters",
                "_single(self.text[begin : self.at], 0)",
                "_single(self.text[begin : self.at], 1)",
            ),
            ("options", "begins |= option(name, ends)", "begins = option(name, ends)"),
            ("the order of parts", "for part in reversed(parts):", "for part in parts:"),
        ],
    ),
    *of(
        "weightonly/formats/bitsandbytes.py",
        "formats_bitsandbytes strange_configs formats_errors",
        [
            ("an infinite offset", "if not abs(offset) <= torch.finfo(torch.float32).max:", "if offset != offset:"),
            ("a blocksize of 2^31", "if value >= 1 << 31:", "if value > 1 << 31:"),
            ("blocks of nested statistics", "[-(-state.blocks // state.nested_blocksize)]", '["blocks"]'),
            (
                "blocks",
                "torch.uint8 if nested else torch.float32, [state.blocks])",
                'torch.uint8 if nested else torch.float32, ["blocks"])',
            ),
            ("groups across rows", "return math.gcd(self.k, self.blocksize)", "return min(self.k, self.blocksize)"),
            (
                "the offset is added",
                "        absmax += torch.tensor(state.nested_offset",
                "        absmax -= torch.tensor(state.nested_offset",
            ),
            ("a state of another kind", "if name in ANCHORS and name !=", "if name not in ANCHORS and name =="),
            ("8-bit weights", 'if option(options, "load_in_8bit", bool,', 'if option(options, "load_in_9bit", bool,'),
            ("nested statistics that are missing", "if nested == (tensor is None):", "if nested < (tensor is None):"),
        ],
    ),
    *of(
        "weightonly/formats/convert.py",
        "formats_converted formats_convert storage",
        [
            ("folders are copied as files", " or not file.is_file():", ":"),
            (
                "links to elsewhere are copied",
                "if not any(place.is_relative_to(home) for home in homes):",
                "if not homes:",
            ),
            ("an existing target", "if os.path.lexists(target):", "if target.is_file():"),
            (
                "two tensors of a name",
                "if name in weight_map or name in entries:",
                "if name in weight_map and name in entries:",
            ),
            ("what no kernel computes", "    check_runs(checkpoint.shapes, arch)\n", ""),
            ("the marker stays", "        marker.unlink()\n", ""),
            ("files of any size", "if held_bytes >= shard_bytes:", "if held_bytes >= 8 * shard_bytes:"),
        ],
    ),
    *of(
        "weightonly/formats/converted.py",
        "formats_converted formats_convert formats_checkpoint",
        [
            (
                "a permutation with a number twice",
                "torch.equal(record.perm.sort().values",
                "torch.equal(record.perm.sort().values.clamp(max=-1)",
            ),
            (
                "zeros that the config denies",
                "if (name in tensors) != (fields[field] is is_there):",
                "if (name in tensors) < (fields[field] is is_there):",
            ),
            (
                "zeros of codes",
                '        if fields["format"] in CODE_FORMATS:\n            raise TensorError("zeros"',
                '        if fields["format"] is None:\n            raise TensorError("zeros"',
            ),
        ],
    ),
    *of(
        "weightonly/formats/recognize.py",
        "formats_checkpoint formats_errors formats_convert",
        [
            (
                "a conversion that was stopped",
                "if (folder / INCOMPLETE).exists():",
                "if (folder / INCOMPLETE).is_dir():",
            ),
            ("GPTQ is guessed", "if info.shape[1] * 8 == scales.shape[1]:", "if info.shape[1] <= scales.shape[1]:"),
        ],
    ),
]
