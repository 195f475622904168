"""`weightonly`, or `python -m weightonly`: what this installation is made of, and checkpoints.

info                             versions, the build, and which of its kernels run here
inspect FOLDER                   what a quantized checkpoint contains
convert IN OUT --arch sm90       packs one for a GPU, or for CPUs
export IN OUT --to gptq          writes one for others: compressed-tensors, gptq, awq
explain FOLDER                   which kernels its layers run, for each number of rows, and why
run FOLDER --prompt TEXT         loads one into transformers and writes text
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import __version__, build_info
from .build_info import BuildInfo
from .console import guarded
from .cpu import library, table
from .device import device_arch, driver_cuda, sm_count
from .explain import ROWS, explain_folder
from .extras import describe_missing
from .formats import convert, export, open_checkpoint
from .formats.describe import describe
from .formats.folder import SHARD_BYTES
from .heuristics import KernelConfig
from .heuristics.configs import CONFIGS
from .kernels import HOW_TO_BUILD, NO_MODULE, cuda_built, is_compiled, runs_on
from .shown import shown


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: int  # compute capability as an integer: 90
    sm_count: int


class _Version(argparse.Action):
    """Prints when it is met, so that `_build.json` is read for this alone."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(describe_version(build_info.read()))
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0; 1 with one line for what it refuses; 130 for Ctrl-C, 141 where nobody reads the output.

    WEIGHTONLY_TRACEBACK=1 shows where an error comes from.
    """
    return guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
        if options.command == "info":
            _print_info()
        elif options.command == "inspect":
            _print_checkpoint(options.folder)
        elif options.command == "explain":
            print(explain_folder(options.folder, options.m, options.arch, options.sm_count))
        elif options.command == "run":
            from .hf.run import run  # transformers: seconds to import, and no dependency of this package

            run(options)
        elif options.command == "export":
            export(options.source, options.target, options.to, options.device, options.shard_bytes)
            _print_checkpoint(options.target)
        else:
            convert(options.source, options.target, options.arch, options.device, options.shard_bytes)
            _print_checkpoint(options.target)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("WEIGHTONLY_TRACEBACK"):
            print(shown(traceback.format_exc(), keep="\n"), end="", file=sys.stderr)
        print(shown(f"error: {_message(error)}", keep="\n"), file=sys.stderr)
        return 1
    return 0


def _message(error: Exception) -> str:
    if isinstance(error, ImportError):
        return describe_missing(error)
    if isinstance(error, ValueError | OSError | RuntimeError):
        return str(error)
    # Such as those of transformers for a strange config: their text alone says little.
    return f"{type(error).__name__}: {error} (WEIGHTONLY_TRACEBACK=1 shows where)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, help="the library and its build, in a line")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, the build, the GPUs, and the kernels that run on each")
    look = commands.add_parser("inspect", help="format, group sizes, act-order, shapes and bytes of a checkpoint")
    look.add_argument("folder", metavar="FOLDER", help="with safetensors files and config.json")
    pack = commands.add_parser("convert", help="read a checkpoint that inspect knows, write it packed")
    pack.add_argument("source", metavar="IN", help="the folder to read")
    pack.add_argument("target", metavar="OUT", help="the folder to write; it must not exist")
    pack.add_argument("--arch", help="the GPU to pack for, such as sm90, or cpu; default: the visible GPU, else cpu")
    pack.add_argument("--device", default="cpu", help="where to unpack and pack: cpu (default), cuda")
    pack.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of a file (default: %(default)s)")
    give = commands.add_parser("export", help="write one in the format of another quantizer")
    give.add_argument("source", metavar="IN", help="the folder to read, that inspect knows")
    give.add_argument("target", metavar="OUT", help="the folder to write; it must not exist")
    give.add_argument("--to", required=True, help="compressed-tensors, gptq or awq")
    give.add_argument("--device", default="cpu", help="where to unpack and pack: cpu (default), cuda")
    give.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of a file (default: %(default)s)")
    why = commands.add_parser("explain", help="which kernels compute its layers, for which numbers of rows, and why")
    why.add_argument("folder", metavar="FOLDER", help="that inspect knows")
    why.add_argument("--m", type=_numbers, default=ROWS, help="rows of x, such as 1,16 (default: 1,16,256,4096)")
    why.add_argument("--arch", help="the GPU that computes, such as sm90, or cpu; default: the visible GPU, else cpu")
    why.add_argument("--sm-count", type=int, help="its multiprocessors (default: those of the visible or usual board)")
    text = commands.add_parser("run", help="load a checkpoint into transformers, continue a text, print tokens/s")
    text.add_argument("folder", metavar="FOLDER", help="quantized or not, with safetensors files and config.json")
    start = text.add_mutually_exclusive_group(required=True)
    start.add_argument("--prompt", help="the text to continue; the folder has a tokenizer")
    start.add_argument("--tokens", help="its tokens instead, as numbers: 1,2,3")
    text.add_argument(
        "--chat", action="store_true", help="the prompt is what a user says, in the model's chat template"
    )
    text.add_argument("--temperature", type=float, help="sample, this random; default and 0: the likeliest token")
    text.add_argument(
        "--top-p", type=float, help="sample from the likeliest tokens that have this probability together"
    )
    text.add_argument("--seed", type=int, help="of sampling; default: a new one, which is printed")
    text.add_argument("--max-new-tokens", type=int, default=32, help="tokens to write (default: %(default)s)")
    text.add_argument("--dtype", help="float16, bfloat16 or float32; default: that of config.json")
    text.add_argument("--device", help="cpu, cuda, auto (accelerate spreads it); default: a GPU with kernels, else cpu")
    text.add_argument("--arch", help="the GPU to pack for, such as sm90, or cpu; default: the visible GPU, else cpu")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,16, got {text!r}") from None


def _program() -> str:
    """How this was called: by its script or by its module."""
    return "weightonly" if os.path.basename(sys.argv[0]) == "weightonly" else "python -m weightonly"


def _print_checkpoint(folder: str) -> None:
    print(shown(describe(open_checkpoint(folder)), keep="\n"))


def _print_info() -> None:
    build = build_info.read()
    print(f"weightonly {__version__}, torch {torch.__version__}")
    print(describe_build(build, loaded=cuda_built()))
    if (problem := driver_problem(build, driver_cuda())) is not None:
        print(problem)
    print(describe_cpu(library.backend()), table.describe(library.backend()), sep="\n")
    print(describe_gpus([c for c in CONFIGS if is_compiled(c)], visible_gpus()))


def describe_version(build: BuildInfo) -> str:
    """The library and its build in one line."""
    if not build.cuda:
        return f"weightonly {__version__} without CUDA kernels ({build.reason})"
    made_with = f"nvcc {build.nvcc}, CUTLASS {build.cutlass}"
    return f"weightonly {__version__} with {build.kernels} kernels for {', '.join(build.archs)} ({made_with})"


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
        lines.append(f"  they cannot be used: {NO_MODULE}")
    return "\n".join(lines)


def driver_problem(build: BuildInfo, driver: tuple[int, int] | None) -> str | None:
    """Why a driver that supports this CUDA cannot run the kernels of the build; None: it can, or it is not known."""
    if not build.cuda or driver is None or driver[0] >= int(build.nvcc.partition(".")[0] or 0):
        return None
    return (
        f"driver: supports CUDA {driver[0]}.{driver[1]}, too old for these kernels (CUDA {build.nvcc}); update it, or "
        f"take kernels that CUDA {driver[0]} built"
    )


def describe_cpu(backend: library.Backend) -> str:
    """What computes on CPU tensors, and why, in a line."""
    threads = (
        "" if backend.library is None or backend.library.wo_cpu_has_threads() else "; one thread: no OpenMP runtime"
    )
    return f"CPU: {backend.name}, {torch.get_num_threads()} threads of torch ({backend.reason}){threads}"


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
