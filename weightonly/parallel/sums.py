"""Sums over the ranks of a group: small ones over memory that GPUs of one host share, others by torch.distributed.

Each rank writes its term into the memory of all others, and adds in the order of ranks, in fp32: results have the same
bits on every rank and in every run (kernels/parallel/sum_over_ranks.cu).
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _resolve_process_group

from ..args import OP_SCHEMA, GemmArgs
from ..device import device_arch
from ..gemm import autocast, compute, dispatch
from ..kernels import _C, FLOAT_TYPES
from ..plain import are_plain, is_virtual, is_watched
from ..require import is_set
from ..weight import QuantizedWeight

LIMITS = {2: 32 << 20, 4: 2 << 20}
"""Ranks -> up to how many bytes a sum is ours, as measured (bench/measurements/LOG.md). Larger ones, and other numbers
of ranks, which no GPUs have tried, are left to torch.distributed."""

PIECE_BYTES = 4 << 20
"""Of a larger sum that are added at a time."""

_PLACES = 3
_DTYPES = (torch.float16, torch.bfloat16)

SWITCH = "WEIGHTONLY_SYMMETRIC_SUMS"
"""Environment variable: 0 on a rank leaves all sums of its groups to torch.distributed."""

is_set(SWITCH, True)  # a wrong value is an error of the import: one rank that fails later lets the others wait

_group_of: Any = _resolve_process_group


class SharedSums:
    """The memory of a group: each rank has some, which the others write.

    Attributes:
        ranks: of the group.
        capacity: bytes of a term that are added at a time.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, capacity: int) -> None:
        """All ranks have to call it, and to know that all have, before the first sum. Raises RuntimeError where PyTorch
        cannot share the memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        self.ranks, self.capacity, self._rank, self._device = group.size(), capacity, group.rank(), device
        with torch.inference_mode(False):
            make = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
            self._memory = make((_PLACES * self.ranks * capacity,), (1,), torch.uint8, device)
            self._state = torch.zeros(3, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # PyTorch may clear it on another stream
        self._memory.fill_(255)
        handle = symmetric.rendezvous(self._memory, group.group_name)  # lives as long as the memory
        self._addresses = [int(address) for address in handle.buffer_ptrs]  # of all ranks, as this one sees them
        self._stream = torch.cuda.current_stream(device)  # of the last sum; not None: `stream != None` is False
        torch.cuda.synchronize(device)

    def add_(self, term: torch.Tensor) -> None:
        """Adds the terms of all ranks to this one, which is contiguous, of fp16 or bf16."""
        if term.data_ptr() % 16:
            copy = term.clone()
            self.add_(copy)
            term.copy_(copy)
            return
        self._follow()
        number, stream = FLOAT_TYPES[term.dtype], torch.cuda.current_stream(self._device).cuda_stream
        most, state = self.capacity // term.element_size(), self._state.data_ptr()
        for begin in range(0, term.numel(), most):
            count, address = min(most, term.numel() - begin), term.data_ptr() + begin * term.element_size()
            where = (self._addresses, self._rank, self.capacity, state, stream)
            _C.sum_over_ranks(self._device.index, number, count, address, *where)

    def _follow(self) -> None:
        """Sums on another stream wait for those before: they share memory. Graphs are left to those who replay."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._stream = stream


_shared: WeakKeyDictionary[distributed.ProcessGroup, SharedSums | None] = WeakKeyDictionary()


def shared_of(group: distributed.ProcessGroup, term: torch.Tensor) -> SharedSums | None:
    """The memory for sums of such terms on a GPU; None where torch.distributed is to add them.

    The first sum of a group makes the memory, together with all ranks. A sum whose group has none yet is left to
    torch.distributed while a CUDA graph is captured.
    """
    if not term.is_cuda or term.dtype not in _DTYPES:
        return None
    try:
        return _shared[group]
    except KeyError:
        if torch.cuda.is_current_stream_capturing():
            return None
    _shared[group] = _share(group, term.device)
    return _shared[group]


