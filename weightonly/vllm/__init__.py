"""The plug-in for vLLM. vLLM calls `register` in each of its processes: entry point group `vllm.general_plugins`.

Importing this package imports nothing of vLLM.
"""

from __future__ import annotations

from ..kernels import arch_runs_on, built_archs
from .support import experts_wanted


def register() -> None:
    """Registers the quantization method and the load format "weightonly", and our linear kernel as the first.

    The kernel is for GPUs that our kernels are built for; on others nothing is put before vLLM's own. There, and where
    WEIGHTONLY_VLLM_EXPERTS is on, experts are taken, too. Calls after the first one change nothing.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.platforms import current_platform

    from .folders import METHOD, WeightOnlyConfig, WeightOnlyLoader

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(WeightOnlyConfig)
        register_model_loader(METHOD)(WeightOnlyLoader)

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None or not any(arch_runs_on(arch, capability.to_int()) for arch in built_archs()):
        return

    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS

    from .linear_kernel import WeightOnlyLinearKernel

    # `register_linear_kernel` appends: a kernel that it adds is asked last.
    kernels = _POSSIBLE_KERNELS.setdefault(current_platform._enum, [])
    if WeightOnlyLinearKernel not in kernels:
        kernels.insert(0, WeightOnlyLinearKernel)
    if experts_wanted():
        from .experts import take_experts

        take_experts()
