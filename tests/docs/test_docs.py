"""README.md and docs/ are run: their Python and their command lines. What they name is there: paths, targets, tables.

A line `<!-- needs: gpu -->` before a Python block skips the block where there is no GPU with kernels, one with the name
of a package where that is not installed. The other blocks of a page run in order, in one namespace, on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pytest
import torch
from tests import ROOT

import weightonly as wo
from tools import drawings, measured, pictures, published
from weightonly.bench import PROVIDERS, shapes
from weightonly.bench.report import GROUP_SIZES
from weightonly.bench.report.results import read
from weightonly.bench.report.tables import lost

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPU = "gpu"
PACKAGES = {"bitsandbytes", "torchao"}
"""What blocks may need, beside a GPU."""
TOOLS = {"tools.regret", "tools.regret_experts", "tools.conversions"}


class Block(NamedTuple):
    source: str
    line: int  # of the page, before its first
    needs: str


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of one language, in order."""
    text = page.read_text(encoding="utf-8")
    pattern = rf"^(?:<!-- needs: (\w+) -->\n)?```{language}\n(.*?)^```$"
    found = re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    return [Block(match[2], text[: match.start(2)].count("\n"), match[1] or "") for match in found]


def run_blocks(page: Path, chosen: list[Block]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in chosen:
        # Blank lines in front: a traceback then shows the line of the page.
        exec(compile("\n" * block.line + block.source, str(page), "exec"), namespace)
    return namespace


def runnable(page: Path, *, on_a_gpu: bool) -> list[Block]:
    """The Python of a page that this machine can run."""
    there = {"", *([GPU] if on_a_gpu else []), *(name for name in PACKAGES if importlib.util.find_spec(name))}
    return [block for block in blocks(page, "python") if block.needs in there]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with_python(*, on_a_gpu: bool) -> list[Any]:
    """Those with blocks that need a GPU, or those with others."""
    found = [page for page in PAGES if any((block.needs == GPU) == on_a_gpu for block in blocks(page, "python"))]
    return [pytest.param(page, id=name_of(page)) for page in found]


def command_lines() -> list[list[str]]:
    """The words of every line of a bash block, without its comment."""
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.source.splitlines()]
    words = (shlex.split(line, comments=True) for line in lines)
    return list(map(list, dict.fromkeys(tuple(line) for line in words if line)))


def module_lines(*, on_a_cpu: bool) -> list[list[str]]:
    """The lines that run a module of ours: those that say they run on a CPU, or those that want more."""
    ours = [words for words in command_lines() if words[:2] == ["python", "-m"]]
    return [words[2:] for words in ours if on_a_cpu == (words[3:] == ["info"] or "cpu" in words)]


def command_name(words: list[str]) -> str:
    return " ".join(words[:4])


def test_python_of_the_readme(without_gpu: None) -> None:
    found = run_blocks(README, blocks(README, "python"))
    w = wo.dequantize(found["qweight"], found["scales"], found["zeros"])
    expected = torch.nn.functional.silu(found["x"].float() @ w.float())
    assert (found["y"].float() - expected).norm() < 2e-3 * expected.norm()
    # What four bits cost: the weight that the example quantizes is still that weight.
    assert (w - found["w"]).float().norm() < 0.15 * found["w"].float().norm()
    assert found["hidden"].shape == (4, 512)


@pytest.mark.parametrize("page", pages_with_python(on_a_gpu=False))
def test_python_runs(page: Path, without_gpu: None) -> None:
    if not (found := runnable(page, on_a_gpu=False)):
        pytest.skip("what its Python needs is not installed")
    run_blocks(page, found)


@pytest.mark.gpu
@pytest.mark.parametrize("page", pages_with_python(on_a_gpu=True))
def test_python_runs_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_device: object) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page, runnable(page, on_a_gpu=True))


def test_needs_are_those_that_the_tests_know() -> None:
    needs = {block.needs for page in PAGES for block in blocks(page, "python")}
    assert needs == {"", GPU, *PACKAGES}


