"""quantize_4bit and dequantize_4bit: bitsandbytes' blocks of 4-bit codes, byte for byte.

The weight is flattened in row-major order and cut into blocks. A block is divided by its largest magnitude, `absmax`.
Each element then becomes the code of the nearest number in the codebook. A byte holds two codes, the even element in
the high nibble. QLoRA: Dettmers et al., https://arxiv.org/abs/2305.14314.

These details are as in bitsandbytes 0.50 on a CPU (https://github.com/bitsandbytes-foundation/bitsandbytes). Another
order of roundings would give other codes for ties:

- A number midway between two of the codebook goes to the lower one. Where the codebook has a number twice (FP4 has two
  zeros), numbers up to it get the first code, and numbers above it the last.
- x / absmax is computed as x * (1 / absmax), with two roundings. A short last block is divided, with one rounding.
- The divisor is at least 1e-38. A short last block also stores this as its absmax.
- Where the number of elements is odd, the low nibble of the last byte is the code of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..codebooks import BLOCK_FORMATS, CODEBOOKS, codebook_values
from ..dense import WEIGHT_DTYPES, check_weight_dtype, finite_range
from ..device import check_one_device, device_arch
from ..formats.words import pack_nibbles, unpack_nibbles
from ..kernels import _C, FLOAT_TYPES, check_kernels
from ..plain import aligned, are_plain
from ..require import require_dtype, require_int

BLOCKSIZES = tuple(32 << i for i in range(8))

_SMALLEST = 1e-38
_CHUNK_ELEMS = 1 << 22
"""Elements that PyTorch's operators work on at a time, in fp32: a multiple of every blocksize."""


