"""The time of loss scaling on the CPU: gradscaler.paddle.GradScaler against Paddle's own.

    python benchmarks/paddle_scaler.py

Paddle's scaler disables itself on the CPU. This script makes it believe that it is on a GPU and
under float16 autocast, which changes nothing else. The optimizer is SGD, or one whose step does
nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import eager
import paddle
import paired

import gradscaler.paddle


class IdleOptimizer(paddle.optimizer.Optimizer):  # type: ignore[misc] # it is Any to mypy
    """An optimizer whose step costs nothing."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__(learning_rate=0.0, parameters=parameters)

    def step(self) -> None:
        """Leave the parameters alone."""


def sgd(parameters: Sequence[Any]) -> Any:
    """The optimizer to time a whole step with."""
    return paddle.optimizer.SGD(learning_rate=1e-4, parameters=parameters)


def compare(
    make_optimizer: Callable[[Sequence[Any]], Any],
    workload: eager.Workload,
    repetitions: int,
    clip: bool = False,
) -> paired.Comparison:
    """Time both scalers around one optimizer, on one set of gradients.

    Clipping is to a norm of inf, so gradients come out unchanged.
    """
    paddle.seed(0)
    zeros = paddle.nn.initializer.Constant(0.0)
    parameters = [
        paddle.create_parameter(shape, "float32", default_initializer=zeros)
        for shape in workload.shapes
    ]
    for parameter in parameters:
        parameter.grad = paddle.randn(parameter.shape) * 1e-3
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    optimizer = make_optimizer(parameters)
    loss = paddle.ones([1])

    def iteration(scaler: Any) -> None:
        scaler.scale(loss)
        if clip and isinstance(scaler, gradscaler.paddle.GradScaler):
            scaler.clip_grad_norm_(optimizer, math.inf)
        elif clip:
            scaler.unscale_(optimizer)
            paddle.nn.utils.clip_grad_norm_(parameters, math.inf)
        scaler.step(optimizer)
        scaler.update()

    def scale_gradients() -> None:
        for gradient in gradients:
            gradient.scale_(eager.SCALE)

    def sums() -> list[Any]:
        return [gradient.sum().item() for gradient in gradients]

    options: dict[str, Any] = {"init_loss_scaling": eager.SCALE, "incr_every_n_steps": eager.NEVER}
    ours = gradscaler.paddle.GradScaler(**options)
    native = paddle.amp.GradScaler(**options)
    before = sums()
    seconds = paired.interleave(
        {"ours": partial(iteration, ours), "native": partial(iteration, native)},
        prepare=scale_gradients,
        repetitions=repetitions,
        calls=workload.calls,
    )
    if not native.is_enable():
        raise RuntimeError("Paddle's own scaler has switched itself off")
    if before != sums():
        raise RuntimeError(f"{workload.name}: the gradients were not unscaled to what they were")
    what = type(optimizer).__name__ + ", clipping" * clip
    return paired.Comparison(f"{workload.name}, {what}", **seconds)


def switch_native_on() -> None:
    """Make Paddle's own scaler believe that it is on a GPU and under float16 autocast."""
    module: Any = sys.modules["paddle.amp.grad_scaler"]
    on_gpu = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    module._dygraph_tracer = lambda: on_gpu
    module.amp_global_state = lambda: SimpleNamespace(amp_dtype="float16")


def main() -> None:
    """Time every workload with both optimizers."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    switch_native_on()
    eager.run(
        arguments,
        {"paddle": paddle.version.full_version},
        [
            *(partial(compare, make) for make in (IdleOptimizer, sgd)),
            partial(compare, IdleOptimizer, clip=True),
        ],
    )


if __name__ == "__main__":
    main()
