"""How commands end: in one line, whatever is wrong; quietly, where nobody reads; with 130 after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests import ROOT
from tests.hf_models import write_model

import weightonly as wo
from weightonly import __main__ as command
from weightonly.extras import EXTRAS


def weightonly(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process; code: what runs before it."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] = {[*words]!r}\n{code}\n"
    start += "from weightonly.__main__ import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False, timeout=300)


WITHOUT = """
from importlib.abc import MetaPathFinder
class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""
"""Python without a package: nothing else of it changes."""


@pytest.fixture
def folder(tmp_path: Path, generator: torch.Generator) -> Path:
    """A small AWQ checkpoint."""
    return write_model(tmp_path / "awq", "awq", generator)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 64)}, tmp_path / "dense/model.safetensors")
    return tmp_path / "dense"


WRONG: dict[str, tuple[list[str], str]] = {
    "a file": (
        ["inspect", "{dense}/model.safetensors"],
        "expected the folder of a checkpoint, with config.json, got a",
    ),
    "a file that is not there": (
        ["inspect", "models/x.safetensors"],
        "x.safetensors: .* got none$",
    ),
    "a GGUF file": (["inspect", "{gguf}"], r"x\.gguf: version and counts: .*: the file is truncated or damaged$"),
    "a folder of GGUF": (["convert", "{gguf}/..", "{out}"], r"got a GGUF file; give the file itself: .*x\.gguf$"),
    "a GGUF file to run": (["run", "{gguf}", "--tokens", "1"], r"x\.gguf: version and counts: "),
    "a hub id": (
        ["inspect", "org/model"],
        "org/model: expected a folder, or a model that was .* HF_HUB_OFFLINE",
    ),
    "a hub id to run": (["run", "org/model", "--tokens", "1"], "^error: org/model: expected a folder, or a model"),
    "dense, to convert": (
        ["convert", "{dense}", "{out}"],
        "a dense model is quantized by `weightonly quantize`",
    ),
    "dense, to explain": (["explain", "{dense}"], "a dense model is quantized by `weightonly quantize`"),
    "an arch": (["explain", "{dense}", "--arch", "sm50"], "a dense model|arch: expected one of cpu, sm70"),
    "an arch to convert for": (
        ["convert", "{dense}", "{out}", "--arch", "x"],
        "arch: expected one of cpu, sm70, .*'x",
    ),
    "no such device": (["run", "{dense}", "--tokens", "1", "--device", "banana"], "device: expected the name of a dev"),
    "another device": (
        ["run", "{dense}", "--tokens", "1", "--device", "mps"],
        "--device: expected cpu, cuda",
    ),
    "temperature": (["run", "x", "--tokens", "1", "--temperature", "-1"], "--temperature: expected 0 or more, got -1"),
    "not a number": (
        ["run", "x", "--tokens", "1", "--temperature", "nan"],
        "--temperature: expected 0 or more, got nan",
    ),
    "top-p": (["run", "x", "--tokens", "1", "--top-p", "1.5"], "--top-p: expected more than 0 and at most 1, got 1.5"),
    "seed alone": (["run", "x", "--tokens", "1", "--seed", "1"], "--seed: expected --temperature above 0 beside it"),
    "chat of tokens": (["run", "x", "--tokens", "1", "--chat"], "--chat: expected --prompt, which the chat template"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(
    case: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "x.gguf").touch()
    (tmp_path / "models/x.gguf").write_bytes(b"GGUF")
    words, message = WRONG[case]
    names = {"dense": dense, "gguf": tmp_path / "models/x.gguf", "out": tmp_path / "out"}
    words = [word.format(**names).replace("models/x.gguf/..", "models") for word in words]
    assert command.main(words) == 1
    out, error = capsys.readouterr()
    assert re.search(message, error.removesuffix("\n")) and error.startswith("error: ") and error.count("\n") == 1
    assert "Traceback" not in out + error


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_one_line(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(dense), "--tokens", "1", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == "error: device: expected 'cpu', as no CUDA GPU is visible, got 'cuda'\n"


def test_errors_of_any_class_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("strange\x1b[2J")

    monkeypatch.setattr("weightonly.commands.open_checkpoint", fail)
    assert command.main(["inspect", str(folder)]) == 1
    line = r"error: KeyError: 'strange\x1b[2J' (WEIGHTONLY_TRACEBACK=1 shows where)" + "\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("WEIGHTONLY_TRACEBACK", "1")
    command.main(["inspect", str(folder)])
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize("words", ["info", "inspect {folder}", "--help", "explain {folder}"])
def test_a_closed_pipe_is_quiet(words: str, folder: Path) -> None:
    arguments = words.format(folder=folder).split()
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "weightonly", *arguments], stdout=writer, stderr=subprocess.PIPE, check=False, cwd=ROOT
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (0 if words == "--help" else 141, b"")  # argparse swallows it


def test_ctrl_c_in_convert_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    code = (
        f"import signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from weightonly.__main__ import main\n"
        "from weightonly.tensor_file import TensorWriter\n"
        "def slow(*args, **kwargs):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "TensorWriter.add = slow\n"
        f"sys.exit(main(['convert', {str(folder)!r}, {str(tmp_path / 'out')!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.splitlines()[-1] == "interrupted" and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["awq"]


# --- packages that are missing -----------------------------------------------------------------------------------

MISSING: dict[str, tuple[str, list[str], str]] = {
    "transformers": ("transformers", ["run", "{folder}", "--tokens", "1"], "hf"),
    "accelerate": ("accelerate", ["run", "{folder}", "--tokens", "1", "--device", "cpu"], "hf"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_package_is_named_with_what_installs_it(case: str, folder: Path) -> None:
    package, words, extra = MISSING[case]
    run = weightonly(*(word.format(folder=folder) for word in words), code=WITHOUT.format(package=package))
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert last.startswith("error: ") and re.search(rf"{package}: expected it|expected {package} >=", last)
    assert f"pip install '{package}>=" in last and f"pip install '.[{extra}]' in a checkout of weightonly" in last


def in_python(code: str, without: str) -> str:
    """What Python without a package writes to stderr."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WITHOUT.format(package=without)}\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False).stderr


def test_weightonly_hf_says_which_package_it_lacks(dense: Path) -> None:
    error = in_python("import weightonly.hf", "transformers").splitlines()[-1]
    assert error.startswith("ImportError: weightonly.hf: expected transformers >= ") and "pip install '.[hf]'" in error
    load = f"import weightonly.hf; weightonly.hf.load_model({str(dense)!r}, device_map='cpu')"
    error = in_python(load, "accelerate").splitlines()[-1]
    assert "accelerate: expected it to be installed, got none; pip install 'accelerate>=" in error


def test_weightonly_hf_does_without_peft() -> None:
    code = "import logging; logging.basicConfig(level=20); import weightonly.hf"
    error = in_python(code, "peft")
    assert "Traceback" not in error and "PEFT does not know weightonly.nn.Linear: expected peft >= " in error


@pytest.mark.parametrize(
    "code", ["import weightonly as wo; wo.bench", "import weightonly.bench", "from weightonly import bench"]
)
def test_the_benchmark_without_pandas_says_what_installs_it(code: str) -> None:
    line = in_python(code, "pandas").splitlines()[-1]
    expected = "ModuleNotFoundError: pandas: expected it to be installed, got none; pip install 'pandas>=2', or "
    assert line == f"{expected}pip install '.[bench]' in a checkout of weightonly"


def test_the_command_of_the_benchmark_says_it_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\n" + WITHOUT.format(package="pandas"))
    places = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-m", "weightonly.bench", "--help"]
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | places)
    assert run.returncode == 1 and run.stderr.startswith("error: pandas: expected it") and run.stderr.count("\n") == 1


def test_versions_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert extras[extra] == [f"{package}{versions}" for package, versions in packages.items()]


# --- names -------------------------------------------------------------------------------------------------------


def test_dir_shows_public_names_alone() -> None:
    assert {*dir(wo)} == {*wo.__all__, "__version__", "bench", "hf", "parallel", "vllm"}
    assert all(getattr(wo, name) is not None for name in dir(wo) if name != "vllm")
