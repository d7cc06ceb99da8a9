"""The time that ``gradscaler run`` adds to each step of a script without a scaler.

    python benchmarks/torch_run.py

A measurement is a process, which trains without loss scaling and times its steps. "ours" is with
``python -m gradscaler run``, and "native" is the same script by itself; a ratio of 1.02 is 2 % more
time. The two take turns. The start of the process and the monitor's first steps, in which it looks
at more, are not timed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter

import paired
import torch

BLOCKS = 6  # the time of a step is that of the median block
MOST_PROCESSES = 6  # of each model and rival: most of five minutes is their start


def perceptron() -> tuple[torch.nn.Module, torch.Tensor]:
    """A small model whose step takes one or two milliseconds, and its input."""
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(256, 128)


def transformer(width: int, batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model with many parameters, most of them small, and its input."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return encoder, torch.randn(batch, 32, width)


# Each with the steps of a block, which takes about a quarter of a second.
MODELS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, torch.Tensor]], int]] = {
    "perceptron": (perceptron, 150),
    "transformer, 64 tokens": (lambda: transformer(128, 2), 50),
    "transformer, 512 tokens": (lambda: transformer(128, 16), 15),
}


def train(name: str) -> None:
    """Train, and print the seconds of a step."""
    torch.manual_seed(0)
    make, steps = MODELS[name]
    model, inputs = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def block() -> float:
        start = perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return (perf_counter() - start) / steps

    for _ in range(2):
        block()
    print(statistics.median(block() for _ in range(BLOCKS)))


def seconds(name: str, *runner: str) -> float:
    """The seconds of a step of a process."""
    command = [sys.executable, *runner, __file__, "--train", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return float(done.stdout)


def compare(name: str, repetitions: int, folder: str) -> paired.Comparison:
    """Time a training by itself and under ``gradscaler run``."""
    run = "-m", "gradscaler", "run", "-o", folder
    both = [(seconds(name, *run), seconds(name)) for _ in range(repetitions)]
    ours, native = zip(*both, strict=True)
    return paired.Comparison(f"a step of a {name}, under gradscaler run", ours, native)


def main() -> None:
    """Time every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    arguments = paired.parse(parser)
    if arguments.train:
        train(arguments.train)
        return
    arguments.repetitions = min(arguments.repetitions, MOST_PROCESSES)
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        comparisons = [compare(name, arguments.repetitions, folder) for name in MODELS]
    paired.report(arguments, setting, comparisons)


if __name__ == "__main__":
    main()
