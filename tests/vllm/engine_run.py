"""Engines of vLLM, on a GPU, in a process of their own: `python -m tests.vllm.engine_run WHAT PROVIDER`.

logprobs PART: of the prompts of a part of `CASES`. ranks CASE:GPUS: of one of them, and what it writes. folders PART:
of the prompts of a part of `FOLDERS`.
features MODEL: prompts longer than a step takes (chunked prefill), cached prefixes, LoRA, sleep, weights that are
loaded again. invariant CASE: what is written after a prompt alone and among others. The last line is what was found,
as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.vllm.engine_folders import FOLDERS, write

from weightonly.bench.serve.engine import (
    RESULT,
    Job,
    engine,
    kernels,
    prompt_logprobs,
    prompts,
    random_weights,
    sampling,
    set_environment,
)
from weightonly.bench.serve.models import MODELS, QUANTIZERS

LENGTH = 200
_RANK = 8
_JOB = Job("tiny", "", "ct", 128, None, "float16", (8,), LENGTH, 16, (), "eager", 0.1, 1, None, False, 1.0)

CASES = {
    **{f"{quant}-fp16": replace(_JOB, quant=quant) for quant in QUANTIZERS},
    **{f"{quant}-bf16": replace(_JOB, quant=quant, dtype="bfloat16") for quant in ("gptq", "awq", "ct8")},
    **{f"ct-groups-of-{group}": replace(_JOB, group_size=group) for group in (32, 64)},
    **{f"{quant}-experts": replace(_JOB, quant=quant, model="tiny-mixtral") for quant in QUANTIZERS if quant != "fp8"},
    "gpt-oss-experts": replace(_JOB, quant="mxfp4", model="tiny-gpt-oss", layers=2, dtype="bfloat16"),
}

PARTS = 3
"""Processes that share the cases, and as many the folders: tests may run side by side."""


def logprobs(provider: str, part: str) -> dict[str, Any]:
    found = {}
    for name in list(CASES)[int(part) :: PARTS]:
        found[name] = _of_prompts(replace(CASES[name], provider=provider))
    return found


def folders(provider: str, part: str) -> dict[str, Any]:
    """Ours or their dense twins."""
    found, is_dense = {}, provider == "dense"
    for name in list(FOLDERS)[int(part) :: PARTS]:
        case = FOLDERS[name]
        with tempfile.TemporaryDirectory() as place:
            folder = write(case, Path(place), is_dense)
            job = replace(_JOB, model=str(folder), provider=provider if is_dense else case.provider)
            found[name] = _of_prompts(job)
    return found


def _of_prompts(job: Job) -> dict[str, Any]:
    llm = engine(job)
    found = {"kernels": llm.apply_model(kernels)[0], "logprobs": prompt_logprobs(llm, LENGTH)}
    _free(llm)
    return found


def ranks(provider: str, case_and_ranks: str) -> dict[str, Any]:
    """steps: for each prompt and token that is written, the log-probabilities of the likeliest tokens, by token."""
    case, _, count = case_and_ranks.partition(":")
    llm = engine(replace(CASES[case], provider=provider, ranks=int(count), mode="graphs"))
    outputs = llm.generate(prompts(llm, 8, LENGTH), sampling(16, logprobs=5), use_tqdm=False)
    steps = [[{token: at.logprob for token, at in step.items()} for step in o.outputs[0].logprobs] for o in outputs]
    found: dict[str, Any] = {"kernels": llm.apply_model(kernels), "logprobs": prompt_logprobs(llm, LENGTH)}
    return found | {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "steps": steps}


def invariant(provider: str, case: str) -> dict[str, Any]:
    """Tokens after each prompt, and their log-probabilities, in vLLM's batch-invariant mode."""
    llm = engine(replace(CASES[case], provider=provider, batch=(64,), mode="graphs"))
    given = prompts(llm, 64, LENGTH)
    found: dict[str, Any] = {"kernels": llm.apply_model(kernels)[0]}
    for name, requests in (("alone", [given[5]]), ("among 63", given), ("among 7", given[3:11])):
        outputs = llm.generate(requests, sampling(32, logprobs=1), use_tqdm=False)
        written = outputs[requests.index(given[5])].outputs[0]
        steps = zip(written.token_ids, written.logprobs, strict=True)
        found[name] = [[token, step[token].logprob] for token, step in steps]
    return found


def _free(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    vars(llm).clear()  # the CUDA graphs, too: before the process group
    cleanup_dist_env_and_memory()
    gc.collect()


def features(provider: str, model: str) -> dict[str, Any]:
    job = replace(_JOB, provider=provider, model=model, mode="graphs")
    with_lora = MODELS[model].mixture is None
    lora = {"enable_lora": True, "max_lora_rank": _RANK} if with_lora else {}
    llm = engine(job, enable_prefix_caching=True, enable_sleep_mode=True, max_num_batched_tokens=256, **lora)
    found: dict[str, Any] = {"chunked prefill": prompt_logprobs(llm, LENGTH)}
    tokens = {"first": _tokens(llm), "cached prefixes": _tokens(llm)}
    if with_lora:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("adapter", 1, str(_adapter(job)))
        found["LoRA"] = prompt_logprobs(llm, LENGTH, lora_request=request)
    llm.sleep(level=1)
    llm.wake_up()
    found["sleep"] = prompt_logprobs(llm, LENGTH)
    llm.collective_rpc("reload_weights")
    found["the same weights again"] = prompt_logprobs(llm, LENGTH)
    other = random_weights(job, torch.device("cuda"), seed=1)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(other)})
    found["other weights"] = prompt_logprobs(llm, LENGTH)
    llm.sleep(level=2)  # the weights are gone
    llm.wake_up()
    llm.collective_rpc("reload_weights")
    found["weights after sleep"] = prompt_logprobs(llm, LENGTH)
    return {"logprobs": found, "tokens": tokens}


def _tokens(llm: Any) -> list[list[int]]:
    outputs = llm.generate(prompts(llm, 8, LENGTH), sampling(16), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def _adapter(job: Job) -> Path:
    """A PEFT folder for q_proj and down_proj of every layer."""
    sizes = MODELS[job.model].attention
    g, tensors = torch.Generator().manual_seed(3), dict[str, torch.Tensor]()
    shapes = {"self_attn.q_proj": (sizes.hidden, sizes.hidden), "mlp.down_proj": (sizes.intermediate, sizes.hidden)}
    for layer in range(sizes.layers):
        for name, (k, n) in shapes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(_RANK, k, generator=g).half() * k**-0.5
            tensors[f"{base}.lora_B.weight"] = torch.randn(n, _RANK, generator=g).half() * 0.3
    folder = Path(tempfile.mkdtemp())
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in shapes]
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return folder


if __name__ == "__main__":
    what, provider, *of = sys.argv[1:]
    set_environment(replace(_JOB, provider=provider))
    if what == invariant.__name__:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    found = {run.__name__: run for run in (logprobs, folders, features, ranks, invariant)}[what](provider, *of)
    print(RESULT + json.dumps(found), flush=True)
    os._exit(0)  # no teardown, see bench/serve/engine.py
