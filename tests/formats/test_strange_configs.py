"""Configs and states of strangers: contradictions with the tensors, patterns that backtrack, sizes beyond all files."""

# mypy: disable-error-code="union-attr"

from __future__ import annotations

import json
import random
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import formats_reference as ref
from tests.formats_layers import (
    AWQ,
    BNB,
    CT,
    GPTQ,
    GROUP,
    K,
    N,
    awq_layer,
    bnb_layer,
    ct_layer,
    folder_of,
    gptq_layer,
    model,
)

import weightonly as wo
from tools.fuzz import files
from weightonly.codebooks import codebook
from weightonly.formats import read_bitsandbytes
from weightonly.formats.patterns import Budget, Pattern, PatternError

Tensors = dict[str, torch.Tensor]
AUTO_ROUND = GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel", "desc_act": None}


def fails(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(str(folder))}.*{message}"):
        list(wo.load_checkpoint(folder))


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- compressed-tensors: what the config says of the layers ---------------------------------------------------


def ct_config(*groups: dict[str, Any], targets: tuple[list[str], ...] = ()) -> dict[str, Any]:
    named = {
        f"group_{i}": {
            "targets": targets[i] if targets else ["Linear"],
            "weights": {"num_bits": 4, "type": "int"} | weights,
        }
        for i, weights in enumerate(groups)
    }
    return CT | {"config_groups": named}


def ct_with(g: torch.Generator, **more: torch.Tensor) -> Tensors:
    return ct_layer(g) | {name: tensor.clone() for name, tensor in more.items()}


