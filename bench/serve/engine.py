"""One engine of vLLM in a process of its own, which alone imports vLLM: a `Job` comes as JSON on stdin.

The last line that `main` prints begins with `RESULT` and is what it measured, as JSON.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .models import MODELS, QUANTIZERS, Weights, config_of, quantization_of, with_layers

RESULT = "RESULT "
METHOD = "weightonly-method"
"""The provider that is `--quantization weightonly`."""

RANDOM = "weightonly-random"
"""The load format of random weights."""

_WARM_TOKENS = 8
_REPEATS = 3


@dataclass(frozen=True)
class Job:
    """What one engine serves and measures. model: a name of `MODELS`, or a folder; quant, group_size, layers: of random
    weights. provider: see `command`. batch: numbers of prompts; prompt, tokens: of each. prefill: tokens of single
    prompts. mode: "graphs", "compile" or "eager"; memory: vLLM's share of the GPU; ranks: GPUs; cache_gb: of keys and
    values, None: what vLLM's share leaves."""

    model: str
    provider: str
    quant: str
    group_size: int
    layers: int | None
    dtype: str
    batch: tuple[int, ...]
    prompt: int
    tokens: int
    prefill: tuple[int, ...]
    mode: str
    memory: float
    ranks: int
    attention: str | None
    logprobs: bool
    cache_gb: float | None = None


def main() -> None:
    job = Job(**json.loads(sys.stdin.read()))
    set_environment(job)
    llm = engine(job)
    result: dict[str, Any] = {"kernels": llm.apply_model(kernels)[0], "decode": {}, "ttft": {}}
    if job.logprobs:
        result["logprobs"] = prompt_logprobs(llm, job.prompt)
    for batch in job.batch:
        result["decode"][batch] = _decode(llm, job, batch)
    for length in job.prefill:
        requests = prompts(llm, 1, length)
        result["ttft"][length] = min(_seconds(llm, requests, 1) for _ in range(_REPEATS + 1))
    print(RESULT + json.dumps(result), flush=True)
    os._exit(0)  # no teardown: destroying a process group hangs while a CUDA graph with NCCL lives


def set_environment(job: Job) -> None:
    """Before vLLM is imported."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions for apply_model
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # ranks know the load format
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if job.provider in ("vllm", "marlin"):
        os.environ["VLLM_PLUGINS"] = ""  # none
    if job.provider == "marlin":
        os.environ["VLLM_DISABLED_KERNELS"] = "MacheteLinearKernel"


def engine(job: Job, **more: Any) -> Any:
    """An LLM of vLLM; more: arguments of it."""
    from vllm import LLM

    folder, arguments = Path(job.model), dict[str, Any]()
    if job.model in MODELS:
        folder = Path(tempfile.mkdtemp(prefix="weightonly_serve_"))
        model = with_layers(MODELS[job.model], job.layers)
        quantization = None if job.provider == "dense" else quantization_of(model, job.quant, job.group_size)
        config = config_of(model, quantization, getattr(torch, job.dtype))
        (folder / "config.json").write_text(json.dumps(config))
        register_random()
        arguments |= {"load_format": RANDOM, "model_loader_extra_config": asdict(job)}
        if job.provider == "marlin" and model.mixture is not None:
            arguments["moe_backend"] = "marlin"
    elif job.provider == METHOD:
        arguments |= {"quantization": "weightonly", "load_format": "weightonly"}
    if job.mode == "eager":
        arguments["enforce_eager"] = True
    elif job.mode == "graphs":
        sizes = sorted({1, 2, 4, 8, *job.batch})
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    if job.attention is not None:
        arguments["attention_backend"] = job.attention
    longest = max(job.prompt + job.tokens, *job.prefill, 0) + 16
    arguments |= {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "seed": 0,
        "max_model_len": longest,
        "max_num_batched_tokens": max(longest, 8192),
        "gpu_memory_utilization": job.memory,
        "max_num_seqs": max(*job.batch, 8),
        "enable_prefix_caching": False,
        "tensor_parallel_size": job.ranks,
    }
    if job.cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(job.cache_gb * 1e9)
    return LLM(**(arguments | more))


def register_random() -> None:
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class RandomLoader(DefaultModelLoader):
        """Brings random tensors as those of a checkpoint, by vLLM's own loading of weights, reloading too."""

        def __init__(self, load_config: Any) -> None:
            plain = copy.copy(load_config)
            plain.model_loader_extra_config = {}
            super().__init__(plain)
            self.job = Job(**load_config.model_loader_extra_config)

        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[Any]:
            return iter(random_weights(self.job, next(model.parameters()).device))

    register_model_loader(RANDOM)(RandomLoader)


def random_weights(job: Job, device: torch.device, seed: int = 0) -> Weights:
    served, dtype = with_layers(MODELS[job.model], job.layers), getattr(torch, job.dtype)
    quantizer = QUANTIZERS[job.quant]
    return Weights(served, quantizer, job.provider == "dense", job.group_size, dtype, device, seed)


def kernels(model: torch.nn.Module) -> dict[str, int]:
    """Which class computes each kind of layer -> how many layers."""
    found = collections.Counter[str]()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            owners = (method, getattr(module, "scheme", None))
            names = ("kernel", "fp8_linear", "linear_kernel")
            kernel = next(filter(None, (getattr(owner, name, None) for owner in owners for name in names)), None)
            cls = getattr(method, "experts_cls", None) or type(kernel or method)
            found[f"{name.rpartition('.')[2]}: {cls.__name__}"] += 1
    return dict(found)


def prompts(llm: Any, count: int, length: int) -> list[Any]:
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    g = torch.Generator().manual_seed(1)
    return [{"prompt_token_ids": torch.randint(3, vocabulary, (length,), generator=g).tolist()} for _ in range(count)]


def sampling(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def _seconds(llm: Any, requests: Sequence[Any], tokens: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    llm.generate(requests, sampling(tokens), use_tqdm=False)
    return time.perf_counter() - begin


def _decode(llm: Any, job: Job, batch: int) -> float:
    """Tokens per second of all prompts together, without their prefill."""
    requests = prompts(llm, batch, job.prompt)
    _seconds(llm, requests, _WARM_TOKENS)
    first = min(_seconds(llm, requests, 1) for _ in range(_REPEATS))
    whole = min(_seconds(llm, requests, job.tokens) for _ in range(_REPEATS - 1))
    return batch * (job.tokens - 1) / max(whole - first, 1e-9)


def prompt_logprobs(llm: Any, length: int, **more: Any) -> list[list[float]]:
    """The log-probability of each token of 8 prompts but the first: no near-tie flips them. more: for `generate`."""
    outputs = llm.generate(prompts(llm, 8, length), sampling(1, prompt_logprobs=0), use_tqdm=False, **more)
    return [list(_seen(o.prompt_token_ids, o.prompt_logprobs)) for o in outputs]


def _seen(ids: Sequence[int], logprobs: Iterable[Any]) -> Iterator[float]:
    return (at[i].logprob for i, at in zip(ids, logprobs, strict=True) if at is not None)
