"""Fine-tune a quantized model with LoRA, save the adapter, load it, merge it, and write text with it.

The model is a tiny Llama with random weights, which learns to count: nothing is downloaded. It takes half a minute on
a CPU. The same lines fine-tune a model of any size: `AutoModelForCausalLM.from_pretrained` instead of `base_model`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

import weightonly as wo
import weightonly.hf  # makes weightonly.nn.Linear known to PEFT

WORDS = 32  # of the vocabulary: the numbers that the model counts with
STEPS = 50


def base_model() -> Any:
    """A quantized model. Its weights are random; the adapters bring in all that it knows."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return wo.nn.quantize_model(transformers.LlamaForCausalLM(config), format="nf4")


def train(model: Any) -> list[float]:
    """The losses of STEPS steps on lines that count up by one."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    losses = []
    for _ in range(STEPS):
        first = torch.randint(0, WORDS, (16, 1), generator=generator)
        lines = (first + torch.arange(12)) % WORDS  # [16, 12]
        loss = model(input_ids=lines, labels=lines).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def count(model: Any, first: int) -> list[int]:
    """Eight numbers that the model writes after `first` and the next one."""
    prompt = torch.tensor([[first, first + 1]])
    written = model.eval().generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    numbers: list[int] = written[0, 2:].tolist()
    return numbers


def main() -> dict[str, list[int]]:
    model = base_model()
    print(model.weightonly_summary)
    adapters = LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"], r=16, task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    model.print_trainable_parameters()
    losses = train(model)
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base_model(), folder)
    texts = {"before": count(base_model(), 5), "trained": count(model, 5), "loaded": count(loaded, 5)}
    merged = loaded.merge_and_unload()  # quantized again: nothing is left of the adapters but their effect
    texts["merged"] = count(merged, 5)
    for name, numbers in texts.items():
        print(f"{name:8} 5 6 -> {' '.join(map(str, numbers))}")
    return texts


if __name__ == "__main__":
    main()
