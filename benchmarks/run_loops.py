"""The time that ``gradscaler run`` adds to each step of a script, in frameworks but PyTorch.

    python benchmarks/run_loops.py jax

A measurement is a process, which trains a network of some milliseconds a step in each of a
framework's loops, one after the other, and times their steps. "ours" is with ``python -m gradscaler
run``, and "native" is the same script by itself; a ratio of 1.02 is 2 % more time. The two take
turns. The start of the process, which takes most of the time, and two blocks of each loop, in which
the step is compiled and the watch looks at more, are not timed. Only ``fit`` with a
``LossScaleOptimizer`` scales its loss, as the batch of each step is kept then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import paired

BLOCKS, STEPS = 3, 50  # the time of a step is that of the median block
MOST_PROCESSES = 6  # of each rival: most of the time is their start
WIDTH, LAYERS, BATCH = 512, 6, 64  # a step of about 5 ms on two cores
INPUTS = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)

Step = Callable[[], object]


def in_jax(*, with_gradients: bool = False) -> Step:
    """A jitted step, or one that applies the gradients of a jitted function."""
    jax, numpy, optax = (importlib.import_module(name) for name in ("jax", "jax.numpy", "optax"))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = [
        {"w": jax.random.normal(k, (WIDTH, WIDTH)) / 23, "b": numpy.zeros(WIDTH)} for k in keys
    ]
    optimizer = optax.adamw(1e-4)
    state = [layers, optimizer.init(layers)]

    def loss_of(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = numpy.tanh(x @ layer["w"] + layer["b"])
        return (x**2).mean()

    take = jax.value_and_grad(loss_of)

    def update(layers: Any, moments: Any, gradients: Any) -> Any:
        updates, moments = optimizer.update(gradients, moments, layers)
        return optax.apply_updates(layers, updates), moments

    def together(layers: Any, moments: Any, x: Any) -> Any:
        loss, gradients = take(layers, x)
        return *update(layers, moments, gradients), loss

    whole, taken, updated = jax.jit(together), jax.jit(take), jax.jit(update)
    x = numpy.asarray(INPUTS)

    def step() -> None:
        if with_gradients:
            loss, gradients = taken(state[0], x)
            state[:] = updated(*state, gradients)
        else:
            *state[:], loss = whole(*state, x)
        loss.block_until_ready()

    return step


def in_tensorflow(*, is_eager: bool = False) -> Step:
    """A loop of one's own by a tape and an optimizer of Keras 3."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    tensorflow, keras = importlib.import_module("tensorflow"), importlib.import_module("keras")
    model = _keras_model(keras)
    optimizer = keras.optimizers.AdamW(1e-4)
    x = tensorflow.constant(INPUTS)

    def step() -> Any:
        with tensorflow.GradientTape() as tape:
            loss = tensorflow.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    run = step if is_eager else tensorflow.function(step)
    return lambda: run().numpy()


def in_fit(package: str, *, is_scaled: bool = False) -> Step:
    """A whole epoch of ``fit``, which counts as its batches."""
    keras: Any = importlib.import_module(package)
    model = _keras_model(keras)
    optimizer = keras.optimizers.AdamW(1e-4)
    if is_scaled:
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    x = np.tile(INPUTS, (STEPS, 1))
    return lambda: model.fit(x, x, BATCH, verbose=0, shuffle=False)


def _keras_model(keras: Any) -> Any:
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def in_eager(package: str) -> Step:
    """A loop of Paddle, or of TensorPlay."""
    library: Any = importlib.import_module(package)
    nn, is_paddle = library.nn, package == "paddle"
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    if is_paddle:
        optimizer = library.optimizer.AdamW(1e-4, parameters=model.parameters())
        x, clear = library.to_tensor(INPUTS), optimizer.clear_grad
    else:
        optimizer = library.optim.AdamW(model.parameters(), lr=1e-4)
        x, clear = library.tensor(INPUTS.tolist()), optimizer.zero_grad

    def step() -> None:
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        clear()
        float(loss.item())

    return step


