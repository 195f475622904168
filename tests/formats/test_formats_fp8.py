"""Readers of 8-bit floats: against fp64, compressed-tensors, transformers, and a folder that ModelOpt wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.fp8_cases import dequantize, dequantize_nvfp4, experts, quantize

import weightonly as wo
from weightonly.formats import QuantizedLayer, convert, open_checkpoint, read_fp8, read_modelopt_fp4
from weightonly.formats.expect import TensorError

E4M3 = torch.float8_e4m3fn
MODELOPT = Path(__file__).parents[1] / "data" / "modelopt_mixed"
K, N = 192, 80
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    block=st.sampled_from([(-1, -1), (1, -1), (16, 16), (16, 32), (1, 8), (7, 5), (128, 128)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_read_is_the_formula(seed: int, n: int, k: int, block: tuple[int, int], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    weight, scale = quantize(torch.randn(n, k, generator=g), block)
    scale = scale.to(dtype)
    layer = read_fp8(weight, scale, block)
    assert layer.format == "fp8" and layer.scales.dtype == dtype and k % len(layer.scales) == 0
    assert torch.equal(layer.dequantize(torch.float32), dequantize(weight, scale, block).float().t())


@pytest.mark.parametrize("form", [(), (1,), (1, 1), (N,), (N, 1)], ids=str)
def test_shapes_that_tell_the_blocks(form: tuple[int, ...], generator: torch.Generator) -> None:
    block = (1, -1) if N in form else (-1, -1)
    weight, scale = quantize(torch.randn(N, K, generator=generator), block)
    layer = read_fp8(weight, scale.reshape(form))
    assert torch.equal(layer.dequantize(torch.float32), dequantize(weight, scale, block).float().t())


def test_dimensions_of_blocks_as_modelopt_has_them(generator: torch.Generator) -> None:
    weight, scale = quantize(torch.randn(N, K, generator=generator), (128, 128))
    layer = read_fp8(weight, scale[:, None, :, None], (128, 128))
    assert torch.equal(layer.dequantize(torch.float32), dequantize(weight, scale, (128, 128)).float().t())


@pytest.mark.parametrize("dtype", [torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)], ids=str)
def test_powers_of_two(dtype: torch.dtype, generator: torch.Generator) -> None:
    exponents = torch.randint(100, 150, (N, K // 32), generator=generator).to(torch.uint8)
    weight = torch.randn(N, K, generator=generator).to(E4M3)
    layer = read_fp8(weight, exponents.view(dtype), (1, 32))
    assert torch.equal(
        layer.dequantize(torch.float32), dequantize(weight, torch.exp2(exponents.double() - 127), (1, 32)).float().t()
    )


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_is_that_of_compressed_tensors(
    strategy: str, dtype: torch.dtype, tmp_path: Path, generator: torch.Generator
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    naive = pytest.importorskip("compressed_tensors.compressors.naive_quantized.base")
    sizes: dict[str, dict[str, Any]] = {"block": {"block_structure": [64, 64]}, "group": {"group_size": 64}}
    more = sizes.get(strategy, {})
    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **more)
    how = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    block = {"tensor": (-1, -1), "channel": (1, -1), "block": (64, 64), "group": (1, 64)}[strategy]
    w = torch.randn(128, K, generator=generator).to(dtype)
    scale = quantize(w.float(), block)[1].to(dtype)
    stored = scale.reshape(1) if strategy == "tensor" else scale
    packed = naive.FloatQuantizationCompressor.compress({"weight": w, "weight_scale": stored}, how)
    in_fp32 = dict(packed) | {"weight_scale": packed["weight_scale"].float()}
    dense = naive.FloatQuantizationCompressor.decompress(in_fp32, how)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": json.loads(how.model_dump_json())},
    }
    folder = write(tmp_path, {f"a.up.{name}": tensor for name, tensor in packed.items()}, config)
    [layer] = layers_in(folder)
    assert torch.equal(layer.dequantize(), dense.t())


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("block", [[32, 16], None], ids=str)
def test_weight_is_that_of_transformers(
    block: list[int] | None, scale_fmt: str, tmp_path: Path, generator: torch.Generator
) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    options = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantizer = fp8.Fp8Quantize(SimpleNamespace(quantization_config=options))
    w = torch.randn(96, 64, generator=generator)
    tensors = quantizer.convert({"a.up.weight": w})
    tensors["a.up.weight_scale_inv"] = (
        tensors["a.up.weight_scale_inv"].squeeze() if block is None else tensors["a.up.weight_scale_inv"]
    )
    folder = write(tmp_path, tensors, FP8 | {"weight_block_size": block, "scale_fmt": scale_fmt})
    [layer] = layers_in(folder)
    dense = fp8.Fp8Dequantize(None)._dequantize_one(*tensors.values(), torch.float32)
    assert torch.equal(layer.dequantize(), dense.t())
    assert layer.dequantize().sub(w.t()).norm() < 0.04 * w.norm()


def test_folder_of_modelopt(tmp_path: Path) -> None:
    tensors = load_file(MODELOPT / "model.safetensors")
    expected = {}
    for name, scale in tensors.items():
        layer, _, inside = name.rpartition(".")
        if inside == "weight_scale":
            weight, factor = tensors[f"{layer}.weight"], tensors.get(f"{layer}.weight_scale_2")
            dense = dequantize(weight, scale, (-1, -1)) if factor is None else dequantize_nvfp4(weight, scale, factor)
            expected[layer] = dense
    checkpoint = open_checkpoint(MODELOPT)
    assert checkpoint.source == "config.json" and checkpoint.methods == ("modelopt",)
    assert {shape.format for shape in checkpoint.shapes.values()} == {"fp8", "nvfp4"}
    assert expected.keys() == checkpoint.layers.keys()
    convert(MODELOPT, tmp_path / "packed", progress=False)
    for folder in (MODELOPT, tmp_path / "packed"):
        layers = layers_in(folder)
        for record in layers:
            w = expected[record.name].t()
            assert (record.dequantize().double() - w).norm() <= 1e-7 * w.norm()
        assert len(layers) == len(expected) == 10


def layers_in(folder: Path) -> list[QuantizedLayer]:
    return [r for r in wo.load_checkpoint(folder, progress=False) if isinstance(r, QuantizedLayer)]


def test_own_file_of_modelopt_alone(tmp_path: Path) -> None:
    """As older versions write, config.json says nothing."""
    folder = copied(tmp_path)
    edit(folder / "config.json", lambda config: config.pop("quantization_config"))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.source == "hf_quant_config.json" and len(checkpoint.layers) == 10


def copied(folder: Path) -> Path:
    for file in MODELOPT.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def layers_of(algorithm: str) -> Any:
    def change(config: dict[str, Any]) -> None:
        inside = config.get("quantization_config") or config["quantization"]
        inside["quantized_layers"]["model.layers.0.mlp.experts"]["quant_algo"] = algorithm

    return change


WRONG_MODELOPT: dict[str, tuple[Any, str]] = {
    "two methods": (
        {"config.json": lambda c: c.update(quantization_config={"quant_method": "fp8"})},
        r"hf_quant_config.json: quant_method: expected 'fp8' as config.json says, got 'modelopt'",
    ),
    "two algorithms": (
        {"hf_quant_config.json": lambda c: c["quantization"].update(quant_algo="FP8")},
        r"hf_quant_config.json: quant_algo: expected 'MIXED_PRECISION' as config.json says, got 'FP8'",
    ),
    "other layers": (
        {"hf_quant_config.json": layers_of("FP8")},
        r"hf_quant_config.json: quantized_layers: expected .*NVFP4.* as config.json says, got",
    ),
    "unknown": (
        {name: layers_of("W4A8_AWQ") for name in ("config.json", "hf_quant_config.json")},
        r"quantized_layers.model.layers.0.mlp.experts: quant_algo: expected one of FP8, .*got 'W4A8_AWQ'",
    ),
    "floats of 8 bits": (
        {name: layers_of("FP8") for name in ("config.json", "hf_quant_config.json")},
        r"experts\.\d\.\w+\.weight: expected 8-bit floats, as the config says, got nvfp4",
    ),
    "no entry": (
        {
            "config.json": lambda c: c["quantization_config"]["quantized_layers"].pop(
                "model.layers.0.self_attn.q_proj"
            ),
            "hf_quant_config.json": lambda c: c["quantization"]["quantized_layers"].pop(
                "model.layers.0.self_attn.q_proj"
            ),
        },
        r"q_proj.weight: expected it in quantized_layers, as it is quantized, got no entry",
    ),
    "excluded": (
        {"config.json": lambda c: c["quantization_config"].update(ignore=["lm_head", "model.layers.0.self*"])},
        r"expected no quantized layer, as ignore says \('model.layers.0.self\*'\), got one",
    ),
    "pattern": (
        {"config.json": lambda c: c["quantization_config"].update(ignore=[3])},
        r"ignore: expected names and patterns, got \[3\]",
    ),
}


@pytest.mark.parametrize("what", WRONG_MODELOPT)
def test_wrong_configs_of_modelopt(what: str, tmp_path: Path) -> None:
    edits, message = WRONG_MODELOPT[what]
    folder = copied(tmp_path)
    for name, change in edits.items():
        edit(folder / name, change)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pre_quant_scale", "svdquant_lora_a"])
def test_tensors_that_change_x(name: str, tmp_path: Path) -> None:
    """NVFP4_AWQ: layers without pre_quant_scale are NVFP4's."""
    folder = copied(tmp_path)
    for file in ("config.json", "hf_quant_config.json"):
        edit(folder / file, layers_of("NVFP4_AWQ"))
    assert len(open_checkpoint(folder).layers) == 10
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.0.mlp.experts.1.down_proj"
    save_file(tensors | {f"{layer}.{name}": torch.ones(32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{layer}.{name}: expected none, as x would .*, got one"):
        open_checkpoint(folder)


def write(folder: Path, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    return folder


def ct(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}


def block_layer(**change: Any) -> dict[str, torch.Tensor]:
    weight, scale = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), (128, 128))
    tensors = {"weight": weight, "weight_scale_inv": scale} | change
    return {f"a.up.{name}": tensor for name, tensor in tensors.items() if tensor is not None}


def scales(value: float) -> torch.Tensor:
    return torch.tensor([[0.1, value]])


def nan_weight() -> torch.Tensor:
    weight = torch.zeros(N, K).to(E4M3)
    weight.view(torch.uint8)[3, 5] = 0x7F
    return weight


WRONG: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "no weight": (block_layer(weight=None), FP8, "weight_scale_inv needs a.up.weight, which is not in the checkpoint"),
    "no scale": (
        block_layer(weight_scale_inv=None)
        | {"b.weight_scale_inv": torch.ones(()), "b.weight": torch.zeros(2, 2).to(E4M3)},
        FP8,
        "a.up.weight: expected weights of 16 bits or more",
    ),
    "shape": (
        block_layer(weight_scale_inv=torch.ones(2, 2)),
        FP8,
        r"weight_scale_inv: expected .* \[1, 2\], got float32 \[2, 2\]",
    ),
    "dtype of the scale": (
        block_layer(weight_scale_inv=torch.ones(1, 2).int()),
        FP8,
        r"weight_scale_inv: expected float16 or .*got int32",
    ),
    "e5m2": (
        block_layer(weight=torch.zeros(N, K).to(torch.float8_e5m2)),
        FP8,
        r"a.up.weight: expected float8_e4m3fn \[N, K\], got float8_e5m2",
    ),
    "cast": (
        block_layer(weight=torch.zeros(N, K).half()),
        FP8,
        r"a.up.weight: expected float8_e4m3fn \[N, K\], got float16",
    ),
    "fmt": (block_layer(), FP8 | {"fmt": "e5m2"}, "fmt: expected 'e4m3', got 'e5m2'"),
    "fnuz": (block_layer(), FP8 | {"fmt": "e4m3fnuz"}, "fmt: expected 'e4m3', got 'e4m3fnuz'"),
    "scheme": (
        block_layer(),
        FP8 | {"activation_scheme": "x"},
        "activation_scheme: expected 'dynamic' or 'static', got 'x'",
    ),
    "block size": (
        block_layer(),
        FP8 | {"weight_block_size": [128]},
        r"weight_block_size: expected two sizes of 1 to 2.31 - 1, got \[128\]",
    ),
    "no block size": (
        block_layer(),
        FP8 | {"weight_block_size": None},
        r"without the sizes of blocks in a config, got \[1, 2\]",
    ),
    "two scales": (
        block_layer(weight_scale=torch.ones(1, 2)),
        FP8,
        "weight_scale: expected none beside weight_scale_inv, got one",
    ),
    "bias": (block_layer(bias=torch.ones(3)), FP8, r"bias: expected .* \[80\], got float32 \[3\]"),
    "channel of fbgemm": (
        block_layer(weight_scale=torch.ones(1), weight_scale_inv=None),
        {"quant_method": "fbgemm_fp8"},
        r"weight_scale: expected .* \[80, 1\], got float32 \[1\]",
    ),
    "strategy": (
        block_layer(weight_scale=torch.ones(1), weight_scale_inv=None),
        ct(strategy="token"),
        "strategy: expected tensor, channel, block or group, got 'token'",
    ),
    "no structure": (
        block_layer(weight_scale=torch.ones(1), weight_scale_inv=None),
        ct(strategy="block"),
        "block_structure: expected two sizes for strategy 'block', got none",
    ),
    "bits": (block_layer(), ct(strategy="tensor", num_bits=4), "weights: expected float of 8 bits, got 'float' of 4"),
    "asymmetric": (
        block_layer(),
        ct(strategy="tensor", symmetric=False),
        "weights.symmetric: expected true for float-quantized, got false",
    ),
    "tensor": (
        block_layer(weight_scale=torch.ones(N, 1), weight_scale_inv=None),
        ct(strategy="tensor"),
        r"weight_scale: expected .* \[1, 1\], got float32 \[80, 1\]",
    ),
}

WRONG_NUMBERS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "nan": (block_layer(weight=nan_weight()), "a.up.weight: expected numbers, got NaN"),
    **{
        str(value): (
            block_layer(weight_scale_inv=scales(value)),
            f"a.up.weight_scale_inv: expected positive numbers, .*got {re.escape(f'{value:g}')}",
        )
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e37)
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_folders(what: str, tmp_path: Path) -> None:
    tensors, options, message = WRONG[what]
    folder = write(tmp_path, tensors, options)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("what", WRONG_NUMBERS)
def test_bad_numbers(what: str, tmp_path: Path) -> None:
    tensors, message = WRONG_NUMBERS[what]
    folder = write(tmp_path, tensors, FP8)
    with pytest.raises(ValueError, match=f"model.safetensors: {message}"):
        list(wo.load_checkpoint(folder, progress=False))
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "packed", progress=False)


