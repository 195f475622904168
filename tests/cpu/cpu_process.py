"""What test_cpu_process.py runs in processes: `python -m tests.cpu.cpu_process NAME`. Exit status 0: it holds."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch


def product() -> bool:
    """Whether a product of several threads is right. Imports weightonly: the first time, maybe in a child."""
    import weightonly as wo

    qweight = wo.preprocess(torch.eye(64, 32, dtype=torch.int8), layout="cpu")
    x = torch.arange(200 * 64).view(200, 64).float()
    return torch.equal(wo.gemm(x, qweight, torch.ones(1, 32)), x[:, :32])


def child_computes(depth: int) -> bool:
    """Whether a child made by fork computes, and its child, ..., `depth` of them."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # for one that waits forever
        os._exit(0 if product() and product() and (depth == 1 or child_computes(depth - 1)) else 1)
    return os.waitpid(child, 0)[1] == 0


def forked(imported: bool) -> None:
    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # the threads of the parent
    assert not imported or product()
    assert child_computes(depth=2) and product()


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy between two pages that cannot be touched, at one end of what is between them."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    inside = (size + page - 1) // page * page
    memory = mmap.mmap(-1, inside + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place in (begin, begin + page + inside):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), ctypes.c_size_t(page), 0) == 0
    offset = page + (inside - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, offset=offset, count=tensor.numel())
    return copy.view(tensor.shape).copy_(tensor)


def guards() -> None:
    """Products of operands that end, or begin, where memory does."""
    from tests.cpu.cpu_cases import Case, backends

    import weightonly as wo
    from weightonly.cpu import native

    g = torch.Generator().manual_seed(1)
    weights = [
        *(("int4", layout, 77) for layout in ("cpu", "tiled", "interleaved", "row_major")),
        *(("int8", layout, 20) for layout in ("cpu", "tiled", "interleaved", "row_major")),
        *(("int8", layout, 96) for layout in ("cpu", "tiled", "interleaved", "row_major")),
        *(("nf4", layout, 40) for layout in ("cpu", "tiled")),
    ]
    for (format, layout, n), dtype, at_end in itertools.product(
        weights, (torch.float32, torch.bfloat16), (False, True)
    ):
        case = Case.make(192, n, format, dtype, g, groups=3, zeros=format != "nf4", exact=True, layout=layout)
        w = case.qweight
        packed = wo.PackedWeight(guarded(w.data, at_end), w.k, w.n, w.format, w.layout, code=w.code)
        scales = guarded(case.scales, at_end)
        zeros = None if case.zeros is None else guarded(case.zeros, at_end)
        bias = guarded(torch.ones(n, dtype=dtype), at_end)
        for m in (1, 2, 5, 17, 33):
            x = guarded(torch.randint(-2, 3, (m, 192), generator=g).to(dtype), at_end)
            for backend in backends():
                out = guarded(torch.zeros(m, n, dtype=dtype), at_end)
                native.gemm(backend, x, packed, scales, zeros, bias, None, out)
                assert torch.equal(out, (x.double() @ case.w64 + 1).to(dtype)), (format, layout, m, backend.level)


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE / 2**20


def shrinks() -> None:
    """A large product's 128 MB for x are given back by a small one."""
    from tests.cpu.cpu_cases import backends

    import weightonly as wo
    from weightonly.cpu import native

    torch.set_num_threads(1)
    large = wo.preprocess(torch.ones(1 << 16, 32, dtype=torch.int8), layout="cpu")
    small = wo.preprocess(torch.ones(64, 32, dtype=torch.int8), layout="cpu")
    x, y, ones = torch.ones(512, 1 << 16), torch.ones(64, 64), torch.ones(1, 32)
    for backend in backends():
        native.gemm(backend, y, small, ones)
        before = resident_mb()
        native.gemm(backend, x, large, ones)
        assert resident_mb() > before + 64
        native.gemm(backend, y, small, ones)
        assert resident_mb() < before + 32


class Recorder:
    """Stands in for the library: keeps the parameters of a call, and says that there was no memory."""

    def wo_cpu_gemm(self, params: ctypes.Structure) -> int:
        self.params = params
        return 1


def without_memory() -> None:
    """With failing_allocations.cpp: each allocation of a call fails once, which is an error; the next one is right."""
    from tests.cpu.cpu_cases import Case, backends

    from weightonly.cpu import library, native

    call, count = ctypes.CDLL(None).call_with_a_failure, ctypes.c_long()

    def attempt(function: Any, params: ctypes.Structure, which: int) -> int:
        """The status, in a thread of its own: it has no memory of earlier calls."""
        found: list[int] = []

        def run() -> None:
            address = ctypes.cast(function, ctypes.c_void_p)
            found.append(call(address, ctypes.byref(params), ctypes.c_long(which), ctypes.byref(count)))
            found.append(function(params))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found[1] == (2 if found[0] == 2 else 0)
        return found[0]

    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    for layout, m, backend in itertools.product(("cpu", "tiled"), (1, 3, 20, 40), backends()):
        case = Case.make(256, 96, "int4", torch.float32, g, groups=2, zeros=True, exact=True, layout=layout)
        x, out = torch.randint(-2, 3, (m, 256), generator=g).float(), torch.empty(m, 96)
        recorder = Recorder()
        stand_in = library.Backend(recorder, backend.level, "")
        with pytest.raises(MemoryError, match=f"^gemm: no memory for {m} rows of K = 256 and their sums$"):
            native.gemm(stand_in, x, case.qweight, case.scales, case.zeros, out=out)
        which = 0
        while attempt(backend.library.wo_cpu_gemm, recorder.params, which) != 0:
            assert which < count.value, (layout, m, backend.level, "no allocation failed")
            which += 1
        assert which == count.value > 2 and torch.equal(out, (x.double() @ case.w64).float()), (layout, m, which)
        recorder.params.m = 0
        assert attempt(backend.library.wo_cpu_gemm, recorder.params, 0) == 2, "no memory for the message"


class Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("bytes", ctypes.c_size_t))


def without_tiles() -> None:
    """Linux refuses the registers of AMX to a process with a small stack for signals: then AMX is above the level."""
    small = ctypes.create_string_buffer(2048)
    stack = Stack(ctypes.addressof(small), 0, 2048)
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
    from weightonly.cpu import library, native
    from weightonly.packing import preprocess

    backend = library.choose("auto", library._PATH)
    assert backend.level < library.LEVELS.index("amx")
    above = library.Backend(backend.library, backend.level + 1, "")
    qweight = preprocess(torch.ones(64, 32, dtype=torch.int8), layout="cpu")
    for m in (1, 40):
        with pytest.raises(ValueError, match=f"^gemm: level must be one that this CPU has, got {above.level}$"):
            native.gemm(above, torch.ones(m, 64), qweight, torch.ones(1, 32))


if __name__ == "__main__":
    name, *flags = sys.argv[1:]
    globals()[name](*(flag == "True" for flag in flags))
