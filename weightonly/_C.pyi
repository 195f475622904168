# The compiled module (kernels/bindings.cpp): internal, use weightonly.gemm. Sizes in elements, addresses as
# integers.

def kernel_names() -> list[str]: ...
def archs() -> str: ...
def set_launch_overlap(enabled: bool) -> None: ...

class Plan:
    def __init__(
        self,
        kernel: int,
        device: int,
        m: int,
        n: int,
        k: int,
        n_padded: int,
        k_padded: int,
        group_size: int,
        split_k: int,
        clusters: int,
        activation: int,
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
        ld_scales: int,
        stream: int,
    ) -> None: ...