def test_zero_points_are_zeros(tmp_path: Path) -> None:
    zeros = torch.zeros(N, 1).to(E4M3)
    layer = block_layer(weight_scale=torch.ones(N, 1), weight_scale_inv=None)
    for value, is_read in ((zeros, True), (torch.ones(N, 1).to(E4M3), False)):
        folder = write(tmp_path, layer | {"a.up.weight_zero_point": value}, ct(strategy="channel"))
        if is_read:
            assert len(list(wo.load_checkpoint(folder, progress=False))) == 1
        else:
            with pytest.raises(ValueError, match="weight_zero_point: expected zeros, got others"):
                list(wo.load_checkpoint(folder, progress=False))


def test_factor_of_modelopt() -> None:
    codes, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2).to(E4M3)
    for factor, message in (
        (torch.tensor(0.0), "weight_scale_2: expected a positive number, got 0.0"),
        (torch.tensor(float("nan")), "weight_scale_2: expected a positive number, got nan"),
        (torch.ones(2), r"weight_scale_2: expected float32 \[\], got float32 \[2\]"),
        (None, "weight: expected a weight_scale_2 beside it for nvfp4, got none"),
    ):
        with pytest.raises(TensorError, match=message):
            read_modelopt_fp4(codes, scale, factor)


def test_groups_of_a_ragged_k(tmp_path: Path) -> None:
    """K = 192 in blocks of 128 has groups of 64; the scales are repeated."""
    folder = write(tmp_path, block_layer(), FP8)
    assert open_checkpoint(folder).shapes["a.up"].group_size == 64
    [layer] = layers_in(folder)
    assert layer.scales.shape == (3, N) and torch.equal(layer.scales[0], layer.scales[1])
    x = torch.randn(3, K)
    torch.testing.assert_close(layer(x), x @ layer.dequantize(), rtol=1e-4, atol=1e-4)


