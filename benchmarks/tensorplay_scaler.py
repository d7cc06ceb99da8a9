"""The time of loss scaling on the CPU: gradscaler.tensorplay.GradScaler against TensorPlay's own.

    python benchmarks/tensorplay_scaler.py

The optimizer is SGD, or one whose step does nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import eager
import paired
import tensorplay

import gradscaler.tensorplay

tp: Any = tensorplay  # typed in part


class IdleOptimizer(tensorplay.optim.Optimizer):
    """An optimizer whose step costs nothing."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__(parameters, {})  # type: ignore[no-untyped-call] # untyped base

    def step(self, closure: Any = None) -> None:
        """Leave the parameters alone."""


def sgd(parameters: Sequence[Any]) -> Any:
    """The optimizer to time a whole step with."""
    return tp.optim.SGD(parameters, lr=1e-4)


def compare(
    make_optimizer: Callable[[Sequence[Any]], Any],
    workload: eager.Workload,
    repetitions: int,
    clip: bool = False,
) -> paired.Comparison:
    """Time both scalers around one optimizer, on one set of gradients.

    Clipping is to a norm of inf, so gradients come out unchanged.
    """
    tp.manual_seed(0)
    parameters = [tp.nn.Parameter(tp.zeros(shape)) for shape in workload.shapes]
    gradients = [tp.randn(shape) * 1e-3 for shape in workload.shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = make_optimizer(parameters)
    loss = tp.ones([])

    def iteration(scaler: Any) -> None:
        scaler.scale(loss)
        if clip and isinstance(scaler, gradscaler.tensorplay.GradScaler):
            scaler.clip_grad_norm_(optimizer, math.inf)
        elif clip:
            scaler.unscale_(optimizer)
            tp.nn.utils.clip_grad_norm_(parameters, math.inf)
        scaler.step(optimizer)
        scaler.update()

    def scale_gradients() -> None:
        for parameter in parameters:
            parameter.grad.mul_(eager.SCALE)

    ours = gradscaler.tensorplay.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    native = tp.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    sums = [gradient.sum().item() for gradient in gradients]
    seconds = paired.interleave(
        {"ours": partial(iteration, ours), "native": partial(iteration, native)},
        prepare=scale_gradients,
        repetitions=repetitions,
        calls=workload.calls,
    )
    if sums != [parameter.grad.sum().item() for parameter in parameters]:
        raise RuntimeError(f"{workload.name}: the gradients were not unscaled to what they were")
    what = type(optimizer).__name__ + ", clipping" * clip
    return paired.Comparison(f"{workload.name}, {what}", **seconds)


def main() -> None:
    """Time every workload with both optimizers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    eager.run(
        paired.parse(parser),
        {"tensorplay": tensorplay.__version__},
        [
            *(partial(compare, make) for make in (IdleOptimizer, sgd)),
            partial(compare, IdleOptimizer, clip=True),
        ],
    )


if __name__ == "__main__":
    main()
