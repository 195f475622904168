"""The kernels inside a compiled library: their machine code and resources, read from the ELF files (cubins) in it."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from . import target

# Attributes of the sections .nv.info (EIATTR_...): code -> the name that a report shows.
_THREADS = {0x05: "threads at most", 0x10: "threads required"}
_PER_KERNEL = {
    0x19: "parameter bytes",
    0x1B: "registers at most",
    0x1E: "call stack bytes",
    0x4C: "barriers",
}
# Hold numbers of symbols, which follow their names: the bank of the parameters (its size is above), functions called.
_OF_NAMES = (0x0A, 0x0F)
_PER_SYMBOL = {0x11: "frame bytes", 0x12: "stack bytes at least", 0x23: "stack bytes at most", 0x2F: "registers"}
# Formats of an attribute: its value is absent, one byte, two bytes, or `size` bytes that follow.
_NO_VALUE, _BYTE, _HALF, _SIZED = 1, 2, 3, 4


@dataclass(frozen=True)
class Kernel:
    """One kernel for one target: what identifies it, and what must not change.

    code       the bytes of its instructions, as a digest
    code_bytes how many they are
    resources  registers, static shared memory, constants and the like, by name
    """

    arch: str  # "sm_90a"
    name: str  # mangled
    cubin: Path
    code: str
    code_bytes: int
    resources: dict[str, int | str] = field(hash=False)


def find_tool(name: str) -> Path:
    """cuobjdump or nvdisasm: beside nvcc, on PATH, beside this Python, or of NVIDIA's PyPI packages.

    Raises RuntimeError with the command that installs both.
    """
    nvcc = target.find_nvcc()
    folders = [str(nvcc.resolve().parent)] if nvcc else []
    nvidia = importlib.util.find_spec("nvidia")
    packages = [Path(root) for root in nvidia.submodule_search_locations or ()] if nvidia else []
    folders += [sysconfig.get_path("scripts"), *(str(found) for root in packages for found in root.glob("*/bin"))]
    for path in (folders[0], None, *folders[1:]):
        if found := shutil.which(name, path=path):
            return Path(found)
    raise RuntimeError(f"{name} was not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def read_kernels(path: Path, folder: Path) -> Iterator[Kernel]:
    """The kernels of a library, an object, a cubin, or a folder of objects; cubins are extracted into `folder`.

    Raises FileNotFoundError when there is no such file, ValueError when it holds no machine code.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    files = sorted(path.rglob("*.o")) if path.is_dir() else [path]
    found = False
    for number, file in enumerate(files):
        for cubin in [file] if file.suffix == ".cubin" else _extract(file, folder / str(number)):
            for kernel in parse_cubin(cubin):
                found = True
                yield kernel
    if not found:
        raise ValueError(f"{path} holds no kernels in machine code")


def parse_cubin(path: Path) -> list[Kernel]:
    """The kernels of one cubin (ELF64, little endian); its file name says the target, as cuobjdump writes it."""
    elf = path.read_bytes()
    sections = _sections(elf)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(elf, sections)
    arch = re.search(r"(sm_\w+)\.cubin$", path.name)
    unit_data: dict[str, int | str] = {
        f"{what} of the unit": _digest(by_name[name].data(elf))[:12]
        for name, what in {".nv.constant3": "constants", ".nv.global.init": "initial values"}.items()
        if name in by_name
    }
    per_symbol: dict[str, dict[str, int | str]] = {}
    if ".nv.info" in by_name:
        for code, value in _attributes(by_name[".nv.info"].data(elf)):
            if code in _PER_SYMBOL and len(value) == 8:
                symbol, number = struct.unpack("<II", value)
                per_symbol.setdefault(symbols[symbol], {})[_PER_SYMBOL[code]] = number
    kernels = []
    for section in sections:
        if not section.name.startswith(".text."):
            continue
        name = section.name.removeprefix(".text.")
        resources = {**per_symbol.get(name, {}), **unit_data}
        if info := by_name.get(f".nv.info.{name}"):
            others = hashlib.sha256()
            for code, value in _attributes(info.data(elf)):
                if code in _THREADS:
                    resources[_THREADS[code]] = "x".join(map(str, struct.unpack("<III", value)))
                elif code in _PER_KERNEL:
                    resources[_PER_KERNEL[code]] = int.from_bytes(value, "little")
                elif code not in _OF_NAMES:
                    others.update(bytes([code]) + value)
            resources["other attributes"] = others.hexdigest()[:12]
        if shared := by_name.get(f".nv.shared.{name}"):
            resources["static shared bytes"] = shared.size
        for bank in range(8):
            if constants := by_name.get(f".nv.constant{bank}.{name}"):
                resources[f"constant {bank} bytes"] = constants.size
                resources[f"constant {bank} contents"] = _digest(constants.data(elf))[:12]
        kernels.append(
            Kernel(arch[1] if arch else "?", name, path, _digest(section.data(elf)), section.size, resources)
        )
    return kernels


