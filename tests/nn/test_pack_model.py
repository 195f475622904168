"""pack_model: layers of torchao and bitsandbytes in memory, beside what these libraries compute."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import hf_models
from tests.formats.test_torchao import int4, int8, zero_point
from tests.formats_layers import GROUP, K, N

import weightonly as wo
from weightonly.formats import read_torchao
from weightonly.nn import Linear, pack_model, quantize_model

INT4: Any = getattr(torch, "int4")  # noqa: B009 - older versions of its types lack it


def stand_in(name: str, tensors: dict[str, torch.Tensor], **attributes: Any) -> torch.nn.Linear:
    """A layer whose weight is of a class as torchao makes them."""
    cls = type(name, (torch.Tensor,), {"__module__": "torchao.quantization"})
    inside = {key.removeprefix("_weight_"): value for key, value in tensors.items()}
    weight: Any = torch.empty(N, K, dtype=torch.float32).as_subclass(cls)
    vars(weight).update(inside | attributes | {"tensor_data_names": [*inside], "requires_grad": False})
    layer = torch.nn.Linear(K, N)
    layer.requires_grad_(False)
    layer._parameters["weight"] = weight
    return layer


def model_of(*layers: torch.nn.Module) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), *layers)


def only(model: torch.nn.Module) -> Linear:
    [layer] = (m for m in model.modules() if isinstance(m, Linear))
    return layer


def test_int4(generator: torch.Generator) -> None:
    tensors = int4(generator)
    layer = stand_in("Int4Tensor", tensors, block_size=[1, GROUP])
    model: Any = pack_model(model_of(layer))
    low, high = tensors["_weight_qdata"] << 4 >> 4, tensors["_weight_qdata"] >> 4
    scale, shift = (tensors[f"_weight_{x}"].float().repeat_interleave(GROUP, 0).t() for x in ("scale", "zero_point"))
    expected = scale * torch.stack((low, high), -1).flatten(1) + shift
    packed = only(model)
    assert (packed.format, packed.group_size, packed.layer_name) == ("int4", GROUP, "1")
    torch.testing.assert_close(packed.dequantize().t(), expected, rtol=1e-6, atol=1e-6)
    x = torch.randn(3, K, generator=generator)
    torch.testing.assert_close(model[1](x), x @ expected.t() + layer.bias, rtol=1e-4, atol=1e-4)
    assert type(model[0]) is torch.nn.Linear


def test_int8_and_intx(generator: torch.Generator) -> None:
    plain = stand_in("Int8Tensor", int8(generator), block_size=[1, K])
    tensors = int8(generator, GROUP, -8, 7) | zero_point(generator, GROUP)
    target = {"target_dtype": INT4}
    grouped = stand_in("IntxUnpackedToInt8Tensor", tensors, block_size=(1, GROUP), **target)
    for layer, format in ((plain, "int8"), (grouped, "int4")):
        weight: Any = layer.weight
        scale = weight.scale.repeat_interleave(K // weight.scale.shape[1], 1)
        zero = getattr(weight, "zero_point", torch.zeros_like(weight.scale)).repeat_interleave(
            K // weight.scale.shape[1], 1
        )
        packed = pack_model(layer)
        assert isinstance(packed, Linear) and packed.format == format
        assert torch.equal(packed.dequantize().t(), scale * (weight.qdata.float() - zero))


@pytest.mark.parametrize("block", [[1, K], [16, 32], [], [N, K]], ids=str)
def test_float8(block: list[int], generator: torch.Generator) -> None:
    q = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = block or (N, K)
    scale = torch.rand(N // rows, K // columns, generator=generator) + 0.1
    tensors = {"_weight_qdata": q, "_weight_scale": scale if block else scale.reshape(())}
    packed = pack_model(stand_in("Float8Tensor", tensors, block_size=block))
    assert isinstance(packed, Linear) and packed.format == "fp8"
    assert torch.equal(
        packed.dequantize().t(), q.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    )


def test_what_is_refused(generator: torch.Generator) -> None:
    good = stand_in("Int8Tensor", int8(generator), block_size=[1, K])
    wrong = {
        "one of Int4Tensor, .*, got 'NVFP4Tensor'; quantize the original": stand_in("NVFP4Tensor", {}),
        r"_weight_scale: expected .* \[16, 1\], got": stand_in("Int8Tensor", int8(generator, GROUP), block_size=[1, K]),
        "act_pre_scale: expected none": stand_in(
            "Int8Tensor", int8(generator) | {"_weight_act_pre_scale": torch.ones(1)}, block_size=[1, K]
        ),
        "block_size: expected two sizes": stand_in("Int8Tensor", int8(generator), block_size=None),
        "float8_e4m3fn .*got int8": stand_in("Float8Tensor", int8(generator), block_size=[1, K]),
    }
    for message, layer in wrong.items():
        model = model_of(good, layer)
        with pytest.raises(ValueError, match=f"layer '2': .*{message}"):
            pack_model(model)
        assert model[1] is good
    with pytest.raises(
        ValueError, match="module: expected linear layers that torchao or bitsandbytes quantized, got none"
    ):
        pack_model(model_of())
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got int"):
        pack_model(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer '1': dtype: expected float16, bfloat16, float32 or None"):
        pack_model(model_of(good), dtype=torch.float64)


def test_quantize_model_leaves_them(generator: torch.Generator) -> None:
    model = model_of(stand_in("Int8Tensor", int8(generator), block_size=[1, K]), torch.nn.Linear(64, 64))
    model.requires_grad_(False)
    [left] = [layer for layer in quantize_model(model, group_size=32).weightonly_summary.left if layer.names == ("1",)]  # type: ignore[union-attr]
    assert left.left == "torchao quantized it; weightonly.nn.pack_model packs its numbers as they are"


# --- the libraries themselves -------------------------------------------------------------------------------


def configs() -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    return {
        "int8": quantization.Int8WeightOnlyConfig(),
        "int8 of dynamic x": quantization.Int8DynamicActivationInt8WeightConfig(),
        "intx": quantization.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=quantization.PerGroup(32)),
        "int4 of dynamic x": quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4),
        "float8": quantization.Float8WeightOnlyConfig(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int8 of dynamic x", "intx", "int4 of dynamic x", "float8"])
def test_torchao(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = hf_models.seeded(hf_models.llama).to(dtype)
    quantization.quantize_(model, configs()[name])
    weights = {name: m.weight for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    dense = {layer: read_torchao(weight).dequantize(torch.float32).t() for layer, weight in weights.items()}
    for layer, weight in weights.items():
        assert torch.equal(weight.dequantize(), dense[layer].to(dtype))
    exact = hf_models.seeded(hf_models.llama)
    with torch.no_grad():
        for layer, w in dense.items():
            exact.get_submodule(layer).weight.copy_(w)
    expected = hf_models.logits(exact, hf_models.TOKENS)
    # A state dict of torch.save goes into a model as torchao says, and from there into packed layers.
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    again = hf_models.seeded(hf_models.llama).to(dtype)
    again.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True), assign=True)
    for given in (model, again):
        packed = pack_model(given)
        found = {name: m for name, m in packed.named_modules() if isinstance(m, Linear)}
        assert found.keys() == weights.keys()
        if dtype == torch.float32:
            for layer, w in dense.items():
                assert torch.equal(found[layer].dequantize().t(), w)
        error = (hf_models.logits(packed, hf_models.TOKENS) - expected).norm()
        assert error <= (2e-5 if dtype == torch.float32 else 2e-2) * expected.norm()
    model.save_pretrained(tmp_path / "packed")
    loaded = hf_models.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=dtype)
    assert hf_models.same_state(loaded, model)


def test_model_that_transformers_quantized(tmp_path: Path) -> None:
    """It saves itself as a folder of this library, and forgets torchao."""
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    hf_models.seeded(hf_models.llama).save_pretrained(tmp_path / "dense")
    config = transformers.TorchAoConfig(configs()["int8"], modules_to_not_convert=["lm_head"])
    model = hf_models.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "torchao")
    expected = hf_models.logits(wo.hf.load_model(tmp_path / "torchao", dtype=torch.float32), hf_models.TOKENS)
    pack_model(model, dtype=torch.float32)
    assert torch.equal(hf_models.logits(model, hf_models.TOKENS), expected)
    model.save_pretrained(tmp_path / "packed")
    loaded = hf_models.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert torch.equal(hf_models.logits(loaded, hf_models.TOKENS), expected)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(nested: bool, generator: torch.Generator) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(128, 64, compute_dtype=torch.float32, compress_statistics=nested, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(
        torch.randn(64, 128, generator=generator), quant_type="nf4", compress_statistics=nested
    )
    model = torch.nn.Sequential(layer)
    with pytest.raises(ValueError, match="layer '0': weight: expected one that is quantized"):
        pack_model(model)
    model.to("cpu")
    dense = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    packed = only(pack_model(model))
    assert packed.format == "nf4"
    torch.testing.assert_close(packed.dequantize().t(), dense, rtol=1e-6, atol=1e-7)