def test_checkpoint_page_multiplies_by_what_the_file_holds(without_gpu: None) -> None:
    page = ROOT / "docs" / "guides" / "checkpoints.md"
    found = run_blocks(page, blocks(page, "python"))
    x, up, norm = found["x"].float(), found["loaded"]["up"], found["loaded"]["norm"]
    w = wo.dequantize(up.packed, up.scales).float()
    expected = torch.nn.functional.rms_norm(x @ w, norm.normalized_shape)
    assert (found["y"].float() - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("words", module_lines(on_a_cpu=True), ids=command_name)
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


@pytest.mark.parametrize("words", module_lines(on_a_cpu=False), ids=command_name)
def test_command_for_a_gpu_has_valid_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command_line = importlib.import_module(words[0] if words[0] in TOOLS else "weightonly.bench.__main__")
    asked: list[Any] = []

    def run(options: Any) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for providers in ("weightonly.bench.providers", "weightonly.bench.experts.providers"):
        monkeypatch.setattr(f"{providers}.register", lambda provider: None)  # a plug-in calls it
    commands = [command_line.COMMAND] if words[0] in TOOLS else command_line.COMMANDS.values()
    for command in commands:
        monkeypatch.setattr(command, "run", run)
    assert command_line.main(words[1:]) == 0
    (options,) = asked
    name = words[0] if words[0] in TOOLS else options.command
    if name in ("experts", "tools.regret_experts"):
        assert set(options.shapes) <= set(shapes.MIXTURES)
    elif name in ("model", "parallel"):
        assert set(options.shapes) <= set(shapes.MODELS)
    else:
        assert shapes.resolve(options.shapes)
    if name == "report":
        assert set(options.formats) <= set(GROUP_SIZES)
    if name == "sweep":
        assert options.providers == "all" or set(options.providers) <= set(PROVIDERS)


def test_the_commands_that_the_tests_above_run_are_there() -> None:
    assert ["weightonly", "info"] in module_lines(on_a_cpu=True)
    assert {words[0] for words in module_lines(on_a_cpu=True)} == {"weightonly", "weightonly.bench", "tools.fuzz"}
    assert {"chain", "report", "tune"} <= {words[1] for words in module_lines(on_a_cpu=False)}
    assert {words[0] for words in module_lines(on_a_cpu=False)} >= TOOLS


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    named = {words[1] for words in command_lines() if words[0] == "make"}
    quoted = {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8"))}
    assert {"demo", "test", "docs"} <= named | quoted
    assert named | quoted <= targets


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    quoted = re.findall(r"`((?:\.ci|[a-z_]+)/[\w./]*)`", text)
    linked = [name for name in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text) if page.parent == ROOT]
    assert {name for name in (*quoted, *linked) if not (ROOT / name).exists()} == set()


def api_names() -> list[str]:
    """What the API pages document, by its place in the package."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)]
    return sorted(name if name.startswith("weightonly.") else f"weightonly.{name}" for name in names)


@pytest.mark.parametrize("name", api_names())
def test_api_page_names_what_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


IN_PROSE = {"register", "read_modelopt_fp4"}
"""A bound method and a partial: their pages say in words what they are."""


@pytest.mark.parametrize("module", ["", ".nn", ".hf", ".parallel", ".formats", ".heuristics", ".bench"])
def test_api_pages_have_every_public_name(module: str) -> None:
    public = importlib.import_module(f"weightonly{module}")
    kinds = {name: getattr(public, name) for name in public.__all__}
    named = {name for name, found in kinds.items() if inspect.isroutine(found) or inspect.isclass(found)}
    documented = {name.rpartition(".")[2] for name in api_names()}
    assert named
    assert named - IN_PROSE - documented == set()


def test_site_builds_strictly(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES) - 2  # README.md and CONTRIBUTING.md are none of their own
    fetched = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    assert [page for page in pages if fetched.search(page.read_text("utf-8"))] == []


def test_architecture_names_every_folder_of_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    code = [Path(name) for name in tracked.stdout.splitlines() if Path(name).suffix in (".py", ".h", ".cuh", ".cu")]
    folders = {f"{path.parent.as_posix()}/" for path in code if len(path.parts) > 1}
    assert {folder for folder in folders if f"`{folder}`" not in text} == set()


def files_of_tables() -> list[str]:
    """What a row of a table says of a folder: paths of the files that the row names."""
    rows = (line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines())
    found: list[str] = []
    for row in rows:
        folder = re.match(r"\| `([a-z_][\w/]*/)` \|", row)
        if folder:
            names = re.findall(r"`(\w+\.(?:py|h|cuh|cu|cpp))`", row)
            found += [folder[1] + name for name in names]
    return found


def test_files_of_folders_exist() -> None:
    assert len(files_of_tables()) > 30
    assert [path for path in files_of_tables() if not (ROOT / path).exists()] == []


def test_variables_are_those_of_the_code() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(WEIGHTONLY_\w+)\b", page.read_text(encoding="utf-8"))}
    paths = [path for folder in ("kernels", "weightonly", "tests") for path in (ROOT / folder).rglob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert named
    assert {name for name in named if f'"{name}"' not in sources} == set()


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.parametrize("document", [pytest.param(path, id=name_of(path)) for path in published.DOCUMENTS])
def test_tables_are_those_of_the_measurements(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert published.with_tables(text) == text


def test_every_table_is_published() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in published.DOCUMENTS)
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == set(published.TABLES)


def test_pictures_are_there_and_the_same_when_made_again(tmp_path: Path) -> None:
    """In processes of their own, as providers that other tests register change colours."""
    code = (
        "import sys, pathlib; from tools import pictures; "
        "[pictures.save_picture(draw, pathlib.Path(sys.argv[1]) / path.name) "
        "for path, draw in pictures.pictures().items()]"
    )
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    for path in pictures.pictures():
        drawn = (tmp_path / "one" / path.name).read_text(encoding="utf-8")
        assert drawn == (tmp_path / "two" / path.name).read_text(encoding="utf-8"), path.name
        committed = path.read_text(encoding="utf-8")
        if f"Matplotlib v{matplotlib.__version__}" in committed:  # another version draws the same in other words
            assert drawn == committed, path.name


@pytest.mark.parametrize("path", drawings.DRAWINGS, ids=lambda path: path.name)
def test_drawings_are_those_that_are_drawn(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == drawings.DRAWINGS[path]().svg()
    assert any(f"assets/{path.name})" in page.read_text(encoding="utf-8") for page in PAGES)


def test_legend_of_the_picture() -> None:
    legend = pictures.peers_picture().axes[0].get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [measured.OURS, *measured.PEERS, "cuBLAS fp16"]


@pytest.mark.parametrize("column", measured.PEERS.values())
def test_no_peer_is_ahead(column: str) -> None:
    """README: none is ahead in any cell where both were measured, each beside cuBLAS of its own run."""
    times = measured.peer_times(4)
    ours = measured.report_part("int4").speedups(measured.DENSE).stack()
    theirs = (times["cublas_f16"] / times[column]).dropna()
    both = theirs.index.intersection(ours.index)
    assert len(both) == len(theirs) >= 50
    assert (theirs[both] < ours[both]).all()


def test_what_the_pages_say_of_nf4() -> None:
    """NF4 is faster than bitsandbytes in all 112 cells."""
    speedups = measured.report_part("nf4").speedups("bitsandbytes").stack()
    assert len(speedups) == 112
    assert not speedups.map(lost).any()


def test_peers_say_where_they_come_from() -> None:
    facts = read_facts(measured.MEASUREMENTS / "h200_peers.csv")
    assert facts["GPU"] == read(measured.MEASUREMENTS / "h200_report.csv").facts["GPU"] == "NVIDIA H200"
    assert "weightonly" in facts["measured by"]


def read_facts(path: Path) -> dict[str, str]:
    lines = (line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return dict(line.split(": ", 1) for line in lines)
