"""`bench model`: the models that it makes, the decode step that it times, its rows and its files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import weightonly as wo
from weightonly.bench.__main__ import main
from weightonly.bench.kept import DoesNotFit
from weightonly.bench.model import build as build_module
from weightonly.bench.model import measure as measure_module
from weightonly.bench.model.build import Built, build, share_keys
from weightonly.bench.model.decoder import Decoder
from weightonly.bench.model.measure import COLUMNS, Cell, ModelBench
from weightonly.bench.model.providers import MODEL_PROVIDERS, ModelProvider, register
from weightonly.bench.model.rows import ModelRows
from weightonly.bench.model.tables import markdown, write
from weightonly.bench.model.training import training_step
from weightonly.bench.report.results import Results, read_rows
from weightonly.bench.shapes import LLAMAS, MODELS, NAMED

CPU = torch.device("cpu")
TINY = LLAMAS["tiny"]
SMALL: dict[str, Any] = {"batch": (1, 2), "context": 20, "prompts": (16,), "train": (1, 8), "progress": False}


def built(name: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Built:
    return build(TINY, layers, MODEL_PROVIDERS[name], dtype, CPU)


@pytest.fixture
def providers() -> Iterator[dict[str, ModelProvider]]:
    """`MODEL_PROVIDERS`, as it was before when the test has ended."""
    before = dict(MODEL_PROVIDERS)
    yield MODEL_PROVIDERS
    MODEL_PROVIDERS.clear()
    MODEL_PROVIDERS.update(before)


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "given", "expected"), [((9, 0), None, "1"), ((9, 0), "0", "0"), ((8, 0), None, None)]
)
def test_attention_shares_keys_where_pytorch_can(
    capability: tuple[int, int], given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    monkeypatch.setenv(name, "")  # what the test leaves is undone
    os.environ.pop(name)
    if given is not None:
        os.environ[name] = given
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    share_keys(torch.device("cuda", 0))
    assert os.environ.get(name) == expected


def test_the_linears_of_a_model_follow_from_its_sizes() -> None:
    assert NAMED["llama3-8b"] == ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    assert NAMED["llama3-70b"] == ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))


@pytest.mark.parametrize("name", ["ours-int4", "ours-int8", "ours-nf4", "dense", "bitsandbytes"])
def test_a_provider_quantizes_the_layers_of_one_model(name: str) -> None:
    if name == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    made, dense = built(name), built("dense")
    for layer, expected in zip(made.model.model.layers, dense.model.model.layers, strict=True):
        for projection in ("self_attn.k_proj", "mlp.down_proj"):
            x = torch.randn(3, expected.get_submodule(projection).in_features)
            y, wanted = layer.get_submodule(projection)(x), expected.get_submodule(projection)(x)
            assert (y - wanted).norm() < 0.25 * wanted.norm(), projection
    assert torch.equal(made.model.lm_head.weight, dense.model.lm_head.weight)
    assert not any(tensor.is_meta for tensor in made.model.state_dict().values())
    assert made.load_s >= 0
    if name != "dense":
        assert made.weight_bytes < dense.weight_bytes
    Decoder(made.model, 2, 32, compile=False).check()


@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("tiny", "ours-int4-fused-head-int8"),
        ("tiny-qwen3-moe", "dense"),
        ("tiny-qwen3-moe", "ours-int4-fused"),
        ("tiny-gpt-oss", "ours-mxfp4-fused"),
        ("tiny-mixtral", "ours-int4"),
    ],
)
def test_mixtures_and_fused_models_decode_as_their_own_forward(model: str, provider: str) -> None:
    made = build(MODELS[model], 2, MODEL_PROVIDERS[provider], torch.float32, CPU).model
    decoder = Decoder(made, 2, 32, compile=False)
    decoder.check()
    decoder.run_linears(2)()
    decoder.run_head()()
    layer = made.model.layers[0]
    assert (getattr(layer.self_attn.k_proj, "_fused", None) is not None) == ("fused" in provider)
    assert isinstance(made.lm_head, wo.nn.Linear) == ("head" in provider)
    is_mixture = model != "tiny"
    assert len(decoder.mixtures()) == 2 * is_mixture
    if is_mixture and provider != "dense":
        assert isinstance(layer.mlp.experts, wo.nn.Experts)


def test_a_mixture_has_rows(tmp_path: Path) -> None:
    line = "model --shapes tiny-qwen3-moe --providers ours-int4-fused,dense --batch 1 --context 20 --prompts 16"
    measures = ["--measures", "decode,prefill", "--layers", "1", "--budget-ms", "1", "--quiet"]
    assert main([*line.split(), *measures, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "results.csv", "models", COLUMNS).rows
    assert set(rows["provider"]) == {"ours int4 fused", "torch bf16"} and set(rows["layers"]) == {1}
    assert rows["note"].isna().all() and (rows["linears_ms"] > 0).all()


def test_a_model_that_does_not_fit_is_given_up_after_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = built("ours-int4")
    seen: list[torch.nn.Module] = []
    monkeypatch.setattr(build_module, "free_memory", lambda device: made.weight_bytes // 2)
    monkeypatch.setattr(MODEL_PROVIDERS["ours-int4"], "quantize", seen.append)
    with pytest.raises(DoesNotFit, match=r"^2 layers of .* GB and embeddings of .* GB are .* GB, and .* GB are free$"):
        built("ours-int4")
    assert len(seen) == 1


def test_free_memory_of_a_cpu_is_known() -> None:
    assert build_module.free_memory(CPU) > 1 << 20


# --- the decode step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "ours-int4"])
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = built(name).model
    decoder = Decoder(model, 2, 40, compile=False)
    prompt = decoder.random_tokens(7)
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, min_new_tokens=9, do_sample=False
    )
    assert torch.equal(decoder.greedy(prompt, 9), written[:, 7:])


def test_one_function_is_compiled_for_all_layers() -> None:
    graphs: list[object] = []

    def backend(graph: Any, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = built("ours-int4", layers=4).model
    decoder = Decoder(model, 2, 40, compile=True, backend=backend)
    decoder.check()
    decoder.step()
    assert len(graphs) == 3  # embeddings, a layer, output embeddings
    prompt = decoder.random_tokens(7)
    assert torch.equal(decoder.greedy(prompt, 5), Decoder(model, 2, 40, compile=False).greedy(prompt, 5))
    torch.compiler.reset()


def test_a_step_is_the_same_step_when_it_is_repeated() -> None:
    decoder = Decoder(built("dense").model, 1, 40, compile=False)
    decoder.fill(20)
    tokens = decoder.tokens.clone()
    decoder.step()
    first = decoder.tokens.clone()
    decoder.tokens.copy_(tokens)
    decoder.step()
    assert torch.equal(decoder.tokens, first) and int(decoder.position) == 20


@pytest.mark.parametrize("broken", ["a prompt", "a decode step"])
def test_a_wrong_model_is_not_timed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(built("dense").model, 2, 40, compile=False)
    name = "prompt" if broken == "a prompt" else "_hidden"
    right = getattr(decoder, name)
    monkeypatch.setattr(decoder, name, lambda *arguments: -right(*arguments))
    with pytest.raises(RuntimeError, match=f"relative error .* of the logits of {broken}, expected at most 0.1"):
        decoder.check()


def test_all_linears_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(built("dense").model, 2, 40, compile=False)
    seen: list[tuple[int, int]] = []
    for module in decoder.linears():
        module.register_forward_hook(lambda module, x, y: seen.append((x[0].shape[0], module.out_features)))
    decoder.run_linears(5)()
    assert len(seen) == 14 and {rows for rows, _ in seen} == {5}
    assert sum(n for _, n in seen) == sum(n for _, n in decoder.linear_shapes())


@pytest.mark.parametrize("name", ["ours-nf4", "bitsandbytes"])
def test_a_training_step_learns(name: str) -> None:
    for package in ("peft", "bitsandbytes"):
        pytest.importorskip(package)
    model = built(name).model
    step = training_step(model, 2, 8)
    losses = [float(step()) for _ in range(8)]
    assert losses[-1] < losses[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7


# --- rows and files ------------------------------------------------------------------------------------------------


def bench(folder: Path, **more: Any) -> ModelBench:
    return ModelBench(shapes=["tiny"], out=folder, device="cpu", **SMALL, **more)


def command(folder: Path, *more: str) -> list[str]:
    line = (
        "model --shapes tiny --providers ours-int4,dense --batch 1,2 --context 20 --prompts 16 --train 1,8 --device cpu"
    )
    return [*line.split(), "--budget-ms", "1", "--quiet", "--out", str(folder), *more]


def test_the_command_writes_rows_tables_and_a_picture_and_then_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(tmp_path)) == 0
    captured = capsys.readouterr()
    files = [tmp_path / name for name in ("results.csv", "model.md", "tiny.png")]
    assert captured.out.splitlines() == [str(file) for file in files]
    found = read_rows(files[0], "models", COLUMNS)
    rows = found.rows
    assert len(rows) == 2 * (2 + 1 + 1) and (rows["tokens_s"] > 0).all() and rows["note"].isna().all()
    assert set(rows["provider"]) == {"ours int4", "torch bf16"}
    assert list(rows["measure"][:4]) == ["decode", "decode", "prefill", "train"]
    decode = rows[rows["measure"] == "decode"]
    assert (decode["linears_ms"] > 0).all() and (decode["head_ms"] > 0).all() and decode["roofline_ms"].isna().all()
    assert decode["ms"].to_list() == pytest.approx((1e3 * decode["batch"] / decode["tokens_s"]).to_list(), rel=0.01)
    assert {"CPU", "method", "command"} <= found.facts.keys()
    text = files[1].read_text()
    assert "## tiny, 2 layers, bf16" in text and "linears / ms" in text and "roofline" not in text.partition("| | |")[0]
    assert files[2].stat().st_size > 0

    monkeypatch.setattr(measure_module, "build", lambda *arguments, **options: pytest.fail("it began to work"))
    assert main(command(tmp_path)) == 0
    pd.testing.assert_frame_equal(read_rows(files[0], "models", COLUMNS).rows, rows)

    capsys.readouterr()
    assert main(["model", "--from", str(files[0]), "--out", str(tmp_path / "again")]) == 0
    again = [tmp_path / "again" / file.name for file in files[1:]]
    assert capsys.readouterr().out.splitlines() == [str(file) for file in again]
    assert again[0].read_text().partition("| | |")[0] == text.partition("| | |")[0]


def test_a_time_budget_leaves_cells_for_the_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, "--measures", "decode", "--batch", "1")
    assert main([*arguments, "--time-budget", "1e-9"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "2 cells are left: the same command measures them" and not captured.out
    assert not (tmp_path / "results.csv").exists()
    assert main(arguments) == 0
    assert len(read_rows(tmp_path / "results.csv", "models", COLUMNS).rows) == 2


class Broken(ModelProvider):
    name = "broken"
    error: Exception | None = RuntimeError("no such kernel\nand more lines")

    def quantize(self, layer: torch.nn.Module) -> None:
        if self.error is not None:
            raise self.error


def test_what_fails_says_why_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], providers: dict[str, ModelProvider]
) -> None:
    broken = Broken()
    register(broken)
    arguments = command(tmp_path, "--measures", "decode", "--providers", "broken,dense", "--batch", "1")
    assert main(arguments) == 1
    expected = "failed: RuntimeError: no such kernel"
    assert f"model: tiny broken decode 1 x 20: {expected}" in capsys.readouterr().err.splitlines()
    rows = read_rows(tmp_path / "results.csv", "models", COLUMNS).rows.set_index("provider")
    assert rows.loc["broken", "note"] == expected and rows.loc["torch bf16", "ms"] > 0
    assert f"- broken, 1 x 20: {expected}" in (tmp_path / "model.md").read_text().splitlines()

    broken.error = DoesNotFit("it is too large")
    assert main(arguments) == 0  # tried again, with another answer
    again = read_rows(tmp_path / "results.csv", "models", COLUMNS).rows.set_index("provider")
    assert again.loc["broken", "note"] == "does not fit: it is too large" and len(again) == 2
    broken.error = None
    assert main(arguments) == 0  # not tried again
    assert read_rows(tmp_path / "results.csv", "models", COLUMNS).rows["note"].notna().sum() == 1


def test_what_is_left_out_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(tmp_path, measures=["decode"], time_budget_s=1e-9).measure()
    assert "model: torchao is left out: it runs on CUDA only" in capsys.readouterr().err.splitlines()
    torchao = MODEL_PROVIDERS["torchao"]
    cuda = torch.device("cuda")
    assert torchao.unavailable(cuda, torch.float16) == "it takes torch.bfloat16 only, not torch.float16"
    assert torchao.untrainable() and "train" not in {cell.measure for cell in of_provider("torchao")}


def of_provider(name: str) -> list[Cell]:
    provider, measures = MODEL_PROVIDERS[name], ["decode", "prefill", "overlap", "train"]
    every = bench(Path(), measures=measures, compile=True)
    return list(every.cells([provider.label(CPU, every.dtype)]))


def test_cells_of_one_batch_follow_each_other_and_training_comes_last() -> None:
    cells = [(cell.measure, cell.batch, cell.tokens, cell.compiled) for cell in of_provider("ours-int4")]
    steps = [("decode", 1, 20, True), ("overlap", 1, 20, True), ("decode", 2, 20, True), ("overlap", 2, 20, True)]
    assert cells == [*steps, ("prefill", 1, 16, False), ("train", 1, 8, False)]
    assert "overlap" not in {cell.measure for cell in of_provider("dense")}


def test_rows_of_overlap() -> None:
    """A GPU alone has such launches; the rows are made the same way here."""
    model = ModelRows(built("ours-int4"), CPU, None, budget_ms=1)
    rows = model.rows(Cell("tiny", 2, "ours int4", "fp32", False, "overlap", 2, 20))
    assert [row["overlap"] for row in rows] == ["False", "True", "constant_weights"]
    assert all(row["same_tokens"] and row["ms"] > 0 for row in rows)
    assert wo.launch_overlap() is True


def test_tables_of_a_gpu() -> None:
    """Of made-up rows: ratios to the roofline and to the times without overlap."""
    cell = {"model": "m", "layers": 2, "provider": "ours int4", "dtype": "bf16", "compiled": True, "note": ""}
    decode = {"measure": "decode", "batch": 1, "tokens": 512, "ms": 4.0, "linears_ms": 3.0, "head_ms": 0.5}
    decode |= {"roofline_ms": 2.0, "tokens_s": 250.0}
    modes = [("False", 4.4), ("True", 4.0), ("constant_weights", 2.2)]
    overlap = [
        {"measure": "overlap", "batch": 1, "tokens": 512, "ms": ms, "tokens_s": 1e3 / ms}
        | {"overlap": mode, "same_tokens": True}
        for mode, ms in modes
    ]
    text = markdown(Results(pd.DataFrame([cell | row for row in [decode, *overlap]], columns=COLUMNS), {"GPU": "G"}))
    tables = [[w.strip() for w in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    first = dict(zip(tables[0], tables[2], strict=True))
    assert (first["linears / ms"], first["head / ms"], first["x roofline"]) == ("0.75", "0.12", "2.00")
    second = [dict(zip(tables[3], line, strict=True)) for line in tables[5:8]]
    assert [line["x without overlap"] for line in second] == ["1.00", "1.10", "2.00"]
    assert {line["same tokens"] for line in second} == {"True"}


def test_rows_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    row = {"model": "tiny", "layers": 2, "provider": "ours int4", "measure": "decode", "ms": 1.0}
    Results(pd.DataFrame([row], columns=COLUMNS), {"GPU": "NVIDIA H200"}).write(tmp_path / "results.csv")
    with pytest.raises(ValueError, match="expected measurements of one GPU, got NVIDIA H200, "):
        bench(tmp_path).measure()


def test_no_rows_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows: expected measurements, got none"):
        write(Results(pd.DataFrame(columns=COLUMNS)), tmp_path)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes llama9", "shapes: expected models, some of llama3-8b, .*, got 'llama9'"),
        ("--shapes minilm", "shapes: expected models, .*, got 'minilm'"),
        ("--measures speed", "measures: expected some of decode, .*, got 'speed'"),
        ("--measures overlap", "measures: overlap needs launches on a GPU, got device cpu"),
        ("--providers nobody", "providers: expected .*, got 'nobody'"),
        ("--providers torchao", "providers: torchao cannot run this: it runs on CUDA only"),
        ("--layers 0", "layers: expected a positive number, got 0"),
        ("--budget-ms 0", "budget_ms: expected a positive number, got 0.0"),
        ("--time-budget -1", "time_budget_s: expected a positive number, got -1.0"),
        ("--batch 0", r"batch: expected integers from 1 on, got \[0\]"),
        ("--context 0", "context: expected integers from 1 on, got 0"),
        ("--prompts 1", r"prompts: expected integers from 2 on, got \[1\]"),
        ("--train 4,1", "train, tokens: expected integers from 2 on, got 1"),
        ("--from nowhere.csv", ".*nowhere.csv.*"),
        ("--train 4", "train: expected LINES,TOKENS such as 4,512, got 1 numbers"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_the_command_refuses_in_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "out", *options.split())) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(f"error: {message}", error)
    assert not (tmp_path / "out").exists()


def test_a_cpu_is_measured_only_where_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["model", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: model needs a CUDA GPU: none is visible here\n"
    with pytest.raises(RuntimeError, match="model needs a CUDA GPU"):
        ModelBench(shapes=["tiny"], out=tmp_path / "out", **SMALL).measure()
    assert not (tmp_path / "out").exists()


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"bench model needs the package transformers: pip install '\.\[bench,hf\]'"):
        bench(tmp_path).measure()


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_models_on_a_gpu(cuda_device: torch.device, tmp_path: Path) -> None:
    found = ModelBench(shapes=["tiny"], out=tmp_path, device=cuda_device, budget_ms=5, **SMALL).measure()
    rows = found.results.rows
    ours = rows[rows["provider"].str.startswith("ours")]
    assert (ours["note"] == "").all() and (ours["tokens_s"] > 0).all() and (ours["peak_mb"] > 0).all()
    overlap = ours[ours["measure"] == "overlap"]
    assert len(overlap) and overlap["same_tokens"].all()
