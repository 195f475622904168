"""What an engine computes in each of vLLM's features: `python -m tests.vllm.engine_features PROVIDER MODEL QUANT`.

Prompts longer than a step takes (chunked prefill), cached prefixes, LoRA, sleep, weights that are loaded again. Prints
log-probabilities of prompts by feature, and the tokens that must stay what they were, as JSON in the last line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weightonly.bench.serve.engine import (
    RESULT,
    Job,
    engine,
    prompt_logprobs,
    prompts,
    random_weights,
    sampling,
    set_environment,
)
from weightonly.bench.serve.models import MODELS

_LENGTH = 200
_RANK = 8


def main(provider: str, model: str, quant: str) -> None:
    job = Job(model, provider, quant, 128, None, "float16", (8,), _LENGTH, 16, (), "graphs", 0.1, 1, None, False, 1.0)
    set_environment(job)
    with_lora = MODELS[model].mixture is None
    lora = {"enable_lora": True, "max_lora_rank": _RANK} if with_lora else {}
    llm = engine(job, enable_prefix_caching=True, enable_sleep_mode=True, max_num_batched_tokens=256, **lora)
    found: dict[str, Any] = {"chunked prefill": prompt_logprobs(llm, _LENGTH)}
    tokens = {"first": _tokens(llm), "cached prefixes": _tokens(llm)}
    if with_lora:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("adapter", 1, str(_adapter(job)))
        found["LoRA"] = prompt_logprobs(llm, _LENGTH, lora_request=request)
    llm.sleep(level=1)
    llm.wake_up()
    found["sleep"] = prompt_logprobs(llm, _LENGTH)
    llm.collective_rpc("reload_weights")
    found["the same weights again"] = prompt_logprobs(llm, _LENGTH)
    other = random_weights(job, torch.device("cuda"), seed=1)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(other)})
    found["other weights"] = prompt_logprobs(llm, _LENGTH)
    llm.sleep(level=2)  # the weights are gone
    llm.wake_up()
    llm.collective_rpc("reload_weights")
    found["weights after sleep"] = prompt_logprobs(llm, _LENGTH)
    print(RESULT + json.dumps({"logprobs": found, "tokens": tokens}), flush=True)
    os._exit(0)


def _tokens(llm: Any) -> list[list[int]]:
    outputs = llm.generate(prompts(llm, 8, _LENGTH), sampling(16), use_tqdm=False)
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
    main(*sys.argv[1:])
