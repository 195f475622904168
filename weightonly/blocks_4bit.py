"""quantize_4bit and dequantize_4bit: bitsandbytes' blocks of 4-bit codes, with the bytes that it makes.

The elements of a weight, row after row, are cut into blocks. Each block is divided by its largest magnitude, `absmax`,
and each element becomes the code of the nearest number in a table: two codes to a byte, the even element in the high
nibble. QLoRA: Dettmers et al., https://arxiv.org/abs/2305.14314; the details are those of bitsandbytes 0.50 on a CPU
(https://github.com/bitsandbytes-foundation/bitsandbytes), which another order of roundings would miss in ties:

- A number in the middle of two of the table goes to the lower one. Of equal numbers in the table (FP4 has two zeros)
  the first stands for what is not above them, the last for what is.
- x / absmax is x * (1 / absmax) with two roundings, in a last block that is too short one division.
- absmax is at least 1e-38 where it divides; in a last block that is too short it is stored so.
- A last byte that is half full has the code of 0 in its low nibble.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checks import check_one_device, require_dtype
from .code_tables import CODE_TABLES, table_values
from .formats.words import pack_nibbles, unpack_nibbles
from .kernels import _C, FLOAT_TYPES, device_arch, readable
from .plan import check_kernels
from .quantize import WEIGHT_DTYPES, finite_range

BLOCKSIZES = tuple(32 << i for i in range(8))

_SMALLEST = 1e-38
_CHUNK_ELEMS = 1 << 22
"""Elements that the CPU holds in fp32 at a time: a multiple of every blocksize."""


@torch.no_grad()
def quantize_4bit(
    w: torch.Tensor,
    blocksize: int = 64,
    quant_type: str = "nf4",
    code: torch.Tensor | Sequence[float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as blocks of 4-bit codes, byte for byte those of bitsandbytes.

    w: float16, bfloat16 or float32 on a CPU or a GPU, any shape and strides; its row-major order is what is cut.
    blocksize: elements that share an absmax: 32, 64, 128, ..., 4096.
    quant_type: "nf4" or "fp4".
    code: 16 numbers of one's own instead of quant_type's, in any order; between -1 and 1, as blocks are. On a CPU: one
        on a GPU is read back, which waits for it.

    Returns (packed, absmax): uint8 [(elements + 1) // 2, 1], the shape that bitsandbytes has, and float32
    [ceil(elements / blocksize)]. Blocks of zeros have absmax 0, or 1e-38 if cut short, and give zeros back.

    On a GPU the kernel runs on the current stream, can be captured in a CUDA graph and does not look for NaN and Inf,
    which would wait for the GPU: the absmax of their block is NaN or Inf, and its codes are any. Not differentiable.

    Raises TypeError for wrong types and dtypes; ValueError for another blocksize or quant_type, a code of another
    length or beyond fp16, and on a CPU NaN or Inf in `w`; RuntimeError where no kernel was built for the device.
    """
    require_dtype("w", w, WEIGHT_DTYPES)
    check_one_device(w=w)
    _check_blocksize(blocksize)
    table = _table(quant_type, code)
    count = w.numel()
    packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(-(-count // blocksize), dtype=torch.float32, device=w.device)
    if count == 0:
        return packed, absmax
    if w.is_cuda:
        _launch("quantize_4bit", "w", readable(w, 16), packed, absmax, blocksize, table)
    else:
        finite_range(w)
        _quantize_on_cpu(w.reshape(-1), packed.view(-1), absmax, blocksize, table)
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
    """The inverse of `quantize_4bit`: table[code] * absmax in fp32, rounded to `dtype`.

    packed: uint8, (elements + 1) // 2 bytes in any shape; absmax: float32 [ceil(elements / blocksize)], on the same CPU
    or GPU. blocksize, quant_type, code: as `quantize_4bit` had them. shape: of the weight, elements is its product.
    dtype: float16, bfloat16 or float32.

    Returns a contiguous tensor of that shape and dtype, the same bits on each device. On a GPU the kernel runs on the
    current stream and can be captured in a CUDA graph; tensors that are not contiguous or not 4-byte aligned are copied
    first.

    Raises TypeError for wrong types and dtypes, ValueError for sizes that do not fit, another blocksize or quant_type,
    a code of another length or beyond fp16 and tensors on different devices, RuntimeError where no kernel was built for
    the device.
    """
    require_dtype("packed", packed, [torch.uint8])
    require_dtype("absmax", absmax, [torch.float32])
    check_one_device(packed=packed, absmax=absmax)
    _check_blocksize(blocksize)
    table = _table(quant_type, code)
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype: expected one of {', '.join(map(str, WEIGHT_DTYPES))}, got {dtype}")
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        raise TypeError(f"shape: expected a sequence of ints, got {shape!r}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape: expected sizes from 0 on, got {list(shape)}")
    w = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
    count = w.numel()
    if packed.numel() != (count + 1) // 2:
        raise ValueError(f"packed: expected {(count + 1) // 2} bytes for shape {list(shape)}, got {packed.numel()}")
    if absmax.shape != (-(-count // blocksize),):
        raise ValueError(
            f"absmax: expected shape [{-(-count // blocksize)}] for {count} elements in blocks of {blocksize}, "
            f"got {list(absmax.shape)}"
        )
    if count == 0:
        return w
    if w.is_cuda:
        _launch("dequantize_4bit", "packed", w, readable(packed, 4), readable(absmax, 4), blocksize, table)
    else:
        _dequantize_on_cpu(w.view(-1), packed.reshape(-1), absmax, blocksize, table)
    return w


def _check_blocksize(blocksize: int) -> None:
    if isinstance(blocksize, bool) or not isinstance(blocksize, int):
        raise TypeError(f"blocksize: expected an int, got {type(blocksize).__name__}")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize: expected one of {', '.join(map(str, BLOCKSIZES))}, got {blocksize}")


def _table(quant_type: str, code: torch.Tensor | Sequence[float] | None) -> tuple[float, ...]:
    if code is not None:
        return table_values(code)
    if quant_type not in CODE_TABLES:
        raise ValueError(f"quant_type: expected one of {', '.join(map(repr, CODE_TABLES))}, got {quant_type!r}")
    return CODE_TABLES[quant_type]


def _quantize_on_cpu(
    w: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, table: tuple[float, ...]
) -> None:
    """w [elements] -> packed [(elements + 1) // 2], absmax [blocks]."""
    order = sorted(range(len(table)), key=table.__getitem__)  # equal ones as they come
    numbers = torch.tensor([table[i] for i in order], dtype=torch.float32)
    midpoints = (numbers[:-1] + numbers[1:]) / 2
    codes = torch.tensor(order, dtype=torch.uint8)
    for begin in range(0, w.numel(), _CHUNK_ELEMS):
        x = w[begin : begin + _CHUNK_ELEMS].to(torch.float32, copy=True)
        absmaxes = absmax[begin // blocksize : (begin + x.numel() - 1) // blocksize + 1]
        end_of_blocks = x.numel() // blocksize * blocksize
        blocks, cut = x[:end_of_blocks].view(-1, blocksize), x[end_of_blocks:]
        if end_of_blocks:
            absmaxes[: len(blocks)] = blocks.abs().amax(dim=1)
            blocks *= 1.0 / absmaxes[: len(blocks), None].clamp(min=_SMALLEST)
        if cut.numel():
            absmaxes[-1] = cut.abs().max().clamp(min=_SMALLEST)
            cut /= absmaxes[-1]
        x = torch.nn.functional.pad(x, (0, x.numel() % 2))
        bytes_of_chunk = packed[begin // 2 : (begin + x.numel()) // 2]
        bytes_of_chunk.copy_(pack_nibbles(codes[torch.bucketize(x, midpoints, out_int32=True)]))


def _dequantize_on_cpu(
    w: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, table: tuple[float, ...]
) -> None:
    """The inverse, into w [elements]."""
    numbers = torch.tensor(table, dtype=torch.float32)
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
    table: tuple[float, ...],
) -> None:
    """Runs a kernel of the C interface; name: the argument that errors about the GPU speak of."""
    device = w.get_device()
    check_kernels(device_arch(device), name)
    getattr(_C, function)(
        device=device,
        type=FLOAT_TYPES[w.dtype],
        count=w.numel(),
        blocksize=blocksize,
        table=table,
        w=w.data_ptr(),
        packed=packed.data_ptr(),
        absmax=absmax.data_ptr(),
        stream=torch._C._cuda_getCurrentRawStream(device),
    )
