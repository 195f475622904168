"""The command: an engine for each provider, one after another, and what they measured as rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from weightonly.require import require_int

from .. import command
from .engine import METHOD, RESULT, Job
from .models import MODELS, QUANTIZERS

PROVIDERS = ("weightonly", METHOD, "vllm", "marlin", "dense")
MODES = ("graphs", "compile", "eager")
LOGPROB_BOUND = 0.05
"""Of the mean difference from the dense model's log-probabilities: both have the same numbers, rounded alike."""


def serve(
    model: str,
    quant: str = "gptq",
    *,
    providers: Sequence[str] = ("weightonly", "vllm"),
    batch: Sequence[int] = (1, 32, 128),
    prompt: int = 32,
    tokens: int = 128,
    prefill: Sequence[int] = (2048,),
    group_size: int = 128,
    layers: int | None = None,
    dtype: torch.dtype = torch.float16,
    mode: str = "graphs",
    memory: float = 0.85,
    ranks: int = 1,
    attention: str | None = None,
    cache_gb: float | None = None,
) -> pd.DataFrame:
    """Time vLLM's engine, in a process for each provider.

    Args:
        model: a name of `MODELS` (random weights in the format `quant`, `layers` of them or all), or a folder.
        quant: the format of random weights: gptq, awq, ct, mxfp4 and others.
        providers: weightonly, vllm, marlin, dense and others, in turns.
        batch: numbers of prompts.
        prompt: tokens of each prompt of a batch.
        tokens: that are written after each prompt.
        prefill: lengths of single prompts.
        group_size: of random weights.
        layers: of a named model; None: all.
        dtype: of activations.
        mode: "graphs": CUDA graphs of decode; or another of `MODES`.
        memory: vLLM's share of the GPU.
        ranks: GPUs.
        attention: a backend of vLLM's; None: its choice.
        cache_gb: of keys and values, instead of what the share leaves.

    Returns:
        A row for each provider and number of prompts or length of a prompt. Columns: model, quant, provider, kernels,
        measure ("decode": tokens/s of all prompts; "ttft": ms to the first token), size (prompts, or tokens of the
        prompt), value, logprob_mean, logprob_max (differences from the dense model's, where it is a provider), note
        (why an engine did not run).

    Raises:
        ValueError: unknown names, numbers out of range, and a model with no folder.
        TypeError: numbers of another type.
        ModuleNotFoundError: without vLLM.
    """
    for provider in providers:
        if provider not in PROVIDERS:
            raise ValueError(f"providers: expected some of {', '.join(PROVIDERS)}, got {provider!r}")
    if model not in MODELS and not (Path(model) / "config.json").is_file():
        raise ValueError(f"model: expected one of {', '.join(MODELS)} or a folder with config.json, got {model!r}")
    wrong = METHOD if model in MODELS else "dense"
    if wrong in providers:
        raise ValueError(f"providers: expected dense with random weights, {METHOD} with a folder, got {wrong}")
    if quant not in QUANTIZERS:
        raise ValueError(f"quant: expected one of {', '.join(QUANTIZERS)}, got {quant!r}")
    if model in MODELS and MODELS[model].is_gpt_oss and (quant, dtype) != ("mxfp4", torch.bfloat16):
        raise ValueError(f"quant and dtype: expected mxfp4 and torch.bfloat16 with {model}, got {quant} and {dtype}")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    numbers = (
        ("batch", batch, 1),
        ("prompt", [prompt], 1),
        ("tokens", [tokens], 2),  # the first is not timed
        ("prefill", prefill, 1),
        ("group_size", [group_size], 1),
        ("layers", [] if layers is None else [layers], 1),
        ("ranks", [ranks], 1),
    )
    for name, values, least in numbers:
        for value in values:
            require_int(name, value, least)
    if not batch:
        raise ValueError("batch: expected at least one number of prompts, got none")
    if not 0 < memory <= 1:
        raise ValueError(f"memory: expected more than 0 and at most 1, got {memory}")
    if cache_gb is not None and not cache_gb > 0:
        raise ValueError(f"cache_gb: expected more than 0, got {cache_gb}")
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("serve: expected vLLM to be installed (pip install vllm), found none")
    rows: list[dict[str, Any]] = []
    logprobs: dict[str, torch.Tensor] = {}
    for provider in providers:
        job = Job(
            model=model,
            provider=provider,
            quant=quant,
            group_size=group_size,
            layers=layers,
            dtype=str(dtype).removeprefix("torch."),
            batch=tuple(batch),
            prompt=prompt,
            tokens=tokens,
            prefill=tuple(prefill),
            mode=mode,
            memory=memory,
            ranks=ranks,
            attention=attention,
            logprobs="dense" in providers,
            cache_gb=cache_gb,
        )
        result = _run(job)
        base: dict[str, Any] = {"model": model, "quant": "" if provider == "dense" else quant, "provider": provider}
        base |= {"mode": mode, "ranks": ranks}
        if isinstance(result, str):
            rows.append(base | {"measure": "", "note": result})
            continue
        base["kernels"] = "; ".join(f"{count} x {name}" for name, count in result["kernels"].items())
        if "logprobs" in result:
            logprobs[provider] = torch.tensor(result["logprobs"])
        rows += [base | {"measure": "decode", "size": int(m), "value": v} for m, v in result["decode"].items()]
        rows += [base | {"measure": "ttft", "size": int(m), "value": 1e3 * v} for m, v in result["ttft"].items()]
    if "dense" in logprobs:
        for row in rows:
            if row["provider"] in logprobs:
                differences = (logprobs[row["provider"]] - logprobs["dense"]).abs()
                row |= {"logprob_mean": float(differences.mean()), "logprob_max": float(differences.max())}
    return pd.DataFrame(rows)


