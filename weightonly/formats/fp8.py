"""Weights of 8-bit floats: transformers' "fp8" (DeepSeek, Qwen), AutoFP8's, and FBGEMM's. Activations stay in 16 bits.

weight                          float8_e4m3fn [N, K]
weight_scale_inv, weight_scale  float, or float8_e8m0fnu: [] or [1]: one for all; [N, 1] or [N]: per channel;
                                [ceil(N / bn), ceil(K / bk)]: for blocks, as the config's weight_block_size says;
                                of gate and up in one weight, also each half's: [2, 1], or [2 ceil(N / 2 / bn), ...]
scale, qscale_weight            the same, of DeepSeek-V4 and of Mistral
activation_scale, input_scale, input_scale_ub    of quantized activations: not used

DeepSeek-V4 has experts in MXFP4 beside such layers: weight int8 [N, K / 2], codes of E2M1; scale [N, K / 32] in E8M0.

w = weight * its scale, whatever the name says ("inv" is of what the quantizer multiplied by).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .ct_fp4 import Fp4Names, fp4_shape, read_fp4
from .e2m1 import E8M0_DTYPES, e8m0_scales
from .expect import FLOATS, TensorError, expect, option
from .groups import even_groups
from .layers import LayerFormat, LayerShape, Tensors, check_bias
from .plain import CodeWeight

METHOD = "fp8"
FBGEMM = "fbgemm_fp8"

Block = tuple[int, int]
"""Columns N and rows K that share a scale; -1: all of them."""

TENSOR: Block = (-1, -1)
CHANNEL: Block = (1, -1)

SCALES = ("weight_scale_inv", "weight_scale", "qscale_weight", "scale")
"""Names of the scales of a layer."""

_MXFP4 = Fp4Names("weight", "scale", "", (), divides=False)

_LARGEST_SCALE = torch.finfo(torch.float32).max / torch.finfo(torch.float8_e4m3fn).max


def read_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: Block | None = None,
    *,
    name: str = "weight_scale",
    is_pair: bool = False,
) -> CodeWeight:
    """One layer of 8-bit floats: numbers [K, N], and scales [K / g, N] in the dtype of the file, fp32 for E8M0.

    g is the K of a block; where that does not divide K, what divides both. All tensors are on one device, CPU or CUDA.

    Args:
        weight: float8_e4m3fn [N, K].
        scale: a float dtype or float8_e8m0fnu: [] or [1], one for all; [N, 1] or [N], per channel; [ceil(N / bn),
            ceil(K / bk)], for blocks.
        block: (N, K) of a block, -1 for all; None: all, or a channel, as the shape of scale says.
        name: what errors call scale.
        is_pair: whether each half of N may have blocks of its own.

    Raises:
        TensorError: a ValueError, tensors that do not fit together, NaN among the weights, and scales that are not
            positive numbers, or that make weights beyond fp32.

    Examples:
        >>> weight = torch.randn(768, 512).to(torch.float8_e4m3fn)
        >>> wo.formats.read_fp8(weight, torch.ones(6, 4), block=(128, 128)).scales.shape
        torch.Size([4, 768])
    """
    k, n, (columns, rows) = fp8_shape(weight, scale, block, name, is_pair)
    if bool(weight.isnan().any()):
        raise TensorError("weight", "expected numbers, got NaN")
    scales = _numbers(name, scale).reshape(-1, -(-k // rows))  # [ceil(N / columns), ceil(K / rows)]
    halves = 2 if is_pair and n % 2 == 0 and len(scales) == _grid_of_halves(n, columns) else 1
    part = torch.arange(n // halves, device=scale.device) // columns
    row_of = torch.cat([part + half * len(scales) // halves for half in range(halves)])
    by_group = scales[row_of].t()
    grouping = even_groups(k, by_group.shape[0], rows, scale.device, name)
    q = weight.t().contiguous()
    return CodeWeight(q, None, grouping.spread(by_group).contiguous(), METHOD, torch.bfloat16)


def _grid_of_halves(n: int, columns: int) -> int:
    """Rows of a grid of blocks of which none has columns of both halves. n: an even number."""
    return 2 * -(-n // 2 // columns)


def fp8_shape(
    weight: torch.Tensor, scale: torch.Tensor, block: Block | None, name: str, is_pair: bool = False
) -> tuple[int, int, Block]:
    """(K, N, sizes of a block). Raises TensorError for tensors that do not fit together; looks at no data."""
    expect("weight", weight, torch.float8_e4m3fn, ["N", "K"])
    n, k = weight.shape
    shape = list(scale.shape)
    if block is None:
        if is_pair and shape == [2, 1] and n % 2 == 0:
            block = (n // 2, -1)
        elif scale.numel() == 1 or shape in ([n], [n, 1]):
            block = TENSOR if scale.numel() == 1 else CHANNEL
        else:
            expected = f"one number, or one for each of {n} rows, without the sizes of blocks in a config"
            raise TensorError(name, f"expected {expected}, got {shape}")
    columns, rows = (n if block[0] == -1 else block[0]), (k if block[1] == -1 else block[1])
    grid = [-(-n // columns), -(-k // rows)]
    # ModelOpt keeps dimensions of 1 inside of blocks, and squeezes them where there is one block.
    forms = [grid, [grid[0], 1, grid[1], 1], *([grid[:1]] if grid[1] == 1 else []), *([[]] if grid == [1, 1] else [])]
    if is_pair and n % 2 == 0:
        forms.append([_grid_of_halves(n, columns), grid[1]])
    expect(name, scale, (*FLOATS, *E8M0_DTYPES), shape if shape in forms else grid)
    return k, n, (columns, rows)


def _numbers(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Positive floats. Host syncs."""
    numbers = e8m0_scales(name, scale).float() if scale.dtype in E8M0_DTYPES else scale
    bad = ~((numbers > 0) & (numbers <= _LARGEST_SCALE))  # NaN is neither
    if bool(bad.any()):
        got = ", ".join(f"{value:g}" for value in numbers[bad].flatten()[:3].tolist())
        raise TensorError(name, f"expected positive numbers, such that weights are within fp32, got {got}")
    return numbers


