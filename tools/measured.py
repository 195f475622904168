"""The committed measurements as tables, for the tables and pictures of the documentation."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import numpy as np
import pandas as pd

from weightonly.bench.kept import read as read_kept
from weightonly.bench.model.measure import COLUMNS as OF_MODELS
from weightonly.bench.report import results
from weightonly.bench.report.tables import Part, geometric_mean, parts
from weightonly.bench.roofline import CEILINGS, roofline_us
from weightonly.bench.shapes import Shape
from weightonly.heuristics.problem import FORMATS

from .regret_experts import problem_of, regret, rows_of_experts

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "bench" / "measurements"

PEER_BATCH = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Where every one of `PEERS` was measured."""

OURS = "weightonly"
DENSE = "cuBLAS fp16"
PEERS = {"Machete": "machete_tuned", "Marlin": "marlin", "FasterTransformer": "fastertransformer_tuned"}
"""Name -> column of h200_peers.csv, of what was measured at all of its shapes."""

SERVED = {
    "h200_serve.csv": "H200",
    "h200_serve_70b.csv": "20 layers, H200",
    "h200_serve_mixtral.csv": "H200",
    "h200_serve_qwen3.csv": "H200",
    "h100_serve.csv": "16 layers, H100",
    "h200_serve_gpt_oss.csv": "12 layers, H200",
    "h200_serve_70b_two.csv": "16 layers, 2 H200",
}
"""File of `bench serve` -> what is special about it."""


def report_part(format: str) -> Part:
    """Our own times and the others' of the same run: "int4", "int8" or "nf4"."""
    for part in parts(results.read(MEASUREMENTS / "h200_report.csv").rows):
        if part.name.startswith(f"{format},"):
            return part
    raise ValueError(f"format: expected one of h200_report.csv, got {format!r}")


def peer_times(bits: int) -> pd.DataFrame:
    """Rows of h200_peers.csv, by (k, n, m); us."""
    frame = pd.read_csv(MEASUREMENTS / "h200_peers.csv", comment="#")
    return frame[frame["bits"] == bits].set_index(["k", "n", "m"])


def peer_speedups() -> pd.DataFrame:
    """How many times faster than cuBLAS fp16 of its own run each is, int4 group 128: a row each, a column per M.

    Geometric means over the shapes of h200_peers.csv.
    """
    times = peer_times(4)
    shapes: list[Shape] = list(dict.fromkeys(times.droplevel("m").index))
    rows = {OURS: geometric_mean(report_part("int4").speedups(DENSE).loc[shapes])[list(PEER_BATCH)]}
    for name, column in PEERS.items():
        speedups = (times["cublas_f16"] / times[column]).unstack("m").loc[shapes]
        rows[name] = geometric_mean(speedups)[list(PEER_BATCH)]
    return pd.DataFrame(rows).T


def model_rows() -> pd.DataFrame:
    """What `bench model` measured, without the rows that have no times."""
    rows = read_kept(MEASUREMENTS / "h200_models.csv", "model", OF_MODELS).rows
    return rows[rows["note"] == ""]


def serve_rows() -> pd.DataFrame:
    """What `bench serve` measured, with what `SERVED` says as the column `on`."""
    return pd.concat(pd.read_csv(MEASUREMENTS / file, comment="#").assign(on=on) for file, on in SERVED.items())


def layer_rows(routing: str) -> pd.DataFrame:
    """What `bench experts --measures layer` measured: "even" or "skewed"."""
    frame = pd.read_csv(MEASUREMENTS / "h200_experts_layer.csv", comment="#")
    return frame[frame["routing"] == routing]


def parallel_rows() -> pd.DataFrame:
    """What `bench parallel` measured on two H200s: products and sums of a layer, and decode steps."""
    files = ("h200x2_parallel.csv", "h200x2_decode.csv")
    frame = pd.concat(pd.read_csv(MEASUREMENTS / file, comment="#") for file in files)
    return frame.drop_duplicates(["provider", "ranks", "piece", "m"])


def grouped_rows(format: str) -> pd.DataFrame:
    """What the choice takes of the measured grouped configurations: a row for each cell, with its roofline."""
    frame = pd.read_csv(MEASUREMENTS / "h200_grouped.csv.xz")
    cells = regret(frame[frame["format"] == format]).cells

    def of_cell(cell: pd.Series) -> float:
        problem, _ = problem_of(cell)
        routed = [(counts > 0).sum() for counts in rows_of_experts(cell)]
        return roofline_us(
            *(problem.m, problem.k, problem.n),
            bits=FORMATS[format],
            group_size=problem.group_size,
            weights=round(float(np.mean(routed))),
            limits=CEILINGS["NVIDIA H200"],
        )

    return cells.assign(roofline_us=cells.apply(of_cell, axis=1))


def source(file: str) -> str:
    """Where the rows of a file come from, in a line: GPU, dates, command and file, as the head of the file has them.

    Heads are facts, "# name: value", or one line that ends with "DATE; COMMAND" or "DATE: ...". Raises ValueError
    where there is no date.
    """
    path = MEASUREMENTS / file
    packed = path.read_bytes()
    lines = (lzma.decompress(packed) if path.suffix == ".xz" else packed).decode().splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    facts = dict(line.split(": ", 1) for line in head if ": " in line)
    dates = sorted(set(re.findall(r"\d{4}-\d\d-\d\d", facts.get("date", head[0]))))
    if not dates:
        raise ValueError(f"{file}: expected a date in its head, got {head[0]!r}")
    gpu = facts.get("GPU", head[0].partition(",")[0]).removeprefix("NVIDIA ")
    gpu = f"2 x {gpu}" if "2 GPUs" in facts.get("ranks talk by", "") else gpu
    commands = re.findall(r"python -m weightonly\.bench [^;]+?(?=;|, commit|$)", "; ".join(head))
    first = re.sub(r" --(quiet|out \S+)", "", commands[0])
    more = f" and {len(commands) - 1} more" if len(commands) > 1 else ""
    return f"{gpu}, {', '.join(dates)}: `{first}`{more} (`bench/measurements/{file}`)."
