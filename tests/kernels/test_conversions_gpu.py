"""The kernels of `awq_dequantize`, `quantize_4bit` and `dequantize_4bit`: bit for bit the results of the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tests import formats_reference as ref

import weightonly as wo
from weightonly.codebooks import BLOCK_FORMATS, CODEBOOKS
from weightonly.device import device_arch
from weightonly.kernels import _C, FLOAT_TYPES
from weightonly.ops import awq_dequantize as awq
from weightonly.ops.blocks_4bit import BLOCKSIZES

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OWN_TABLE = tuple((torch.arange(16) * 7 % 16 / 7.5 - 1).tolist())  # the numbers of a line, shuffled
CROWDED_TABLE = tuple(((torch.arange(16) - 8.0) / 200).tolist())  # several of them in one cell of the search
TABLES = {**{name: CODEBOOKS[name] for name in BLOCK_FORMATS}, "own": OWN_TABLE, "crowded": CROWDED_TABLE}


@pytest.fixture(autouse=True)
def gpu(cuda_device: torch.device) -> None:
    """Every test here needs one."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor is, byte by byte, on the CPU: -0 is not 0."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def framed(count: int, dtype: torch.dtype, poison: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(place, frame): 16-byte aligned memory for `count` elements inside a larger tensor, all of it `poison`."""
    frame = torch.full((count + 64,), poison, dtype=dtype, device="cuda")
    return frame[32 : 32 + count], frame


def assert_untouched(frame: torch.Tensor, count: int, poison: float) -> None:
    outside = torch.cat([frame[:32], frame[32 + count :]])
    assert same(outside, torch.full_like(outside, poison)), "wrote outside of its result"


# --- AWQ ---------------------------------------------------------------------------------------------------

AWQ_DTYPES = [torch.float16, torch.bfloat16]
AWQ_SHAPES = [  # K, N, groups
    (1, 8, 1),
    (7, 8, 7),
    (16, 16, 1),
    (34, 520, 17),
    (130, 72, 13),
    (60, 264, 3),
    (300, 1032, 2),
    (96, 2048, 3),
    (640, 4096, 5),
    (257, 11008, 1),
]


def awq_layer(k: int, n: int, groups: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, torch.Tensor]:
    """Scales of both signs and of any size: with the products, subnormal numbers and the largest ones."""
    low, high = (-25, 12) if dtype == torch.float16 else (-130, 120)
    exponents = torch.randint(low, high, (groups, n), generator=g)
    return {
        "qweight": ref.random_words(k, n // 8, g),
        "scales": (torch.randn(groups, n, generator=g).double() * 2.0 ** exponents.double()).to(dtype),
        "qzeros": ref.random_words(groups, n // 8, g),
    }


def paths(dtype: torch.dtype) -> list[int]:
    """Those that this GPU has."""
    arch = device_arch(torch.cuda.current_device())
    return [awq.ARITHMETIC, awq.BIT_TRICKS] if arch >= (80 if dtype == torch.bfloat16 else 75) else [awq.ARITHMETIC]


def on_gpu(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in layer.items()}


@pytest.mark.parametrize("dtype", AWQ_DTYPES, ids=str)
@pytest.mark.parametrize("shape", AWQ_SHAPES, ids=str)
def test_awq_equals_the_cpu(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> None:
    layer = awq_layer(*shape, dtype, generator)
    expected = wo.awq_dequantize(**layer)
    assert same(wo.awq_dequantize(**on_gpu(layer)), expected)
    for path in paths(dtype):
        for _ in range(2):
            assert same(awq.on_gpu(**on_gpu(layer), path=path), expected), path


@pytest.mark.parametrize("dtype", AWQ_DTYPES, ids=str)
def test_awq_writes_its_result_and_nothing_else(dtype: torch.dtype, generator: torch.Generator) -> None:
    for k, n, groups in AWQ_SHAPES:
        layer = awq_layer(k, n, groups, dtype, generator)
        inputs = on_gpu(layer)
        for path in paths(dtype):
            place, frame = framed(k * n, dtype, float("nan"))
            _C.awq_dequantize(
                device=torch.cuda.current_device(),
                type=FLOAT_TYPES[dtype],
                path=path,
                k=k,
                n=n,
                groups=groups,
                **{name: tensor.data_ptr() for name, tensor in inputs.items()},
                w=place.data_ptr(),
                stream=torch.cuda.current_stream().cuda_stream,
            )
            assert same(place.view(k, n), wo.awq_dequantize(**layer))
            assert_untouched(frame, k * n, float("nan"))


@pytest.mark.parametrize("group_size", [1, 2, 3, 8, 15, 16, 17, 20, 24, 31, 32, 33, 48, 100, 128])
def test_awq_group_sizes(group_size: int, generator: torch.Generator) -> None:
    layer = awq_layer(3 * group_size, 136, 3, torch.float16, generator)
    assert same(wo.awq_dequantize(**on_gpu(layer)), wo.awq_dequantize(**layer))


def test_awq_more_tiles_than_a_grid_has_rows(generator: torch.Generator) -> None:
    """A grid has 65535 rows of CTAs, which go on to further tiles; four tiles of one row each to a CTA."""
    layer = awq_layer(300_000, 8, 300_000, torch.float16, generator)
    assert same(wo.awq_dequantize(**on_gpu(layer)), wo.awq_dequantize(**layer))


def test_awq_views(generator: torch.Generator) -> None:
    layer = awq_layer(64, 72, 4, torch.float16, generator)
    expected = wo.awq_dequantize(**layer)
    wide = {name: torch.cat([tensor, tensor], dim=1).cuda() for name, tensor in layer.items()}
    assert same(wo.awq_dequantize(*(t[:, : t.shape[1] // 2] for t in wide.values())), expected)
    shifted = {}
    for name, tensor in layer.items():
        base = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        base[1:] = tensor.cuda().flatten()
        shifted[name] = base[1:].view(tensor.shape)
    assert shifted["scales"].data_ptr() % 16
    assert same(wo.awq_dequantize(**shifted), expected)
    assert same(wo.awq_dequantize(*(t.cuda().t().contiguous().t() for t in layer.values())), expected)


def test_awq_in_a_graph_and_on_another_stream(generator: torch.Generator) -> None:
    layers = [awq_layer(256, 520, 2, torch.float16, generator) for _ in range(2)]
    place = on_gpu(layers[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        w = wo.awq_dequantize(**place)
    stream.synchronize()
    assert same(w, wo.awq_dequantize(**layers[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w = wo.awq_dequantize(**place)
    for layer in (layers[1], layers[0]):
        for name, tensor in layer.items():
            place[name].copy_(tensor)
        w.fill_(float("nan"))
        graph.replay()
        assert same(w, wo.awq_dequantize(**layer))


def test_awq_beyond_two_to_the_31_elements() -> None:
    k, n = 66560, 33024
    if torch.cuda.get_device_properties(0).total_memory < 16e9:
        pytest.skip("needs 16 GB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    qweight = torch.randint(-(2**31), 2**31, (k, n // 8), generator=generator, device="cuda").to(torch.int32)
    qzeros = torch.randint(-(2**31), 2**31, (k // 128, n // 8), generator=generator, device="cuda").to(torch.int32)
    scales = torch.rand(k // 128, n, generator=generator, device="cuda").half()
    w = wo.awq_dequantize(qweight, scales, qzeros)
    for rows, groups in ((slice(0, 256), slice(0, 2)), (slice(-256, None), slice(-2, None))):
        assert same(w[rows], wo.awq_dequantize(qweight[rows].cpu(), scales[groups].cpu(), qzeros[groups].cpu()))


@pytest.mark.parametrize("name", ["scales", "qzeros"])
def test_awq_tensors_on_two_devices(name: str, generator: torch.Generator) -> None:
    layer = awq_layer(64, 16, 2, torch.float16, generator)
    with pytest.raises(ValueError, match=rf"^{name}: expected on cuda:\d as qweight is, got cpu$"):
        wo.awq_dequantize(**on_gpu(layer) | {name: layer[name]})


# --- blocks of 4-bit codes ---------------------------------------------------------------------------------

COUNTS = [1, 2, 31, 33, 1000, 4095, 4096, 4097, 12288, 50_003]
"""The kernel's tiles have 4096 elements: a part of one, some, and some and a part."""


def weights(count: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Normal ones of different size from place to place, zeros, and numbers in the middle of two of the tables."""
    exponents = torch.randint(-20, 12, (count // 100 + 1,), generator=g).repeat_interleave(100)[:count]
    w = torch.randn(count, generator=g) * 2.0**exponents
    w[torch.rand(count // 500 + 1, generator=g).repeat_interleave(500)[:count] < 0.2] = 0
    ties = torch.cat([torch.tensor(CODEBOOKS[name]).sort().values for name in BLOCK_FORMATS])
    ties = torch.cat([(ties[:-1] + ties[1:]) / 2, torch.ones(5), -torch.ones(5), torch.tensor([0.0, -0.0])])
    tied = torch.rand(count // 300 + 1, generator=g).repeat_interleave(300)[:count] < 0.3
    w[tied] = (ties[torch.randint(len(ties), (count,), generator=g)] * 2.0 ** torch.randint(-4, 4, (1,), generator=g))[
        tied
    ]
    return w.to(dtype)


def check_blocks(w: torch.Tensor, blocksize: int, name: str) -> None:
    """Both directions equal those of the CPU, and each other in a second run."""
    code: dict[str, Any] = {} if name in BLOCK_FORMATS else {"code": TABLES[name]}
    quant_type = name if name in BLOCK_FORMATS else "nf4"
    expected = wo.quantize_4bit(w, blocksize, quant_type, **code)
    for _ in range(2):
        packed, absmax = wo.quantize_4bit(w.cuda(), blocksize, quant_type, **code)
        assert same(absmax, expected[1])
        assert same(packed, expected[0])
    for dtype in DTYPES:
        restored = wo.dequantize_4bit(*expected, blocksize, quant_type, w.shape, dtype, **code)
        for _ in range(2):
            assert same(wo.dequantize_4bit(packed, absmax, blocksize, quant_type, w.shape, dtype, **code), restored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("name", TABLES)
def test_blocks_equal_those_of_the_cpu(
    name: str, blocksize: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for count in COUNTS:
        check_blocks(weights(count, dtype, generator), blocksize, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", [64, 4096])
def test_several_tiles_to_a_cta(blocksize: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """More tiles than the quantizing kernel has CTAs, some of which go further than others."""
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    check_blocks(weights(4096 * (2 * 8 * sms + 77) + 901, dtype, generator), blocksize, "fp4")


def test_tiny_and_huge_numbers(generator: torch.Generator) -> None:
    for exponent in (-149, -140, -127, -126, -60, 60, 125, 127):
        w = (torch.randn(5000, generator=generator) * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)).clamp(
            -3e38, 3e38
        )
        for dtype in (torch.float32, torch.bfloat16):
            check_blocks(w.to(dtype), 64, "nf4")
    for exponent in (-24, -14, 10):
        check_blocks((torch.randn(5000, generator=generator) * 2.0**exponent).half(), 64, "fp4")


@pytest.mark.parametrize("quant_type", BLOCK_FORMATS)
def test_zeros_give_zeros_back(quant_type: str) -> None:
    w = torch.zeros(5000, dtype=torch.float16)
    check_blocks(w, 64, quant_type)
    restored = wo.dequantize_4bit(*wo.quantize_4bit(w.cuda(), 64, quant_type), 64, quant_type, (5000,), torch.float16)
    assert torch.equal(restored.cpu(), w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_nan_and_inf_stay_in_their_block(blocksize: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    count = 3 * 4096 + 100
    w = torch.randn(count, generator=generator).to(dtype)
    for bad, place in ((float("nan"), 4096 + 77), (float("-inf"), 8192 + 4000), (float("nan"), count - 1)):
        poisoned = w.clone()
        poisoned[place] = bad
        packed, absmax = wo.quantize_4bit(poisoned.cuda(), blocksize)
        block = place // blocksize
        wanted = float("nan") if bad != bad else float("inf")
        assert absmax[block].isnan() if wanted != wanted else absmax[block] == wanted
        others = torch.arange(absmax.numel()) != block
        expected = wo.quantize_4bit(w, blocksize)
        assert same(absmax.cpu()[others], expected[1][others])
        begin, end = block * blocksize // 2, (block + 1) * blocksize // 2
        assert same(packed[:begin], expected[0][:begin]) and same(packed[end:], expected[0][end:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_write_their_results_and_nothing_else(dtype: torch.dtype, generator: torch.Generator) -> None:
    common: dict[str, Any] = {
        "device": torch.cuda.current_device(),
        "type": FLOAT_TYPES[dtype],
        "codebook": CODEBOOKS["nf4"],
        "stream": torch.cuda.current_stream().cuda_stream,
    }
    for count in COUNTS:
        for blocksize in (32, 64, 128, 1024, 4096):
            common |= {"count": count, "blocksize": blocksize}
            w = weights(count, dtype, generator)
            expected = wo.quantize_4bit(w, blocksize)
            source = w.cuda()
            packed, packed_frame = framed((count + 1) // 2, torch.uint8, 0xA5)
            absmax, absmax_frame = framed(-(-count // blocksize), torch.float32, float("nan"))
            addresses: dict[str, Any] = {"packed": packed.data_ptr(), "absmax": absmax.data_ptr()}
            _C.quantize_4bit(**common, **addresses, w=source.data_ptr())
            assert same(packed[:, None], expected[0]) and same(absmax, expected[1])
            assert_untouched(packed_frame, packed.numel(), 0xA5)
            assert_untouched(absmax_frame, absmax.numel(), float("nan"))
            place, frame = framed(count, dtype, float("nan"))
            _C.dequantize_4bit(**common, **addresses, w=place.data_ptr())
            assert same(place, wo.dequantize_4bit(*expected, blocksize, "nf4", (count,), dtype))
            assert_untouched(frame, count, float("nan"))


def test_blocks_of_views(generator: torch.Generator) -> None:
    w = weights(6000, torch.float16, generator).cuda()
    for view in (w[1:], w[::2], w.view(60, 100).t(), w.view(60, 100)[:, 3:70], w[:0], w[5]):
        packed, absmax = wo.quantize_4bit(view)
        expected = wo.quantize_4bit(view.cpu())
        assert same(packed, expected[0]) and same(absmax, expected[1])
        restored = wo.dequantize_4bit(*expected, 64, "nf4", view.shape, torch.float16)
        assert same(wo.dequantize_4bit(packed, absmax, 64, "nf4", view.shape, torch.float16), restored)
        # Bytes and statistics from an odd address on, and with gaps.
        shifted = torch.cat([packed.view(-1)[:1], packed.view(-1)])[1:]
        gaps = torch.stack([absmax, absmax], dim=1)[:, 0]
        assert same(wo.dequantize_4bit(shifted, gaps, 64, "nf4", view.shape, torch.float16), restored)


def test_blocks_in_a_graph_and_on_another_stream(generator: torch.Generator) -> None:
    sources = [weights(70_001, torch.bfloat16, generator) for _ in range(2)]
    place = sources[0].cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        packed, absmax = wo.quantize_4bit(place, 128, "fp4")
        w = wo.dequantize_4bit(packed, absmax, 128, "fp4", place.shape, torch.float16)
    stream.synchronize()
    expected = [wo.quantize_4bit(source, 128, "fp4") for source in sources]
    assert same(packed, expected[0][0]) and same(absmax, expected[0][1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed, absmax = wo.quantize_4bit(place, 128, "fp4")
        w = wo.dequantize_4bit(packed, absmax, 128, "fp4", place.shape, torch.float16)
    for i in (1, 0):
        place.copy_(sources[i])
        packed.fill_(0)
        absmax.fill_(float("nan"))
        w.fill_(float("nan"))
        graph.replay()
        assert same(packed, expected[i][0]) and same(absmax, expected[i][1])
        assert same(w, wo.dequantize_4bit(*expected[i], 128, "fp4", place.shape, torch.float16))


def test_a_table_on_the_gpu(generator: torch.Generator) -> None:
    w = weights(5000, torch.float16, generator)
    code = torch.tensor(OWN_TABLE)
    expected = wo.quantize_4bit(w, 64, code=code)
    packed, absmax = wo.quantize_4bit(w.cuda(), 64, code=code.cuda())
    assert same(packed, expected[0]) and same(absmax, expected[1])


def test_blocks_beyond_two_to_the_32_elements() -> None:
    count = (1 << 32) + 4096 * 3 + 77
    if torch.cuda.get_device_properties(0).total_memory < 32e9:
        pytest.skip("needs 32 GB of GPU memory")
    w = torch.randn(count, generator=torch.Generator("cuda").manual_seed(0), dtype=torch.float16, device="cuda")
    packed, absmax = wo.quantize_4bit(w)
    restored = wo.dequantize_4bit(packed, absmax, 64, "nf4", w.shape, torch.float16)
    for begin, end in ((0, 1 << 16), ((1 << 32) - 4096, count)):
        expected = wo.quantize_4bit(w[begin:end].cpu())
        assert same(packed[begin // 2 : (end + 1) // 2], expected[0])
        assert same(absmax[begin // 64 : -(-end // 64)], expected[1])
        assert same(restored[begin:end], wo.dequantize_4bit(*expected, 64, "nf4", (end - begin,), torch.float16))


def test_blocks_on_two_devices() -> None:
    packed, absmax = wo.quantize_4bit(torch.ones(100, device="cuda"))
    with pytest.raises(ValueError, match=r"^absmax: expected on cuda:\d as packed is, got cpu$"):
        wo.dequantize_4bit(packed, absmax.cpu(), 64, "nf4", (100,), torch.float16)


@pytest.mark.parametrize("name", ["qweight", "w", "packed"])
def test_without_kernels(name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = on_gpu(awq_layer(64, 16, 2, torch.float16, generator))
    blocks = wo.quantize_4bit(torch.ones(100, device="cuda"))
    call = {
        "qweight": lambda: wo.awq_dequantize(**layer),
        "w": lambda: wo.quantize_4bit(torch.ones(100, device="cuda")),
        "packed": lambda: wo.dequantize_4bit(*blocks, 64, "nf4", (100,), torch.float16),
    }[name]
    monkeypatch.setattr(sys.modules["weightonly.kernels"], "cuda_built", lambda: False)
    with pytest.raises(RuntimeError, match=rf"^{name}: is a CUDA tensor, .* WEIGHTONLY_CUDA=on WEIGHTONLY_ARCHS="):
        call()
