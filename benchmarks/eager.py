"""The part that eager frameworks' benchmarks share: gradients to unscale, and workloads.

Both scalers take turns to make the calls of a training loop on the same gradients. With an
optimizer whose step does nothing, the time is the scaler's own; with a real optimizer, it is that
of the whole step. A call ends with unscaled gradients. They are scaled again outside of the
measured time, so every call reads the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paired

Shape = tuple[int, ...]

SCALE = 2.0**16
NEVER = 2**30  # the growth interval: the scale stays at what the gradients are scaled by

LAYER: list[Shape] = [  # of GPT-2 small: shapes of one transformer block
    *[(768,), (768,)],  # ln_1: weight, bias
    *[(768, 2304), (2304,)],  # attn.c_attn
    *[(768, 768), (768,)],  # attn.c_proj
    *[(768,), (768,)],  # ln_2
    *[(768, 3072), (3072,)],  # mlp.c_fc
    *[(3072, 768), (768,)],  # mlp.c_proj
]
EMBEDDINGS: list[Shape] = [(50257, 768), (1024, 768)]  # wte, which is the output layer too; wpe
FINAL_NORM: list[Shape] = [(768,), (768,)]  # ln_f


@dataclass(frozen=True)
class Workload:
    """Parameters to make gradients for.

    Attributes:
        name: its name in the table.
        shapes: the shape of each parameter.
        calls: the number of calls of a scaler in one measurement.
    """

    name: str
    shapes: Sequence[Shape]
    calls: int


WORKLOADS = [
    Workload("GPT-2 small", EMBEDDINGS + LAYER * 12 + FINAL_NORM, calls=1),
    Workload("2,000 of 64x64", [(64, 64)] * 2000, calls=5),
    Workload("one 16x16 linear", [(16, 16), (16,)], calls=200),
]


def run(
    arguments: argparse.Namespace,
    setting: Mapping[str, Any],
    comparisons: Sequence[Callable[[Workload, int], paired.Comparison]],
    workloads: Sequence[Workload] = WORKLOADS,
) -> None:
    """Make every comparison of every workload; print a table, and write JSON if asked.

    Args:
        arguments: the parsed command line.
        setting: what the numbers depend on, by name.
        comparisons: each compares on a workload, with a number of repetitions.
        workloads: what to compare on.
    """
    results = [
        compare(workload, arguments.repetitions)
        for compare in comparisons
        for workload in workloads
    ]
    paired.report(arguments, setting, results)
