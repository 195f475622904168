"""The plug-in for vLLM. vLLM calls `register` in each of its processes: entry point group `vllm.general_plugins`.

Importing this package imports nothing of vLLM.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from .. import __version__
from ..invariance import batch_invariant, set_batch_invariant
from ..kernels import arch_runs_on, built_archs
from .support import experts_wanted, is_asked_for

logger = logging.getLogger("vllm.weightonly")


def register() -> None:
    """Registers the quantization method and the load format "weightonly", and our linear kernels as the first.

    The kernels are for GPUs that ours are built for; on others nothing is put before vLLM's own. There, and unless
    WEIGHTONLY_VLLM_EXPERTS is off, experts are taken, too. VLLM_BATCH_INVARIANT=1 turns our batch-invariant mode
    on. Calls after the first one change nothing.

    A version of vLLM that lacks what one of these needs does without it: a warning says so, and vLLM runs as before.
    """
    import vllm
    from vllm import envs

    is_invariant = follow_batch_invariance(envs)
    wanted = experts_wanted()
    parts: dict[str, Callable[[], None]] = {"compile cache": _register_cache, "quantization method": _register_method}
    if _runs_here():
        parts["linear kernel"] = _register_kernel
        if is_invariant:
            parts["layers of the batch-invariant mode"] = _register_invariant_layers
        parts["kernel of 4-bit floats"] = _register_fp4_kernels
        parts["kernel of FP8"] = _register_fp8_kernel
        if wanted:
            parts["experts"] = _register_experts
    for name, part in parts.items():
        try:
            part()
        except (ImportError, AttributeError) as error:
            logger.warning("weightonly has no %s for vLLM %s: %s", name, vllm.__version__, error)


def follow_batch_invariance(envs: Any) -> bool:
    """Turns the batch-invariant mode on where vLLM's is, and says so. envs: vLLM's module of environment variables."""
    if not getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return False
    set_batch_invariant(True)
    return True


def _register_cache() -> None:
    """A graph that vLLM compiled and kept is for the kernels, hence parameters, of the layers it was compiled with."""
    from vllm import envs

    compile_factors = envs.compile_factors
    if hasattr(compile_factors, "__wrapped__"):
        return

    @functools.wraps(compile_factors)
    def with_ours() -> dict[str, object]:
        experts = experts_wanted(), is_asked_for()
        ours = f"experts {experts}, kernels {_runs_here()}, batch invariant {batch_invariant()}"
        return compile_factors() | {"weightonly": f"{__version__}, {ours}"}

    envs.compile_factors = with_ours


def _register_method() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from .folders import METHOD, WeightOnlyConfig, WeightOnlyLoader

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(WeightOnlyConfig)
        register_model_loader(METHOD)(WeightOnlyLoader)


def _runs_here() -> bool:
    """Whether the GPU is one that our kernels are built for. vLLM asks the driver, so CUDA is not initialized."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return capability is not None and any(arch_runs_on(arch, capability.to_int()) for arch in built_archs())


def _register_kernel() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.platforms import current_platform

    from .linear_kernel import WeightOnlyLinearKernel

    # `register_linear_kernel` appends: a kernel that it adds is asked last.
    kernels = _POSSIBLE_KERNELS.setdefault(current_platform._enum, [])
    if WeightOnlyLinearKernel not in kernels:
        kernels.insert(0, WeightOnlyLinearKernel)


def _register_invariant_layers() -> None:
    from .invariant_layers import take_invariant_layers

    take_invariant_layers()


def _register_fp4_kernels() -> None:
    from .fp4_kernels import take_marlins_place

    take_marlins_place()


def _register_fp8_kernel() -> None:
    from .fp8_kernels import take_fp8

    take_fp8()


def _register_experts() -> None:
    from .experts import take_experts

    take_experts()
