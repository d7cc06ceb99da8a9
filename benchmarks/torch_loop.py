"""A whole training loop of one small layer, where Python takes most of the time.

    python benchmarks/torch_loop.py --repetitions 200

An iteration is the forward and backward pass of a 16x16 linear layer, ``scale``, ``step`` and
``update``, with ``unscale_`` or without. The optimizers are AdamW and SGD, fused and not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import eager
import paired
import torch

import gradscaler.torch

SMALL = eager.Workload("one 16x16 linear", [(16, 16), (16,)], calls=40)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": torch.optim.SGD,
    "fused SGD": partial(torch.optim.SGD, fused=True),
}


def iteration(name: str, unscales: bool, scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """Return one iteration of a loop with a model and an optimizer of its own."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(16, 16), torch.randn(8, 16)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-4)

    def iterate() -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return iterate


def compare(
    name: str, unscales: bool, workload: eager.Workload, repetitions: int
) -> paired.Comparison:
    """Time the loops with both scalers by turns."""
    seconds = paired.interleave(
        {
            "ours": iteration(name, unscales, gradscaler.torch.GradScaler("cpu")),
            "native": iteration(name, unscales, torch.amp.GradScaler("cpu")),
        },
        prepare=lambda: None,
        repetitions=repetitions,
        calls=workload.calls,
    )
    what = name + ", unscale_" * unscales
    return paired.Comparison(f"{workload.name}, {what}: whole loop", **seconds)


def main() -> None:
    """Time the loop with each optimizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments = paired.parse(parser)
    torch.set_num_threads(1)
    setting = {"torch": torch.__version__, "threads": 1}
    comparisons = [
        partial(compare, name, unscales) for name in OPTIMIZERS for unscales in (False, True)
    ]
    eager.run(arguments, setting, comparisons, [SMALL])


if __name__ == "__main__":
    main()
