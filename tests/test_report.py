"""The report of a benchmark: its files from measurements made up here, what it says of them, and comparisons."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch

from weightonly import nvml
from weightonly.bench import facts, results
from weightonly.bench.__main__ import main
from weightonly.bench.compare import compare, describe
from weightonly.bench.plot import styles
from weightonly.bench.report import GROUP_SIZES, Report, measure
from weightonly.bench.results import Results, cells, join, read
from weightonly.bench.shapes import NAMED
from weightonly.bench.tables import MEAN, OVER_ROOFLINE, QUICKEST, number_text, parts, speedup_text, with_mean

BATCH = (1, 16, 256)
# us of "ours" as a multiple of the roofline, then of others as a multiple of ours: by M.
TIMES = {"ours": (1.2, 1.5, 1.3), "cublas": (3.0, 1.8, 0.8), "marlin": (1.1, 0.9, 2.0)}


def made_up(factor: float = 1.0, spread: float = 0.01, format: str = "int4", runs: int = 1) -> pd.DataFrame:
    """Rows of a sweep of Llama-3-8B and one shape more. factor: of the times of ours; spread: of a run's replays."""
    rows = []
    for run in range(runs):
        for place, (k, n) in enumerate([*NAMED["llama3-8b"], (256, 128)]):
            for i, m in enumerate(BATCH):
                roofline_us = 2.0 * m**0.5 * (place + 1)
                for provider, ratios in TIMES.items():
                    us = roofline_us * TIMES["ours"][i] * (factor if provider == "ours" else ratios[i])
                    us *= 1 + 0.02 * run
                    rows.append(
                        {
                            "k": k,
                            "n": n,
                            "m": m,
                            "format": format,
                            "group_size": GROUP_SIZES[format],
                            "zeros": False,
                            "dtype": "fp16",
                            "provider": provider,
                            "us": us,
                            "us_p10": us * (1 - spread),
                            "us_p90": us * (1 + spread),
                            "roofline_us": roofline_us,
                            "config": "kernel_a" if provider == "ours" else "",
                            "sm_mhz": 1980.0 - m,
                        }
                    )
    return pd.DataFrame(rows)


FACTS = {"GPU": "NVIDIA <H200>", "driver": "580.65", "command": "python -m weightonly.bench report: x", "method": "So."}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Results(made_up(), FACTS).write(tmp_path / "results.csv")
    return tmp_path / "results.csv"


# --- files -------------------------------------------------------------------------------------------------


def test_a_file_keeps_rows_and_facts(file: Path) -> None:
    found = read(file)
    assert found.facts == FACTS
    pd.testing.assert_frame_equal(found.rows, made_up(), atol=6e-4, check_dtype=False)
    assert len(pd.read_csv(file, comment="#")) == len(found.rows)


def test_a_plain_sweep_is_read_too(tmp_path: Path) -> None:
    made_up().drop(columns=["zeros", "config", "sm_mhz"]).to_csv(tmp_path / "sweep.csv", index=False)
    found = read(tmp_path / "sweep.csv")
    assert not found.facts and not found.rows["zeros"].any() and set(found.rows["config"]) == {""}


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "expected a CSV file"), ("# GPU: x\na,b\n1,2\n", "got none of k, n, m"), ("k,n\n", "got none of m")],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"other\.csv: .*{message}"):
        read(tmp_path / "other.csv")


def test_files_of_one_gpu_are_joined() -> None:
    first, second = Results(made_up(), {"GPU": "a", "date": "1"}), Results(made_up(), {"GPU": "a", "date": "2"})
    both = join([first, second])
    assert both.facts == {"GPU": "a", "date": "1; 2"} and len(both.rows) == 2 * len(first.rows)
    with pytest.raises(ValueError, match="expected measurements of one GPU, got a, b"):
        join([first, Results(made_up(), {"GPU": "b"})])


