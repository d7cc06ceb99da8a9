"""What loss scaling costs on the CPU: gradscaler.torch.GradScaler beside torch.amp.GradScaler.

    python benchmarks/torch_scaler.py

The optimizer is either one whose step does nothing or fused AdamW, which unscales in its own pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import eager
import paired
import torch

import gradscaler.torch


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
    make_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
    workload: eager.Workload,
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

    ours = gradscaler.torch.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    native = torch.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    norms = torch._foreach_norm(gradients)
    seconds = paired.interleave(
        {"ours": partial(iteration, ours), "native": partial(iteration, native)},
        prepare=lambda: torch._foreach_mul_(gradients, eager.SCALE),
        repetitions=repetitions,
        calls=workload.calls,
    )
    if not all(map(torch.equal, norms, torch._foreach_norm(gradients))):
        raise RuntimeError(f"{workload.name}: the gradients were not unscaled to what they were")
    return paired.Comparison(f"{workload.name}, {type(optimizer).__name__}", **seconds)


def main() -> None:
    """Time every workload with both optimizers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, help="of torch; as many as it likes by default")
    arguments = eager.parse(parser)
    if arguments.threads is not None:
        if arguments.threads < 1:
            parser.error("--threads must be at least 1")
        torch.set_num_threads(arguments.threads)
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    eager.run(arguments, setting, [partial(compare, IdleOptimizer), partial(compare, fused_adamw)])


if __name__ == "__main__":
    main()
