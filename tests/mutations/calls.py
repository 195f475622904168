"""What a call is checked for, and what becomes of it: arguments, PackedWeight, operands, plans, tuned tables."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "weightonly/args.py",
        "arguments expected_operands kernel_plan packed_experts act_order",
        [
            ("x of another K", "if x.shape[-1] != packed.k:", "if x.shape[-1] < packed.k:"),
            ("x as a scalar", "if x.dim() < 1:", "if x.dim() < 0:"),
            ("a bias of another length", "if list(bias.shape) != sizes:", "if bias.dim() != len(sizes):"),
            ("stacked experts", "if qweight.experts is not None:", "if qweight.experts == 0:"),
            ("K in a permutation", "high >= len(perm)", "high > len(perm)"),
            ("negative numbers in a permutation", "if low < 0 or high >= len(perm)", "if high >= len(perm)"),
            (
                "out of another shape",
                "if tuple(out.shape) != self.result_shape():",
                "if out.numel() < self.m * self.qweight.n:",
            ),
            (
                "out with strides in a row",
                "out.stride(-1) != 1 and shape[-1] > 1",
                "out.stride(-1) < 1 and shape[-1] > 1",
            ),
            ("out of overlapping rows", "out.stride(0) < shape[1]", "out.stride(0) < 0"),
            (
                "out with strides beyond two dimensions",
                "if len(shape) > 2 and not out.is_contiguous():",
                "if len(shape) > 3 and not out.is_contiguous():",
            ),
            (
                "out on top of an input",
                "if _overlap(out, tensor):",
                "if out is tensor:",
            ),
            ("out that begins in an input", "begin + span_bytes(a) <= other or", "begin < other or"),
            ("columns that meet", "offset < span_bytes(a[0]) or", "offset == 0 or"),
            ("columns that meet from the left", "or offset + span_bytes(b[0]) > pitch", "or offset > pitch"),
        ],
    ),
    *of(
        "weightonly/weight.py",
        "quantized_weight arguments expected_operands packed_experts act_order plan_cache",
        [
            ("one group counts as one row", "return -1 if self.groups == 1 else", "return -1 if self.groups == 0 else"),
            ("bytes elsewhere", "check_device(name, packed.data, of, like)", "pass"),
            ("scales elsewhere", "        check_device(name, rows, of, like)\n", ""),
            ("a permutation elsewhere", 'check_device("perm", perm, of, like)', "pass"),
            ("zeros of another shape", "if zeros.shape != scales.shape:", "if zeros.dim() != scales.dim():"),
            ("scales of more columns", "rows.shape[-1] != w.n", "rows.shape[-1] < w.n"),
            ("scales of fewer experts", "list(rows.shape[:-2]) != stack", "len(rows.shape[:-2]) != len(stack)"),
            (
                "scales of a group that does not divide K",
                "if rows.shape[-2] < 1 or w.k % rows.shape[-2]:",
                "if rows.shape[-2] < 1:",
            ),
            (
                "other scales than the weight was packed for",
                "if self.groups != packed.k // rows:",
                "if self.groups > packed.k // rows:",
            ),
            ("forgotten zeros", "packed.has_zeros != (zeros is not None)", "packed.has_zeros < (zeros is not None)"),
            (
                "a forgotten permutation",
                "packed.has_perm != (perm is not None)",
                "packed.has_perm < (perm is not None)",
            ),
            ("zeros of codes", "            if packed.code is not None:", "            if packed.code == ():"),
            (
                "a permutation of floats",
                'require_dtype("perm", perm, (torch.int32, torch.int64))',
                'require_tensor("perm", perm)',
            ),
            ("a permutation of another length", "if list(perm.shape) != sizes:", "if perm.dim() != len(sizes):"),
            (
                "zeros are not in the key",
                "(zeros.shape, zeros.is_contiguous() or zeros.stride(), zeros.dtype, zeros.device)",
                "(zeros.shape, zeros.dtype)",
            ),
            (
                "each expert in the order of the first",
                "self.expert(expert)._dense(dtype)",
                "self.expert(0)._dense(dtype)",
            ),
            (
                "another dtype in that of the scales",
                "w = self if dtype == self.dtype else self.with_dtype(torch.float32)",
                "w = self",
            ),
        ],
    ),
    *of(
        "weightonly/plan/base.py",
        "quantized_weight",
        [
            (
                "a tensor that is set anew",
                "if w._kind is not None and w._kind is not w.look_again():",
                "if w._kind is not None and w._kind is None:",
            ),
        ],
    ),
    *of(
        "weightonly/packed.py",
        "plan_cache expected_operands",
        [
            ("codebooks are not in the key", "self.layout, self.code, self.experts", "self.layout, self.experts"),
            ("what is expected is not in the key", "kind_of(*fields, *expected)", "kind_of(*fields)"),
        ],
    ),
    *of(
        "weightonly/require.py",
        "wrong_arguments arguments",
        [
            ("sparse tensors", "if value.layout is not torch.strided:", "if value.layout is None:"),
            ("nested tensors", "if value.is_nested:", "if value is None:"),
            ("negated views", "if value.is_neg():", "if value.is_conj():"),
            ("tensors on meta", "if tensor.is_meta:", "if tensor is None:"),
            ("true is a number", "if isinstance(value, bool) or not isinstance", "if not isinstance"),
            ("numbers are flags", "if not isinstance(value, bool) and", "if not isinstance(value, int) and"),
            ("the least is too small", "value < least:", "value <= least:"),
            ("None is a flag", "not (or_none and value is None)", "not (value is None)"),
            ("paths of bytes", "and isinstance(text := os.fspath(value), str):", "and (text := os.fspath(value)):"),
            ("numbers are paths", "if isinstance(value, str | os.PathLike) and", "if not isinstance(value, bytes) and"),
            ("true is a GPU", "if isinstance(device, bool) or not isinstance(device", "if not isinstance(device"),
            ("names of no device", "    except RuntimeError as error:\n", "    except KeyError as error:\n"),
        ],
    ),
    *of(
        "weightonly/plain.py",
        "tensor_kinds arguments",
        [
            ("modes do not watch", "if is_compiling() or dispatch_modes() or", "if is_compiling() or"),
            ("jit.trace does not watch", "or torch._C._is_tracing():", "or False:"),
            ("modes of functions do not watch", "return function_modes() > 0 and", "return function_modes() > 9 and"),
            ("a default device watches", "isinstance(m, DeviceContext)", "False"),
            ("sizes stay tensors", "tracing._set_tracing_state(None)", "pass"),
            ("subclasses are plain", "type(t) in PLAIN and has_memory(t)", "has_memory(t)"),
            ("zero tensors have memory", "tensor._is_zerotensor() or", "False or"),
            ("functional tensors have memory", "torch._is_functional_tensor(tensor) or is_func", "is_func"),
            ("memory that is cut", ">= span_bytes(tensor)", ">= 1"),
            ("strides have no span", "return (last + 1) * tensor", "return tensor"),
        ],
    ),
    *of(
        "weightonly/plan/base.py",
        "tensor_kinds arguments",
        [
            ("a freed weight", "if not is_same:", "if w._held is None:"),
            ("a freed perm", "return w._perm is None or has_memory(w._perm)", "return True"),
            ("autograd is not told", "increment_version(out)", "out.is_neg()"),
            ("a gradient of the second out", "out.requires_grad,  # type", "None,  # type"),
            ("an out that became shorter", "0 if self.device >= 0 else out", "0 if self.m else out"),
        ],
    ),
    *of(
        "weightonly/plan/cpu.py",
        "arguments tensor_kinds",
        [
            ("sizes of 64 bits", "if got > limit:", "if got > 8 * limit:"),
            ("an x that became shorter", "- args.x_address < self.x_bytes:", "- args.x_address < 1:"),
            ("a weight that became shorter", "data.untyped_storage().nbytes(),", "0,"),
            ("scales that became shorter", "scales.untyped_storage().nbytes(),", "0,"),
            ("zeros that became shorter", "(zeros.data_ptr(), zeros.untyped_storage().nbytes())", "zeros.data_ptr()"),
            ("a bias that became shorter", "(bias.data_ptr(), bias.untyped_storage().nbytes())", "bias.data_ptr()"),
            ("a freed perm", "return w._perm is None or has_memory(w._perm)", "return True"),
        ],
    ),
    *of(
        "weightonly/flops.py",
        "tensor_kinds",
        [
            ("flops of one row", "math.prod(rows.shape[:-1])", "1"),
            ("counters of today", 'getattr(mode, "counter", mode)', "mode"),
        ],
    ),
    *of(
        "weightonly/packed.py",
        "packed packing slices packed_experts code_packed expected_operands",
        [
            ("a byte less", "if data.numel() != expected_bytes:", "if data.numel() > expected_bytes:"),
            ("bytes with strides", "if data.dim() != 1 or not data.is_contiguous():", "if data.dim() != 1:"),
            ("experts are not counted", "expected_bytes = (experts or 1) * k_padded", "expected_bytes = k_padded"),
            ("zeros of codes", "if has_zeros and codebook is not None:", "if has_zeros and codebook == ():"),
            (
                "all of K is a group",
                "-1 if resolve_group_size(group_size, k) == k else group_size",
                "resolve_group_size(group_size, k)",
            ),
            ("a slice of K keeps the whole alive", "data = data.clone()", "data = data.view(-1)"),
            (
                "a slice of K inside of a group",
                "if group is not None and group != -1 and (begin % group",
                "if group is not None and group > 128 and (begin % group",
            ),
            ("a slice that begins in a tile", "if begin % TILE:", "if begin % (TILE // 2):"),
            ("a slice that ends in a tile", "if end % TILE and end != size:", "if end % TILE and end > size:"),
            ("a slice beyond the end", "if not 0 <= begin < end <= size:", "if not 0 <= begin < end:"),
            ("a slice keeps the permutation", '{} if self.has_perm is None else {"has_perm": False}', "{}"),
            ("k of 0", "require_int(name, size, least=1)", "require_int(name, size, least=0)"),
        ],
    ),
    *of(
        "weightonly/operands.py",
        "operands",
        [
            ("alignment is not looked at", "tensor.data_ptr() % alignment_bytes == 0", "True"),
            ("rows at 8 bytes", "rows.data_ptr() % 16 == 0", "rows.data_ptr() % 8 == 0"),
            ("strided rows", "rows.is_contiguous() and", "True and"),
            ("padding is what was there", "rows.new_zeros(", "rows.new_ones("),
        ],
    ),
    *of(
        "weightonly/plan/cache.py",
        "plan_cache expected_operands",
        [
            ("no plan goes", "if len(_plans) >= MAX_PLANS:", "if len(_plans) > MAX_PLANS + 1:"),
        ],
    ),
    *of(
        "weightonly/plan/base.py",
        "plan_cache arguments",
        [
            (
                "out is checked once for all",
                "if where is None or where != packed._checked_out:",
                "if where is None or packed._checked_out is None:",
            ),
            ("x is not among the addresses", "                args.x_address,\n", ""),
        ],
    ),
    *of(
        "weightonly/plan/choose.py",
        "choice kernel_plan",
        [
            (
                "bf16 before Ampere",
                'types.dtype == "bf16" and problem.arch < 80',
                'types.dtype == "bf16" and problem.arch < 75',
            ),
            ("sizes beyond the kernels", "        if got > limit:\n", "        if got > 2 * limit:\n"),
            ("zeros take a kernel per channel", '    if has_zeros:\n        return "group_zeros"\n', ""),
            ("one group is grouped", '"channel" if group_size == -1', '"channel" if group_size == 0'),
            ("an empty x takes a kernel", "if args.x.numel() == 0:", "if args.x.dim() == 0:"),
        ],
    ),
    *of(
        "weightonly/plan/kernel.py",
        "kernel_plan",
        [
            ("K that is no multiple of 8", "self.x_k = -(-k // 8) * 8", "self.x_k = k"),
            ("rows at any distance", "and self.ldx % 8 == 0", "and self.ldx % 4 == 0"),
            ("rows at any address", "if not self.rows_aligned or x_address % 16:", "if not self.rows_aligned:"),
            ("scales at any address", "not (scales_address | zeros_address) % 16", "not scales_address % 16"),
            (
                "a strided bias",
                "self.bias_in_place = bias is None or bias.is_contiguous()",
                "self.bias_in_place = True",
            ),
            (
                "memory for partials of one part",
                "splits_in_memory = config.split_k > 1 and",
                "splits_in_memory = config.split_k > 2 and",
            ),
            (
                "groups of K without padding",
                "qweight.k_padded if w.group_size == -1",
                "qweight.k if w.group_size == -1",
            ),
            ("zeros of the tail", "row, 0 if zeros is None else row, 0", "row, 0, 0"),
            ("columns beyond K are what was there", "            copy[:, k:] = 0\n", "            pass\n"),
        ],
    ),
    *of(
        "weightonly/plan/tuned.py",
        "tuned_choice tuned_files storage",
        [
            ("an M of twice the size", "ms[place] >= 2 * problem.m", "ms[place] > 2 * problem.m"),
            ("an M that was measured is looked for in vain", "bisect.bisect_left(ms", "bisect.bisect_right(ms"),
            (
                "illegal configurations",
                "if ms[place] == problem.m or legal(config, problem) else None",
                "if True else None",
            ),
            ("tables of others", "if owner not in (0, os.geteuid()):", "if owner < 0:"),
            ("tables of another driver", "if has != needs:", 'if has != needs and field.name != "driver":'),
        ],
    ),
]