@torch.no_grad()
def quantize_4bit(
    w: torch.Tensor,
    blocksize: int = 64,
    quant_type: str = "nf4",
    code: torch.Tensor | Sequence[float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as blocks of 4-bit codes, byte for byte as in bitsandbytes.

    On a GPU the kernel runs on the current stream and can be captured in a CUDA graph. It does not look for NaN and
    Inf, because the host would have to wait: their block has absmax NaN or Inf, and codes without meaning. Under
    torch.compile, torch.jit.trace and modes, and for subclasses of torch.Tensor, PyTorch's operators do it, with the
    same bytes. Not differentiable.

    Args:
        w: float16, bfloat16 or float32, on a CPU or a GPU, of any shape and strides; it is cut in row-major order.
        blocksize: elements that share an absmax: 32, 64, 128, ..., 4096.
        quant_type: "nf4" or "fp4", the codebook.
        code: another codebook: 16 numbers in any order, between -1 and 1 as the elements of a block are. It is read on
            the host; a tensor on a GPU is copied back, which waits for the GPU.

    Returns:
        (packed, absmax): uint8 [(elements + 1) // 2, 1], the shape that bitsandbytes uses, and float32 [ceil(elements /
        blocksize)]. A block of zeros has absmax 0 (a short last one 1e-38) and dequantizes to zeros.

    Raises:
        TypeError: wrong types and dtypes.
        ValueError: another blocksize or quant_type, a code of another length or beyond fp16, and on a CPU for NaN or
            Inf in `w`.
        RuntimeError: where no kernel was built for the device.

    Examples:
        >>> packed, absmax = wo.quantize_4bit(torch.randn(768, 512))
        >>> packed.shape, absmax.shape
        (torch.Size([196608, 1]), torch.Size([6144]))
    """
    require_dtype("w", w, WEIGHT_DTYPES)
    check_one_device(w=w)
    _check_blocksize(blocksize)
    codebook = _codebook(quant_type, code)
    count = w.numel()
    packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(-(-count // blocksize), dtype=torch.float32, device=w.device)
    if count == 0:
        return packed, absmax
    if w.is_cuda and are_plain(w):
        _launch("quantize_4bit", "w", aligned(w, 16), packed, absmax, blocksize, codebook)
    else:
        if not w.is_cuda:
            finite_range(w)
        _quantize_by_operators(w.reshape(-1), packed.view(-1), absmax, blocksize, codebook)
    return packed, absmax


@torch.no_grad()
def dequantize_4bit(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    code: torch.Tensor | Sequence[float] | None = None,
) -> torch.Tensor:
    """The inverse of `quantize_4bit`: codebook[code] * absmax in fp32, rounded to `dtype`.

    Args:
        packed: uint8 of any shape, (elements + 1) // 2 bytes.
        absmax: float32 [ceil(elements / blocksize)], on the device of `packed`.
        blocksize: as `quantize_4bit` was given them.
        quant_type: as `quantize_4bit` was given them.
        shape: of the weight; its product is the number of elements.
        dtype: float16, bfloat16 or float32.
        code: as `quantize_4bit` was given them.

    Returns:
        A contiguous tensor of this shape and dtype, the same bits on each device. On a GPU the kernel runs on the
        current stream and can be captured in a CUDA graph. Tensors that are not contiguous or not 4-byte aligned are
        copied first.

    Raises:
        TypeError: wrong types and dtypes.
        ValueError: sizes that do not fit, another blocksize or quant_type, a code of another length or beyond fp16, and
            tensors on different devices.
        RuntimeError: where no kernel was built for the device.

    Examples:
        >>> packed, absmax = wo.quantize_4bit(torch.randn(768, 512), blocksize=128, quant_type="fp4")
        >>> wo.dequantize_4bit(packed, absmax, 128, "fp4", shape=(768, 512), dtype=torch.float16).shape
        torch.Size([768, 512])
    """
    require_dtype("packed", packed, [torch.uint8])
    require_dtype("absmax", absmax, [torch.float32])
    check_one_device(packed=packed, absmax=absmax)
    _check_blocksize(blocksize)
    codebook = _codebook(quant_type, code)
    check_weight_dtype(dtype)
    if not isinstance(shape, Sequence) or not all(type(size) is int for size in shape):
        raise TypeError(f"shape: expected a sequence of ints, got {shape!r}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape: expected sizes from 0 on, got {list(shape)}")
    count = math.prod(shape)
    if max(count, *shape, 0) >= 1 << 63:
        raise ValueError(f"shape: expected sizes that memory can have, got {list(shape)}")
    if packed.numel() != (count + 1) // 2:
        raise ValueError(f"packed: expected {(count + 1) // 2} bytes for shape {list(shape)}, got {packed.numel()}")
    if absmax.shape != (-(-count // blocksize),):
        raise ValueError(
            f"absmax: expected shape [{-(-count // blocksize)}] for {count} elements in blocks of {blocksize}, "
            f"got {list(absmax.shape)}"
        )
    w = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
    if count == 0:
        return w
    if w.is_cuda and are_plain(packed, absmax):
        _launch("dequantize_4bit", "packed", w, aligned(packed, 4), aligned(absmax, 4), blocksize, codebook)
    else:
        _dequantize_by_operators(w.view(-1), packed.reshape(-1), absmax, blocksize, codebook)
    return w


def _check_blocksize(blocksize: int) -> None:
    require_int("blocksize", blocksize)
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize: expected one of {', '.join(map(str, BLOCKSIZES))}, got {blocksize}")


def _codebook(quant_type: str, code: torch.Tensor | Sequence[float] | None) -> tuple[float, ...]:
    if quant_type not in BLOCK_FORMATS:
        raise ValueError(f"quant_type: expected one of {', '.join(map(repr, BLOCK_FORMATS))}, got {quant_type!r}")
    return CODEBOOKS[quant_type] if code is None else codebook_values(code)


def _quantize_by_operators(
    w: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, codebook: tuple[float, ...]
) -> None:
    """w [elements] -> packed [(elements + 1) // 2], absmax [blocks]."""
    order = sorted(range(len(codebook)), key=codebook.__getitem__)  # stable: equal numbers keep their order
    numbers = torch.tensor([codebook[i] for i in order], dtype=torch.float32, device=w.device)
    midpoints = (numbers[:-1] + numbers[1:]) / 2
    codes = torch.tensor(order, dtype=torch.uint8, device=w.device)
    for begin in range(0, w.numel(), _CHUNK_ELEMS):
        x = w[begin : begin + _CHUNK_ELEMS].to(torch.float32, copy=True)
        absmaxes = absmax[begin // blocksize : (begin + x.numel() - 1) // blocksize + 1]
        end_of_blocks = x.numel() // blocksize * blocksize
        blocks, short_block = x[:end_of_blocks].view(-1, blocksize), x[end_of_blocks:]
        if end_of_blocks:
            absmaxes[: len(blocks)] = blocks.abs().amax(dim=1)
            blocks *= 1.0 / absmaxes[: len(blocks), None].clamp(min=_SMALLEST)
        if short_block.numel():
            absmaxes[-1] = short_block.abs().max().clamp(min=_SMALLEST)
            short_block /= absmaxes[-1]
        x = torch.nn.functional.pad(x, (0, x.numel() % 2))
        bytes_of_chunk = packed[begin // 2 : (begin + x.numel()) // 2]
        bytes_of_chunk.copy_(pack_nibbles(codes[torch.bucketize(x, midpoints, out_int32=True)]))


def _dequantize_by_operators(
    w: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, codebook: tuple[float, ...]
) -> None:
    """packed [(elements + 1) // 2], absmax [blocks] -> w [elements]."""
    numbers = torch.tensor(codebook, dtype=torch.float32, device=w.device)
    for begin in range(0, w.numel(), _CHUNK_ELEMS):
        chunk = w[begin : begin + _CHUNK_ELEMS]
        codes = unpack_nibbles(packed[begin // 2 : (begin + _CHUNK_ELEMS) // 2], chunk.numel())
        scales = absmax[begin // blocksize : (begin + _CHUNK_ELEMS) // blocksize].repeat_interleave(blocksize)
        chunk.copy_(numbers[codes.int()] * scales[: chunk.numel()])


def _launch(
    function: str,
    name: str,
    w: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    blocksize: int,
    codebook: tuple[float, ...],
) -> None:
    """Runs a kernel of the C interface. name: the argument that an error about the GPU names."""
    device = w.get_device()
    check_kernels(device_arch(device), name)
    getattr(_C, function)(
        device=device,
        type=FLOAT_TYPES[w.dtype],
        count=w.numel(),
        blocksize=blocksize,
        codebook=codebook,
        w=w.data_ptr(),
        packed=packed.data_ptr(),
        absmax=absmax.data_ptr(),
        stream=torch._C._cuda_getCurrentRawStream(device),
    )
