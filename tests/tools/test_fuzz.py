"""`tools.fuzz`: its oracle, its loop, and random calls of the library as it is and with planted faults."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import weightonly as wo
from tools.fuzz import TARGETS, Outcome, State, Target, fuzz
from tools.fuzz.__main__ import main
from tools.fuzz.loop import describe, summary
from tools.fuzz.oracle import Grid, Sums, dense

CPU = torch.device("cpu")


class Counted(Target):
    """Cases of three calls; those of `bad` fail."""

    name = "counted"
    bad: tuple[int, ...] = ()

    def run(self, seed: int, index: int) -> Outcome:
        return Outcome(calls=3, failures=["it broke"] if index in self.bad else [], covered={f"part {index % 2}"})

    def to_cover(self) -> set[str]:
        return {"part 0", "part 1", "part 2"}


def test_random_calls_on_the_cpu_are_exact(seed: int) -> None:
    target = TARGETS["calls"](CPU)
    state = fuzz(target, State("calls", seed), calls=600, say=pytest.fail)
    assert state.calls >= 600 and not state.failed


@pytest.mark.gpu
def test_random_calls_on_the_gpu_are_exact(cuda_device: torch.device, launch_overlap: None, seed: int) -> None:
    target = TARGETS["calls"](cuda_device)
    state = fuzz(target, State("calls", seed), calls=3000, say=pytest.fail)
    assert state.calls >= 3000 and not state.failed
    assert len(state.covered) > 100


def _fails(monkeypatch: pytest.MonkeyPatch, fault: object, cases: int = 40) -> list[str]:
    """What is said of the first cases, with `fault` in place of `gemm`."""
    monkeypatch.setattr(wo, "gemm", fault)
    target = TARGETS["calls"](CPU)
    return [text for index in range(cases) for text in target.run(11, index).failures]


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = wo.gemm

    def fault(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        y = gemm(*operands, **arguments)  # type: ignore[arg-type]
        if y.numel():
            y[..., -1] += y[..., -1].abs() * 0.01 + 0.01
        return y

    assert any("not the right numbers" in text for text in _fails(monkeypatch, fault))


def test_an_element_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = wo.gemm

    def fault(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        y = gemm(*operands, **arguments)  # type: ignore[arg-type]
        if y.numel():
            y[..., -1] = torch.nan
        return y

    assert any("not the right numbers" in text for text in _fails(monkeypatch, fault))


def test_a_write_outside_of_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = wo.gemm

    def fault(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        y = gemm(*operands, **arguments)  # type: ignore[arg-type]
        if isinstance(arguments["out"], torch.Tensor) and y.numel():
            torch.as_strided(y, (1,), (1,), y.storage_offset() - 1).fill_(0)
        return y

    assert any("wrote outside of out" in text for text in _fails(monkeypatch, fault))


def test_other_bits_at_the_second_call_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, turn = wo.gemm, itertools.count()

    def fault(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        y = gemm(*operands, **arguments)  # type: ignore[arg-type]
        y[y == 0] *= 1 if next(turn) % 2 else -1  # the same number with another sign
        return y

    assert any("other bits" in text for text in _fails(monkeypatch, fault))


def test_a_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        raise ValueError("x: expected something else")

    assert "ValueError: x: expected something else" in _fails(monkeypatch, fault, cases=1)


def test_another_weight_of_dequantize_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    dequantize = wo.dequantize
    monkeypatch.setattr(wo, "dequantize", lambda *operands: dequantize(*operands).roll(1, 0))
    target = TARGETS["calls"](CPU)
    assert any("dequantize: another weight" in target.run(11, index).failures for index in range(5))


def test_a_case_is_the_same_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    gemm = wo.gemm

    def watch(x: torch.Tensor, *operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        seen.append(x.clone())
        return gemm(x, *operands, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(wo, "gemm", watch)
    run = TARGETS["calls"](CPU)
    run.run(5, 0)
    seen.clear()
    run.run(5, 1)
    first = list(seen)
    seen.clear()
    TARGETS["calls"](CPU).run(5, 1)
    assert len(first) == len(seen) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, seen, strict=True))


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    fuzz(Counted(CPU), State("counted", 4), calls=7, path=path)
    state = State.read(path)
    assert (state.seed, state.next_index, state.calls) == (4, 3, 9)
    fuzz(Counted(CPU), state, calls=12, path=path)
    assert State.read(path).next_index == 4
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_keeps_the_state(tmp_path: Path) -> None:
    class Interrupted(Counted):
        def run(self, seed: int, index: int) -> Outcome:
            if index == 2:
                raise KeyboardInterrupt
            return super().run(seed, index)

    said: list[str] = []
    fuzz(Interrupted(CPU), State("counted", 4), calls=100, path=tmp_path / "s", say=said.append)
    assert State.read(tmp_path / "s").next_index == 2 and said == ["interrupted"]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"target": 1, "seed": 2}', '{"target": "a", "seed": 1, "other": 2}', "[1]"]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s").write_text(text)
    with pytest.raises(ValueError, match=r"s: expected the state of a fuzz run"):
        State.read(tmp_path / "s")


def test_failures_name_the_command_that_repeats_them() -> None:
    target = Counted(CPU)
    target.bad = (1, 2, 4)
    said: list[str] = []
    state = fuzz(target, State("counted", 9), calls=1000, most_failures=2, say=said.append)
    assert state.failed == ["9:1", "9:2"] and len(said) == 2
    assert "it broke" in said[0]
    assert said[0].endswith("python -m tools.fuzz --target counted --device cpu --case 9:1")
    assert describe(target, "9:4", target.run(9, 4)).startswith("FAILED counted 9:4")
    assert "kernels run: 2 of 3" in summary(target, state)
    assert "--seed 9 --start 3" in summary(target, state)


def test_nothing_follows_a_lost_gpu() -> None:
    class Lost(Counted):
        def run(self, seed: int, index: int) -> Outcome:
            return Outcome(calls=1, failures=["CUDA error"], fatal=True)

    assert fuzz(Lost(CPU), State("counted", 9), calls=1000, say=lambda text: None).next_index == 1


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = f"--device cpu --state {tmp_path / 's'}"
    assert main(f"{state} --seed 3 --calls 6".split()) == 0
    assert "seed 3, from case 0" in capsys.readouterr().out
    assert main(f"{state} --calls 12".split()) == 0
    printed = capsys.readouterr().out
    assert "seed 3, from case 1" in printed
    assert "12 random calls in 2 cases, 0 failed" in printed and "go on with --seed 3 --start 2" in printed
    assert main(f"{state} --seed 4 --calls 12".split()) == 2
    assert "error: seed: expected 3, that of" in capsys.readouterr().err


def test_the_command_repeats_a_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--device", "cpu", "--case", "3:1"]) == 0
    assert "calls 3:1 on cpu: 6 calls, nothing wrong" in capsys.readouterr().out
    monkeypatch.setattr(wo, "gemm", lambda x, *operands, **arguments: x)
    assert main(["--device", "cpu", "--case", "3:1"]) == 1
    assert capsys.readouterr().out.startswith("FAILED calls 3:1")
    assert main(["--device", "cpu", "--seed", "3", "--seconds", "30", "--failures", "2"]) == 1
    printed = capsys.readouterr().out
    assert "--device cpu --case 3:0" in printed and "failed cases: 3:0 3:1" in printed


@pytest.mark.parametrize("case", ["7", "7:", "a:1", "-1:3"])
def test_a_case_is_a_seed_and_an_index(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--case={case}"])
    assert "expected SEED:INDEX" in capsys.readouterr().err


def test_a_budget_is_needed() -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        fuzz(Counted(CPU), State("counted", 1))


def test_seconds_end_a_run() -> None:
    assert fuzz(Counted(CPU), State("counted", 1), seconds=0.05).next_index > 10


def test_the_oracle_is_the_equation() -> None:
    q = torch.tensor([[1, -8], [2, 7], [3, 0], [-4, 5]], dtype=torch.int8)  # [4, 2], groups of 2
    scales, zeros = torch.tensor([[0.5, 2], [4, 1]]), torch.tensor([[1, 0], [0.5, -3]])
    expected = [[0, -16], [0.5, 14], [10, 3], [-18, 8]]
    assert dense(q, scales, zeros, None).tolist() == expected
    table = torch.arange(16).double() ** 2
    assert dense(torch.tensor([[3], [15]]), torch.tensor([[0.5]]), None, table).tolist() == [[4.5], [112.5]]


def test_grid_of_numbers() -> None:
    assert Grid.of([0.75, -6, 0]) == Grid(0.25, 6)
    assert Grid.of([1 / 3]).unit == 2.0**-54
    assert Grid(0.25, 6).scaled((-1, 2)) == Grid(0.125, 24)
    assert Grid(1, 8).terms == 2**20


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_activations_of_a_framework_pass_and_worse_ones_do_not(activation: str, dtype: torch.dtype) -> None:
    sums = Sums(torch.arange(-4000, 4000).double().view(80, 100) / 256, None)
    y = getattr(torch.nn.functional, activation)(sums.exact.float()).to(dtype)
    assert not sums.differs(y, None, activation, False).any()
    worse = y * (1 + max(4 * torch.finfo(dtype).eps, 2.0**-19))
    large = sums.exact > 0.5
    assert sums.differs(worse.to(dtype), None, activation, False)[large].all()


def test_slack_allows_what_fp32_sums_round() -> None:
    x, w = torch.randn(20, 64).double(), torch.randn(64, 30).double()
    sums = Sums.of(x, w, 64)
    y = x.float() @ w.float()
    assert not sums.differs(y, None, None, False).any()
    assert sums.differs(y * (1 + 1e-3), None, None, False).float().mean() > 0.9
