"""Train with parameters of 16 bits, and see what rounding them after each step costs.

    python examples/torch_half_weights.py

A network learns handwritten digits, each time from the same weights: with float32 parameters under
autocast, and with float16 ones in five ways. Then the network that was trained in float32 is
fine-tuned in each way at a low rate, where most updates are smaller than the distance of two
float16 numbers. The table has the mean over some seeds.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscaler.torch import GradScaler, MasterWeights

TRAINING, TUNING = 1e-3, 1e-5  # learning rates
BATCH = 64


class RoundedToNearest(torch.optim.Optimizer):
    """AdamW on float32 copies that are forgotten after each step: what not to do."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.narrow = self.param_groups[0]["params"]
        self.wide = [nn.Parameter(parameter.detach().float()) for parameter in self.narrow]
        self.inner = torch.optim.AdamW(self.wide, lr=lr)
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no closure is called
        """Widen, step and round."""
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            wide.copy_(narrow)
            wide.grad = narrow.grad.float()
        self.inner.step()
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            narrow.copy_(wide)


def master_weights(store: str) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    """AdamW on the model's parameters, which it casts to float16."""

    def make(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return MasterWeights(torch.optim.AdamW, model, dtype=torch.float16, store=store, lr=lr)

    return make


WAYS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "float32, autocast": lambda model, lr: torch.optim.AdamW(model.parameters(), lr),
    "float16, PyTorch's AdamW": lambda model, lr: torch.optim.AdamW(model.half().parameters(), lr),
    "float16, rounded to nearest": lambda model, lr: RoundedToNearest(
        model.half().parameters(), lr
    ),
    'MasterWeights, "float32"': master_weights("float32"),
    'MasterWeights, "remainder16"': master_weights("remainder16"),
    'MasterWeights, "stochastic"': master_weights("stochastic"),
}


class Result(NamedTuple):
    """The result of one way: its loss, how far fine-tuning lowered it, and its memory.

    Attributes:
        loss: after training.
        fell: from before fine-tuning to after it.
        size: bytes per parameter of the weights and the optimizer's state.
    """

    loss: float
    fell: float
    size: float


def main(argv: list[str] | None = None) -> None:
    """Train and fine-tune in each way, and print a table."""
    parser = argparse.ArgumentParser(description="Compare ways to train 16-bit parameters.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of a training (%(default)s)")
    arguments = parser.parse_args(argv)
    results = compare(arguments.seeds, arguments.steps)
    print("| parameters | loss | fine-tuning lowers it by | bytes per parameter |")
    print("|---|--:|--:|--:|")
    for way, result in results.items():
        numbers = [f"{result.loss:.4f}", f"{result.fell:.4f}", f"{result.size:.0f}"]
        print(f"| {way} |", " | ".join("-" if text == "nan" else text for text in numbers), "|")


def compare(seeds: int, steps: int) -> dict[str, Result]:
    """The mean of each way over the seeds."""
    runs = [run(seed, steps) for seed in range(seeds)]
    return {
        way: Result(
            *(math.fsum(column) / seeds for column in zip(*(run[way] for run in runs), strict=True))
        )
        for way in WAYS
    }


def run(seed: int, steps: int) -> dict[str, Result]:
    """Each way from the weights of one seed."""
    pixels, digits = load_digits(return_X_y=True)
    data = torch.tensor(pixels / 16).float(), torch.tensor(digits)
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trained = copy.deepcopy(first)
    train(trained, WAYS["float32, autocast"](trained, TRAINING), data, steps)
    results = {}
    for way, make in WAYS.items():
        model, tuned = copy.deepcopy(first), copy.deepcopy(trained)
        optimizer = make(model, TRAINING)
        train(model, optimizer, data, steps)
        tuner = make(tuned, TUNING)
        before = loss_of(tuned, *data).item()
        train(tuned, tuner, data, steps)
        loss, fell = loss_of(model, *data).item(), before - loss_of(tuned, *data).item()
        results[way] = Result(loss, fell, size_of(optimizer))
    return results


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    steps: int,
) -> None:
    """The same batches for each way."""
    images, labels = data
    scaler = GradScaler(allow_fp16_gradients=True)  # for PyTorch's AdamW on float16 alone
    numbers = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=numbers)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, images[batch], labels[batch])).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss in float16 autocast, which leaves float16 parameters as they are."""
    with torch.autocast("cpu", dtype=torch.float16):
        return nn.functional.cross_entropy(model(images).float(), labels)


def size_of(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of parameters and state for each parameter; counters of a few numbers do not count."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for state in optimizer.state.values() for t in state.values()]
    large = [*parameters, *(t for t in states if t.numel() > 2)]
    size: float = sum(t.nbytes for t in large) / sum(p.numel() for p in parameters)
    return size


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are too small for more
    main()
