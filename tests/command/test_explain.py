"""`explain`: the choice is that of `gemm`; what a layer, a model, a weight and a folder are."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_models import write_model

import weightonly as wo
from weightonly import __main__ as command
from weightonly.cpu import library
from weightonly.heuristics import select
from weightonly.heuristics.grouped import select_grouped, select_layer
from weightonly.heuristics.launches import estimate_us
from weightonly.heuristics.problem import Problem

ROWS = (1, 7, 64, 512, 4096)
PROBLEMS: dict[str, dict[str, Any]] = {
    "int4, sm90": {"format": "int4", "group_size": 128, "arch": "sm90", "sm_count": 132},
    "int4 with zeros, sm80": {"format": "int4", "group_size": 64, "arch": 80, "sm_count": 108, "zeros": True},
    "int8 per channel, sm89": {"format": "int8", "group_size": -1, "arch": (8, 9), "sm_count": 58},
    "nf4, sm75": {"format": "nf4", "group_size": 64, "arch": "75", "sm_count": 40},
    "nvfp4, H100 PCIe": {"format": "nvfp4", "group_size": 16, "arch": "sm_90a", "sm_count": 114},
    "int8, sm70": {"format": "int8", "group_size": 128, "arch": 70, "sm_count": 80},
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_the_choice_is_the_one_that_gemm_takes(case: str) -> None:
    arguments = PROBLEMS[case]
    found = wo.explain(k=4096, n=3072, m=ROWS, **arguments)
    for m, row in zip(ROWS, found.rows, strict=True):
        config = select(m, 3072, 4096, **arguments)
        problem = Problem(m, 3072, 4096, **arguments)
        assert (row.m, row.config, row.kernel, row.family) == (m, config, config.name, config.family)
        assert row.us == pytest.approx(estimate_us(config, problem)) and row.bound in ("memory", "compute", "launch")
        assert f"{row.us:.1f} us" in str(found) and row.bound in row.why and (row.next is None or row.next in row.why)


def model(**arguments: Any) -> Any:
    layers = [torch.nn.Linear(256, 128), torch.nn.Linear(256, 128), torch.nn.Linear(128, 256)]
    return wo.nn.quantize_model(torch.nn.Sequential(*layers), dtype=torch.float16, **arguments)


def test_a_model_has_a_row_for_each_kind_of_layer() -> None:
    found = wo.explain(model(group_size=64), m=[1, 8], arch="sm90")
    kinds = [(row.count, row.kind.k, row.kind.n, row.m) for row in found.rows]
    assert kinds == [(2, 256, 128, 1), (2, 256, 128, 8), (1, 128, 256, 1), (1, 128, 256, 8)]
    assert found.target.startswith("sm90, 132 SMs") and "packed as tiled" in str(found)
    assert "2 layers 256 x 128 int4, groups of 64" in str(found) and "1 layer 128 x 256" in str(found)


def test_weights_and_layers_are_explained_alike() -> None:
    layer = model(group_size=64)[0]
    of_layer = wo.explain(layer, 16, arch=80).rows[0]
    assert wo.explain(layer.operand, 16, arch=80).rows[0] == of_layer
    assert wo.explain(layer.packed, 16, arch=80).rows[0] == of_layer
    assert wo.explain(k=256, n=128, group_size=64, m=16, arch=80).rows[0].config == of_layer.config
    unknown = wo.preprocess(wo.unpack(layer.packed))
    assert wo.explain(unknown, 16, group_size=64, arch=80).rows[0].config == of_layer.config


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU is what computes where no GPU is")
def test_on_a_cpu_it_is_what_the_library_chooses() -> None:
    backend = library.backend()
    [row] = wo.explain(model(group_size=64)[2], 1).rows
    if backend.library is None:
        assert row.kernel == "reference" and backend.reason in row.why
    else:
        assert (row.family, row.us) == (library.LEVELS[backend.level], None) and row.kernel in ("few", "many", "tiles")


def test_the_reference_path_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "backend", lambda: library.Backend(None, -1, "WEIGHTONLY_CPU=off"))
    [row] = wo.explain(k=256, n=128, m=3, arch="cpu").rows
    assert (row.kernel, row.why) == ("reference", "the equation in PyTorch, because WEIGHTONLY_CPU=off")


def experts() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**sizes, intermediate_size=256, num_key_value_heads=2, num_local_experts=4)
    mixture: torch.nn.Module = transformers.MixtralForCausalLM(config).half()
    return wo.nn.quantize_model(mixture, group_size=64)


def test_experts_are_those_of_the_layer_as_a_whole() -> None:
    found = [row for row in wo.explain(experts(), 32, arch="sm90").rows if row.kind.experts]
    problems = [Problem(32, n, k, "int4", 64, 90, 132) for k, n in ((128, 512), (256, 128))]
    layer = select_layer(problems[0], problems[1], 4, True)
    assert layer is not None and [row.config for row in found] == [layer.first, layer.second]
    [alone] = wo.explain(k=128, n=512, experts=4, group_size=64, m=32, arch="sm90").rows
    assert alone.config == select_grouped(problems[0], 4)
    [turing] = wo.explain(k=128, n=512, experts=4, group_size=64, m=32, arch="sm75").rows
    assert turing.kernel == "gemm for each expert" and "8 rows" in turing.why


def test_codes_that_a_gpu_has_no_kernels_for_say_so() -> None:
    [row] = wo.explain(k=256, n=128, format="nf4", m=1, arch="sm70").rows
    assert row.kernel == "none" and "sm70 has no kernels for codes" in row.why


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, TypeError, "expected a weight, or k and n"),
    "a tensor": ({"weight": torch.zeros(2)}, TypeError, "weight: expected a module, .* got Tensor"),
    "a dense model": (
        {"weight": torch.nn.Linear(4, 4)},
        ValueError,
        "weight: expected packed layers, got none in L",
    ),
    "no rows": ({"k": 128, "n": 64, "m": []}, ValueError, "m: expected at least one number of rows, got none"),
    "k": ({"k": 0, "n": 64}, ValueError, "k: expected at least 1, got 0"),
    "n": ({"k": 128, "n": "64"}, TypeError, "n: expected an int, got str"),
    "experts": ({"k": 128, "n": 64, "experts": 0}, ValueError, "experts: expected at least 1, got 0"),
    "SMs": ({"k": 128, "n": 64, "sm_count": 0, "arch": 90}, ValueError, "sm_count: expected at least 1, got 0"),
    "zeros": ({"k": 128, "n": 64, "zeros": "no"}, TypeError, "zeros: expected True, False or None, got str"),
    "zeros of codes": ({"k": 128, "n": 64, "format": "nf4", "zeros": True}, ValueError, "zeros: expected none for nf4"),
    "dtype": ({"k": 128, "n": 64, "dtype": "fp16"}, TypeError, "dtype: expected one of torch.float16"),
    "rows": ({"k": 64, "n": 64, "group_size": 64, "m": 0}, ValueError, "m: expected at least 1, got 0"),
    "group size": ({"k": 100, "n": 64, "m": 1}, ValueError, "group_size: expected -1 or a divisor of K=100, got 128"),
    "format": ({"k": 64, "n": 64, "format": "int3"}, ValueError, "format: expected one of"),
    "arch": ({"k": 128, "n": 64, "arch": "sm50"}, ValueError, "arch: expected one of cpu, sm70"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    arguments, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        wo.explain(**arguments)


def test_the_command_shows_a_folder(
    tmp_path: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "awq", "awq", generator)
    assert command.main(["explain", str(folder), "--m", "1,64", "--arch", "sm80", "--sm-count", "72"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sm80, 72 SMs") and "M = 1  " in out and "M = 64  " in out and "zeros" in out
    assert select(64, 128, 256, "int4", 32, 80, 72, zeros=True).name in out
