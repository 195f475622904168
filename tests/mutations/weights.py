"""What makes numbers: quantization, layouts, packing, the equation in PyTorch, blocks of 4 bits."""

from __future__ import annotations

from .mutation import of

MUTATIONS = [
    *of(
        "weightonly/quantize.py",
        "quantize",
        [
            ("symmetric scales leave no slack", "_largest(bits), 0.5, peak", "_largest(bits), 0.0, peak"),
            ("a level more than there are", "(1 << bits) - 1, 0.0", "(1 << bits), 0.0"),
            (
                "the negative peak is forgotten",
                "peak = torch.maximum(high, -low)\n            scale",
                "peak = high\n            scale",
            ),
            ("0 is not in the range from below", "high.clamp(min=0.0)", "high.clamp(min=1e-3)"),
            ("0 is not in the range from above", "low.clamp(max=0.0)", "low"),
            ("the scale is not rounded up", "_step(scale, 1), scale)", "scale, scale)"),
            ("reach is not looked at", "reach > 0.5, _step(scale, -1)", "reach > 1.5, _step(scale, -1)"),
            ("zeros have scale 0", "torch.where(span == 0, torch.ones_like(scale), scale)", "scale"),
            ("zero points are rounded down", "torch.round(_smallest(bits) - low", "torch.floor(_smallest(bits) - low"),
            (
                "the end of the range is not mended",
                "if float(peak.max()) <",
                "if float(peak.max()) >= 0 or float(peak.max()) <",
            ),
            (
                "any better candidate counts as bad",
                "(error > 0.5) & (error_here < error)",
                "(error > 0.5) & (error_here > error)",
            ),
            ("levels beyond q", "max=_largest(bits))\n    levels", "max=_largest(bits) + 1)\n    levels"),
            ("infinite levels", "low = torch.clamp(zero - reach", "low = torch.clamp(zero - 2 * reach"),
            ("levels are rounded to zero", ".round_().add_(zero", ".trunc_().add_(zero"),
        ],
    ),
    *of(
        "weightonly/dense.py",
        "quantize",
        [
            ("a group size that does not divide K", "group_size < 1 or k % group_size", "group_size < 1"),
            ("a group size of 0", "if group_size < 1 or", "if group_size < 0 or"),
            ("NaN passes", "math.isfinite(low) and", "True and"),
            ("values beyond the dtype", "max(-low, high) > limit", "high > limit"),
            ("an empty weight", "w.dim() != 2 or w.numel() == 0", "w.dim() != 2"),
            ("blocks overlap", "range(0, groups, group_step)", "range(0, groups, group_step + 1)"),
            ("columns are left out", "min(column + column_step, n)", "min(column + column_step, n - 1)"),
        ],
    ),
    *of(
        "weightonly/layout/shapes.py",
        "layout packing",
        [
            ("K is not padded", "return -(-k // K_ALIGN) * K_ALIGN", "return k // K_ALIGN * K_ALIGN"),
            ("N of int8 is padded less", "N_ALIGN = {4: 64, 8: 32}", "N_ALIGN = {4: 64, 8: 16}"),
            ("-8 is refused", "if low < -limit or", "if low <= -limit or"),
            ("8 is taken", "high >= limit:", "high > limit:"),
            ("code 16 is taken", "high > 15", "high > 16"),
            ("negative codes", "if low < 0 or high > 15", "if low < -1 or high > 15"),
            ("a layout of codes", "if layout not in CODE_LAYOUTS:", "if False:"),
            ("a layout without codes", "CODE_LAYOUTS = (*GPU_CODE_LAYOUTS, CPU)", "CODE_LAYOUTS = GPU_CODE_LAYOUTS"),
            ("a word is a step", "CPU: PANEL}.get(layout, 32 // bits)", "CPU: PANEL}.get(layout, 16 // bits)"),
            ("a panel is a step", "CPU: PANEL}.get(layout", "CPU: PANEL // 2}.get(layout"),
            ("multiples", "if size % multiple:", "if size < multiple:"),
        ],
    ),
    *of(
        "weightonly/layout/interleaved.py",
        "layout",
        [
            (
                "rows of lanes",
                "2, n).transpose(1, 2).reshape(k, n)\n\n\ndef unpermute",
                "2, n).reshape(k, n)\n\n\ndef unpermute",
            ),
            ("half of the columns", "n // columns, columns, tiles, K_ALIGN", "n // columns, tiles, columns, K_ALIGN"),
        ],
    ),
    *of(
        "weightonly/layout/tiled.py",
        "layout",
        [
            ("int4 words", "4: (6, 0, 8, 7, 4, 1, 2, 3, 9, 5)", "4: (6, 0, 8, 7, 4, 1, 2, 3, 5, 9)"),
            ("int8 halves", "8: (6, 0, 8, 1, 7, 4, 2, 3, 9, 5)", "8: (6, 0, 8, 7, 1, 4, 2, 3, 9, 5)"),
            (
                "K counted as columns",
                'check_multiple("columns of q", n, TILE)',
                'check_multiple("columns of q", k, TILE)',
            ),
        ],
    ),
    *of(
        "weightonly/layout/words.py",
        "layout",
        [
            ("the bias of a nibble", "packed.add_(136)", "packed.add_(135)"),
            ("bytes keep their sign", "reshape(rows, length).bitwise_xor_(0x80)", "reshape(rows, length)"),
            (
                "codes the other way round",
                "torch.add(pairs[..., 0], pairs[..., 1]",
                "torch.add(pairs[..., 1], pairs[..., 0]",
            ),
        ],
    ),
    *of(
        "weightonly/layout/pack.py",
        "layout packing",
        [
            (
                "an unpadded shape",
                "if (k, n) != padded_shape(k, n, bits, layout):",
                "if k != padded_shape(k, n, bits, layout)[0]:",
            ),
            ("columns beyond the end", "not 0 <= begin < end <= n:", "not 0 <= begin < end:"),
            ("an empty range", "not 0 <= begin < end <= n:", "not 0 <= begin <= end <= n:"),
            ("an end in a word", "begin % step or end % step or", "begin % step or"),
        ],
    ),
    *of(
        "weightonly/packing.py",
        "packing code_preprocess packed_experts arch code_packed",
        [
            ("codes of uint8", "q.dtype == torch.uint8", "q.dtype == torch.int16"),
            (
                "an arch of another layout",
                "check_layout(layout)\n        if arch is not None and",
                "check_layout(layout)\n        if False and",
            ),
            (
                "an arch of another layout of codes",
                "check_code_layout(4, layout)\n        if arch is not None and",
                "check_code_layout(4, layout)\n        if False and",
            ),
            ("bits of another format", "!= (bits or format_bits(format))", "< (bits or 0)"),
            ("zeros of codes", "if zeros and is_code:", "if zeros and not is_code and False:"),
            ("experts in one place", "data[expert] = _padded_bytes(matrix", "data[0] = _padded_bytes(matrix"),
            ("padding of ones", "(0, n_padded - n, 0, k_padded - k))", "(0, n_padded - n, 0, k_padded - k), value=1)"),
            ("repack packs anew", "    if layout == w.layout:\n        return w\n", ""),
            (
                "repack forgets what the weight is for",
                '**w.fields | {"layout": layout})',
                "w.k, w.n, w.format, layout, w.code)",
            ),
            ("rows of the padding", "return q[: w.k, : end - begin]", "return q[:, : end - begin]"),
        ],
    ),
    *of(
        "weightonly/slicing.py",
        "slicing",
        [
            ("the end is in the next group", "(end - 1) // group_size:", "end // group_size:"),
            (
                "where the rows begin",
                "math.gcd(group_size, begin, end)",
                "math.gcd(group_size, end)",
                "check_group_size wants groups that divide the rows; those that divide the end, too, divide both",
            ),
            (
                "where the rows end",
                "math.gcd(group_size, begin, end)",
                "math.gcd(group_size, begin)",
                "check_group_size wants groups that divide the rows; those that divide the begin, too, divide both",
            ),
            ("groups of 32 become 16", "(size, math.gcd(size, 32))", "(size, math.gcd(size, 16))"),
            ("other groups become none", "(size, math.gcd(size, 32))", "(size,)"),
            (
                "scales of the first groups",
                "torch.arange(begin, end, size, device=w.device)",
                "torch.arange(0, end - begin, size, device=w.device)",
            ),
            (
                "zeros of the first groups",
                "w.zeros.index_select(-2, index)",
                "w.zeros.index_select(-2, index - index[0])",
            ),
            ("rows beyond the end", "if not 0 <= begin < end <= size:", "if not 0 <= begin < end:"),
            ("no rows", "if not 0 <= begin < end <= size:", "if not 0 <= begin <= end <= size:"),
            ("rows keep their groups", '        fields.pop("group_size", None)\n', ""),
            ("rows keep the permutation", 'fields["has_perm"] = False', "pass"),
            ("columns inside of a word", "first = begin // step * step", "first = begin"),
            ("experts on meta", "(w.experts or 1) * k * n * w.bits // 8", "k * n * w.bits // 8"),
            ("bias of the whole", "for t in (w.scales, w.zeros, product.bias)", "for t in (w.scales, w.zeros, None)"),
        ],
    ),
    *of(
        "weightonly/layout/cut.py",
        "slicing",
        [
            ("rows from anywhere", "        rows[0] % K_ALIGN == 0\n        and (", "        ("),
            ("rows up to anywhere", "(rows[1] % K_ALIGN == 0 or rows[1] == k)", "True"),
            ("columns from anywhere", "and last[0] % align == 0", "and True"),
            ("columns up to anywhere", "and (last[1] % align == 0 or last[1] == n)", "and True"),
            (
                "a first range that ends inside of a block",
                "all(begin % align == 0 and end % align == 0 for begin, end in others)",
                "all(begin % align == 0 for begin, end in others)",
            ),
        ],
    ),
    *of(
        "weightonly/codebooks.py",
        "codebooks code_packed",
        [
            ("the largest of fp16 is refused", "abs(value) <= _LIMIT", "abs(value) < _LIMIT"),
            (
                "a codebook that is not needed",
                '    if code is not None:\n        raise ValueError(f"code: expected None',
                '    if code is False:\n        raise ValueError(f"code: expected None',
            ),
            ("15 numbers", "if numbers.shape != (CODEBOOK_LENGTH,):", "if numbers.dim() != 1:"),
        ],
    ),
    *of(
        "weightonly/reference.py",
        "reference slices autograd",
        [
            ("the bias of the first block", "y += bias[begin:end]", "y += bias[: end - begin]"),
            ("autocast", 'if torch.is_autocast_enabled("cpu"):', "if False:"),
            ("zeros of other columns", "zeros[:, begin:end].unsqueeze(1)", "zeros[:, : end - begin].unsqueeze(1)"),
            ("scales of other columns", "scales[:, begin:end].unsqueeze(1)", "scales[:, : end - begin].unsqueeze(1)"),
            ("a block in a word", "// least * least)", "+ 1)"),
            ("blocks that leave columns out", "min(begin + step, qweight.n)", "min(begin + step, qweight.n) - 1"),
        ],
    ),
    *of(
        "weightonly/ops/blocks_4bit.py",
        "blocks_4bit",
        [
            ("a block more", "-(-count // blocksize), dtype", "count // blocksize + 1, dtype"),
            ("negative magnitudes", "blocks.abs().amax(dim=1)", "blocks.amax(dim=1)"),
            (
                "divided, not multiplied",
                "blocks *= 1.0 / absmaxes[: len(blocks), None].clamp(min=_SMALLEST)",
                "blocks /= absmaxes[: len(blocks), None].clamp(min=_SMALLEST)",
            ),
            ("a short block of zeros", ".abs().max().clamp(min=_SMALLEST)", ".abs().max().clamp(min=2 * _SMALLEST)"),
            (
                "packed of another size",
                "if packed.numel() != (count + 1) // 2:",
                "if packed.numel() < (count + 1) // 2:",
            ),
            ("absmax of another size", "if absmax.shape != (-(-count // blocksize),):", "if absmax.dim() != 1:"),
            (
                "ties go up",
                "torch.bucketize(x, midpoints, out_int32=True)",
                "torch.bucketize(x, midpoints, out_int32=True, right=True)",
            ),
        ],
    ),
]
