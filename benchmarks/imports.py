"""The time to import an adapter and to construct a scaler, against the framework's own.

    python benchmarks/imports.py torch

Each measurement is a new process. It imports the framework with the module of its own scaler
("native") and then the adapter ("ours" is both together). For scalers, "native" is the framework's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import paired

SCALERS = {  # the adapter's, and the framework's own
    "torch": ("GradScaler", "torch.amp.GradScaler"),
    "tensorplay": ("GradScaler", "tensorplay.amp.GradScaler"),
    "paddle": ("GradScaler", "paddle.amp.GradScaler"),
    "mindspore": ("DynamicLossScaleManager", "mindspore.amp.DynamicLossScaleManager"),
    "jax": ("DynamicScale", "flax.training.dynamic_scale.DynamicScale"),
    "keras": ("LossScaleOptimizer", "keras.optimizers.LossScaleOptimizer"),
    "tf_keras": ("LossScaleOptimizer", "tf_keras.mixed_precision.LossScaleOptimizer"),
}
TIMED = (
    "from time import perf_counter as now; start = now(); {}; between = now(); {}; "
    "print(between - start, now() - start)"
)


def compare_imports(framework: str, repetitions: int) -> paired.Comparison:
    """Time the imports of the framework and then the adapter, each time in a new process."""
    own = SCALERS[framework][1].rpartition(".")[0]  # for JAX, flax's module
    statements = TIMED.format(f"import {framework}, {own}", f"import gradscaler.{framework}")
    command = [sys.executable, "-W", "ignore", "-c", statements]
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, list[float]] = {"native": [], "ours": []}
    for _ in range(1 + repetitions):
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=compiled)
        native, ours = map(float, run.stdout.split()[-2:])
        seconds["native"].append(native)
        seconds["ours"].append(ours)
    counted = {name: measured[1:] for name, measured in seconds.items()}  # the first one compiles
    return paired.Comparison(f"{framework}: import", **counted)


def compare_construction(framework: str, repetitions: int) -> paired.Comparison:
    """Time the constructor of a scaler with its defaults."""
    name, native = SCALERS[framework]
    module, _, native_name = native.rpartition(".")
    scalers = {
        "ours": getattr(import_module(f"gradscaler.{framework}"), name),
        "native": getattr(import_module(module), native_name),
    }
    arguments: Callable[[], tuple[Any, ...]] = tuple
    if framework in ("torch", "tensorplay"):
        arguments = lambda: ("cpu",)  # noqa: E731 # without it, theirs look for CUDA
    if framework == "paddle":  # its own scaler disables itself on the CPU
        import_module("paddle_scaler").switch_native_on()
    if name == "LossScaleOptimizer":
        optimizers = import_module(f"{framework}.optimizers")
        arguments = lambda: (optimizers.SGD(),)  # noqa: E731 # each wraps its own
    rivals = {
        who: partial(lambda scaler: scaler(*arguments()), scaler) for who, scaler in scalers.items()
    }
    seconds = paired.interleave(rivals, lambda: None, repetitions, calls=100)
    return paired.Comparison(f"{framework}: construct a scaler", **seconds)


def main() -> None:
    """Time both for the named framework."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("framework", choices=SCALERS)
    arguments = paired.parse(parser)
    results = [
        compare(arguments.framework, arguments.repetitions)
        for compare in (compare_imports, compare_construction)
    ]
    paired.report(arguments, {}, results)


if __name__ == "__main__":
    main()
