"""`python -m weightonly`: what this installation is made of, the choice of kernels, and checkpoints.

info                             versions, the build, and which of its kernels run here
tune --shapes llama3-8b          measures which kernels are the quickest here, for gemm to run them
inspect FOLDER                   what a quantized checkpoint contains
convert IN OUT --arch sm90       packs one for a GPU
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import __version__, build_info
from .build_info import BuildInfo
from .code_tables import CODE_TABLES
from .formats import convert, open_checkpoint
from .formats.convert import SHARD_BYTES
from .formats.describe import describe
from .heuristics import KernelConfig
from .heuristics.configs import CONFIGS
from .kernels import HOW_TO_BUILD, cuda_built, device_arch, is_compiled, runs_on, sm_count
from .tuned import VARIABLE, Origin
from .tuner import BATCH, SECONDS, table_path, tune

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: int  # compute capability as an integer: 90
    sm_count: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "info":
            _print_info()
        elif options.command == "tune":
            _tune(options)
        elif options.command == "inspect":
            print(describe(open_checkpoint(options.folder)))
        else:
            convert(options.source, options.target, options.arch, options.device, options.shard_bytes)
            print(describe(open_checkpoint(options.target)))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightonly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, the build, the GPUs, and the kernels that run on each")
    _add_tune_options(commands.add_parser("tune", help="measure which configurations are the quickest on this GPU"))
    look = commands.add_parser("inspect", help="format, group sizes, act-order, shapes and bytes of a checkpoint")
    look.add_argument("folder", metavar="FOLDER", help="with safetensors files and config.json")
    pack = commands.add_parser("convert", help="read AWQ, GPTQ, compressed-tensors or bitsandbytes, write it packed")
    pack.add_argument("source", metavar="IN", help="the folder to read")
    pack.add_argument("target", metavar="OUT", help="the folder to write; it must not exist")
    pack.add_argument("--arch", help="the GPU to pack for, such as sm90; default: the visible one, else sm80")
    pack.add_argument("--device", default="cpu", help="where to unpack and pack: cpu (default), cuda")
    pack.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of a file (default: %(default)s)")
    return parser


def _add_tune_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", default="llama3-8b", help="KxN or models of weightonly.bench, by commas (llama3-8b)"
    )
    parser.add_argument("--batch", type=_integers, default=BATCH, help="rows of x (default: powers of two up to 8192)")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--format", choices=tuple(CODE_TABLES), help="codes of a table instead of integers")
    parser.add_argument(
        "--group-size", type=int, default=128, help="rows of w per scale; -1: per channel (default 128)"
    )
    parser.add_argument("--zeros", action="store_true", help="with zero points")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp16")
    parser.add_argument("--device", help="cuda, cuda:1 (default: the current GPU)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="about how long it may take (default %(default)s)"
    )
    parser.add_argument("--folder", help=f"where the table goes (default: ${VARIABLE}, else the user's cache)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _tune(options: argparse.Namespace) -> None:
    frame = tune(
        options.shapes,
        options.batch,
        bits=options.bits,
        format=options.format,
        group_size=options.group_size,
        zeros=options.zeros,
        dtype=_DTYPES[options.dtype],
        device=options.device,
        seconds=options.seconds,
        folder=options.folder,
        progress=not options.quiet,
    )
    print(frame.to_string(index=False, float_format="{:.2f}".format))
    device = torch.device(options.device or "cuda")
    index = torch.cuda.current_device() if device.index is None else device.index
    print(describe_gains(frame["gain"].tolist()))
    print(f"gemm uses it from now on: {table_path(Origin.of(index), options.folder)}")


def describe_gains(gains: Sequence[float]) -> str:
    """How much faster the tuned choices are than the cost model's."""
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    faster = sum(gain > 1 for gain in gains)
    return f"{faster} of {len(gains)} choices changed; gain: geometric mean {mean:.3f}, largest {max(gains):.2f}"


def _print_info() -> None:
    build = build_info.read()
    print(f"weightonly {__version__}, torch {torch.__version__}")
    print(describe_build(build, loaded=cuda_built()))
    print(describe_gpus([c for c in CONFIGS if is_compiled(c)], visible_gpus()))


def describe_build(build: BuildInfo, loaded: bool) -> str:
    """The build in a few lines; `loaded`: whether this Python has the compiled module that calls them."""
    if not build.cuda:
        lines = [f"build: no CUDA kernels ({build.reason})"]
    else:
        lines = [
            f"build: {build.kernels} kernels for {', '.join(build.archs)} ({build.reason})",
            f"  nvcc {build.nvcc}, CUTLASS {build.cutlass}",
            f"  register spills: {len(build.spills) or 'none'}",
        ]
        lines += [
            f"    {spill.unit} sm_{spill.arch}: {spill.spill_store_bytes} bytes stored, "
            f"{spill.spill_load_bytes} bytes loaded"
            for spill in build.spills
        ]
    if build.cuda and not loaded:
        lines.append("  they cannot be used: there is no compiled module for this Python (`make binding`)")
    return "\n".join(lines)


def describe_gpus(compiled: Sequence[KernelConfig], gpus: Sequence[Gpu]) -> str:
    """Each GPU and the configurations that run on it, a line per configuration."""
    if not gpus:
        return "GPU: none is visible; CPU tensors work"
    lines: list[str] = []
    for index, gpu in enumerate(gpus):
        running = [config for config in compiled if runs_on(config, gpu.arch)]
        lines.append(f"GPU {index}: {gpu.name}, compute capability {gpu.arch / 10}, {gpu.sm_count} SMs")
        lines.append(f"  {len(running)} of {len(compiled)} compiled configurations run on it")
        lines += [f"    {config.kernel} ({', '.join(config.formats)})" for config in running]
        if not running:
            lines.append(f"  build for it: {HOW_TO_BUILD.format(archs=gpu.arch)}")
    return "\n".join(lines)


def visible_gpus() -> list[Gpu]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [Gpu(torch.cuda.get_device_name(i), device_arch(i), sm_count(i)) for i in devices]


if __name__ == "__main__":
    sys.exit(main())
