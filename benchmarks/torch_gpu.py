"""Loss scaling on a CUDA device: no waits for it, steps in a CUDA graph, launches and time.

    python benchmarks/torch_gpu.py

Without a CUDA device, the script says so and measures nothing. It raises an error if an iteration
waits for the device, or if a graph of an iteration gives other results than the iteration itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import eager
import paired
import torch
from torch.profiler import ProfilerActivity, profile
from torch_scaler import fused_adamw

import gradscaler.torch

SHOWN = [
    ("what is shown", "how"),
    ("no step waits for the device", "any wait raises an error, with clipping and without"),
    ("a step in a CUDA graph", "replays give the scales and parameters of plain steps, to the bit"),
    ("kernel launches of a step", "counted by the profiler, ours beside PyTorch's"),
    ("time of a step", "paired with PyTorch's scaler, for each workload, with an interval"),
]

DEVICE = "cuda"
SHAPES: list[eager.Shape] = [(256, 256), (64, 64), (64,)]  # small and large are checked differently
CLIPPING = {False: "scaling", True: "scaling and clipping"}


class Training:
    """A scaler, fused AdamW, and parameters with scaled gradients in proportion to ``factor``."""

    def __init__(self, scaler: torch.amp.GradScaler, shapes: list[eager.Shape], clip: bool) -> None:
        torch.manual_seed(0)
        self.scaler = scaler
        self.parameters = [torch.nn.Parameter(torch.zeros(s, device=DEVICE)) for s in shapes]
        self.directions = [torch.randn(s, device=DEVICE) for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, capturable=True)
        self.factor = torch.ones((), device=DEVICE)
        self.clip = clip

    def step(self) -> None:
        """Make gradients, and do one iteration of loss scaling."""
        for parameter, direction in zip(self.parameters, self.directions, strict=True):
            parameter.grad = self.scaler.scale(self.factor) * direction
        scale_and_step(self.scaler, self.optimizer, self.clip)


def scale_and_step(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, clip: bool
) -> None:
    """Clip if asked, step and update, as a training loop does after its backward pass."""
    if clip and isinstance(scaler, gradscaler.torch.GradScaler):
        scaler.clip_grad_norm_(optimizer, 1.0)
    elif clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    scaler.step(optimizer)
    scaler.update()


def check_that_nothing_waits(clip: bool) -> None:
    """Run iterations in which any wait for the device is an error."""
    training = Training(gradscaler.torch.GradScaler(DEVICE), SHAPES, clip)
    training.step()  # places the scale and makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_a_graph(clip: bool) -> None:
    """Check that replayed iterations give the scales and parameters of plain ones, to the bit.

    They go through finite steps, growth, an overflow, and growth again.
    """
    plain, captured = (
        Training(
            gradscaler.torch.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2),
            SHAPES,
            clip,
        )
        for _ in range(2)
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step()
    torch.cuda.current_stream().wait_stream(side)
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for factor in (1.0, 2.0, float("inf"), 1.0, float("nan"), 0.5, 1.0, 1.0):
        plain.factor.fill_(factor)
        captured.factor.fill_(factor)
        plain.step()
        graph.replay()
        scales = plain.scaler.state_dict()["scale"], captured.scaler.state_dict()["scale"]
        same = all(map(torch.equal, plain.parameters, captured.parameters))
        if scales[0] != scales[1] or not same:
            raise RuntimeError(f"after a factor of {factor} a replayed step differs: {scales}")


def compare(clip: bool, workload: eager.Workload, repetitions: int) -> paired.Comparison:
    """Time whole iterations with both scalers, on one set of gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(s, device=DEVICE)) for s in workload.shapes]
    scaled = [torch.randn(s, device=DEVICE).mul_(1e-3 * eager.SCALE) for s in workload.shapes]
    gradients = [gradient.clone() for gradient in scaled]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = fused_adamw(parameters)
    loss = torch.ones((), device=DEVICE)

    def prepare() -> None:
        torch._foreach_copy_(gradients, scaled)
        torch.cuda.synchronize()

    def iteration(scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss)
        scale_and_step(scaler, optimizer, clip)
        torch.cuda.synchronize()

    options: dict[str, Any] = {"init_scale": eager.SCALE, "growth_interval": eager.NEVER}
    rivals = {
        "ours": partial(iteration, gradscaler.torch.GradScaler(DEVICE, **options)),
        "native": partial(iteration, torch.amp.GradScaler(DEVICE, **options)),
    }
    launched = {name: launches(prepare, rival) for name, rival in rivals.items()}
    seconds = paired.interleave(rivals, prepare, repetitions, workload.calls)
    counted = f"{launched['ours']} launches to {launched['native']}"
    return paired.Comparison(f"{workload.name}, {CLIPPING[clip]}, {counted}", **seconds)


def launches(prepare: Callable[[], object], iteration: Callable[[], object]) -> int:
    """Count the kernels that one iteration launches."""
    for _ in range(2):
        prepare()
        iteration()
    prepare()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        iteration()
    return sum(event.count for event in profiled.key_averages() if "LaunchKernel" in event.key)


def main() -> None:
    """Check, then time every workload."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing runs. On one, this shows:\n")
        print(paired.aligned(SHOWN))
        return
    for clip, what in CLIPPING.items():
        check_that_nothing_waits(clip)
        check_a_graph(clip)
        print(f"{what}: no step waits for the device, and a graph of it gives the same results")
    setting = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    eager.run(arguments, setting, [partial(compare, clip) for clip in CLIPPING])


if __name__ == "__main__":
    main()
