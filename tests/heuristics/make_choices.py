"""Writes data/choices.csv.xz, what `select` chooses: `python -m tests.heuristics.make_choices FOLDER`.

FOLDER: a checkout, whose `heuristics` are asked. The problems are those of the report (bench/measurements) and 6000
random ones: all formats, architectures, layouts, group sizes, zero points, and M from 1 to 100000.
"""

from __future__ import annotations

import csv
import lzma
import random
import sys
from typing import Any

from tests import ROOT

FIELDS = ["m", "n", "k", "format", "group_size", "arch", "sm_count", "layout", "zeros"]
ARCHS = [70, 75, 80, 86, 87, 89, 90, 100, 120]
K = [512, 1536, 2048, 2880, 4096, 5120, 6144, 8192, 11008, 14336, 16384, 28672, 53248]


def random_problem(generator: random.Random) -> tuple[Any, ...]:
    r = generator
    arch = r.choice([*ARCHS, 90, 90, 90, 90, 90, 90])
    layout = r.choice(["tiled"] * 3 + ["interleaved"]) if arch == 90 else ["row_major", "interleaved"][arch >= 75]
    format = r.choice(["int4", "int8", "nf4", "fp4"] if layout == "tiled" else ["int4", "int8"])
    k = r.choice(K) if r.random() < 0.7 else 64 * r.randint(1, 600)
    n = r.choice([1024, 4096, 6144, 8192, 10240, 28672]) if r.random() < 0.3 else r.randint(1, 40000)
    m = r.randint(1, 16) if r.random() < 0.3 else int(10 ** r.uniform(0, 5))
    group_size = r.choice([g for g in (-1, 32, 64, 128, 192, 256) if k % g == 0 or g == -1])
    zeros = format in ("int4", "int8") and r.random() < 0.4
    sm_count = 132 if arch == 90 and r.random() < 0.7 else r.choice([20, 46, 68, 78, 84, 108, 114, 132, 144, 264])
    return m, n, k, format, group_size, arch, sm_count, layout, zeros


def problems() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    with (ROOT / "bench/measurements/h200_report.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        ours = [r for r in rows if r["provider"] == "ours"]
    for r in ours:
        sizes = int(r["m"]), int(r["n"]), int(r["k"]), r["format"], int(r["group_size"])
        found.append((*sizes, 90, 132, "tiled", False))
    generator = random.Random(20250)
    return found + [random_problem(generator) for _ in range(6000)]


def main(checkout: str) -> None:
    sys.path.insert(0, checkout)
    from heuristics import select

    with lzma.open(ROOT / "tests/heuristics/data/choices.csv.xz", "wt", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*FIELDS, "config"])
        for problem in problems():
            writer.writerow([*problem[:-1], int(problem[-1]), select(*problem).name])


if __name__ == "__main__":
    main(sys.argv[1])
