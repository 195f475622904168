"""Fits the cost model to measurements: `python -m tools.fit MEASUREMENTS.csv...`.

MEASUREMENTS.csv is what `python -m tools.regret --csv` writes: the time of every configuration on many
problems. Times of Hopper's kernels (`regret --layout tiled`) are for clusters.py, of dequantizing and cuBLAS for
unfused.py, all others for waves.py. Grouped products (`tools.regret_experts`) are for grouped.py. What was not
measured keeps its constants. Needs scipy and pandas.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from weightonly.heuristics import h200

from . import clusters, grouped, unfused, waves
from .write import Constants, write


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurements", nargs="+", type=Path)
    parser.add_argument("--log", type=Path, help="folder with the ptxas logs of the build, for kernels before Hopper")
    parser.add_argument("--out", type=Path, default=Path(h200.__file__), help="the file (default: heuristics/h200.py)")
    parser.add_argument("--moves", type=int, default=40000, help="of the random search, for the kernels of Hopper")
    arguments = parser.parse_args(argv)
    frame = pd.concat([pd.read_csv(path) for path in arguments.measurements], ignore_index=True)
    is_clusters, is_waves = clusters.usable(frame), waves.usable(frame)
    is_unfused = unfused.usable(frame)
    if is_waves.any() and arguments.log is None:
        parser.error("--log is needed: there are times of kernels before Hopper")
    found = Constants(**{name: getattr(h200, name.upper()) for name in Constants._fields})
    if (is_grouped := grouped.usable(frame)).any():
        of_grouped = frame[is_grouped]
        found = found._replace(grouped=grouped.polish(of_grouped, grouped.fit(of_grouped, h200.GROUPED)))
    if is_unfused.any():
        found = found._replace(unfused=unfused.fit(frame[is_unfused]))
    if is_clusters.any():
        found = Constants(**(found._asdict() | clusters.run(frame[is_clusters], arguments.moves)))
    if is_waves.any():
        found = found._replace(waves=waves.run(frame[is_waves], arguments.log, h200.WAVES))
    write(arguments.out, found)


if __name__ == "__main__":
    main()
