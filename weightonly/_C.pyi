# The compiled module (kernels/api/bindings.cpp). Internal: use weightonly.gemm. Sizes are in elements, addresses are
# integers.

from collections.abc import Sequence

def kernel_names() -> list[str]: ...
def grouped_kernel_names() -> list[str]: ...
def archs() -> str: ...
def dequantizes_groups_of_16() -> bool: ...
def dequantizes_fp8() -> bool: ...
def set_pdl_mode(mode: int) -> None: ...
def awq_dequantize(
    device: int,
    type: int,
    path: int,
    k: int,
    n: int,
    groups: int,
    qweight: int,
    scales: int,
    qzeros: int,
    w: int,
    stream: int,
) -> None: ...
def quantize_4bit(
    device: int,
    type: int,
    count: int,
    blocksize: int,
    codebook: Sequence[float],
    w: int,
    packed: int,
    absmax: int,
    stream: int,
) -> None: ...
def dequantize_4bit(
    device: int,
    type: int,
    count: int,
    blocksize: int,
    codebook: Sequence[float],
    w: int,
    packed: int,
    absmax: int,
    stream: int,
) -> None: ...
def quantize_activations(
    device: int, type: int, m: int, k: int, x: int, ldx: int, x8: int, x_scales: int, rows_end: int, stream: int
) -> None: ...
def dequantize(
    *,
    device: int,
    bits: int,
    type: int,
    layout: int,
    k: int,
    k_padded: int,
    n_begin: int,
    n_end: int,
    n_padded: int,
    group_size: int,
    weight: int,
    scales: int,
    zeros: int,
    codebook: int,
    w: int,
    ld_scales: int,
    ldw: int,
    stream: int,
    is_float: bool = False,
) -> None: ...
def route(
    device: int, choices: int, experts: int, is_int64: bool, ids: int, offs: int, places: int, stream: int, /
) -> None: ...
def gather(
    device: int,
    tokens: int,
    top_k: int,
    experts: int,
    columns: int,
    x: int,
    ldx: int,
    scales: int,
    offs: int,
    places: int,
    sorted: int,
    sorted_scales: int,
    stream: int,
    /,
) -> None: ...
def combine(
    device: int,
    type: int,
    tokens: int,
    top_k: int,
    columns: int,
    rows: int,
    weights: int,
    places: int,
    rows_end: int,
    y: int,
    stream: int,
    /,
) -> None: ...
def spread(
    device: int,
    type: int,
    tokens: int,
    top_k: int,
    columns: int,
    grad: int,
    rows: int,
    weights: int,
    places: int,
    rows_end: int,
    of_rows: int,
    of_weights: int,
    stream: int,
    /,
) -> None: ...
def sum_over_ranks(
    device: int,
    type: int,
    count: int,
    y: int,
    memory: list[int],
    rank: int,
    capacity: int,
    state: int,
    stream: int,
    /,
) -> None: ...

class Plan:
    def __init__(
        self,
        *,
        kernel: int,
        device: int,
        is_tail: bool,
        m: int,
        n: int,
        k: int,
        n_padded: int,
        k_padded: int,
        group_size: int,
        ld_scales: int,
        split_k: int,
        clusters: int,
        activation: int,
        order: tuple[int, int] = ...,
    ) -> None: ...
    def launch(
        self,
        x: int,
        weight: int,
        scales: int,
        zeros: int,
        bias: int,
        y: int,
        partials: int,
        ldx: int,
        ldy: int,
        stream: int,
        scales_in_place: bool,
        /,
    ) -> None: ...
    def launch_fp8(
        self,
        x: int,
        x_scales: int,
        weight: int,
        scales: int,
        bias: int,
        y: int,
        ldx: int,
        ldy: int,
        stream: int,
        scales_in_place: bool,
        /,
    ) -> None: ...

class GroupedPlan:
    def __init__(
        self,
        *,
        kernel: int,
        device: int,
        experts: int,
        m: int,
        n: int,
        k: int,
        n_padded: int,
        k_padded: int,
        group_size: int,
        ld_scales: int,
        clusters: int,
        is_gated: bool = False,
        gate: tuple[int, float, float, float] = ...,
        top_k: int = 0,
        is_int64: bool = False,
        is_in_layer: bool = False,
    ) -> None: ...
    def launch(
        self,
        x: int,
        weight: int,
        scales: int,
        zeros: int,
        bias: int,
        y: int,
        offs: int,
        ldx: int,
        ldy: int,
        stream: int,
        x_scales: int,
        /,
    ) -> None: ...
    def launch_choices(
        self,
        x: int,
        weight: int,
        scales: int,
        zeros: int,
        bias: int,
        y: int,
        ids: int,
        places: int,
        rows: int,
        ldx: int,
        ldy: int,
        stream: int,
        /,
    ) -> None: ...