def test_a_cell_is_the_median_of_its_runs_with_their_range() -> None:
    table = cells(pd.concat([made_up(f) for f in (1.0, 1.3, 1.1)]))
    row = table[(table["k"] == 4096) & (table["n"] == 6144) & (table["m"] == 1) & (table["provider"] == "ours")].iloc[0]
    assert row["us"] == pytest.approx(2.4 * 1.1) and row["runs"] == 3
    assert (row["low"], row["high"]) == (pytest.approx(2.4 * 0.99), pytest.approx(2.4 * 1.3 * 1.01))
    assert row["x_roofline"] == pytest.approx(1.32)


# --- tables ------------------------------------------------------------------------------------------------


def test_ratios_and_their_means() -> None:
    (part,) = parts(made_up())
    assert part.name == "int4, group 128, fp16" and part.others == ["cublas", "marlin"]
    for provider, ratios in (("cublas", (3.0, 1.8, 0.8)), (QUICKEST, (1.1, 0.9, 0.8))):
        table = with_mean(part.speedups(provider))
        assert list(table.index) == ["4096 x 6144", "4096 x 4096", "4096 x 28672", "14336 x 4096", "256 x 128", MEAN]
        assert list(table.columns) == list(BATCH)
        for _, row in table.iterrows():
            assert tuple(row) == pytest.approx(ratios)
    summary = part.summary()
    assert list(summary.index) == [f"faster than {name}" for name in (QUICKEST, "cublas", "marlin")] + [OVER_ROOFLINE]
    assert tuple(summary.loc[OVER_ROOFLINE]) == pytest.approx(TIMES["ours"])


def test_the_mean_is_geometric_and_of_all_shapes() -> None:
    rows = made_up()
    first = (rows["provider"] == "cublas") & (rows["k"] == 256)
    rows.loc[first, "us"] *= 32
    (part,) = parts(rows)
    assert part.summary().loc["faster than cublas", 1] == pytest.approx(3.0 * 2)  # 32 ** (1 / 5)
    (lacking,) = parts(rows[~(first & (rows["m"] == 16))])
    assert math.isnan(lacking.summary().loc["faster than cublas", 16])
    ratios = lacking.mean_ratios()
    assert list(ratios.loc[ratios["provider"] == "cublas", "m"]) == [1, 256]
    # A missing time does not beat one that is there.
    assert lacking.speedups(QUICKEST).loc[(256, 128), 16] == pytest.approx(0.9)


def test_formats_are_apart() -> None:
    names = [part.name for part in parts(pd.concat([made_up(), made_up(format="int8"), made_up(format="nf4")]))]
    assert names == ["int4, group 128, fp16", "int8, per channel, fp16", "nf4, group 64, fp16"]


