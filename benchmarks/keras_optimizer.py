"""The time of a training step with gradscaler.keras.LossScaleOptimizer and with Keras' own.

    python benchmarks/keras_optimizer.py

Both wrap the same optimizer of the same model, and take turns to train on the same batch. The step
is Keras' own ``train_step``, compiled by XLA, as a TensorFlow graph, or as PyTorch runs it. Batches
are small, so the optimizer is a large part of the step. Each backend runs in its own process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paired

BACKENDS = ("tensorflow", "jax", "torch")
BATCH = 16
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A multilayer perceptron to train.

    Attributes:
        name: its name in the table.
        width: units in a layer, and values in an input.
        layers: the number of layers.
        calls: the number of steps in one measurement.
    """

    name: str
    width: int
    layers: int
    calls: int


WORKLOADS = [
    Workload("4 layers of 1024", width=1024, layers=4, calls=2),
    Workload("50 layers of 64", width=64, layers=50, calls=5),
    Workload("one layer of 16", width=16, layers=1, calls=50),
]


def compare(workload: Workload, jit_compile: bool, repetitions: int) -> paired.Comparison:
    """Time a step under both wrappers; raise an error if they end with different weights."""
    import keras

    import gradscaler.keras

    def model(wrapper: Any) -> Any:
        keras.utils.set_random_seed(0)
        width = workload.width
        hidden = [keras.layers.Dense(width, "relu") for _ in range(workload.layers)]
        net = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(wrapper(keras.optimizers.Adam(1e-4)), loss)
        net.optimizer.build(net.trainable_variables)
        return net

    rng = np.random.default_rng(0)
    images = rng.random((BATCH, workload.width)).astype("float32")
    data = (images, rng.integers(CLASSES, size=BATCH))
    models = {
        "ours": model(gradscaler.keras.LossScaleOptimizer),
        "native": model(keras.optimizers.LossScaleOptimizer),
    }
    step_of = {"tensorflow": tensorflow_step, "jax": jax_step, "torch": torch_step}
    make_step = step_of[keras.backend.backend()]
    steps, weights = {}, {}
    for name, net in models.items():
        steps[name], weights[name] = make_step(net, data, jit_compile)
    seconds = paired.interleave(steps, lambda: None, repetitions, workload.calls)
    if not all(map(np.array_equal, weights["ours"](), weights["native"]())):
        raise RuntimeError(f"{workload.name}: the wrappers end with different weights")
    compiled = {"tensorflow": "XLA" if jit_compile else "graph", "jax": "XLA", "torch": "eager"}
    backend = keras.backend.backend()
    return paired.Comparison(f"{backend}, {compiled[backend]}: {workload.name}", **seconds)


def tensorflow_step(
    model: Any, data: tuple[Any, Any], jit_compile: bool
) -> tuple[Callable[[], object], Callable[[], list[Any]]]:
    """Return a step of a model, and a function that returns its weights."""
    import tensorflow as tf

    batch = tuple(map(tf.constant, data))
    step = tf.function(model.train_step, jit_compile=jit_compile)
    return lambda: step(batch), model.get_weights


def jax_step(
    model: Any, data: tuple[Any, Any], jit_compile: bool
) -> tuple[Callable[[], object], Callable[[], list[Any]]]:
    """Return the same, for a state that the step replaces."""
    import jax

    batch = tuple(map(jax.numpy.asarray, data))
    compiled = jax.jit(model.train_step, donate_argnums=0)
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = [[jax.numpy.copy(variable.value) for variable in part] for part in parts]

    def step() -> None:
        nonlocal state
        _, state = compiled(state, batch)
        jax.block_until_ready(state)  # type: ignore[no-untyped-call] # JAX's is not typed

    return step, lambda: state[0]


def torch_step(
    model: Any, data: tuple[Any, Any], jit_compile: bool
) -> tuple[Callable[[], object], Callable[[], list[Any]]]:
    """Return the same, in place and uncompiled: ``torch.compile`` takes minutes for this step."""
    import torch

    batch = tuple(map(torch.tensor, data))
    return lambda: model.train_step(batch), model.get_weights


def main() -> None:
    """Run every workload on every requested backend; print tables, and write JSON."""
    arguments = parse()
    if len(arguments.backends) > 1:
        for backend in arguments.backends:
            command = [
                sys.executable,
                __file__,
                backend,
                "--repetitions",
                str(arguments.repetitions),
            ]
            if arguments.json:
                command += ["--json", str(arguments.json.with_suffix(f".{backend}.json"))]
            subprocess.run(command, check=True)
        return
    (backend,) = arguments.backends
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # or it warns about missing GPUs
    import keras

    comparisons = [
        compare(workload, jit_compile, arguments.repetitions)
        for jit_compile in ((True, False) if backend == "tensorflow" else (True,))
        for workload in WORKLOADS
    ]
    setting = {"keras": keras.__version__, "backend": backend}
    paired.report(arguments, setting, comparisons)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "backends",
        nargs="*",
        metavar="BACKEND",
        help=f"any of {', '.join(BACKENDS)} (all)",
    )
    arguments = paired.parse(parser)
    arguments.backends = arguments.backends or list(BACKENDS)
    if unknown := set(arguments.backends) - set(BACKENDS):
        parser.error(f"there is no backend {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    main()
