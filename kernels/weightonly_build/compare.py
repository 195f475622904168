"""Compares the machine code of two builds, kernel by kernel: what a change of names and files must leave as it was.

    PYTHONPATH=kernels python -m weightonly_build compare OLD NEW

OLD and NEW are kernel libraries (.so), objects (.o), cubins, or folders of objects. Equal kernels have the same
instructions and the same resources; names, and numbers that only the order of names decides, do not count. PTX is no
machine code and is left out. ptxas may write neighbouring copies of registers in either order: kernels that differ in
nothing else are listed as reordered, and do what the others do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import unified_diff
from itertools import islice
from pathlib import Path

from . import cubin
from .cubin import Kernel

# Units of generate.py are named after a configuration: its family, then its tile. So are their namespaces; those of
# older builds are anonymous, which nvcc names after the file, between two numbers that change with its text and path.
_CONFIG = r"\w+_\d+x\d+\w*"
_NAMED = re.compile(rf"\b(?P<unit>{_CONFIG})::(?=B?[fF]\d+[A-Z])")
_ANONYMOUS = re.compile(rf"_GLOBAL__N__[0-9a-f]{{8}}_\d+_(?P<unit>{_CONFIG}?)_cu_[0-9a-f]{{8}}")
_TYPES = re.compile(r"\bB?[fF]\d+[A-Z]\w+")  # F16Int4Group, Bf16Code4Group
_LITERAL = re.compile(r"(?<![\w.])(?:\d+|true|false)\b")
# A report shows lines of so many kernels, and so many lines of each.
_SHOWN_KERNELS, _SHOWN_LINES = 20, 12


@dataclass(frozen=True)
class Named:
    """A kernel and what its name says, without namespaces and hashes.

    unit       the configuration of a generated unit ("gemm_sm80_16x128x64_w16x32_s2"), else ""
    types      the types of a generated kernel ("F16Int4Group"), else ""
    function   the function and its template arguments ("dequantize_kernel<half_t, TiledReader<uint8_t>>")
    literals   the numbers among those arguments
    """

    kernel: Kernel
    unit: str
    types: str
    function: str
    literals: tuple[str, ...]

    def __str__(self) -> str:
        numbers = f" <{', '.join(self.literals)}>" if self.literals else ""
        name = f"{self.unit} {self.types}{numbers}" if self.unit else self.function
        return f"{self.kernel.arch} {name}"


@dataclass
class Comparison:
    """What the kernels of two builds have in common."""

    equal: list[tuple[Named, Named]] = field(default_factory=list)
    reordered: list[tuple[Named, Named]] = field(default_factory=list)
    different: list[tuple[Named, Named]] = field(default_factory=list)
    only_old: list[Named] = field(default_factory=list)
    only_new: list[Named] = field(default_factory=list)

    @property
    def all_equal(self) -> bool:
        return not (self.different or self.only_old or self.only_new)


def compare(old_path: Path, new_path: Path) -> tuple[bool, str]:
    """Whether all kernels of both builds are equal, and the report.

    Raises FileNotFoundError, ValueError or RuntimeError when a build cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        builds = []
        for name, path in (("old", old_path), ("new", new_path)):
            (extracted := Path(folder, name)).mkdir()
            builds.append(name_kernels(list(cubin.read_kernels(path, extracted))))
        old, new = builds
        result = match(old, new)
        return result.all_equal, report(result)


def name_kernels(kernels: list[Kernel]) -> list[Named]:
    """The kernels with their names read."""
    return [_read_name(kernel, text) for kernel, text in zip(kernels, _demangle(kernels), strict=True)]


Tells = Callable[[Kernel, Kernel], bool]


def match(
    old: list[Named], new: list[Named], same: Tells | None = None, is_reordered: Tells | None = None
) -> Comparison:
    """Pairs the kernels of two builds, by names as far as they agree, then by equal code.

    A round pairs kernels that agree in a key: first the equal ones, then those of which each build has as many as the
    other. The keys become looser: the whole name; unit and types, or the function alone; the code alone.
    same          tells equal instructions where the bytes differ (the default disassembles both)
    is_reordered  tells those that are equal but for the order of copies of registers (likewise)
    """
    tells = (same or _same_instructions, is_reordered or _same_but_for_order)
    result = Comparison()
    rounds: list[Callable[[Named], Hashable]] = [
        lambda one: (one.kernel.arch, one.unit, one.types or one.function, one.literals),
        lambda one: (one.kernel.arch, one.unit, one.types or one.function.partition("<")[0]),
    ]
    for key in rounds:
        old, new = _pair(old, new, key, result, *tells)
    codes = _group(new, lambda one: (one.kernel.arch, one.kernel.code))
    for one in old:
        partners = codes[one.kernel.arch, one.kernel.code]
        partner = next((other for other in partners if other.kernel.resources == one.kernel.resources), None)
        if partner is None:
            result.only_old.append(one)
        else:
            partners.remove(partner)
            result.equal.append((one, partner))
    result.only_new = [one for partners in codes.values() for one in partners]
    return result