def fp8_layers(
    method: str,
    block_of: Callable[[str], Block | None],
    names: tuple[str, ...] = SCALES,
    unused: tuple[str, ...] = (),
) -> LayerFormat:
    """A format of such layers. block_of: layer -> its blocks. names: of the scale. unused: tensors of activations."""

    def parts(layer: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, Block | None, str]:
        name, *others = [name for name in names if name in tensors]
        if others:
            raise TensorError(others[0], f"expected none beside {name}, got one")
        return tensors["weight"], tensors[name], block_of(layer), name

    def is_pair(layer: str) -> bool:
        return layer.endswith(".gate_up_proj")

    def describe(layer: str, tensors: Tensors) -> LayerShape:
        weight, scale, block, name = parts(layer, tensors)
        if weight.dtype == torch.int8 and name == _MXFP4.scale:
            expect(name, scale, E8M0_DTYPES, list(scale.shape))
            _, k, n = fp4_shape(weight.view(torch.uint8), scale, None, _MXFP4)
            check_bias(tensors, n)
            return LayerShape("mxfp4", k, n, 32, symmetric=True, act_order=False)
        k, n, (_, rows) = fp8_shape(weight, scale, block, name, is_pair(layer))
        check_bias(tensors, n)
        group_size = even_groups(k, -(-k // rows), rows, torch.device("cpu"), name).rows
        return LayerShape(METHOD, k, n, group_size, symmetric=True, act_order=False)

    def read(layer: str, tensors: Tensors, zeros: torch.Tensor | None) -> CodeWeight:
        zero_points = tensors.get("weight_zero_point")  # some versions of quantizers write zeros
        if zero_points is not None and bool((zero_points.float() != 0).any()):
            raise TensorError("weight_zero_point", "expected zeros, got others")
        weight, scale, block, name = parts(layer, tensors)
        if weight.dtype == torch.int8:
            return read_fp4(weight.view(torch.uint8), scale, None, _MXFP4)
        return read_fp8(weight, scale, block, name=name, is_pair=is_pair(layer))

    return LayerFormat(
        name=method,
        anchors=names,
        required=("weight",),
        optional=(*names, *unused, "bias"),
        owned=(),
        small=(),
        describe=describe,
        read=read,
        shared=("scale",),
    )


def fp8_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format of transformers' "fp8", and of AutoFP8. options: the quantization config.

    Raises ValueError for other floats than E4M3, unknown schemes of activations, and blocks that are no two sizes.
    """
    fmt = option(options, "fmt", str, "e4m3")
    if fmt.lower() not in ("e4m3", "e4m3fn"):
        raise ValueError(f"fmt: expected 'e4m3', got {fmt!r}")
    scheme = option(options, "activation_scheme", str, "dynamic")
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"activation_scheme: expected 'dynamic' or 'static', got {scheme!r}")
    option(options, "modules_to_not_convert", list)
    block = block_option(options, "weight_block_size")
    return fp8_layers(METHOD, lambda layer: block, unused=("activation_scale", "input_scale"))


def fbgemm_format(options: Mapping[str, Any]) -> LayerFormat:
    """The format of FBGEMM: a scale for each column of w. Raises ValueError for entries of another kind."""
    option(options, "activation_scale_ub", (int, float))
    option(options, "modules_to_not_convert", list)
    return fp8_layers(FBGEMM, lambda layer: CHANNEL, ("weight_scale",), ("input_scale_ub",))


def block_option(options: Mapping[str, Any], key: str) -> Block | None:
    """The two sizes of blocks, N and K; None where there are none. Raises ValueError for anything else."""
    sizes = option(options, key, (list, tuple))
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise ValueError(f"{key}: expected two sizes of 1 to 2^31 - 1, got {list(sizes)!r:.200}")
    return sizes[0], sizes[1]