def _add(term: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """The term, which has become the sum. term: contiguous, in memory of its own."""
    shared = shared_of(group, term)
    if shared is None or term.nbytes > LIMITS[shared.ranks]:
        distributed.all_reduce(term, group=group)
    else:
        shared.add_(term)
    return term


def sum_of_products(x: torch.Tensor, w: QuantizedWeight, group_name: str) -> torch.Tensor:
    """`sum_over_ranks` of `gemm(x, w)`, in its memory. Not differentiable.

    The operator `weightonly::sum_of_products` under torch.compile and modes.
    """
    args = GemmArgs(autocast(x, w.scales), w)
    if is_watched() or not args.is_plain() or any(map(is_virtual, args.tensors().values())):
        return dispatch(args, partial(_product_op, group_name))
    return _sum_of_products(args, group_name)


def _sum_of_products(args: GemmArgs, group_name: str) -> torch.Tensor:
    return _add(compute(args), _group_of(group_name))


@torch.library.custom_op(
    "weightonly::sum_of_products", mutates_args=(), schema=OP_SCHEMA.replace("(", "(str group_name, ", 1)
)
def _product_op(group_name: str, *operands: Any) -> torch.Tensor:
    return _sum_of_products(GemmArgs.from_op(*operands), group_name)


@_product_op.register_fake
def _result_of_product_op(group_name: str, x: torch.Tensor, data: torch.Tensor, k: int, n: int, *rest: Any) -> Any:
    return x.new_empty((*x.shape[:-1], n))


def sum_over_ranks(term: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of the terms that all ranks of a group have; a tensor of its own. Not differentiable.

    The operator `weightonly::sum_over_ranks` under torch.compile and modes.
    """
    return _sum(term, group_name) if are_plain(term) else _sum_op(term, group_name)


def _sum(term: torch.Tensor, group_name: str) -> torch.Tensor:
    return _add(term.clone(memory_format=torch.contiguous_format), _group_of(group_name))


_sum_op: Any = torch.library.custom_op(
    "weightonly::sum_over_ranks", mutates_args=(), schema="(Tensor term, str group_name) -> Tensor"
)(_sum)


@_sum_op.register_fake
def _result_of_op(term: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(term, memory_format=torch.contiguous_format)


def _share(group: distributed.ProcessGroup, device: torch.device) -> SharedSums | None:
    """Memory, where all ranks have some; all ranks have to call it."""
    if group.size() not in LIMITS:
        return None
    with torch.cuda.device(device):
        return _shared_by_all(group, device)


def _shared_by_all(group: distributed.ProcessGroup, device: torch.device) -> SharedSums | None:
    if not _all_agree(group, _says(group, device)):
        return None
    try:
        shared = SharedSums(group, device, min(LIMITS[group.size()], PIECE_BYTES))
    except RuntimeError:  # such as of a container that may not pass memory on
        shared = None
    return shared if _all_agree(group, shared is not None) else None


def _says(group: distributed.ProcessGroup, device: torch.device) -> bool:
    """Whether this rank, having heard of the others, can share memory with them."""
    has_kernels = _C is not None and device_arch(torch.cuda._get_device_index(device)) == 90
    mine = (_host(), str(torch.cuda.get_device_properties(device).uuid))
    all_of: list[Any] = [None] * group.size()
    distributed.all_gather_object(all_of, mine, group=group)
    hosts, gpus = {host for host, _ in all_of}, [gpu for _, gpu in all_of]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    peers = [visible[gpu] for gpu in gpus if gpu in visible and gpu != mine[1]]  # others show when memory is shared
    return (
        is_set(SWITCH, True)
        and has_kernels
        and len(hosts) == 1
        and len(set(gpus)) == len(gpus)
        and all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
    )


def _host() -> str:
    """Differs between hosts, and between containers, which pass no memory to each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def _all_agree(group: distributed.ProcessGroup, says: bool) -> bool:
    answers: list[Any] = [None] * group.size()
    distributed.all_gather_object(answers, says, group=group)
    return all(answers)