ORDER = (torch.arange(K) // GROUP).roll(5).int()

CONTRADICTIONS: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "zero points missing": (
        {"symmetric": False},
        {},
        r"a\.\w+\.weight_zero_point: expected one for symmetric: false of the config, got none",
    ),
    "order missing": (
        {"actorder": "group", "group_size": GROUP},
        {},
        r"a\.\w+\.weight_g_idx: expected one for actorder: group of the config, got none",
    ),
    "order never set": (
        {"actorder": "group"},
        {"weight_g_idx": torch.full((K,), -1, dtype=torch.int32)},
        r"a\.\w+\.weight_g_idx: expected one for actorder: group of the config",
    ),
    "order of which the config knows nothing": (
        {"actorder": None},
        {"weight_g_idx": ORDER},
        r"a\.\w+\.weight_g_idx: expected groups in order without actorder: group of the config",
    ),
    "group size": (
        {"group_size": 2 * GROUP, "strategy": "group"},
        {},
        r"a\.\w+\.weight_scale: expected 1 groups of 64 rows for K = 64 as the config says, got 2",
    ),
    "per channel": (
        {"strategy": "channel"},
        {},
        r"a\.\w+\.weight_scale: expected 1 groups of K rows for K = 64 as the config says, got 2",
    ),
    "one scale for all": (
        {"strategy": "tensor"},
        {},
        r"a\.\w+\.weight_scale: expected 1 groups of K rows for K = 64 as the config says, got 2",
    ),
    "zero points of a symmetric layer": (
        {"symmetric": True},
        {"weight_zero_point": torch.full((N // 8, K // GROUP), 0x77777777, dtype=torch.int32)},
        r"a\.\w+\.weight_zero_point: expected zeros, as the config says symmetric",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    weights, more, message = CONTRADICTIONS[case]
    fails(folder_of(tmp_path, lambda g: ct_with(g, **more), ct_config(weights), generator), message)


def zero_points(value: int) -> torch.Tensor:
    """Eight 4-bit numbers to a word, all `value`."""
    word = int("".join([f"{value:x}"] * 8), 16)
    return torch.full((N // 8, K // GROUP), word - (1 << 32 if word >> 31 else 0), dtype=torch.int32)


AGREEING: dict[str, tuple[dict[str, Any], Tensors]] = {
    "symmetric": ({"symmetric": True, "group_size": GROUP, "strategy": "group", "actorder": None}, {}),
    "zero points": ({"symmetric": False, "group_size": GROUP}, {"weight_zero_point": zero_points(7)}),
    "zero points of 0": ({"symmetric": True}, {"weight_zero_point": zero_points(8)}),
    "order": ({"actorder": "group"}, {"weight_g_idx": ORDER}),
    "order of calibration": ({"actorder": "static"}, {"weight_g_idx": (torch.arange(K) // GROUP).int()}),
    "order never set": ({"actorder": "weight"}, {"weight_g_idx": torch.full((K,), -1, dtype=torch.int32)}),
}


@pytest.mark.parametrize("case", AGREEING)
def test_a_config_that_agrees_with_the_tensors(case: str, tmp_path: Path, generator: torch.Generator) -> None:
    weights, more = AGREEING[case]
    folder = folder_of(tmp_path, lambda g: ct_with(g, **more), ct_config(weights), generator)
    (layer, *_) = (r for r in wo.load_checkpoint(folder) if r.name == "a.up")
    assert (layer.zeros is not None) == (case == "zero points")
    assert (layer.perm is not None) == (case == "order")


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        ((["a.up"], ["Linear"]), "a.up"),
        ((["Linear"], ["a.up"]), "a.down"),
        ((["re:.*up$"], ["Linear"]), "a.up"),
        ((["re:.*(x|down)"], ["re:a.u"]), "a.down"),
        ((["Linear"], ["Linear"]), None),  # either may mean it
    ],
)
def test_the_group_of_a_layer_is_the_one_that_names_it(
    targets: tuple[list[str], ...], wrong: str | None, tmp_path: Path, generator: torch.Generator
) -> None:
    """Two groups: the first wants zero points, which no layer has."""
    config = ct_config({"symmetric": False}, {"symmetric": True}, targets=targets)
    folder = folder_of(tmp_path, ct_layer, config, generator)
    if wrong:
        fails(folder, f"{wrong}.weight_zero_point: expected one for symmetric: false")
    else:
        assert len(list(wo.load_checkpoint(folder))) == 4


# --- GPTQ ----------------------------------------------------------------------------------------------------


def test_gptq_groups_are_as_many_as_the_config_says(tmp_path: Path, generator: torch.Generator) -> None:
    folder = folder_of(tmp_path, gptq_layer, GPTQ | {"group_size": 16}, generator)
    fails(folder, r"a\.\w+\.scales: expected 4 groups of 16 rows for K = 64, got 2")


@pytest.mark.parametrize("order", ["random", "all zero"])
def test_gptq_without_act_order_has_its_groups_in_order(order: str, tmp_path: Path, generator: torch.Generator) -> None:
    def layer(g: torch.Generator) -> Tensors:
        tensors = gptq_layer(g)
        return tensors | ({"g_idx": torch.zeros_like(tensors["g_idx"])} if order == "all zero" else {})

    folder = folder_of(tmp_path, layer, GPTQ | {"desc_act": False}, generator)
    fails(folder, r"a\.\w+\.g_idx: expected the groups in order, as the config says desc_act is false")


def test_gptq_per_channel_needs_no_order(tmp_path: Path, generator: torch.Generator) -> None:
    def layer(g: torch.Generator) -> Tensors:
        tensors = gptq_layer(g)
        del tensors["g_idx"]
        return tensors | {name: tensors[name][:1].clone() for name in ("scales", "qzeros")}

    folder = folder_of(tmp_path, layer, GPTQ | {"group_size": -1}, generator)
    assert len(list(wo.load_checkpoint(folder))) == 4
    fails(
        folder_of(made(tmp_path / "grouped"), layer, GPTQ | {"group_size": 64}, generator),
        r"a\.\w+\.g_idx: expected one",
    )


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [(r"+:a\.up", True), (r".*up", True), (r"up", False), (r"\.up", False), (r"+:b", False), (r"^a\.(up|down)$", True)],
)
def test_gptq_patterns_match_from_the_start(
    pattern: str, matches: bool, tmp_path: Path, generator: torch.Generator
) -> None:
    folder = folder_of(tmp_path, gptq_layer, GPTQ | {"dynamic": {pattern: {"bits": 8}}}, generator)
    if matches:  # eight bits have other shapes
        fails(folder, r"a\.\w+\.qweight: expected int32 \[16, 16\]")
    else:
        assert len(list(wo.load_checkpoint(folder))) == 4


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*)*$", "(a*a*a*a*a*)*$", "((a{1,9}){1,9}){1,9}$"])
@pytest.mark.parametrize("make", [GPTQ, AUTO_ROUND], ids=["match", "search"])
def test_patterns_end_in_time(
    make: dict[str, Any], pattern: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a pattern asks for: a result, or an error of the layer."""
    monkeypatch.setattr("weightonly.formats.layer_settings.Budget", lambda: Budget(0.5))
    name = "a" * 200 + "b"
    tensors = {f"{name}.{inside}": tensor for inside, tensor in gptq_layer(generator).items()}
    entry = "dynamic" if make is GPTQ else "extra_config"
    config = {"quantization_config": make | {entry: {f"{pattern}{'' if make is GPTQ else 'c'}": {}}}}
    folder = ref.write_checkpoint(tmp_path / "model", tensors, config)
    started = time.process_time()
    try:
        (record,) = wo.load_checkpoint(folder)
        assert record.name == name
        assert pattern != "(a|aa)+$" or make is not GPTQ
    except ValueError as error:
        assert f"{folder}/model.safetensors: {name}.qweight: {entry}: its patterns take too long" in str(error)  # noqa: PT017
    assert time.process_time() - started < 5


def matches(pattern: str, name: str, budget: Budget) -> bool:
    return Pattern(pattern, budget).matches_start(name)


def test_patterns_share_their_time() -> None:
    budget = Budget(0.05)
    pattern = Pattern("a", budget)

    def match_on() -> None:
        while True:
            assert pattern.matches_start("a")

    with pytest.raises(PatternError, match="take too long"):
        match_on()
    with pytest.raises(PatternError, match="take too long"):
        pattern.matches_start("a")


def test_counts_are_characters() -> None:
    """They are to `regex`, in memory."""
    budget = Budget()
    assert matches("(?:a{2,10}b){30}", "aab" * 30, budget)
    assert budget.characters == Budget.characters - 17 * 300
    for text in ("a{999999999}", "(?:(?:(?:a?){99}){99}){99}", "a{1,99999}", "a{,50000}", "a{50000,}"):
        with pytest.raises(PatternError, match="at most 100000 characters in all patterns, each times its counts"):
            Pattern(text, Budget())


REFUSED = ("(", "a**", "(?R)", "(a)(?1)", "a{e<=1}", r"\p{L}", "(?<=a+)b", "(?V1)a", "(?>a", "(" * 500 + ")" * 500)


@pytest.mark.parametrize("text", REFUSED)
def test_patterns_that_are_refused(text: str) -> None:
    """Among them what `regex` has and `re` has not."""
    with pytest.raises(PatternError):
        Pattern(text, Budget())


def _pattern(draw: random.Random, depth: int = 0) -> str:
    kind = draw.randrange(12 if depth < 4 else 4)
    if kind < 3:
        return draw.choice("abc.")
    if kind == 3:
        return draw.choice([r"\d", r"\.", "[ab]", "[^a]", r"\w", "^", "$", r"\b", r"\B", "[]a]", "[a-c]", r"\]", r"\Z"])
    if kind == 6:
        times = draw.choice(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "{1,2}?"])
        return f"(?:{_pattern(draw, depth + 1)}){times}"
    if kind == 7:
        return f"({_pattern(draw, depth + 1)}|{_pattern(draw, depth + 1)})"
    if kind in (8, 9):
        return f"(?{'=!'[kind - 8]}{_pattern(draw, depth + 1)})"
    return _pattern(draw, depth + 1) + _pattern(draw, depth + 1)


def test_patterns_match_as_re_says(seed: int) -> None:
    draw, answers = random.Random(seed), [0, 0]
    while sum(answers) < 5_000:
        text = _pattern(draw)
        if len(text) > 40:
            continue
        pattern = Pattern(text, Budget())
        for _ in range(6):
            name = "".join(draw.choice("abc.1]\n") for _ in range(draw.randrange(1, 7)))
            expected = bool(re.match(text, name))
            assert pattern.matches_start(name) == expected, (text, name)
            assert pattern.matches_part(name) == bool(re.search(text, name)), (text, name)
            answers[expected] += 1
    assert min(answers) > 250


# --- AWQ -----------------------------------------------------------------------------------------------------


def test_awq_per_channel_is_minus_one(tmp_path: Path, generator: torch.Generator) -> None:
    """-1 means one group, no other number of them."""
    folder = folder_of(tmp_path, awq_layer, AWQ | {"group_size": -1}, generator)
    fails(folder, r"a\.\w+\.scales: expected groups of -1 rows as the config says, got 32")

    def one_group(g: torch.Generator) -> Tensors:
        tensors = awq_layer(g)
        return tensors | {name: tensors[name][:1].clone() for name in ("scales", "qzeros")}

    folder = folder_of(made(tmp_path / "one"), one_group, AWQ | {"group_size": -1}, generator)
    assert len(list(wo.load_checkpoint(folder))) == 4


def test_g_idx_is_unset_only_where_all_of_it_is(tmp_path: Path, generator: torch.Generator) -> None:
    g_idx = (torch.arange(K) // GROUP).int()
    g_idx[3] = -1
    folder = folder_of(tmp_path, lambda g: ct_with(g, weight_g_idx=g_idx), CT, generator)
    fails(folder, r"a\.\w+\.weight_g_idx: expected groups within 0\.\.1 as scales has, got -1\.\.1")


# --- bitsandbytes: sizes and numbers of the state ------------------------------------------------------------


def nested_state(**fields: object) -> dict[str, torch.Tensor]:
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float16", "shape": [N, K], "nested_blocksize": 256}
    state |= {"nested_dtype": "float32", "nested_offset": 0.5} | fields
    return {
        "weight": torch.zeros(N * K // 2, 1, dtype=torch.uint8),
        "absmax": torch.arange(N * K // GROUP).to(torch.uint8),
        "quant_map": codebook("nf4"),
        "quant_state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        "nested_absmax": torch.tensor([2.0]),
        "nested_quant_map": torch.arange(256.0),
    }


def test_a_huge_blocksize_takes_no_memory() -> None:
    expected = read_bitsandbytes(**nested_state()).scales
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    assert torch.equal(read_bitsandbytes(**nested_state(nested_blocksize=2**29)).scales, expected)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


BAD_STATES: dict[str, tuple[dict[str, object], str]] = {
    "blocksize beyond 64 bits": ({"nested_blocksize": 10**400}, "nested_blocksize: expected less than 2"),
    "offset beyond fp64": ({"nested_offset": 10**400}, "nested_offset: expected a finite number of fp32, got 1000"),
    "offset beyond fp32": ({"nested_offset": 1e300}, "nested_offset: expected a finite number of fp32, got 1e.300"),
    "infinite offset": ({"nested_offset": float("inf")}, "quant_state: Infinity is no JSON"),
    "shape beyond 64 bits": ({"shape": [10**30, 64]}, r"shape: expected \[N, K\], got"),
    "shape of a bool": ({"shape": [True, 64]}, r"shape: expected \[N, K\], got"),
    "long": ({"x": "y" * 70000}, "quant_state: expected at most 65536 bytes of JSON"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_states_that_are_refused(case: str) -> None:
    fields, message = BAD_STATES[case]
    with pytest.raises(ValueError, match=message):
        read_bitsandbytes(**nested_state(**fields))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5], ids=str)
def test_a_codebook_is_finite(value: float) -> None:
    tensors = nested_state()
    tensors["quant_map"][3] = value
    with pytest.raises(ValueError, match=r"weight\.quant_map: code: expected finite values within"):
        read_bitsandbytes(**tensors)


def test_a_state_is_of_the_kind_that_its_name_says(tmp_path: Path, generator: torch.Generator) -> None:
    tensors = model(bnb_layer, generator)
    name = "a.up.weight.quant_state.bitsandbytes__nf4"
    state = bytes(tensors[name].tolist()).replace(b"nf4", b"fp4")
    tensors[name] = torch.tensor(list(state), dtype=torch.uint8)
    folder = ref.write_checkpoint(tmp_path / "model", tensors, {"quantization_config": BNB})
    fails(folder, f"{name}: quant_type: expected that of the tensor's name, got 'fp4'")


def test_deeply_nested_states_are_an_error() -> None:
    tensors = nested_state() | {"quant_state": torch.tensor(list(b"[" * 5000 + b"]" * 5000), dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"weight\.quant_state: "):
        read_bitsandbytes(**tensors)


# --- every reader: values of another kind ---------------------------------------------------------------------


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the values of a config are."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, found in inside:
        yield (*at, key)
        yield from places(found, (*at, key))


def put(value: Any, at: tuple[str | int, ...], new: Any) -> Any:
    """The same config with `new` there."""
    copy = json.loads(json.dumps(value))
    inside = copy
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = new
    return copy


@pytest.mark.parametrize("kind", files.QUANTIZERS)
def test_errors_name_the_file_and_the_key(kind: str, tmp_path: Path, generator: torch.Generator) -> None:
    """An entry that the config does not have is not asked for, or it is of another quantizer."""
    options, tensors = files.QUANTIZERS[kind](generator)
    others: dict[str, Any] = {"source": {}, "config_groups": {}, "modules_to_not_convert": []}
    folder = tmp_path / "model"
    files.write_checkpoint(folder, options, tensors, 1)
    for place in places(others | options):
        for value in (0, 1, -1, 10**40, 0.5, True, "x", [], [1], {}, {"a": 1}):
            config = put(others | options, place, value)
            (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
            message = problem_of(folder)
            of_config, of_tensors = (
                message.startswith(f"{folder}{file}: ") for file in ("/config.json", "/model-0.safetensors")
            )
            assert not message or of_config or of_tensors or f"{folder}: expected tensors" in message, (place, value)
            names = [key for key in place if isinstance(key, str)]
            assert not of_config or any(key in message for key in names[-2:]), (place, value, message)


def problem_of(folder: Path) -> str:
    """Why it is refused; "" where it is read."""
    try:
        list(wo.load_checkpoint(folder, progress=False))
    except ValueError as error:
        return str(error)
    return ""