def disassemble(kernel: Kernel) -> list[str]:
    """Its instructions, one a line, without their addresses; numbers that only the order of names decides read `?`.

    Each line ends with the scheduling bits of the instruction (stalls, barriers), which its text does not show.
    """
    return _listings(kernel.cubin)[kernel.name]


@lru_cache(maxsize=2)  # kernels of one unit are compared one after another
def _listings(path: Path) -> dict[str, list[str]]:
    """Mangled name -> `normalize` of the kernel, for all kernels of a cubin."""
    find_tool("nvdisasm")  # cuobjdump calls it, and says less when it is missing
    command = [str(find_tool("cuobjdump")), "-sass", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _, *functions = re.split(r"^\s*Function : ", text, flags=re.MULTILINE)
    return {name: normalize(body) for name, _, body in (function.partition("\n") for function in functions)}


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"^\s*/\* 0x(?P<word>[0-9a-f]{16}) \*/\s*$")
# Bank 4 holds the addresses of the unit's variables, in an order that follows their names.
_ADDRESS_BANK = re.compile(r"c\[0x4\]\s*\[0x[0-9a-f]+\]")
_SYMBOL = re.compile(r"`\([^)]*\)|\$_?_[\w$]+")


def normalize(text: str) -> list[str]:
    """The instructions in what `cuobjdump -sass` wrote, as `disassemble` gives them."""
    lines: list[str] = []
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            lines.append(_SYMBOL.sub("?", _ADDRESS_BANK.sub("c[0x4][?]", found["text"])))
        elif lines and (found := _SECOND_WORD.match(line)):
            lines[-1] += f"  # {int(found['word'], 16) >> 41:06x}"
    return lines


_MOVE = re.compile(r"(?:IMAD\.MOV\.U32 (?P<to>R\d+), RZ, RZ|MOV (?P<target>R\d+)), (?P<source>R\d+)  # (?P<bits>\w+)")


def with_sorted_moves(lines: list[str]) -> list[str]:
    """A listing in which neighbouring copies of registers are in one order, where their order changes nothing.

    Neighbours are sorted when all have the same scheduling bits, write registers of their own, and read none of those.
    """
    result: list[str] = []
    run: list[str] = []
    written: set[str] = set()
    read: set[str] = set()
    bits = ""
    for line in [*lines, ""]:
        found = _MOVE.fullmatch(line)
        to = (found["to"] or found["target"]) if found else ""
        if not (found and found["bits"] == bits and to not in written | read and found["source"] not in written):
            result += sorted(run)
            run, written, read = [], set(), set()
        if found:
            run.append(line)
            written.add(to)
            read.add(found["source"])
            bits = found["bits"]
        else:
            result.append(line)
    return result[:-1]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int

    def data(self, elf: bytes) -> bytes:
        return b"" if self.kind == 8 else elf[self.offset : self.offset + self.size]  # 8: SHT_NOBITS


def _extract(file: Path, folder: Path) -> list[Path]:
    folder.mkdir()
    command = [str(find_tool("cuobjdump")), "-xelf", "all", str(file.resolve())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    cubins = sorted(folder.glob("*.cubin"))
    if done.returncode and "does not contain device code" not in done.stdout + done.stderr:
        raise RuntimeError(f"cuobjdump cannot read {file}: {(done.stderr or done.stdout).strip()}")
    return cubins


def _sections(elf: bytes) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("expected an ELF file of 64 bits, little endian")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + size * i) for i in range(count)]
    strings = headers[names][4]
    return [_Section(_string(elf, strings + h[0]), h[1], h[4], h[5], h[6]) for h in headers]


def _symbols(elf: bytes, sections: list[_Section]) -> list[str]:
    for section in sections:
        if section.kind == 2:  # SHT_SYMTAB
            strings = sections[section.link].offset
            entries = struct.iter_unpack("<IBBHQQ", section.data(elf))
            return [_string(elf, strings + entry[0]) for entry in entries]
    return []


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, code, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield code, data[at : at + size]
            at += size
        else:
            yield code, {_NO_VALUE: b"", _BYTE: bytes([size & 0xFF])}.get(form, struct.pack("<H", size))


def _string(elf: bytes, at: int) -> str:
    return elf[at : elf.index(b"\0", at)].decode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
