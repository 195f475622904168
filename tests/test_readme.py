"""README.md is run: its Python, its command lines, and the paths and targets that it names."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from weightonly.bench import PROVIDERS, shapes
from weightonly.bench.report import GROUP_SIZES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return found


def command_lines() -> list[list[str]]:
    """The words of every line of a bash block, without its comment."""
    lines = "".join(blocks("bash")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def module_lines(*, on_a_cpu: bool) -> list[list[str]]:
    """The lines that run a module of ours: those that say they run on a CPU, or those that want more."""
    ours = [words for words in command_lines() if words[:2] == ["python", "-m"]]
    return [words[2:] for words in ours if on_a_cpu == (words[3:] == ["info"] or "cpu" in words)]


def name_of(words: list[str]) -> str:
    return " ".join(words[:4])


def layout_paths() -> list[str]:
    """What the layout section names: folders of the repository, and what is in the folder named before."""
    section = README.partition("## How the code is laid out\n")[2].partition("\n## ")[0]
    paths: list[str] = []
    for item in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]:
        folder = ""
        for name in re.findall(r"`(\w+/|\w+\.(?:py|h|cuh|cu|cpp))`", item):
            if not folder or (name.endswith("/") and (ROOT / name).is_dir()):
                folder = name
            paths.append(name if name == folder else folder + name)
    return paths


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sources = blocks("python")
    namespace: dict[str, Any] = {"__name__": "readme"}
    for source in sources:
        line = README[: README.index(source)].count("\n")
        # Blank lines in front: a traceback then shows the line of the README.
        exec(compile("\n" * line + source, str(ROOT / "README.md"), "exec"), namespace)
    x, y = namespace["x"].float(), namespace["y"]
    expected = torch.nn.functional.silu(x @ namespace["w_used"].float())
    assert (y.float() - expected).norm() < 2e-3 * expected.norm()
    # What four bits cost: the weight that the example quantizes is still that weight.
    assert (namespace["w_used"] - namespace["w"]).float().norm() < 0.15 * namespace["w"].float().norm()
    assert namespace["hidden"].shape == (4, 512)
    assert (namespace["restored"] - namespace["dense"]).float().norm() < 0.15 * namespace["dense"].float().norm()
    assert set(namespace["frame"]["m"]) == {1, 16}


@pytest.mark.parametrize("words", module_lines(on_a_cpu=True), ids=name_of)
def test_command_runs_on_a_cpu(words: list[str], tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    run = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 1


@pytest.mark.parametrize("words", module_lines(on_a_cpu=False), ids=name_of)
def test_command_for_a_gpu_has_valid_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "weightonly":
        tuned = importlib.import_module("weightonly.__main__")._parser().parse_args(words[1:])
        assert tuned.command == "tune" and shapes.resolve(tuned.shapes)
        return
    command_line = importlib.import_module("weightonly.bench.__main__")
    asked: list[Any] = []

    def run(options: Any) -> int:
        asked.append(options)
        return 0

    for command in ("_run_sweep", "_run_regret", "_run_chain", "_run_report", "_run_conversions"):
        monkeypatch.setattr(command_line, command, run)
    assert command_line.main(words[1:]) == 0
    (options,) = asked
    named = {"chain": "model", "report": "models"}.get(options.command, "shapes")
    assert shapes.resolve(getattr(options, named))
    if options.command == "report":
        assert set(options.formats) <= set(GROUP_SIZES)
    if options.command == "sweep":
        assert options.providers == "all" or set(options.providers) <= set(PROVIDERS)


def test_the_commands_that_the_tests_above_run_are_there() -> None:
    assert ["weightonly", "info"] in module_lines(on_a_cpu=True)
    assert {words[0] for words in module_lines(on_a_cpu=True)} == {"weightonly", "weightonly.bench"}
    assert {"regret", "chain", "report", "tune", "conversions"} <= {words[1] for words in module_lines(on_a_cpu=False)}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):(?!=)", makefile, re.MULTILINE))
    named = {words[1] for words in command_lines() if words[0] == "make"}
    assert named == {"demo", "test"}
    assert named | set(re.findall(r"`make (\w+)`", README)) <= targets


@pytest.mark.parametrize("path", layout_paths())
def test_path_of_the_layout_section_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_layout_section_names_every_folder_of_code() -> None:
    code = [path for path in ROOT.glob("[!.]*/*") if path.suffix in (".py", ".h", ".cuh")]
    assert {f"{path.parent.name}/" for path in code} - {"build/"} <= set(layout_paths())


def test_variables_are_those_of_the_code() -> None:
    named = set(re.findall(r"`(WEIGHTONLY_\w+)`", README))
    paths = [*(ROOT / "kernels").rglob("*.py"), ROOT / "weightonly" / "tuned.py"]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert named
    assert {name for name in named if f'"{name}"' not in sources} == set()