STACK = "a.experts.gate_up_proj"


def stacked(**change: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Three experts; of tensors beside them what follows the name."""
    w = torch.randn(3, 2 * N, K, generator=torch.Generator().manual_seed(0))
    tensors = experts(w, (32, 32))[0] | change
    return {f"{STACK}{name}": tensor for name, tensor in tensors.items() if tensor is not None}


SCALES_OF_STACKS: dict[str, tuple[Any, list[int] | None]] = {
    "blocks": (torch.rand(3, 5, 6), [32, 32]),
    "blocks of halves": (torch.rand(3, 2, 2), [128, 128]),
    "halves": (torch.rand(3, 2, 1), None),
    "experts": (torch.rand(3), None),
    "one": (torch.rand(()), None),
    "columns": (torch.rand(3, 2 * N, 1), None),
    "powers": (torch.randint(100, 140, (3, 5, 6)).to(torch.uint8), [32, 32]),
}


@pytest.mark.parametrize("form", SCALES_OF_STACKS)
def test_stacked_experts(form: str, tmp_path: Path, generator: torch.Generator) -> None:
    scale, sizes = SCALES_OF_STACKS[form]
    q = torch.randn(3, 2 * N, K, generator=generator).to(E4M3)
    folder = write(tmp_path, stacked(**{"": q, "_scale_inv": scale}), FP8 | {"weight_block_size": sizes})
    numbers = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    each = numbers.expand(3) if numbers.dim() < 2 else numbers
    rows, columns = torch.arange(2 * N), torch.arange(K)
    part = N if "halves" in form else 2 * N
    for expert, record in enumerate(layers_in(folder)):
        grid = each[expert].reshape(each[expert].shape if each.dim() == 3 else (1, 1))
        block = sizes or [part // (len(grid) // (2 * N // part)), K]
        index = rows // part * (len(grid) // (2 * N // part)) + rows % part // block[0]
        expected = q[expert].double() * grid[index][:, columns // block[1]]
        assert record.name == f"a.experts.{expert}.gate_up_proj"
        assert torch.equal(record.dequantize(), expected.float().t())
    convert(folder, tmp_path / "packed", progress=False)
    for one, other in zip(layers_in(folder), layers_in(tmp_path / "packed"), strict=True):
        assert torch.equal(one.dequantize(), other.dequantize())


@pytest.mark.parametrize("suffix", ["_scale", "_weight_scale"])
def test_stacked_experts_the_other_way(suffix: str, tmp_path: Path, generator: torch.Generator) -> None:
    q = torch.randn(3, K, 2 * N, generator=generator).to(E4M3)
    scale = torch.rand(3, 1, 2 * N) if suffix == "_scale" else torch.rand(3)
    method = "fbgemm_fp8" if suffix == "_scale" else "modelopt"
    tensors = stacked(**{"": q, "_scale_inv": None, suffix: scale})
    folder = write(tmp_path, tensors, {"quant_method": method, "quant_algo": "FP8"})
    found = layers_in(folder)
    assert len(found) == 3
    for expert, record in enumerate(found):
        assert torch.equal(record.dequantize(), q[expert].float() * scale[expert])


WRONG_STACKS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "another number": ({"_scale_inv": torch.ones(2, 5, 6)}, rf"{STACK}_scale_inv: expected \[3, ...\], as {STACK} is"),
    "another grid": (
        {"_scale_inv": torch.ones(3, 4, 6)},
        r"experts.0.gate_up_proj.weight_scale_inv: expected .* \[5, 6\], got float32 \[4, 6\]",
    ),
    "NaN": (
        {"_scale_inv": torch.full((3, 5, 6), torch.nan)},
        "weight_scale_inv: expected positive numbers, .* got nan",
    ),
    "no scales": ({"_scale_inv": None}, rf"{STACK}: expected weights of 16 bits or more, got float8_e4m3fn \[3, "),
    "no weight": ({"": None}, rf"{STACK}_scale_inv: expected no tensor of this name, got"),
    "no experts": (
        {"": torch.zeros(0, 2, 2).to(E4M3), "_scale_inv": torch.ones(0, 1, 1)},
        rf"{STACK}_scale_inv: expected no tensor of this name, got float32 \[0, 1, 1\]",
    ),
    "too many": (
        {"": torch.zeros(1 << 18, 1, 1).to(E4M3), "_scale_inv": torch.ones(1 << 18, 1, 1)},
        rf"{STACK}: expected at most 262144 tensors of experts, got more",
    ),
    "bias": ({"_bias": torch.ones(3, 4)}, r"experts.0.gate_up_proj.bias: expected .* \[160\], got float32 \[4\]"),
    "zero points": (
        {"_zero_point": torch.ones(3)},
        r"_zero_point: expected none beside the experts of a",
    ),
    "an expert, too": (
        {".0": None},
        rf"a.experts.0.gate_up_proj.weight: expected none beside {STACK} of all experts, got one",
    ),
}


@pytest.mark.parametrize("what", WRONG_STACKS)
def test_wrong_stacks(what: str, tmp_path: Path) -> None:
    change, message = WRONG_STACKS[what]
    alone = {"a.experts.0.gate_up_proj.weight": torch.ones(2, 2)} if ".0" in change else {}
    folder = write(
        tmp_path,
        stacked(**change) | alone | block_layer(weight_scale_inv=torch.ones(3, 6)),
        FP8 | {"weight_block_size": [32, 32]},
    )
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        layers_in(folder)


@pytest.mark.parametrize("dtype", [torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)], ids=str)
def test_experts_of_deepseek_v4(dtype: torch.dtype, tmp_path: Path, generator: torch.Generator) -> None:
    """MXFP4 beside FP8; a module that has a scale, and no weight, is another one."""
    codes = torch.randint(0, 256, (N, K // 2), generator=generator).to(torch.uint8)
    exponents = torch.randint(100, 140, (N, K // 32), generator=generator).to(torch.uint8)
    expert = {"b.w1.weight": codes.view(torch.int8), "b.w1.scale": exponents.view(dtype)}
    other = {"a.hc.scale": torch.ones(3)}
    layer = {name.replace("weight_scale_inv", "scale"): tensor for name, tensor in block_layer().items()}
    found = {record.name: record for record in layers_in(write(tmp_path, expert | other | layer, FP8))}
    assert {name: record.weight.format for name, record in found.items()} == {"a.up": "fp8", "b.w1": "mxfp4"}
    powers = torch.exp2(exponents.double() - 127)
    expected = dequantize_nvfp4(codes, powers.repeat_interleave(2, 1), torch.ones(()))
    assert torch.equal(found["b.w1"].dequantize().double(), expected.t())
    for change, message in (
        ({"b.w1.scale": torch.ones(N, K // 32)}, "b.w1.scale: expected uint8 or float8_e8m0fnu .*got float32"),
        ({"b.w1.scale": exponents[:, 1:]}, r"b.w1.scale: expected .* \[80, 6\]"),
        ({"b.w1.weight": codes}, "b.w1.weight: expected float8_e4m3fn .*got uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            open_checkpoint(write(tmp_path, expert | layer | change, FP8))