def _run(job: Job) -> dict[str, Any] | str:
    """What the engine measured; a str: why it did not. What it prints goes to stderr."""
    command = [sys.executable, "-c", f"from {__package__}.engine import main; main()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asdict(job)))
        process.stdin.close()
        last, error = "no output", ""
        for line in process.stdout:
            if line.startswith(RESULT):
                found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
                return found
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
            error = line.strip() if "Error: " in line else error
    return error or last


def _table(frame: pd.DataFrame) -> str:
    """A line for each measure and size, a column for each provider, and the ratio of ours to the others'."""
    parts = []
    notes = frame[frame["measure"] == ""]
    measured = frame[frame["measure"] != ""]
    for (provider, kernels), _ in measured.groupby(["provider", "kernels"], sort=False):
        parts.append(f"{provider}: {kernels}")
    if len(measured):
        wide = measured.pivot_table(index=["measure", "size"], columns="provider", values="value", sort=False)
        for other in [c for c in wide.columns if c != "weightonly" and "weightonly" in wide]:
            ratio = wide["weightonly"] / wide[other]
            is_decode = wide.index.get_level_values("measure") == "decode"
            wide[f"x {other}"] = ratio.where(is_decode, 1 / ratio)
        parts.append(wide.to_string(float_format=lambda v: f"{v:.2f}" if v < 100 else f"{v:.0f}"))
    if "logprob_mean" in measured:
        for provider, row in measured.groupby("provider", sort=False).first().iterrows():
            parts.append(
                f"{provider}: log-probabilities {row['logprob_mean']:.4f} from the dense model's in the mean, "
                f"{row['logprob_max']:.4f} at most"
            )
    parts += [f"{row['provider']} did not run: {row['note']}" for _, row in notes.iterrows()]
    return "\n".join(parts)


def _add_options(parser: command.Parser) -> None:
    parser.add_argument("--model", default="llama3-8b", help=f"{', '.join(MODELS)}, or a folder (default llama3-8b)")
    parser.add_argument("--quant", choices=tuple(QUANTIZERS), default="gptq", help="format of random weights")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="of x (default fp16)")
    command.add_providers(parser, "weightonly,vllm", PROVIDERS)
    command.add_batch(parser, (1, 32, 128), "prompts at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt (default 32)")
    parser.add_argument("--tokens", type=int, default=128, help="to write for each prompt (default 128)")
    parser.add_argument("--prefill", type=command.integers, default=[2048], help="tokens of single prompts")
    parser.add_argument(
        "--mode", choices=MODES, default="graphs", help="CUDA graphs of decode, vLLM's default, or eager"
    )
    parser.add_argument("--memory", type=float, default=0.85, help="vLLM's share of the GPU (default 0.85)")
    parser.add_argument("--cache-gb", type=float, help="of keys and values (default: what vLLM's share leaves)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (tensor parallel)")
    parser.add_argument("--attention", help="vLLM's attention backend, such as FLASH_ATTN or TRITON_ATTN")
    command.add_csv(parser)


def _command(options: command.Options) -> int:
    """1 where an engine did not run, or log-probabilities are beyond the bound."""
    if options.providers == "all":
        options.providers = list(PROVIDERS)
    frame = serve(**command.keywords(options, serve))
    print(_table(frame))
    command.write_csv(frame, options)
    is_off = "logprob_mean" in frame and bool((frame["logprob_mean"] > LOGPROB_BOUND).any())
    return int(is_off or bool((frame["measure"] == "").any()))


COMMAND = command.Command("vLLM's engine with our kernels, beside its own choice", _add_options, _command)
