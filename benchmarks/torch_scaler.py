"""The time of loss scaling on the CPU: gradscaler.torch.GradScaler against torch.amp.GradScaler.

    python benchmarks/torch_scaler.py

The optimizer is one whose step does nothing, or fused AdamW, which unscales in its own pass. For
fused AdamW, another measurement is the time that scaling, with and without clipping, adds to its
bare step. In the rows of flat gradients, ours works on gradients that flat_gradients keeps side by
side, and the others work on ordinary ones.
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

Optimizers = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


class IdleOptimizer(torch.optim.Optimizer):
    """An optimizer whose step costs nothing."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no closure is called
        """Leave the parameters alone."""


def fused_adamw(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer to time a whole step with."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Training:
    """Parameters with gradients, and their optimizer.

    Args:
        make_optimizer: makes the optimizer from the parameters.
        gradients: the values that ``restore`` puts into the gradients.
        flat: whether the gradients lie side by side.
    """

    def __init__(
        self, make_optimizer: Optimizers, gradients: list[torch.Tensor], flat: bool = False
    ) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in gradients]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        self.optimizer = make_optimizer(self.parameters)
        if flat:
            gradscaler.torch.flat_gradients(self.optimizer)
        self.gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.restore = partial(torch._foreach_copy_, self.gradients, gradients)
        self.restore()


def compare(
    make_optimizer: Optimizers,
    workload: eager.Workload,
    repetitions: int,
    clip: bool = False,
    flat: bool = False,
) -> paired.Comparison:
    """Time both scalers around one optimizer, on the same gradients, or ours on flat ones.

    Clipping is to a norm of inf, so gradients come out unchanged.
    """
    torch.manual_seed(0)
    scaled = [torch.randn(shape).mul_(1e-3 * eager.SCALE) for shape in workload.shapes]
    ordinary = Training(make_optimizer, scaled)
    trainings = {
        "ours": Training(make_optimizer, scaled, flat=True) if flat else ordinary,
        "native": ordinary,
    }
    loss = torch.ones(())

    def iteration(scaler: torch.amp.GradScaler, training: Training) -> None:
        optimizer = training.optimizer
        scaler.scale(loss)
        if clip and isinstance(scaler, gradscaler.torch.GradScaler):
            scaler.clip_grad_norm_(optimizer, math.inf)
        elif clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(training.parameters, math.inf)
        elif isinstance(optimizer, IdleOptimizer):  # a fused optimizer unscales in its own pass
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    scalers = {
        "ours": gradscaler.torch.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER),
        "native": torch.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER),
    }
    seconds = paired.interleave(
        {name: partial(iteration, scalers[name], trainings[name]) for name in scalers},
        prepare={name: training.restore for name, training in trainings.items()},
        repetitions=repetitions,
        calls=workload.calls,
    )
    for name, training in trainings.items():
        training.restore()
        iteration(scalers[name], training)
        unscaled = (gradient * eager.SCALE for gradient in training.gradients)
        if not all(map(torch.equal, unscaled, scaled)):
            raise RuntimeError(f"{workload.name}: the gradients were not unscaled by {name}")
    what = type(ordinary.optimizer).__name__ + ", clipping" * clip + ", flat gradients" * flat
    return paired.Comparison(f"{workload.name}, {what}", **seconds)


def compare_added(
    clip: bool, workload: eager.Workload, repetitions: int, flat: bool = False
) -> paired.Comparison:
    """Measure the time that each scaler adds to a bare step of fused AdamW."""
    torch.manual_seed(0)
    scaled = [torch.randn(shape).mul_(1e-3 * eager.SCALE) for shape in workload.shapes]
    ordinary = Training(fused_adamw, scaled)
    its = Training(fused_adamw, scaled, flat=True) if flat else ordinary
    loss = torch.ones(())
    ours = gradscaler.torch.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    native = torch.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)

    def with_ours() -> None:
        ours.scale(loss)
        if clip:
            ours.clip_grad_norm_(its.optimizer, 1.0)
        ours.step(its.optimizer)
        ours.update()

    def with_native() -> None:
        native.scale(loss)
        if clip:
            native.unscale_(ordinary.optimizer)
            torch.nn.utils.clip_grad_norm_(ordinary.parameters, 1.0)
        native.step(ordinary.optimizer)
        native.update()

    seconds = paired.interleave(
        {"ours": with_ours, "native": with_native, "bare": ordinary.optimizer.step},
        prepare={"ours": its.restore, "native": ordinary.restore, "bare": ordinary.restore},
        repetitions=repetitions,
        calls=workload.calls,
    )
    bare = statistics.median(seconds["bare"])  # less noisy than each repetition's own
    added = {name: [each - bare for each in seconds[name]] for name in ("ours", "native")}
    what = ("scaling and clipping" if clip else "scaling") + ", flat gradients" * flat
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
        partial(compare, IdleOptimizer, flat=True),
        partial(compare, IdleOptimizer, clip=True, flat=True),
        *(partial(compare_added, clip, flat=True) for clip in (False, True)),
    ]
    eager.run(arguments, setting, comparisons)


if __name__ == "__main__":
    main()
