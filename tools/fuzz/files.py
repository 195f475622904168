"""Target "files": checkpoints and packed files, cut, flipped, spliced and crafted, given to every reader.

Such a file is read as some checkpoint, or refused by a ValueError or OSError that names it; anything else is a failure.
A header that the package safetensors, or gguf, refuses has to be refused. The mutations are blind: they know the
formats, not the code.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import struct
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import weightonly as wo
from weightonly.formats import convert, open_checkpoint
from weightonly.formats.gguf_header import read_gguf_header

from .loop import Outcome, Target

_SECONDS, _MEMORY_KIB = 20.0, 400 << 10  # what a file of some KB may take; of CPU time, as machines may be busy

K, N, GROUP = 64, 16, 32

Tensors = dict[str, torch.Tensor]


def _words(rows: int, columns: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, (rows, columns), generator=g).to(torch.int32)


def _scales(rows: int, columns: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, columns, generator=g).half()


def _awq(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    tensors = {"qweight": _words(K, N // 8, g), "qzeros": _words(2, N // 8, g), "scales": _scales(2, N, g)}
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP}, tensors


def _gptq(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    order = (torch.arange(K) // GROUP)[torch.randperm(K, generator=g)].int()
    tensors = {"qweight": _words(K // 8, N, g), "qzeros": _words(2, N // 8, g), "scales": _scales(2, N, g)}
    options = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}
    return options | {"dynamic": {"-:.*head": {}, "+:.*c$": {"bits": 8}}}, tensors | {"g_idx": order}


def _compressed(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "group_size": GROUP, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear", "re:.*x"], "weights": weights}}
    tensors = {
        "weight_packed": _words(N, K // 8, g),
        "weight_scale": _scales(N, 2, g),
        "weight_shape": torch.tensor([N, K]),
        "weight_zero_point": _words(N // 8, 2, g),
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}, tensors


def _bitsandbytes(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float16", "shape": [N, K], "nested_blocksize": 256}
    text = json.dumps(state | {"nested_dtype": "float32", "nested_offset": 0.25}).encode()
    tensors = {
        "weight": torch.randint(0, 256, (N * K // 2, 1), generator=g).to(torch.uint8),
        "weight.absmax": torch.randint(0, 256, (N * K // GROUP,), generator=g).to(torch.uint8),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.nested_absmax": torch.rand(1, generator=g),
        "weight.nested_quant_map": torch.rand(256, generator=g),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors


def _floats(format: str, rows: int, g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": rows}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": format}}
    codes = torch.randint(0, 256, (N, K // 2), generator=g).to(torch.uint8)
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}, {"weight_packed": codes}


def _mxfp4(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    options, tensors = _floats("mxfp4-pack-quantized", 32, g)
    return options, tensors | {"weight_scale": torch.randint(100, 140, (N, K // 32), generator=g).to(torch.uint8)}


def _nvfp4(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    options, tensors = _floats("nvfp4-pack-quantized", 16, g)
    scale = torch.rand(N, K // 16, generator=g).mul(448).to(torch.float8_e4m3fn)
    return options, tensors | {"weight_scale": scale, "weight_global_scale": torch.tensor([2000.0])}


def _fp8(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    options = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, GROUP]}
    weight = torch.randn(N, K, generator=g).to(torch.float8_e4m3fn)
    return options, {"weight": weight, "weight_scale_inv": torch.rand(1, K // GROUP, generator=g)}


def _stacks(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    """Two experts, which are read one by one."""
    options, _ = _fp8(g)
    weight = torch.randn(2, N, K, generator=g).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, K // GROUP, generator=g)
    tensors = {"gate_up_proj": weight, "gate_up_proj_scale_inv": scale, "gate_up_proj_bias": torch.rand(2, N)}
    return options, tensors | {"gate_up_proj_activation_scale": torch.ones(2)}


def _fbgemm(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    _, tensors = _fp8(g)
    beside = {"weight_scale": torch.rand(N, 1, generator=g), "input_scale_ub": torch.ones(1)}
    return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {"weight": tensors["weight"]} | beside


def _float_quantized(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, GROUP]}
    options = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    _, tensors = _fp8(g)
    tensors = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}
    return options | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}, tensors


def _modelopt(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    tensors = {
        "weight": torch.randint(0, 256, (N, K // 2), generator=g).to(torch.uint8),
        "weight_scale": torch.rand(N, K // 16, generator=g).mul(448).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.001),
        "input_scale": torch.tensor(0.01),
    }
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.gate"]}, tensors


def _gpt_oss(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    """Two experts; the names of its tensors have an underscore where others have a dot."""
    blocks = torch.randint(0, 256, (2, N, K // 32, 16), generator=g).to(torch.uint8)
    scales = torch.randint(100, 140, (2, N, K // 32), generator=g).to(torch.uint8)
    tensors = {"up_proj_blocks": blocks, "up_proj_scales": scales, "up_proj_bias": torch.rand(2, N, generator=g)}
    return {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors


def _hqq(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    """Groups of 2 rows of [N, K]."""
    numbers = {"nbits": 4, "group_size": 2 * K, "axis": 1, "view_as_float": 0, "quant_scale": 0}
    tensors = {
        "W_q": torch.randint(0, 256, (N // 4, 2 * K), generator=g).to(torch.uint8),
        "scale": _scales(N // 2, 1, g),
        "zero": _scales(N // 2, 1, g) * 15,
        "shape": torch.tensor([N, K]),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    }
    return {"quant_method": "hqq"}, tensors | {name: torch.tensor(value) for name, value in numbers.items()}


def _torchao(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    tensors = {
        "_weight_qdata": torch.randint(-128, 128, (N, K // 2), generator=g).to(torch.int8),
        "_weight_scale": _scales(K // GROUP, N, g) + 0.5,
        "_weight_zero_point": _scales(K // GROUP, N, g),
    }
    return {"quant_method": "torchao"}, tensors


def _torchao_float8(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    _, tensors = _float_quantized(g)
    scale = torch.rand(N // 8, K // GROUP, generator=g)
    return {"quant_method": "torchao"}, {"_weight_qdata": tensors["weight"], "_weight_scale": scale}


def _quark(g: torch.Generator) -> tuple[dict[str, Any], Tensors]:
    weight = {"dtype": "uint4", "qscheme": "per_group", "group_size": GROUP, "ch_axis": -1}
    options = {"global_quant_config": {"weight": weight}, "export": {"pack_method": "reorder"}, "exclude": ["*.head"]}
    tensors = {"weight": _words(K, N // 8, g), "weight_scale": _scales(2, N, g)}
    own = {"c*": {"weight": weight | {"dtype": "int8"}}}
    tensors |= {"weight_zero_point": _words(2, N // 8, g), "input_scale": torch.ones(1)}
    return {"quant_method": "quark", "layer_quant_config": own} | options, tensors


def _metadata(tensors: Tensors) -> dict[str, str] | None:
    """Of files of torchao."""
    if "_weight_qdata" not in tensors:
        return None
    kind, rows = ("Int4Tensor", 1) if "_weight_zero_point" in tensors else ("Float8Tensor", 8)
    text = json.dumps({"_type": kind, "_data": {"block_size": [rows, GROUP], "shape": [N, K]}})
    return dict.fromkeys(("a.weight", "b.weight"), text)


QUANTIZERS = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "gpt-oss": _gpt_oss,
    "fp8": _fp8,
    "stacked fp8": _stacks,
    "fbgemm_fp8": _fbgemm,
    "float-quantized": _float_quantized,
    "modelopt": _modelopt,
    "hqq": _hqq,
    "quark": _quark,
    "torchao": _torchao,
    "torchao float8": _torchao_float8,
}

KINDS = (*QUANTIZERS, "converted", "packed", "gguf")

GGUF_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")


def write_gguf(folder: Path, draw: random.Random) -> None:
    """A file of one layer of Llama, its blocks of any bytes, in a new folder."""
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    sizes = {"context_length": 64, "block_count": 1, "embedding_length": K, "feed_forward_length": K}
    for key, value in (sizes | {"attention.head_count": 4}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(N)])
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in (*(f"blk.0.{name}" for name in names), "token_embd", "output"):
        kind = gguf.GGMLQuantizationType[draw.choice(GGUF_TYPES)]
        rows, row_bytes = N if "." not in name else K, gguf.quant_shape_to_byte_shape((K,), kind)[0]
        blocks = np.frombuffer(draw.randbytes(rows * row_bytes), np.uint8) & 0x7F  # no exponent of MXFP4 is NaN
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, row_bytes), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(K, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_NUMBERS = [0, 1, -1, 2, 7, 8, 15, 16, 17, 31, 32, 63, 64, 65, 128, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 10**40]
_VALUES: list[Any] = [*_NUMBERS, None, True, False, "", "x", "re:(a+)+$", [], [1], {}, {"a": 1}, 0.5, 1e300, "\ud800"]


def write_checkpoint(folder: Path, options: dict[str, Any], tensors: Tensors, shards: int) -> None:
    folder.mkdir()
    named = {f"{layer}.{inside}": tensor.clone() for layer in ("a", "b") for inside, tensor in tensors.items()}
    named["norm.weight"] = torch.ones(4)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(named.items()) if i % shards == shard}
        save_file(part, folder / file, _metadata(tensors))
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))


def _change_bytes(draw: random.Random, content: bytes, suffix: str) -> bytes:
    """Cut, flip, overwrite, repeat or remove some bytes; of a file of tensors mostly in its header."""
    if not content:
        return b"\0"
    end = len(content)
    if end > 8 and draw.random() < 0.8:
        headers = {".safetensors": 8 + struct.unpack("<Q", content[:8])[0], ".gguf": 1500}
        end = min(end, headers.get(suffix, end))
    at = draw.randrange(end)
    kind = draw.randrange(6)
    if kind == 5:
        number = draw.choice([number for number in _NUMBERS if 0 <= number < 1 << 64])
        return content[:at] + struct.pack("<Q", number) + content[at + 8 :]
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return content[:at] + draw.randbytes(draw.randrange(1, 5)) + content[at + draw.randrange(5) :]
    if kind == 3:
        return content + draw.randbytes(draw.randrange(1, 9))
    size = draw.randrange(1, 40)
    return content[: at + size] + content[at:]


def change_json(draw: random.Random, value: Any) -> Any:
    """The same value with one thing in it replaced, removed or added."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        kind = draw.randrange(8)
        if kind == 0:
            return {key: inside for key, inside in value.items() if key != name}
        if kind == 1:
            return value | {draw.choice(["__metadata__", "x", f"{name}x", ""]): draw.choice(_VALUES)}
        return value | {name: change_json(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], change_json(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice([-8, -1, 1, 8])
    return draw.choice(_VALUES)


def _craft_header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file with another header of valid JSON, and sometimes with some bytes more or fewer."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for _ in range(draw.randrange(1, 3)):
        header = change_json(draw, header)
    text = json.dumps(header).encode()
    data = content[8 + length :]
    if draw.random() < 0.2:
        data = data[: -draw.randrange(1, 9)] if draw.random() < 0.5 else data + b"\0" * draw.randrange(1, 9)
    return struct.pack("<Q", len(text)) + text + data


def damage(draw: random.Random, folder: Path) -> None:
    """Changes some file of a folder."""
    file = draw.choice(sorted(folder.iterdir()))
    content = file.read_bytes()
    is_tensors = file.suffix == ".safetensors"
    if draw.random() < 0.5 or file.suffix == ".gguf":
        file.write_bytes(_change_bytes(draw, content, file.suffix))
    elif is_tensors:
        file.write_bytes(_craft_header(draw, content))
    else:
        value = json.loads(content)
        for _ in range(draw.randrange(1, 3)):
            value = change_json(draw, value)
        file.write_text(json.dumps(value))


class Files(Target):
    """A checkpoint of each quantizer, a converted one or a packed file; damaged; and read by what reads it."""

    name = "files"
    covers = "kinds of cases"

    def to_cover(self) -> set[str]:
        return {f"{kind} {end}" for kind in KINDS for end in ("read", "refused")}

    def run(self, seed: int, index: int) -> Outcome:
        draw = random.Random(f"files:{seed}:{index}")
        outcome = Outcome()
        with tempfile.TemporaryDirectory() as made:
            top = Path(made)
            kind = draw.choice(KINDS)
            try:
                self.make(draw, kind, top)
            except Exception as error:
                outcome.failures.append(f"{kind}: not made: {type(error).__name__}: {error!s:.300}")
                return outcome
            pristine = top / "pristine"
            shutil.copytree(top / "model", pristine)
            for _ in range(8):
                shutil.rmtree(top / "model")
                shutil.copytree(pristine, top / "model")
                damage(draw, top / "model")
                outcome.calls += 1
                ended = self.read(kind, top / "model", outcome)
                outcome.covered.add(f"{kind} {ended}")
        return outcome

    def make(self, draw: random.Random, kind: str, top: Path) -> None:
        g = torch.Generator().manual_seed(draw.getrandbits(40))
        if kind == "packed":
            (top / "model").mkdir()
            weight = wo.preprocess(torch.randint(-8, 8, (K, N), generator=g).to(torch.int8), bits=4)
            wo.save(top / "model" / "w.safetensors", {"w": weight, "scales": torch.ones(2, N)})
            return
        if kind == "gguf":
            write_gguf(top / "model", draw)
            return
        options, tensors = QUANTIZERS[draw.choice(list(QUANTIZERS)) if kind == "converted" else kind](g)
        source = top / ("source" if kind == "converted" else "model")
        write_checkpoint(source, options, tensors, draw.randrange(1, 4))
        if kind == "converted":
            convert(source, top / "model", progress=False)

    def read(self, kind: str, folder: Path, outcome: Outcome) -> str:
        """How reading ended. What is wrong with it goes to `outcome`."""
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ended = "read"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if kind == "packed":
                    wo.load(folder / "w.safetensors")
                else:
                    checkpoint = open_checkpoint(folder / "x.gguf" if kind == "gguf" else folder)
                    self._compare_headers({info.file for info in checkpoint.shards.tensors.values()}, outcome)
                    for _ in checkpoint.records(progress=False):
                        pass
        except (ValueError, OSError) as error:
            ended = "refused"
            if str(folder) not in str(error):
                outcome.failures.append(f"{kind}: an error that names no file: {type(error).__name__}: {error}")
        except Exception as error:
            ended = "refused"
            outcome.failures.append(f"{kind}: {type(error).__name__}: {error!s:.300}")
        seconds = time.process_time() - started
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if seconds > _SECONDS:
            outcome.failures.append(f"{kind}: it took {seconds:.1f} s")
        if grown > _MEMORY_KIB:
            outcome.failures.append(f"{kind}: it took {grown >> 10} MiB")
        return ended

    def _compare_headers(self, files: set[Path], outcome: Outcome) -> None:
        for file in files:
            if file.suffix == ".gguf":
                theirs = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(file).tensors}
                if theirs != {tensor.name: tensor.begin for tensor in read_gguf_header(file).tensors}:
                    outcome.failures.append(f"a header was read as others do not: {file.read_bytes()[:300]!r}")
                continue
            with contextlib.suppress(SafetensorError), safe_open(file, "pt"):
                continue
            outcome.failures.append(f"a header was read that safetensors refuses: {file.read_bytes()[:300]!r}")
