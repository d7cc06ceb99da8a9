"""What loss scaling costs on the CPU: gradscaler.torch.GradScaler beside torch.amp.GradScaler.

    python benchmarks/torch_scaler.py

Both scalers do the calls of a training loop on the same gradients, by turns. The optimizer is
either one whose step does nothing, so that the time is the scaler's own, or fused AdamW, which
unscales in its own pass, for the whole step. A call ends with unscaled gradients in either case;
they are scaled again outside the measured time, so every call reads the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paired
import torch

import gradscaler.torch

Shape = tuple[int, ...]

SCALE = 2.0**16
NEVER = 2**30  # the growth interval: the scale stays what the gradients are scaled by

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
        name: for the table.
        shapes: one for each parameter.
        calls: calls of a scaler to one measurement.
    """

    name: str
    shapes: Sequence[Shape]
    calls: int


WORKLOADS = [
    Workload("GPT-2 small", EMBEDDINGS + LAYER * 12 + FINAL_NORM, calls=1),
    Workload("2,000 of 64x64", [(64, 64)] * 2000, calls=5),
    Workload("one 16x16 linear", [(16, 16), (16,)], calls=200),
]


class IdleOptimizer(torch.optim.Optimizer):
    """An optimizer whose step costs nothing."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no closure is called
        """Leave the parameters alone."""


def fused_adamw(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer to time a whole step with."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def compare(
    workload: Workload,
    make_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
    repetitions: int,
) -> paired.Comparison:
    """Time both scalers around one optimizer, on one set of gradients."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in workload.shapes]
    gradients = [torch.randn(shape).mul_(1e-3) for shape in workload.shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = make_optimizer(parameters)
    loss = torch.ones(())

    def iteration(scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss)
        if isinstance(optimizer, IdleOptimizer):  # a fused optimizer unscales in its own pass
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    ours = gradscaler.torch.GradScaler("cpu", SCALE, growth_interval=NEVER)
    native = torch.amp.GradScaler("cpu", SCALE, growth_interval=NEVER)
    norms = torch._foreach_norm(gradients)
    seconds = paired.interleave(
        {"ours": partial(iteration, ours), "native": partial(iteration, native)},
        prepare=lambda: torch._foreach_mul_(gradients, SCALE),
        repetitions=repetitions,
        calls=workload.calls,
    )
    if not all(map(torch.equal, norms, torch._foreach_norm(gradients))):
        raise RuntimeError(f"{workload.name}: the gradients were not unscaled to what they were")
    return paired.Comparison(f"{workload.name}, {type(optimizer).__name__}", **seconds)


def main() -> None:
    """Run every workload with both optimizers; print a table, and write JSON where asked."""
    arguments = parse()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    setting = {
        **paired.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repetitions": arguments.repetitions,
    }
    print(*(f"{name}: {value}" for name, value in setting.items()), sep="\n", end="\n\n")
    comparisons = [
        compare(workload, make_optimizer, arguments.repetitions)
        for make_optimizer in (IdleOptimizer, fused_adamw)
        for workload in WORKLOADS
    ]
    print(paired.table(comparisons))
    if arguments.json:
        paired.write_json(arguments.json, setting, comparisons)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--repetitions",
        type=int,
        default=50,
        help="measurements of each scaler and workload, at least 6 (%(default)s)",
    )
    parser.add_argument(
        "--quick",
        dest="repetitions",
        action="store_const",
        const=10,
        help="10 repetitions",
    )
    parser.add_argument("--threads", type=int, help="of torch; as many as it likes by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    arguments = parser.parse_args()
    if arguments.repetitions < 6:
        parser.error("--repetitions must be at least 6: fewer give no 95 % interval")
    if arguments.threads is not None and arguments.threads < 1:
        parser.error("--threads must be at least 1")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.parent}")
    return arguments


if __name__ == "__main__":
    main()
