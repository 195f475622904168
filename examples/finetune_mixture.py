"""Fine-tune a mixture with packed experts by LoRA and Trainer; use the adapter beside packed and dense experts.

The model is a tiny Qwen3-MoE with random weights, which learns to count: nothing is downloaded. It takes a minute on a
CPU. The same lines fine-tune a mixture of any size: `AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=
WeightOnlyConfig(format="int4"))` instead of `packed_model`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

import weightonly as wo
import weightonly.hf  # makes packed experts known to PEFT

WORDS = 32  # of the vocabulary: the numbers that the model counts with
STEPS = 60


def dense_model() -> Any:
    """Its weights are random; the adapters bring in all that it knows."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def packed_model() -> Any:
    return wo.nn.quantize_model(dense_model(), format="int4", group_size=64)


def train(model: Any, folder: str) -> list[float]:
    """The losses of STEPS steps on lines that count up by one."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, WORDS, (16 * STEPS, 1), generator=generator)
    lines = [{"input_ids": line, "labels": line} for line in ((first + torch.arange(12)) % WORDS).tolist()]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=lines)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def count(model: Any, first: int) -> list[int]:
    """Eight numbers that the model writes after `first` and the next one."""
    prompt = torch.tensor([[first, first + 1]])
    written = model.eval().generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    numbers: list[int] = written[0, 2:].tolist()
    return numbers


def main() -> dict[str, list[int]]:
    model = packed_model()
    print(model.weightonly_summary)
    adapters = LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        modules_to_save=["lm_head", "gate"],  # the output, and the router
        r=16,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, adapters)
    model.print_trainable_parameters()
    with tempfile.TemporaryDirectory() as folder:
        losses = train(model, folder)
        print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
        model.save_pretrained(folder)
        packed = PeftModel.from_pretrained(packed_model(), folder)
        dense = PeftModel.from_pretrained(dense_model(), folder)
    texts = {
        "before": count(packed_model(), 5),
        "trained": count(model, 5),
        "packed": count(packed, 5),
        "dense": count(dense.merge_and_unload(), 5),  # nothing is rounded
        "merged": count(packed.merge_and_unload(), 5),  # quantized again
    }
    for name, numbers in texts.items():
        print(f"{name:8} 5 6 -> {' '.join(map(str, numbers))}")
    return texts


if __name__ == "__main__":
    main()
