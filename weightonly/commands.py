"""The commands of `weightonly`: the options of each, and what it does."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from .explain import ROWS, explain_folder
from .formats import convert, export, open_checkpoint
from .formats.describe import describe
from .formats.folder import SHARD_BYTES
from .info import print_info
from .shown import shown

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_MODEL = "a folder with safetensors files and config.json, or OWNER/NAME of the Hugging Face Hub"
_ARCH = "the GPU to pack for, such as sm90, or cpu; default: the visible GPU, else cpu"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def _info(commands: Commands) -> None:
    parser = commands.add_parser("info", help="versions, the build, the GPUs, and the kernels that run on each")
    parser.set_defaults(act=lambda _: print_info())


def _inspect(commands: Commands) -> None:
    parser = commands.add_parser("inspect", help="format, group sizes, act-order, shapes and bytes of a checkpoint")
    parser.add_argument("folder", metavar="MODEL", help=_MODEL)
    parser.set_defaults(act=lambda options: _print_checkpoint(options.folder))


def _convert(commands: Commands) -> None:
    parser = commands.add_parser("convert", help="read a quantized checkpoint that inspect knows, write it packed")
    parser.add_argument("source", metavar="IN", help=_MODEL)
    parser.add_argument("target", metavar="OUT", help="the folder to write; it must not exist")
    parser.add_argument("--arch", help=_ARCH)
    parser.add_argument("--device", default="cpu", help="where to unpack and pack: cpu (default), cuda")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of a file (default: %(default)s)")

    def act(options: argparse.Namespace) -> None:
        convert(options.source, options.target, options.arch, options.device, options.shard_bytes)
        _print_checkpoint(options.target)

    parser.set_defaults(act=act)


def _export(commands: Commands) -> None:
    parser = commands.add_parser("export", help="write a quantized checkpoint in the format of another quantizer")
    parser.add_argument("source", metavar="IN", help=_MODEL)
    parser.add_argument("target", metavar="OUT", help="the folder to write; it must not exist")
    parser.add_argument("--to", required=True, help="compressed-tensors, gptq or awq")
    parser.add_argument("--device", default="cpu", help="where to unpack and pack: cpu (default), cuda")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of a file (default: %(default)s)")

    def act(options: argparse.Namespace) -> None:
        export(options.source, options.target, options.to, options.device, options.shard_bytes)
        _print_checkpoint(options.target)

    parser.set_defaults(act=act)


def _quantize(commands: Commands) -> None:
    parser = commands.add_parser(
        "quantize",
        help="read a dense model, write it quantized and packed",
        description="PATTERN is a name of a layer, in which * matches as in a file name, or the end of one, after a "
        "dot: lm_head, model.layers.0.*, down_proj.",
    )
    parser.add_argument("source", metavar="MODEL", help=_MODEL)
    parser.add_argument("target", metavar="OUT", help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--format", help="int4 (default), int8, nf4, fp4, mxfp4 or nvfp4")
    parser.add_argument(
        "--group-size", type=int, help="rows that share a scale, -1: all (default: the usual ones of the format)"
    )
    parser.add_argument("--asymmetric", action="store_true", help="with zero points: int4 and int8")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--no-search", action="store_true", help="scales by the range of a group: faster, worse")
    how.add_argument(
        "--whole-zeros", action="store_true", help="--asymmetric with whole zero points, which export writes: worse"
    )
    parser.add_argument("--skip", metavar="PATTERN", action="append", default=[], help="layers to leave as they are")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="the layers to quantize")
    parser.add_argument(
        "--layer",
        metavar="PATTERN=FORMAT[:GROUP_SIZE]",
        action="append",
        default=[],
        type=_layer,
        help="another format for some layers, such as down_proj=int8; the last one that matches counts",
    )
    parser.add_argument(
        "--activations",
        metavar="fp8",
        help="fp8: layers round x to E4M3, for Hopper's FP8 tensor cores; int4 and mxfp4",
    )
    parser.add_argument("--head", metavar="FORMAT", help="quantize the output embeddings, too, such as in int8 or fp8")
    parser.add_argument("--revision", help="a branch, tag or commit of a model of the hub")
    parser.add_argument("--dtype", help="of scales and dense weights: float16, bfloat16 or float32; default: as it is")
    parser.add_argument("--device", default="cpu", help="where to quantize: cpu (default), cuda")
    parser.add_argument("--arch", help=_ARCH)
    parser.add_argument("--shard-size", type=_bytes, default=SHARD_BYTES, help="of a file, such as 500M (default: 2Gi)")
    parser.set_defaults(act=_run_quantize)


def _run_quantize(options: argparse.Namespace) -> None:
    from .hf.config import WeightOnlyConfig  # transformers: seconds to import, and no dependency of this package
    from .hf.quantize_folder import quantize_folder

    config = WeightOnlyConfig(
        options.format,
        options.group_size,
        False if options.asymmetric or options.whole_zeros else None,
        options.arch,
        layers={pattern: own for layer in options.layer for pattern, own in layer.items()},
        search="whole" if options.whole_zeros else not options.no_search,
        activations=options.activations,
        quantize_head=options.head,
    )
    summary = quantize_folder(
        options.source,
        options.target,
        config,
        skip=options.skip,
        only=options.only,
        revision=options.revision,
        dtype=options.dtype,
        device=options.device,
        shard_bytes=options.shard_size,
    )
    print(shown(summary, keep="\n"))


def _layer(text: str) -> dict[str, dict[str, Any]]:
    pattern, equals, kind = text.rpartition("=")
    format, colon, size = kind.partition(":")
    try:
        if not (pattern and equals and format):
            raise ValueError
        return {pattern: {"format": format} | ({"group_size": int(size)} if colon else {})}
    except ValueError:
        expected = "a pattern and a format, such as down_proj=int8 or mlp.*=int4:64"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]I?)?B?", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 500M, 2G or 2Gi, got {text!r}")
    return int(found[1]) * _UNITS[found[2] or ""]


def _explain(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="which kernels compute its layers, for which numbers of rows, and why")
    parser.add_argument("folder", metavar="MODEL", help=_MODEL)
    parser.add_argument("--m", type=_numbers, default=ROWS, help="rows of x, such as 1,16 (default: 1,16,256,4096)")
    parser.add_argument(
        "--arch", help="the GPU that computes, such as sm90, or cpu; default: the visible GPU, else cpu"
    )
    parser.add_argument(
        "--sm-count", type=int, help="its multiprocessors (default: those of the visible or usual board)"
    )
    parser.set_defaults(act=lambda o: print(explain_folder(o.folder, o.m, o.arch, o.sm_count)))


def _run(commands: Commands) -> None:
    text = commands.add_parser("run", help="load a model into transformers, continue a text, print tokens/s")
    text.add_argument("folder", metavar="MODEL", help=f"quantized or not: {_MODEL}")
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
    text.add_argument("--arch", help=_ARCH)
    text.add_argument(
        "--activations", metavar="fp8|16bit", help="fp8: x in E4M3; default: as a packed folder has it, else 16bit"
    )

    def act(options: argparse.Namespace) -> None:
        from .hf.run import run  # transformers: seconds to import, and no dependency of this package

        run(options)

    text.set_defaults(act=act)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,16, got {text!r}") from None


def _print_checkpoint(folder: str) -> None:
    print(shown(describe(open_checkpoint(folder)), keep="\n"))


COMMANDS: tuple[Callable[[Commands], None], ...] = (_info, _inspect, _quantize, _convert, _export, _explain, _run)
"""What adds each command to the parser, in the order of the help."""
