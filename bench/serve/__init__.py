"""vLLM's engine with our kernels, with its own choice and with the dense model: tokens per second, time to first token.

`python -m weightonly.bench serve --model llama3-8b --quant gptq --batch 1,32,128 --prefill 2048`

Each engine runs in a process of its own, on random weights of a real model's shapes or on a folder. Providers:

weightonly         vLLM with this plug-in
weightonly-method  a folder through `--quantization weightonly`
vllm               vLLM without us: Machete on Hopper, Marlin for experts, OpenAI's Triton kernels for gpt-oss
marlin             Marlin for all
dense              the same numbers in 16 bits; log-probabilities are compared with it
"""

from .command import COMMAND, serve

__all__ = ["COMMAND", "serve"]
