"""Mutations: small faults for `mutate.py` to plant, one after another, each of which the tests have to notice.

A mutation names a function of a file, and replaces a text that the function has once: lines around it may change. What
the tests cannot notice, because no caller can, has a reason beside it. A subject has a module; `ALL` has them in order.
"""

from __future__ import annotations

from . import calls, cpu, experts, hf, invariance, parallel, readers, selection, vllm, weights
from .mutation import Mutation

__all__ = ["ALL", "Mutation"]

ALL: tuple[Mutation, ...] = (
    *weights.MUTATIONS,
    *calls.MUTATIONS,
    *cpu.MUTATIONS,
    *experts.MUTATIONS,
    *readers.MUTATIONS,
    *selection.MUTATIONS,
    *invariance.MUTATIONS,
    *hf.MUTATIONS,
    *parallel.MUTATIONS,
    *vllm.MUTATIONS,
)