def in_mindspore(*, is_graph: bool = False) -> Step:
    """A step in PyNative mode, or one that ``mindspore.jit`` compiles with its optimizer."""
    mindspore: Any = importlib.import_module("mindspore")
    nn = mindspore.nn
    layers = [part for _ in range(LAYERS) for part in (nn.Dense(WIDTH, WIDTH), nn.Tanh())]
    model = nn.SequentialCell(*layers)
    optimizer = nn.AdamWeightDecay(model.trainable_params(), 1e-4)
    x = mindspore.Tensor(INPUTS)

    def loss_of(x: Any) -> Any:  # a lambda is no function that MindSpore can compile
        return (model(x) ** 2).mean()

    take = mindspore.value_and_grad(loss_of, None, model.trainable_params())

    def step(x: Any) -> Any:
        loss, gradients = take(x)
        optimizer(gradients)
        return loss

    run = mindspore.jit(step) if is_graph else step
    return lambda: float(run(x).asnumpy())


LOOPS: dict[str, dict[str, Callable[[], Step]]] = {
    "jax": {"a jitted step": in_jax, "jitted gradients": partial(in_jax, with_gradients=True)},
    "keras": {
        "fit": partial(in_fit, "keras"),
        "fit with a LossScaleOptimizer": partial(in_fit, "keras", is_scaled=True),
        "a loop in tf.function": in_tensorflow,
        "an eager loop of TensorFlow": partial(in_tensorflow, is_eager=True),
    },
    "tf_keras": {
        "fit": partial(in_fit, "tf_keras"),
        "fit with a LossScaleOptimizer": partial(in_fit, "tf_keras", is_scaled=True),
    },
    "paddle": {"a loop": partial(in_eager, "paddle")},
    "tensorplay": {"a loop": partial(in_eager, "tensorplay")},
    "mindspore": {"a loop": in_mindspore, "a jitted step": partial(in_mindspore, is_graph=True)},
}


def time_of(framework: str, loop: str) -> float:
    """The seconds of a step of a loop."""
    step = LOOPS[framework][loop]()
    calls = 1 if loop.startswith("fit") else STEPS  # of which each has so many

    def block() -> float:
        start = perf_counter()
        for _ in range(calls):
            step()
        return (perf_counter() - start) / STEPS

    for _ in range(2):
        block()
    return statistics.median(block() for _ in range(BLOCKS))


def seconds(framework: str, *runner: str) -> list[float]:
    """The seconds of a step of each loop, in a new process."""
    command = [sys.executable, *runner, __file__, framework, "--train"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(framework: str, repetitions: int) -> list[paired.Comparison]:
    """Time the loops of a framework by themselves and under ``gradscaler run``."""
    with tempfile.TemporaryDirectory() as folder:
        run = "-m", "gradscaler", "run", "-o", folder
        both = [(seconds(framework, *run), seconds(framework)) for _ in range(repetitions)]
    watched, alone = (list(zip(*each, strict=True)) for each in zip(*both, strict=True))
    return [
        paired.Comparison(f"a step of {loop}, under gradscaler run", *times)
        for loop, *times in zip(LOOPS[framework], watched, alone, strict=True)
    ]


def main() -> None:
    """Time every loop of a framework."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("framework", choices=LOOPS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = paired.parse(parser)
    framework = arguments.framework
    if arguments.train:
        print(json.dumps([time_of(framework, loop) for loop in LOOPS[framework]]))
        return
    arguments.repetitions = min(arguments.repetitions, MOST_PROCESSES)
    comparisons = compare(framework, arguments.repetitions)
    package: Any = importlib.import_module(framework)
    paired.report(arguments, {framework: package.__version__}, comparisons)


if __name__ == "__main__":
    main()
