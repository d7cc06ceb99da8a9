"""The time that a monitor adds to training with PyTorch: steps with and without one.

    python benchmarks/torch_monitor.py

A measurement is 100 steps. The monitor samples one of them and writes it to a file. "ours" is with
the monitor, and "native" is the same scaler without it; a ratio of 1.02 is 2 % more time. In the
workloads in which each tenth batch holds NaN, both skip ten of the steps.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import paired
import torch

from gradscaler.diagnose import FindingWarning, Monitor
from gradscaler.torch import GradScaler

EVERY = 100


def perceptron() -> tuple[torch.nn.Module, torch.Tensor]:
    """A small model whose step takes about a millisecond, and its input."""
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(256, 128)


def transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model with many parameters, most of them small, and its input."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return encoder, torch.randn(4, 16, 128)


MODELS = {"perceptron": perceptron, "transformer": transformer}


def compare(
    name: str,
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]],
    each_tenth_is_nan: bool,
    repetitions: int,
    folder: Path,
) -> paired.Comparison:
    """Time training with and without a monitor."""
    what = f"{EVERY} steps of a {name}, fused AdamW"
    if each_tenth_is_nan:
        what += ", NaN in each tenth batch"

    def training(monitored: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model, good = make()
        bad = good * math.nan if each_tenth_is_nan else good
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        scaler = GradScaler()
        if monitored:
            Monitor(scaler, model, EVERY, folder / f"{what}.jsonl")

        def steps() -> None:
            for step in range(EVERY):
                inputs = bad if step % 10 == 5 else good
                optimizer.zero_grad()
                scaler.scale(model(inputs).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()

        return steps

    seconds = paired.interleave(
        {"ours": training(True), "native": training(False)},
        prepare=lambda: None,
        repetitions=repetitions,
    )
    return paired.Comparison(what, **seconds)


def main() -> None:
    """Time every model, with good batches alone and with bad ones."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    warnings.simplefilter("ignore", FindingWarning)  # the bad batches are meant
    with tempfile.TemporaryDirectory() as folder:
        time = partial(compare, repetitions=arguments.repetitions, folder=Path(folder))
        comparisons = [
            time(name, make, each_tenth_is_nan)
            for name, make in MODELS.items()
            for each_tenth_is_nan in (False, True)
        ]
    paired.report(arguments, setting, comparisons)


if __name__ == "__main__":
    main()
