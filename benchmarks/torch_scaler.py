"""What loss scaling costs on the CPU: gradscaler.torch.GradScaler beside torch.amp.GradScaler.

    python benchmarks/torch_scaler.py

The optimizer is one whose step does nothing, or fused AdamW, which unscales in its own pass. For
fused AdamW there is also what scaling, with and without clipping, adds to its bare step.
"""

from __future__ import annotations

import argparse
import math
import statistics
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
    clip: bool = False,
) -> paired.Comparison:
    """Time both scalers around one optimizer, on one set of gradients.

    Clipping is to a norm of inf, so gradients come out unchanged.
    """
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in workload.shapes]
    gradients = [torch.randn(shape).mul_(1e-3) for shape in workload.shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = make_optimizer(parameters)
    loss = torch.ones(())

    def iteration(scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss)
        if clip and isinstance(scaler, gradscaler.torch.GradScaler):
            scaler.clip_grad_norm_(optimizer, math.inf)
        elif clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, math.inf)
        elif isinstance(optimizer, IdleOptimizer):  # a fused optimizer unscales in its own pass
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
    what = type(optimizer).__name__ + ", clipping" * clip
    return paired.Comparison(f"{workload.name}, {what}", **seconds)


def compare_added(clip: bool, workload: eager.Workload, repetitions: int) -> paired.Comparison:
    """Time what each scaler adds to a bare step of fused AdamW, with or without clipping."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in workload.shapes]
    scaled = [torch.randn(shape).mul_(1e-3 * eager.SCALE) for shape in workload.shapes]
    gradients = [gradient.clone() for gradient in scaled]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = fused_adamw(parameters)
    loss = torch.ones(())
    ours = gradscaler.torch.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    native = torch.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)

    def with_ours() -> None:
        ours.scale(loss)
        if clip:
            ours.clip_grad_norm_(optimizer, 1.0)
        ours.step(optimizer)
        ours.update()

    def with_native() -> None:
        native.scale(loss)
        if clip:
            native.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        native.step(optimizer)
        native.update()

    seconds = paired.interleave(
        {"ours": with_ours, "native": with_native, "bare": optimizer.step},
        prepare=lambda: torch._foreach_copy_(gradients, scaled),
        repetitions=repetitions,
        calls=workload.calls,
    )
    bare = statistics.median(seconds["bare"])  # less noisy than each repetition's own
    added = {name: [each - bare for each in seconds[name]] for name in ("ours", "native")}
    what = "scaling and clipping" if clip else "scaling"
    return paired.Comparison(f"{workload.name}, {what}, added to fused AdamW", **added)


def main() -> None:
    """Time every workload with both optimizers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, help="of torch; by default torch chooses")
    arguments = paired.parse(parser)
    if arguments.threads is not None:
        if arguments.threads < 1:
            parser.error("--threads must be at least 1")
        torch.set_num_threads(arguments.threads)
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    comparisons = [
        *(partial(compare, make) for make in (IdleOptimizer, fused_adamw)),
        partial(compare, IdleOptimizer, clip=True),
        *(partial(compare_added, clip) for clip in (False, True)),
    ]
    eager.run(arguments, setting, comparisons)


if __name__ == "__main__":
    main()
