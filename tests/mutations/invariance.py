"""Faults of the batch-invariant mode."""

from __future__ import annotations

from .mutation import Mutation, of

MUTATIONS: tuple[Mutation, ...] = (
    *of(
        "heuristics/invariant.py",
        "classes",
        [
            ("a first launch of another class", "class_of", " if config.tail.rules", " if True or config.tail.rules"),
            ("a class without kernels for many rows", "quickest_class", "(*MEAN_ROWS, MOST_ROWS)", "MEAN_ROWS[:1]"),
            ("the slowest class", "quickest_class", "min(means", "max(means"),
        ],
    ),
    *of(
        "heuristics/families/gemm_sm90.py",
        "classes",
        [
            ("CTAs do not count", "GemmSm90.bits_class", "config.split_k, warpgroups", "1, warpgroups"),
            ("warpgroups do not count", "GemmSm90.bits_class", "config.split_k, warpgroups", "config.split_k, 1"),
            ("parts of any length", "GemmSm90.bits_class", "config.split_k > 1 and ", "False and "),
            ("any tile follows", "GemmSm90.may_follow", "96 <= config.block_m <= 128", "True"),
            ("parts of other CTAs", "GemmSm90.may_follow", "(1, order.split_k)", "(1, 2, 3, order.split_k)"),
        ],
    ),
    *of(
        "heuristics/families/waves.py",
        "classes",
        [("parts of K do not count", "WaveFamily.bits_class", "config.split_k", "1")],
    ),
    *of(
        "heuristics/select.py",
        "classes",
        [
            ("the mode is not seen", "kernels_for", "p.invariant", "False"),
            (
                "no kernel follows",
                "invariant_kernels",
                "computes_class(config, problem, of)",
                "config.rules.bits_class(config, problem) == of",
            ),
            ("cuBLAS for more rows", "_last_resort", "p.invariant", "False"),
        ],
    ),
    *of(
        "heuristics/grouped.py",
        "classes",
        [
            ("the mode is not seen", "_times_us", "not problem.invariant", "True"),
            ("another way for many rows", "_times_us", "not of_class", "False"),
        ],
    ),
    *of(
        "weightonly/plan/choose.py",
        "classes",
        [
            ("a table of another class", "preferred", " or not is_of_class(found, problem)", ""),
            ("a config of another class", "check_config", "not is_of_class(config, problem)", "False"),
        ],
    ),
    *of(
        "weightonly/plan/grouped.py",
        "classes",
        [("a config of another class", "check_grouped_class", "!= expected", "is expected")],
    ),
    *of(
        "weightonly/args.py",
        "switch",
        [
            ("plans of any mode", "GemmArgs.key", "self.config, self.invariant", "self.config"),
            ("operators of another mode", "GemmArgs.from_op", "    args.invariant = invariant\n", ""),
        ],
    ),
    *of(
        "weightonly/fp8_product.py",
        "switch",
        [("a rounded x of another mode", "_compute", "    args8.invariant = args.invariant\n", "")],
    ),
    *of(
        "weightonly/ops/around_experts.py",
        "plan_experts",
        [
            ("rows that are read otherwise", "invariant_rows", " or is_rows(x)", " or True"),
            ("more choices than kernels sort", "invariant_rows", "> MAX_CHOICES", "> 2 * MAX_CHOICES"),
        ],
    ),
    *of(
        "weightonly/gate.py",
        "rows",
        [("gates as PyTorch has them", "Gate.__call__", "in_pieces(self._combined, *parts)", "self._combined(*parts)")],
    ),
    *of(
        "kernels/cpu/variant.cpp",
        "rows",
        [("few rows have their kernel", "kernel_of", " && p.invariant == 0", "")],
    ),
    *of(
        "kernels/cpu/checks.h",
        "cpu_interface",
        [("another mode", "check_choice", "p.invariant != 0 && p.invariant != 1", "false")],
    ),
)
