"""``python -m gradscaler doctor``: which frameworks are installed, and whether they work.

Each framework takes two steps in a process of its own, so that one that crashes, hangs or prints
does not affect the others.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import gradscaler
from gradscaler._frameworks import FRAMEWORKS, install_command, installed, requirements_of

PROBE = "from gradscaler import _doctor; _doctor.probe({!r})"
SECONDS = 120  # for an import and two steps, on a slow disk
TOOLS = {  # for each, its extras, and the packages that they install
    "report": (("diagnose",), ("matplotlib", "rich")),
    "demo": (("torch", "demo"), ("torch", "matplotlib", "rich", "sklearn")),
}
TRIED = {  # as in docs/devices.md
    "cpu": "every test runs on one",
    "cuda": "not tried yet: please report what `make bench-gpu` prints",
    "mps": "not tried yet",
    "xpu": "not tried yet",
    "npu": "not tried yet: where it saturates, it needs GradScaler(overflow=...)",
    "xla": "not tried yet: in JAX, use gradscaler.jax",
}
Found = tuple[list[str], list[float]]  # devices; the scale and the weight after each of two steps


class Finding(NamedTuple):
    """The result of trying a framework or a tool.

    Attributes:
        name: the framework's package, or the command.
        version: the package's version; empty if it is not installed.
        works: whether it works; None if it is not installed.
        says: the devices, or the failure.
        advice: one line: an import to write, or how to repair it.
    """

    name: str
    version: str
    works: bool | None
    says: str
    advice: str


def examine() -> Iterator[Finding]:
    """Try every installed framework, then the tools that need more packages than NumPy."""
    for name in FRAMEWORKS:
        yield _framework(name)
    for name, (extras, packages) in TOOLS.items():
        missing = [package for package in packages if not installed(package)]
        advice = f"python -m gradscaler {name} --help"
        if missing:
            advice = f"{install_command(*extras)}  # for {', '.join(missing)}"
        yield Finding(name, "", None if missing else True, "", advice)


def heading() -> str:
    """The versions of gradscaler, Python and NumPy, and the platform."""
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    return f"gradscaler {gradscaler.__version__}, {versions}, {platform.platform()}"


def line(finding: Finding) -> str:
    """A finding in three columns: name and version, result, and advice."""
    state = {None: "not installed", True: "works", False: "FAILS"}[finding.works]
    what = f"{finding.name} {finding.version}".rstrip()
    return f"{what:<27} {f'{state} {finding.says}'.rstrip():<34} {finding.advice}"


def _framework(name: str) -> Finding:
    extra = name.replace("_", "-")
    install = install_command(extra)
    show = f'try: python -c "import gradscaler.{name}"'
    if not installed(name):
        return Finding(name, "", None, "", install)
    command = [sys.executable, "-c", PROBE.format(name)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(name, "", False, f"(no answer in {SECONDS} seconds)", show)
    try:
        version, devices, trace = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, TypeError, ValueError):  # the process ended before it printed them
        error = (process.stderr.split("\n\n")[-1].strip().splitlines() or ["no message"])[-1]
        says = error if process.returncode >= 0 else f"killed by signal {-process.returncode}"
        return Finding(name, "", False, f"({says})", show)
    if trace != [0.5, 1.0, 0.5, 0.0]:
        advice = "this is a defect: please report it, with this output"
        return Finding(name, version, False, f"(scale and weight are {trace})", advice)
    lowest = _lowest(extra)
    if _numbers(version) < _numbers(lowest):
        return Finding(name, version, False, f"(older than {lowest})", install)
    says, advice = f"on {', '.join(devices)}", f"import gradscaler.{name}"
    if name == "torch":
        advice += f"  # {devices[0]}: {TRIED.get(devices[0], 'not tried yet')}"
    return Finding(name, version, True, says, advice)


def _lowest(extra: str) -> str:
    """The lowest version that an extra requires: the first bound among its requirements."""
    return next(iter(re.findall(r">=([\d.]+)", " ".join(requirements_of(extra)))), "")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def probe(name: str) -> None:
    """Skip one step and take one with a framework, and print the results as JSON.

    The loss is the weight times Inf in the first step, and the weight times 1 in the second. The
    weight, the learning rate and the loss scale start at 1. So scale and weight are 0.5 and 1 after
    the skipped step, and 0.5 and 0 after the other.
    """
    ours = import_module(f"gradscaler.{name}")
    library = import_module(name)
    devices, trace = _PROBES[name](library, ours)
    print(json.dumps([library.__version__, devices, trace]))


def on_torch(library: ModuleType, ours: ModuleType) -> Found:
    """PyTorch on its accelerator, or on the CPU. TensorPlay has the same names."""
    device = _accelerator_of(library) or "cpu"
    names = [library.cuda.get_device_name(i) for i in range(library.cuda.device_count())]
    weight = library.ones(1, device=device, requires_grad=True)
    optimizer = library.optim.SGD([weight], lr=1.0)
    scaler = ours.GradScaler(init_scale=1.0)
    trace = []
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        trace += [scaler.get_scale(), float(weight.detach().sum())]
    return [device, *names], trace


def _accelerator_of(library: ModuleType) -> str | None:
    """The type of the accelerator, or None. TensorPlay only knows CUDA."""
    accelerator = getattr(library, "accelerator", None)
    if accelerator is None:
        return "cuda" if library.cuda.is_available() else None
    found = accelerator.current_accelerator() if accelerator.is_available() else None
    return None if found is None else str(found.type)


on_tensorplay = on_torch


def on_paddle(library: ModuleType, ours: ModuleType) -> Found:
    """Paddle on its default device."""
    weight = library.ones([1])
    weight.stop_gradient = False
    optimizer = library.optimizer.SGD(1.0, [weight])
    scaler = ours.GradScaler(init_loss_scaling=1.0, decr_every_n_nan_or_inf=1)
    trace = []
    for factor in (float("inf"), 1.0):
        optimizer.clear_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        trace += [scaler.get_scale(), float(weight)]
    return [library.device.get_device()], trace


def on_jax(library: ModuleType, ours: ModuleType) -> Found:
    """JAX, compiled, on its default device."""
    scaler, weight, trace = ours.GradScaler(gradscaler.DynamicScale(init_scale=1.0)), 1.0, []
    step = library.jit(lambda scaler, weight, factor: _step_of_jax(ours, scaler, weight, factor))
    for factor in (float("inf"), 1.0):
        scaler, weight = step(scaler, weight, factor)
        trace += [float(scaler.loss_scale), float(weight)]
    return [str(device) for device in library.devices()], trace


def _step_of_jax(ours: ModuleType, scaler: Any, weight: Any, factor: Any) -> Any:
    scaler, finite, _, gradient = scaler.value_and_grad(lambda weight: weight * factor)(weight)
    return scaler, ours.select_tree(finite, weight - gradient, weight)


def on_keras(library: ModuleType, ours: ModuleType) -> Found:
    """Keras 3 on the backend in use, on its default device."""
    inner = library.optimizers.SGD(1.0)
    optimizer = ours.LossScaleOptimizer(inner, policy=gradscaler.DynamicScale(init_scale=1.0))
    weight, trace = library.Variable(1.0), []
    optimizer.build([weight])
    for factor in (float("inf"), 1.0):
        gradient = library.ops.convert_to_tensor(factor) * optimizer.loss_scale
        optimizer.apply([gradient], [weight])
        trace += [float(optimizer.loss_scale), float(weight)]
    backend = library.backend.backend()
    return [backend, *library.distribution.list_devices()], trace


def on_tf_keras(library: ModuleType, ours: ModuleType) -> Found:
    """Keras 2 on TensorFlow's default device."""
    import tensorflow as tf

    policy = gradscaler.DynamicScale(init_scale=1.0)
    optimizer = ours.LossScaleOptimizer(library.optimizers.SGD(1.0), policy=policy)
    weight, trace = tf.Variable(1.0), []
    for factor in (float("inf"), 1.0):
        optimizer.minimize(lambda factor=factor: weight * factor, [weight])
        trace += [float(optimizer.loss_scale), float(weight)]
    return [device.name for device in tf.config.list_physical_devices()], trace


def on_mindspore(library: ModuleType, ours: ModuleType) -> Found:
    """MindSpore on its default device."""
    policy = gradscaler.DynamicScale(init_scale=1.0)
    scaler = ours.DynamicLossScaler(policy=policy)
    weight, trace = library.Tensor(1.0, library.float32), []
    for factor in (float("inf"), 1.0):
        loss = library.value_and_grad(lambda weight, factor=factor: scaler.scale(weight * factor))
        gradient = scaler.unscale((loss(weight)[1],))
        finite = ours.all_finite(gradient)
        weight = weight - gradient[0] if finite else weight
        scaler.adjust(finite)
        trace += [float(scaler.scale_value), float(weight)]
    return [library.get_context("device_target")], trace


_PROBES: dict[str, Callable[[ModuleType, ModuleType], Found]] = {
    "torch": on_torch,
    "tensorplay": on_tensorplay,
    "paddle": on_paddle,
    "keras": on_keras,
    "tf_keras": on_tf_keras,
    "mindspore": on_mindspore,
    "jax": on_jax,
}
