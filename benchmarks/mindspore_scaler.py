"""The time of loss scaling on the CPU: gradscaler.mindspore against mindspore.amp.

    python benchmarks/mindspore_scaler.py

Both sides take turns to do one functional training step: scale the loss, take the gradients,
unscale and check them, step the optimizer unless one overflowed, and adjust the scale. Python calls
the step in PyNative mode, or mindspore.jit compiles it as a whole. A second measurement times only
the scaler's own calls, on gradients that are ready.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore
import numpy as np
import paired
from mindspore import Tensor, amp, nn

import gradscaler.mindspore

SCALE = 2.0**10
Rivals = dict[str, Callable[[Any], Any]]

NEVER = 2**30  # the growth interval: the scale stays at what the gradients are scaled by


@dataclass(frozen=True)
class Workload:
    """A network of equal layers, and how many steps make one measurement."""

    name: str
    width: int
    layers: int
    batch: int
    calls: int


WORKLOADS = [
    Workload("6 layers of 64", width=64, layers=6, batch=32, calls=5),
    Workload("2 layers of 1024", width=1024, layers=2, batch=32, calls=1),
]


class Network(nn.Cell):  # type: ignore[misc] # untyped base
    """Layers of sigmoids; the loss is the mean square of their output."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        layers = []
        for _ in range(workload.layers):
            weight = generator.standard_normal((workload.width, workload.width)) / 8
            layers += [
                nn.Dense(
                    workload.width, workload.width, Tensor(weight, mindspore.float32), "zeros"
                ),
                nn.Sigmoid(),
            ]
        self.layers = nn.SequentialCell(*layers)

    def construct(self, inputs: Any) -> Any:
        """The mean square of the last layer's output."""
        return self.layers(inputs).square().mean()


@mindspore.jit_class
class Training:
    """One side: a scaler with its own network and optimizer."""

    def __init__(self, workload: Workload, scaler: Any, all_finite: Callable[..., Any]) -> None:
        network = Network(workload)
        self.network = network
        self.scaler = scaler
        self.all_finite = all_finite
        self.optimizer = nn.Adam(network.trainable_params(), learning_rate=1e-4)
        self.value_and_grad = mindspore.value_and_grad(
            self.scaled_loss, None, self.optimizer.parameters
        )

    def scaled_loss(self, inputs: Any) -> Any:
        """The loss times the scale."""
        return self.scaler.scale(self.network(inputs))

    def step(self, inputs: Any) -> Any:
        """Do a whole step, and return the loss."""
        loss, grads = self.value_and_grad(inputs)
        grads = self.scaler.unscale(grads)
        finite = self.all_finite(grads)
        if finite:
            self.optimizer(grads)
        self.scaler.adjust(finite)
        return self.scaler.unscale(loss)

    def calls(self, grads: Any) -> Any:
        """Do the scaler's part of a step, and return whether the gradients are finite."""
        finite = self.all_finite(self.scaler.unscale(grads))
        self.scaler.adjust(finite)
        return finite


def step_of(training: Training) -> Callable[[Any], Any]:
    """The whole step, compiled."""

    @mindspore.jit  # type: ignore[untyped-decorator]
    def step(inputs: Any) -> Any:
        return training.step(inputs)

    return step  # type: ignore[no-any-return] # mindspore's decorators are not typed


def calls_of(training: Training) -> Callable[[Any], Any]:
    """The scaler's own part, compiled."""

    @mindspore.jit  # type: ignore[untyped-decorator]
    def calls(grads: Any) -> Any:
        return training.calls(mindspore.mutable(grads))

    return calls  # type: ignore[no-any-return] # mindspore's decorators are not typed


def compare(workload: Workload, compiled: bool, repetitions: int) -> list[paired.Comparison]:
    """Time both sides' whole step, and both scalers' own calls.

    Raises:
        RuntimeError: the two end with different parameters.
    """
    ours = Training(
        workload,
        gradscaler.mindspore.DynamicLossScaler(SCALE, 2, NEVER),
        gradscaler.mindspore.all_finite,
    )
    native = Training(workload, amp.DynamicLossScaler(SCALE, 2, NEVER), amp.all_finite)
    generator = np.random.default_rng(1)
    inputs = Tensor(generator.standard_normal((workload.batch, workload.width)), mindspore.float32)
    grads = tuple(
        Tensor(generator.standard_normal(parameter.shape), mindspore.float32)
        for parameter in ours.optimizer.parameters
    )
    steps: Rivals = {"ours": ours.step, "native": native.step}
    calls: Rivals = {"ours": ours.calls, "native": native.calls}
    if compiled:
        steps = {"ours": step_of(ours), "native": step_of(native)}
        calls = {"ours": calls_of(ours), "native": calls_of(native)}

    comparisons = []
    way = "compiled" if compiled else "PyNative"
    for part, functions, argument in [("step", steps, inputs), ("calls", calls, grads)]:
        rivals = {
            name: partial(finished, functions[name], argument, side.scaler.scale_value)
            for name, side in (("ours", ours), ("native", native))
        }
        seconds = paired.interleave(
            rivals, prepare=lambda: None, repetitions=repetitions, calls=workload.calls
        )
        comparisons.append(paired.Comparison(f"{workload.name}, {way}, {part}", **seconds))
    pairs = zip(ours.optimizer.parameters, native.optimizer.parameters, strict=True)
    if not all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in pairs):
        raise RuntimeError(f"{workload.name}, {way}: the two end with different parameters")
    return comparisons


def finished(function: Callable[[Any], Any], argument: Any, scale: Any) -> None:
    """Call, and wait for all that the call has started; the scale comes last."""
    function(argument).asnumpy()
    scale.asnumpy()


def main() -> None:
    """Run every workload in both modes; print a table, and write JSON if asked."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    setting = {
        "mindspore": mindspore.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", "MindSpore's choice"),
    }
    comparisons = [
        comparison
        for compiled in (False, True)
        for workload in WORKLOADS
        for comparison in compare(workload, compiled, arguments.repetitions)
    ]
    paired.report(arguments, setting, comparisons)


if __name__ == "__main__":
    main()