def test_rows_without_ours_are_refused() -> None:
    rows = made_up()
    with pytest.raises(ValueError, match='expected some of the provider "ours", got none'):
        parts(rows[rows["provider"] != "ours"])


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((3.0, 1.8, 0.8), "3.00 times as fast as cublas at M = 1, not slower up to M = 16, slower from M = 256 on"),
        ((3.0, 1.8, 1.2), "not slower at any M (at worst 1.20 times as fast, at M = 256"),
        ((0.5, 0.9, 0.7), "slower at every M (at worst 0.50 times as fast, at M = 1"),
        ((3.0, 0.7, 1.2), "slower at M = 16 (at worst 0.70 times as fast, at M = 16"),
    ],
)
def test_in_words(ratios: tuple[float, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIMES, "cublas", ratios)
    (part,) = parts(made_up())
    assert words in part.in_words()
    assert "geometric means over 5 shapes" in part.in_words()
    slower = 5 * sum(min(a, b) < 1 for a, b in zip(ratios, TIMES["marlin"], strict=True))
    assert part.in_words().endswith(f"Slower than the quickest other in {slower} of 15 cells of shape and M")


def test_lost_cells_are_marked_by_what_is_printed() -> None:
    assert [speedup_text(ratio) for ratio in (1.5, 0.996, 0.99, math.nan)] == ["1.50", "1.00", "0.99 ▼", ""]
    assert [number_text(value) for value in (1.234, 123.4, 1234.5, math.nan, 7)] == ["1.23", "123.4", "1234", "", "7"]


# --- the page ----------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would fetch, the ids, the marked cells and the text; and that every element is closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.lost: list[str] = []
        self.headings: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe")
        self.fetched += [value for name in ("src", "href", "xlink:href") if (value := values.get(name))]
        if identity := values.get("id"):
            self.ids.append(identity)
        if tag not in self.VOID:
            self._open.append((tag, values.get("class")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == ("td", "lost"):
            self.lost.append(data)
        if self._open and self._open[-1][0] in ("h1", "h2", "h3"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def report() -> Report:
    rows = pd.concat([made_up(runs=2), made_up(format="int8", runs=2)], ignore_index=True)
    return Report(Results(rows, dict(FACTS)), ("llama3-8b", "llama3-70b"))


def test_the_page_needs_nothing_else(report: Report) -> None:
    page = Page(report.html())
    assert len(page.ids) == len(set(page.ids)) > 0
    assert set(page.fetched) <= {f"#{name}" for name in page.ids}
    assert "@import" not in report.html() and not re.search(r"url\((?!#)", report.html())


def test_the_page_has_a_section_per_model_and_one_for_other_shapes(report: Report) -> None:
    page, formats = Page(report.html()), ["int4, group 128, fp16", "int8, per channel, fp16"]
    assert page.headings == [
        "weightonly benchmark: NVIDIA <H200>",
        "llama3-8b",
        *formats,
        "other shapes",
        *formats,
        "How it was measured",
    ]


def test_the_page_marks_every_lost_cell_and_no_other(report: Report) -> None:
    page = Page(report.html())
    assert {float(text.removesuffix(" ▼")) for text in page.lost} == {0.8, 0.9}
    assert all(text.endswith(" ▼") for text in page.lost)
    # Per format: ours loses 2 of 3 columns to the quickest other, 1 to each of cublas and marlin: in the means of all
    # shapes, in those of the model's four, and in 5 shapes. Among all numbers: to cublas and marlin, in 5 shapes.
    assert len(page.lost) == 2 * ((2 + 1 + 1) + (5 + 1) * (2 + 1 + 1) + 5 * (1 + 1))


def test_the_page_says_what_and_how(report: Report) -> None:
    text = report.html()
    assert text.count("<svg") == 1 + 2 * 2 * 2  # the summary; sections x formats x (time, ratio)
    for words in ("580.65", "python -m weightonly.bench report: x", "So.", "2 of each time", "median 1964 MHz"):
        assert words in text
    assert "NVIDIA &lt;H200&gt;" in text and "<H200>" not in text


def test_markdown_has_the_tables_of_the_page(report: Report) -> None:
    text = report.markdown()
    for words in ("# weightonly benchmark", "## llama3-8b", "## other shapes", "| 4096 x 6144", "0.80 ▼", "So."):
        assert words in text
    assert "## llama3-70b" not in text


def test_times_hold_every_number(report: Report) -> None:
    table = report.times()
    assert len(table) == 2 * 5 * 3
    row = table[(table["K"] == 256) & (table["M"] == 16) & (table["format"] == "int8")].iloc[0]
    assert row["ours us"] == pytest.approx(60.0 * 1.01) and row["roofline us"] == pytest.approx(40.0)
    assert row["x cublas"] == pytest.approx(1.8) and row["x roofline"] == pytest.approx(1.515)
    assert row["range %"] == pytest.approx(100 * (1.02 * 1.01 - 0.99) / 1.01)


def test_without_a_roofline_and_without_others() -> None:
    rows = made_up().assign(roofline_us=math.nan)
    page = Page(Report(Results(rows)).html())
    assert "weightonly benchmark: machine not recorded" in page.headings
    alone = Report(Results(rows[rows["provider"] == "ours"]))
    assert "no other provider was measured" in alone.html() and not Page(alone.html()).lost
    assert "faster than" not in alone.markdown()


def test_every_provider_has_a_look_of_its_own() -> None:
    looks = styles(["ours", "cublas", "one", "two", "three"])
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == len(looks)
    assert looks["one"] == styles(["one"])["one"]
    assert looks["ours"].linewidth > looks["cublas"].linewidth


# --- comparisons -------------------------------------------------------------------------------------------


def test_a_change_beyond_the_noise_counts() -> None:
    old, quick = cells(made_up()), made_up()
    quick.loc[(quick["k"] == 256) & (quick["m"] == 1), ["us", "us_p10", "us_p90"]] *= 0.9
    slow = quick["m"] == 16
    quick.loc[slow, ["us", "us_p10", "us_p90"]] *= 1.05
    found = compare(cells(quick), old)
    assert len(found.regressions) == 5 and set(found.regressions["m"]) == {16}
    assert list(found.regressions["change"]) == pytest.approx([0.05] * 5)
    assert list(found.improvements["k"]) == [256] and found.improvements["change"].iloc[0] == pytest.approx(-0.1)
    lines = describe(found).splitlines()
    assert lines[0].startswith("15 times of ours compared: 5 regressions, 1 improvements")
    assert any(
        re.fullmatch(r"for comparison, cublas: [+-]\d\.\d% in the geometric mean, 10\.0% at most", x) for x in lines
    )
    assert "improvement: 256x128 M = 1 (int4, group 128, fp16): 12.00 us -> 10.80 us (-10.0%)" in lines


@pytest.mark.parametrize(
    ("factor", "spread", "regressions"),
    [(1.10, 0.01, 15), (1.10, 0.06, 0), (1.02, 0.001, 0), (1.0, 0.01, 0)],
    ids=["beyond", "within the range", "below the tolerance", "the same"],
)
def test_noise_is_no_regression(factor: float, spread: float, regressions: int) -> None:
    found = compare(cells(made_up(factor, spread)), cells(made_up(spread=spread)))
    assert len(found.regressions) == regressions and len(found.improvements) == 0
    backwards = compare(cells(made_up(spread=spread)), cells(made_up(factor, spread)))
    assert len(backwards.regressions) == 0 and len(backwards.improvements) == regressions


def test_runs_that_differ_widen_the_range() -> None:
    """Each run is steady, but they are 12% apart: 10% more is then within the noise."""
    apart = cells(pd.concat([made_up(), made_up(1.12)]))
    assert len(compare(cells(made_up(1.1)), apart).regressions) == 0
    assert len(compare(cells(made_up(1.3)), apart).regressions) == 15


def test_what_the_new_file_lacks_is_counted() -> None:
    new = made_up()
    found = compare(cells(new[new["m"] != 1]), cells(made_up()))
    assert found.missing == 5 * 3
    assert "15 measurements of the old file are not in the new one" in describe(found)
    with pytest.raises(ValueError, match="expected measurements of the same shapes"):
        compare(cells(new), cells(made_up(format="int8")))


# --- the command -------------------------------------------------------------------------------------------


def test_command_makes_a_report_of_files(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["report", "--from", str(file), "--out", str(out), "--note", "commit 123"]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [out / name for name in ("report.html", "report.md", "times.csv", "results.csv")]
    assert all(path.stat().st_size for path in printed)
    again = read(out / "results.csv")
    assert again.facts == FACTS | {"note": "commit 123"}
    pd.testing.assert_frame_equal(again.rows, read(file).rows)


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (0.8, 0)])
def test_command_exits_by_regressions(
    factor: float, code: int, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Results(made_up(factor)).write(tmp_path / "new.csv")
    arguments = ["report", "--from", str(tmp_path / "new.csv"), "--out", str(tmp_path / "out"), "--compare", str(file)]
    assert main(arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("regression: ") for line in lines) == (15 if factor > 1 else 0)
    assert sum(line.startswith("improvement: ") for line in lines) == (15 if factor < 1 else 0)


def test_command_measures_on_a_cpu(tmp_path: Path) -> None:
    arguments = (
        "report --models 256x64 --batch 1,8 --formats int4,int8 --providers ours,cublas --dtype bf16 --device cpu "
        f"--runs 2 --budget-ms 1 --quiet --out {tmp_path}"
    )
    assert main(arguments.split()) == 0
    found = read(tmp_path / "results.csv")
    assert set(found.rows["format"]) == {"int4", "int8"} and len(found.rows) == 2 * 2 * 2 * 2
    assert found.facts["command"] == f"python -m weightonly.bench {arguments}"
    assert {"CPU", "torch", "weightonly", "commit", "Python", "method"} <= set(found.facts)
    assert set(cells(found.rows)["runs"]) == {2}
    assert Page((tmp_path / "report.html").read_text()).headings[1:3] == ["256x64", "int4, group 128, bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--from nowhere.csv", "nowhere.csv"),
        ("--formats int4,int3 --device cpu", "formats: expected some of int4, int8, nf4, got 'int3'"),
        ("--runs 0 --device cpu", "runs: expected at least 1, got 0"),
        ("--models llama9 --device cpu", "llama9"),
    ],
)
def test_command_refuses(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --- facts -------------------------------------------------------------------------------------------------


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    assert facts.commit(tmp_path) == "not a git checkout"

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    assert re.fullmatch(r"[0-9a-f]{12}", facts.commit(tmp_path))
    (tmp_path / "file").write_text("2")
    assert re.fullmatch(r"[0-9a-f]{12} \+ changes", facts.commit(tmp_path))


class Library:
    """NVML as far as it is used, of a GPU that does not tell its temperature."""

    def nvmlSystemGetDriverVersion(self, text: object, length: object) -> int:
        text.value = b"580.65.06"  # type: ignore[attr-defined]
        return 0

    def _answer(self, place: object, value: int) -> int:
        place._obj.value = value  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetClockInfo(self, handle: object, kind: object, place: object) -> int:
        return self._answer(place, {1: 1980, 2: 3201}[kind.value])  # type: ignore[attr-defined]

    def nvmlDeviceGetPowerUsage(self, handle: object, place: object) -> int:
        return self._answer(place, 123456)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: object, place: object) -> int:
        return 3  # not supported


def test_state_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", Library)
    assert nvml.driver_version() == "580.65.06"
    state = nvml._read_state(nvml.ctypes.c_void_p(1))
    assert state == nvml.GpuState(1980, 3201, None, 123.456)
    assert str(state) == "SM 1980 MHz, memory 3201 MHz, 123 W"
    assert str(nvml.GpuState(None, None, None, None)) == "not known"


def test_no_driver_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.driver_version() is None
    assert nvml.gpu_state(torch.device("cuda", 0)) is None
    assert nvml.gpu_state(torch.device("cpu")) is None


@pytest.mark.gpu
def test_report_of_a_gpu(cuda_device: torch.device, tmp_path: Path) -> None:
    found = measure(["4096x4096"], [1, 64], ["int4"], ["ours", "cublas"], runs=2, budget_ms=2, progress=False)
    for name in ("GPU", "driver", "CUDA", "roofline", "GPU before", "GPU after", "method"):
        assert found.facts[name] not in ("", "not known", "None")
    assert (found.rows["sm_mhz"] > 100).all()
    Report(found, ("4096x4096",)).write(tmp_path)
    assert Page((tmp_path / "report.html").read_text()).headings[1] == "4096x4096"
    assert results.read(tmp_path / "results.csv").facts == found.facts
