"""Sums over the ranks of a group: small ones over memory that GPUs of one host share, others by torch.distributed.

One-shot: each rank reads the terms of all and adds them. Two-shot: each rank adds its part of the rows, and reads the
parts of the others. Both are kernels of PyTorch (torch.distributed._symmetric_memory) and add in the order of ranks:
they have the same bits, on every rank, in every run. They wait for all ranks before the first read and after the last
one, so that one buffer for a group is enough: when a sum is over nobody reads it, and the next product may fill it.
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
from ..gemm import autocast, compute, dispatch
from ..plain import are_plain, is_virtual, is_watched
from ..require import is_set
from ..weight import QuantizedWeight

ONE_SHOT, TWO_SHOT, NCCL = "one-shot", "two-shot", "nccl"

LIMITS = {2: (1 << 20, 16 << 20), 4: (256 << 10, 1 << 20), 8: (128 << 10, 1 << 20)}
"""Ranks -> up to how many bytes a sum is one-shot, and two-shot; larger ones, and other numbers of ranks, are left to
torch.distributed. Of two ranks as measured on H200s (bench/measurements/h200x2_sums.csv), of others guessed."""

SWITCH = "WEIGHTONLY_SYMMETRIC_SUMS"
"""Environment variable: 1 on all ranks asks for shared memory; else all sums are left to torch.distributed."""

is_set(SWITCH)  # a wrong value is an error of the import: one rank that fails later lets the others wait

_DTYPES = (torch.bfloat16, torch.float32)  # that PyTorch's kernels add
_ALIGN_BYTES = 16

_group_of: Any = _resolve_process_group


class SharedSums:
    """The buffer of a group: each rank has one, which the others read.

    Attributes:
        ranks: of the group.
        capacity: bytes of a term.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, capacity: int) -> None:
        """All ranks have to call it. Raises RuntimeError where PyTorch cannot share the memory."""
        from torch.distributed import _symmetric_memory as symmetric

        self.ranks, self.capacity, self.name = group.size(), capacity, group.group_name
        # Not by symmetric.empty: tensors of its pool may share the flags on which ranks wait for each other.
        with torch.inference_mode(False):
            make = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
            self._buffer = make((capacity,), (1,), torch.uint8, device)
        self._stream = torch.cuda.current_stream(device)  # of the last sum; not None: `stream != None` is False
        symmetric.rendezvous(self._buffer, self.name)

    def term(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Where this rank's term of the next sum belongs; of `capacity` bytes at most."""
        self._follow()
        return self._padded(shape.numel(), dtype)[: shape.numel()].view(shape)

    def sum(self, shape: torch.Size, dtype: torch.dtype, way: str) -> torch.Tensor:
        """Adds up the terms of all ranks; a tensor of its own."""
        buffer = self._padded(shape.numel(), dtype)
        y = torch.empty(buffer.shape, dtype=dtype, device=buffer.device)
        ops = torch.ops.symm_mem
        add = ops.two_shot_all_reduce_out if way == TWO_SHOT else ops.one_shot_all_reduce_out
        with torch.cuda.device(buffer.device):
            add(buffer, "sum", self.name, y)
        return y[: shape.numel()].view(shape)

    def _padded(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of the buffer, `count` and more: the kernels add 16 bytes at a time."""
        whole = self._buffer.view(dtype)
        unit = _ALIGN_BYTES // dtype.itemsize
        return whole[: -(-count // unit) * unit]

    def _follow(self) -> None:
        """Sums on another stream wait for those before: there is one buffer. Graphs are left to those who replay."""
        stream = torch.cuda.current_stream(self._buffer.device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._stream = stream


_shared: WeakKeyDictionary[distributed.ProcessGroup, SharedSums | None] = WeakKeyDictionary()


def shared_of(group: distributed.ProcessGroup, term: torch.Tensor) -> SharedSums | None:
    """The buffer for sums of such terms on a GPU; None where torch.distributed is to add them.

    The first sum of a group makes the buffer, together with all ranks. A sum whose group has none yet is left to
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


def way_of(ranks: int, size_bytes: int) -> str:
    """How so many bytes are added, where ranks share memory."""
    one_shot, two_shot = LIMITS[ranks]
    if size_bytes <= one_shot:
        return ONE_SHOT
    return TWO_SHOT if size_bytes <= two_shot else NCCL


def sum_of_products(x: torch.Tensor, w: QuantizedWeight, group_name: str) -> torch.Tensor:
    """`sum_over_ranks` of `gemm(x, w)`, which writes where the other ranks read. Not differentiable.

    The operator `weightonly::sum_of_products` under torch.compile and modes.
    """
    args = GemmArgs(autocast(x, w.scales), w)
    if is_watched() or not args.is_plain() or any(map(is_virtual, args.tensors().values())):
        return dispatch(args, partial(_product_op, group_name))
    return _sum_of_products(args, group_name)


def _sum_of_products(args: GemmArgs, group_name: str) -> torch.Tensor:
    group, x = _group_of(group_name), args.x
    shape = torch.Size((*x.shape[:-1], args.weight.n))
    shared = shared_of(group, x)
    way = NCCL if shared is None else way_of(shared.ranks, shape.numel() * x.element_size())
    if shared is None or way == NCCL:
        y = compute(args)
        distributed.all_reduce(y, group=group)
        return y
    args.out = shared.term(shape, x.dtype)
    compute(args, checks_out=False)
    return shared.sum(shape, x.dtype, way)


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
    group = _group_of(group_name)
    shared = shared_of(group, term)
    way = NCCL if shared is None else way_of(shared.ranks, term.nbytes)
    if shared is None or way == NCCL:
        y = term.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(y, group=group)
        return y
    shared.term(term.shape, term.dtype).copy_(term)
    return shared.sum(term.shape, term.dtype, way)


_sum_op: Any = torch.library.custom_op(
    "weightonly::sum_over_ranks", mutates_args=(), schema="(Tensor term, str group_name) -> Tensor"
)(_sum)


@_sum_op.register_fake
def _result_of_op(term: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(term, memory_format=torch.contiguous_format)


def _share(group: distributed.ProcessGroup, device: torch.device) -> SharedSums | None:
    """A buffer, where all ranks have one; all ranks have to call it."""
    if group.size() not in LIMITS:
        return None
    with torch.cuda.device(device):
        return _shared_by_all(group, device)


def _shared_by_all(group: distributed.ProcessGroup, device: torch.device) -> SharedSums | None:
    if not _all_agree(group, _says(group, device)):
        return None
    try:
        shared = SharedSums(group, device, max(LIMITS[group.size()]))
    except RuntimeError:  # such as of a container that may not pass memory on
        shared = None
    return shared if _all_agree(group, shared is not None) else None


def _says(group: distributed.ProcessGroup, device: torch.device) -> bool:
    """Whether this rank, having heard of the others, can share memory with them."""
    ops = torch.ops.symm_mem
    has_kernels = hasattr(ops, "one_shot_all_reduce_out") and hasattr(ops, "two_shot_all_reduce_out")
    mine = (_host(), str(torch.cuda.get_device_properties(device).uuid))
    all_of: list[Any] = [None] * group.size()
    distributed.all_gather_object(all_of, mine, group=group)
    hosts, gpus = {host for host, _ in all_of}, [gpu for _, gpu in all_of]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    peers = [visible[gpu] for gpu in gpus if gpu in visible and gpu != mine[1]]  # others show when memory is shared
    return (
        is_set(SWITCH)
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