def report(result: Comparison) -> str:
    """Counts for each target, then every kernel that is not equal; the first ones with the lines that differ."""
    header = ("", "OLD", "NEW", "equal", "reordered", "different", "only OLD", "only NEW")
    pairs = result.equal + result.reordered + result.different
    counts = [
        Counter(one.kernel.arch for one in kernels)
        for kernels in (
            [old for old, _ in pairs] + result.only_old,
            [new for _, new in pairs] + result.only_new,
            [old for old, _ in result.equal],
            [old for old, _ in result.reordered],
            [old for old, _ in result.different],
            result.only_old,
            result.only_new,
        )
    ]
    archs = sorted(counts[0] | counts[1])
    rows = [header, *((arch, *(str(count[arch]) for count in counts)) for arch in archs)]
    rows.append(("all", *(str(count.total()) for count in counts)))
    lines = ["".join(f"{cell:>{11 if i else 8}}" for i, cell in enumerate(row)) for row in rows]
    for i, (old, new) in enumerate(result.different):
        lines.append(f"different: {old}" + ("" if str(old) == str(new) else f" -> {new}"))
        lines += _differences(old, new) if i < _SHOWN_KERNELS else ()
    lines += [f"only in OLD: {one}" for one in result.only_old]
    lines += [f"only in NEW: {one}" for one in result.only_new]
    if renamed := sum(str(old) != str(new) for old, new in result.equal):
        lines.append(f"{renamed} of the equal kernels have another name")
    all_equal = "all kernels are equal" + (", but for the order of copies" if result.reordered else "")
    lines.append(all_equal if result.all_equal else "the builds differ")
    return "\n".join(lines)


def _pair(
    old: list[Named],
    new: list[Named],
    key: Callable[[Named], Hashable],
    result: Comparison,
    same: Tells,
    is_reordered: Tells,
) -> tuple[list[Named], list[Named]]:
    """One round of `match`; returns the kernels that found no partner."""
    old_groups, new_groups = _group(old, key), _group(new, key)
    for name in list(old_groups):
        mine, others = old_groups[name], new_groups[name]
        for pairs, tells in (
            (result.equal, _same_bytes),
            (result.equal, lambda one, other: _same_resources(one, other) and same(one, other)),
            (result.reordered, lambda one, other: _same_resources(one, other) and is_reordered(one, other)),
        ):
            for one in list(mine):
                if partner := next((other for other in others if tells(one.kernel, other.kernel)), None):
                    mine.remove(one)
                    others.remove(partner)
                    pairs.append((one, partner))
        if len(mine) == len(others):
            result.different += zip(mine, others, strict=True)
            mine.clear()
            others.clear()
    return _flat(old_groups.values()), _flat(new_groups.values())


def _same_bytes(one: Kernel, other: Kernel) -> bool:
    return one.code == other.code and _same_resources(one, other)


def _same_resources(one: Kernel, other: Kernel) -> bool:
    return one.resources == other.resources


def _same_instructions(one: Kernel, other: Kernel) -> bool:
    return one.code_bytes == other.code_bytes and cubin.disassemble(one) == cubin.disassemble(other)


def _same_but_for_order(one: Kernel, other: Kernel) -> bool:
    if one.code_bytes != other.code_bytes:
        return False
    mine, others = (cubin.with_sorted_moves(cubin.disassemble(kernel)) for kernel in (one, other))
    return mine == others


def _differences(old: Named, new: Named) -> Iterator[str]:
    mine, others = old.kernel.resources, new.kernel.resources
    for name in mine | others:
        if mine.get(name) != others.get(name):
            yield f"    {name}: {mine.get(name, 'none')} -> {others.get(name, 'none')}"
    if old.kernel.code == new.kernel.code:
        return
    texts = cubin.disassemble(old.kernel), cubin.disassemble(new.kernel)
    yield f"    instructions: {len(texts[0])} -> {len(texts[1])}"
    first = next((i for i, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), min(map(len, texts)))
    # difflib takes quadratic time; the lines behind the first difference are enough to see what it is.
    window = slice(max(first - 2, 0), first + 40)
    lines = unified_diff(texts[0][window], texts[1][window], lineterm="", n=2)
    for line in islice(lines, 3, 3 + _SHOWN_LINES):
        yield f"    {window.start if line.startswith('@@') else ''}{line}"


def _read_name(kernel: Kernel, text: str) -> Named:
    found = _NAMED.search(text) or _ANONYMOUS.search(kernel.name)
    function = _without_parameters(re.sub(r"\(anonymous namespace\)::|\b(?:\w+::)+", "", text))
    literals = tuple(_LITERAL.findall(function.partition("<")[2]))
    types = _TYPES.search(function)
    if found and types:
        return Named(kernel, found["unit"], types[0], function, literals)
    return Named(kernel, "", "", function, literals)


def _without_parameters(text: str) -> str:
    """ "void f<T, (E)0>(int)" without the parameters and what stands before the name."""
    depth = 0
    for i, letter in enumerate(text):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            text = text[:i]
            break
    return text.removeprefix("void ").replace("> >", ">>")


def _demangle(kernels: list[Kernel]) -> list[str]:
    """Their names as C++ writes them; mangled where there is no c++filt."""
    names = [kernel.name for kernel in kernels]
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    return text.splitlines()


def _group(kernels: Iterable[Named], key: Callable[[Named], Hashable]) -> defaultdict[Hashable, list[Named]]:
    groups: defaultdict[Hashable, list[Named]] = defaultdict(list)
    for one in kernels:
        groups[key(one)].append(one)
    return groups


def _flat(groups: Iterable[list[Named]]) -> list[Named]:
    return [one for group in groups for one in group]
