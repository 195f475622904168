"""Stands in for the compiled module, so that plans of an H200 are made and launched without a GPU.

Tensors are on the CPU; nothing is computed. What a plan would hand to a kernel is recorded by the names of _C.pyi.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from tests import ROOT

from weightonly.args import GemmArgs
from weightonly.fp8_args import Fp8Args
from weightonly.heuristics import KernelConfig, Problem, select
from weightonly.heuristics.configs import CONFIGS, FP8_CONFIGS, kernel_types
from weightonly.plan import choose, fp8, kernel
from weightonly.plan.fp8 import Fp8KernelPlan
from weightonly.plan.kernel import KernelPlan

ARCH, SM_COUNT, STREAM = 90, 132, 77


def declared() -> dict[str, list[str]]:
    """Of _C.pyi: function, or Class.method, -> names of its parameters."""
    found = {}
    for node in ast.parse((ROOT / "weightonly" / "_C.pyi").read_text()).body:
        of_class = isinstance(node, ast.ClassDef)
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef):
                a = function.args
                names = [parameter.arg for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
                found[f"{node.name}.{function.name}" if isinstance(node, ast.ClassDef) else function.name] = names[
                    of_class:
                ]
    return found


class Module:
    """The compiled module.

    launches: each launch's arguments with the sizes of its plan. plans: how many were made. names: of kernels, by
    number.
    at_launch: called with the arguments of each launch while there are tensors at its addresses.
    """

    def __init__(self) -> None:
        configs = (*CONFIGS, *FP8_CONFIGS)
        self.names = [f"{config.kernel}_{types.name}" for config in configs for types in kernel_types(config)]
        self.launches: list[dict[str, Any]] = []
        self.at_launch: Callable[[dict[str, Any]], object] = lambda launch: None
        self.plans = 0
        module = self

        class Plan:
            def __init__(self, **sizes: Any) -> None:
                assert list(sizes) == declared()["Plan.__init__"]
                self.sizes = sizes
                module.plans += 1

            def launch(self, *arguments: Any) -> None:
                self.record("launch", arguments)

            def launch_fp8(self, *arguments: Any) -> None:
                self.record("launch_fp8", arguments)

            def record(self, method: str, arguments: tuple[Any, ...]) -> None:
                parameters = declared()[f"Plan.{method}"]
                module.launches.append(self.sizes | dict(zip(parameters, arguments, strict=True)))
                module.at_launch(module.launches[-1])

        self.Plan = Plan


def installed(monkeypatch: pytest.MonkeyPatch) -> Module:
    """From now on calls of `gemm` on CPU tensors take the plans that an H200 with every kernel would make of them."""
    stand_in = Module()
    numbers = {name: number for number, name in enumerate(stand_in.names)}
    monkeypatch.setattr(kernel, "_C", stand_in)
    monkeypatch.setattr(kernel, "kernel_numbers", lambda: numbers)
    monkeypatch.setattr(kernel, "_current_stream", lambda device: STREAM)
    monkeypatch.setattr(fp8, "_current_stream", lambda device: STREAM)
    monkeypatch.setattr(choose, "CpuPlan", plan_of_an_h200)
    monkeypatch.setattr(choose, "Fp8CpuPlan", plan_of_an_h200)
    return stand_in


def choice(p: Problem) -> KernelConfig:
    return select(p.m, p.n, p.k, p.format, p.group_size, p.arch, p.sm_count, p.layout, p.zeros)


def plan_of_an_h200(args: GemmArgs) -> KernelPlan:
    p = choose.problem_of(args.m, args.weight, ARCH, SM_COUNT, args.invariant)
    make = Fp8KernelPlan if isinstance(args, Fp8Args) else KernelPlan
    return make(args, p, choose.types_of(p, args.dtype), args.config or choice(p))
