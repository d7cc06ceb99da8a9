"""The time of both scalers over the number of parameters and the number of tensors.

    python benchmarks/torch_large.py           to 16 million parameters and 2,000 tensors
    python benchmarks/torch_large.py --large   to 1.5 billion parameters and 20,000 tensors

The gradients are simulated: float32 tensors of one value, without a model, and with an optimizer
whose step does nothing. They take nearly all the memory, 6 GB for 1.5 billion parameters. The calls
are ``scale``, ``unscale_``, ``step`` and ``update``, with and without clipping by the norm. Between
measurements, gradients are multiplied by the scale again.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import eager
import paired
import torch
from torch_scaler import IdleOptimizer

import gradscaler.torch

VALUE = 2.0**-10
MILLION = 10**6
SMALL = ((1, 4, 16), (10, 2000))
LARGE = ((1, 10, 100, 500, 1500), (10, 100, 1000, 20_000))
CONSTANT = (100, 16)  # tensors where parameters vary, and millions where tensors do


def workload(millions: int, tensors: int) -> eager.Workload:
    """Return gradients of so many parameters in so many tensors of one size."""
    name = f"{millions:,} million parameters, {tensors:,} tensors"
    size = millions * MILLION // tensors
    return eager.Workload(name, [(size,)] * tensors, calls=max(1, 20 // millions))


def compare(clip: bool, workload: eager.Workload, repetitions: int) -> paired.Comparison:
    """Time both scalers by turns on the same gradients."""
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in workload.shapes]
    gradients = [torch.full(shape, VALUE) for shape in workload.shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = IdleOptimizer(parameters)
    ours = gradscaler.torch.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    native = torch.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    loss = torch.ones(())

    def with_ours() -> None:
        ours.scale(loss)
        if clip:
            ours.clip_grad_norm_(optimizer, math.inf)
        else:
            ours.unscale_(optimizer)
        ours.step(optimizer)
        ours.update()

    def with_native() -> None:
        native.scale(loss)
        native.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, math.inf)
        native.step(optimizer)
        native.update()

    seconds = paired.interleave(
        {"ours": with_ours, "native": with_native},
        prepare=partial(torch._foreach_mul_, gradients, eager.SCALE),
        repetitions=repetitions,
        calls=workload.calls,
    )
    if not all(bool((gradient == VALUE).all()) for gradient in gradients):
        raise RuntimeError(f"{workload.name}: the gradients were not unscaled")
    return paired.Comparison(workload.name + ", clipping" * clip, **seconds)


def main() -> None:
    """Time every workload, with clipping and without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--large",
        action="store_true",
        help="to 1.5 billion parameters, in 6 GB, and 20,000 tensors",
    )
    arguments = paired.parse(parser)
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    millions, tensors = LARGE if arguments.large else SMALL
    workloads = [
        *(workload(each, CONSTANT[0]) for each in millions),
        *(workload(CONSTANT[1], each) for each in tensors),
    ]
    eager.run(arguments, setting, [partial(compare, clip) for clip in (False, True)], workloads)


if __name__ == "__main__":
    main()
