"""Short trainings in fp16, and what gradscaler says is wrong with each.

    python examples/torch_stuck.py
    python examples/torch_stuck.py nan --runs runs
    python -m gradscaler report runs/nan.jsonl -o nan.html

All but one make a common mistake: their loss scale falls forever, or is too small, or they learn
nothing without any sign of it. docs/stuck.md explains each.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradscaler import DynamicScale, FixedScale
from gradscaler.diagnose import FindingWarning, Monitor, StuckError, Verdict
from gradscaler.torch import GradScaler

STEPS = 100
MANY_STEPS = 800  # so many that there is time to watch some of them
BATCH = 64
FEATURES = 32


class Training(NamedTuple):
    """The parts that differ between the trainings. ``loss`` takes the step and a batch."""

    model: nn.Module
    loss: Callable[[int, Tensor], Tensor]
    scaler: GradScaler
    lr: float = 1e-3
    optimizer: torch.optim.Optimizer | None = None  # SGD if it is left out
    steps: int = STEPS


def normal() -> Training:
    """The first scale is too large, and falls until it fits."""
    model = network()
    return Training(
        model,
        lambda step, inputs: nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)),
        GradScaler(init_scale=2.0**20),
        lr=1e-2,
    )


def loss() -> Training:
    """The logarithm of a probability that fp16 rounds to 0 or 1; a loss of logits avoids this."""
    model = network(squash=nn.Sigmoid())

    def cross_entropy(step: int, inputs: Tensor) -> Tensor:
        labels = (inputs.sum(1, keepdim=True) > 0).float()
        guess: Tensor = model(100 * inputs)
        return -(labels * guess.log() + (1 - labels) * (1 - guess).log()).mean()

    return Training(model, cross_entropy, GradScaler())


def parameter() -> Training:
    """Weights that are normalised by hand: a row of zeros is divided by its norm."""
    model = network()
    weight = model.get_parameter("hidden.weight")

    def squares(step: int, inputs: Tensor) -> Tensor:
        if step == STEPS // 2:
            with torch.no_grad():
                weight[3] = 0.0  # pruned
                weight.div_(weight.norm(dim=1, keepdim=True))
        outputs: Tensor = model(inputs)
        return outputs.float().square().mean()

    return Training(model, squares, GradScaler())


def activations() -> Training:
    """Weights that suit bfloat16: with them, the outputs go beyond 65504."""
    model = network()
    with torch.no_grad():
        for name in ("hidden.weight", "output.weight"):
            model.get_parameter(name).mul_(3000.0)
    return Training(model, lambda step, inputs: model(inputs).float().square().mean(), GradScaler())


def nan() -> Training:
    """The distance of a point to itself is 0, and the gradient of the root is 0 times Inf."""
    model = network()

    def distances(step: int, inputs: Tensor) -> Tensor:
        points: Tensor = model(inputs).float()
        return (points - points[:1]).square().sum(1).sqrt().mean()

    return Training(model, distances, GradScaler())


def floor() -> Training:
    """The sum, not the mean, of squares of large numbers, and a scale that is at least 1."""
    model = network()
    policy = DynamicScale(init_scale=2.0**8, min_scale=1.0)
    return Training(
        model,
        lambda step, inputs: (model(inputs).float() - 5000.0).square().sum(),
        GradScaler(policy=policy),
    )


def divergence() -> Training:
    """A learning rate at which the weights grow in each step."""
    model = network()
    return Training(
        model,
        lambda step, inputs: nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)),
        GradScaler(),
        lr=1.0,
    )


def data() -> Training:
    """Every twelfth batch holds a NaN."""
    model = network()

    def squares(step: int, inputs: Tensor) -> Tensor:
        if step % 12 == 11:
            inputs[5, 7] = torch.nan
        return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))

    return Training(model, squares, GradScaler(), steps=MANY_STEPS)


def silent() -> Training:
    """The divergence from a distribution with zeros: 0 * log(0) has no gradient."""
    model = network()

    def kl_divergence(step: int, inputs: Tensor) -> Tensor:
        target = torch.cat([inputs[:, :1] > 0, inputs[:, :1] <= 0], 1).float()
        guess = nn.functional.logsigmoid(torch.cat([model(inputs), -model(inputs)], 1).float())
        return (target * (target.log() - guess)).sum(1).mean()

    return Training(model, kl_divergence, GradScaler(), steps=MANY_STEPS)


def dead() -> Training:
    """A bias so negative that no ReLU is ever on."""
    model = network()
    with torch.no_grad():
        model.get_parameter("hidden.bias").fill_(-100.0)

    def squares(step: int, inputs: Tensor) -> Tensor:
        outputs: Tensor = model(inputs)
        return outputs.float().square().mean()

    return Training(model, squares, GradScaler(), steps=MANY_STEPS)


def underflow() -> Training:
    """A deep network of sigmoids, whose gradients are too small for a scale that stays 1."""
    model, scaler = sigmoids(6), GradScaler(policy=FixedScale(1.0))
    return Training(model, lambda step, inputs: model(inputs).float().square().mean(), scaler)


def out_of_range() -> Training:
    """Sixteen layers of sigmoids: at any scale, the first are flushed or the last overflows."""
    model = sigmoids(16)
    return Training(
        model, lambda step, inputs: (model(inputs).float() - 3.0).square().mean(), GradScaler()
    )


def state() -> Training:
    """One step is taken without the scaler, on a gradient that overflowed."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    weight = model.get_parameter("output.weight")

    def squares(step: int, inputs: Tensor) -> Tensor:
        if step == STEPS // 2:
            weight.grad = torch.full_like(weight, 1e30)  # whose square is Inf
            optimizer.step()
        return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))

    return Training(model, squares, GradScaler(init_scale=2.0**20), optimizer=optimizer)


def stalled() -> Training:
    """Float16 parameters, and a learning rate at which each update is rounded away."""
    model = network().half()

    def squares(step: int, inputs: Tensor) -> Tensor:
        outputs: Tensor = model(inputs.half())
        return nn.functional.mse_loss(outputs.float(), inputs.sum(1, keepdim=True))

    return Training(model, squares, GradScaler(allow_fp16_gradients=True), lr=1e-6)


def eps() -> Training:
    """A mean of a mean, so that the gradients are below the eps of Adam."""
    model = network()

    def squares(step: int, inputs: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)) / 1e9

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(model, squares, GradScaler(init_scale=2.0**28), optimizer=optimizer)


def misuse() -> Training:
    """The forward pass leaves autocast, so that nothing is computed in float16."""
    model = network()

    def squares(step: int, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))

    return Training(model, squares, GradScaler())


TRAININGS = {
    "normal": normal,
    "parameter": parameter,
    "activations": activations,
    "loss": loss,
    "nan": nan,
    "floor": floor,
    "divergence": divergence,
    "data": data,
    "silent": silent,
    "dead": dead,
    "underflow": underflow,
    "range": out_of_range,
    "state": state,
    "stalled": stalled,
    "eps": eps,
    "misuse": misuse,
}


def main(argv: list[str] | None = None) -> None:
    """Run the named trainings, or all, and print each verdict."""
    parser = argparse.ArgumentParser(description="What gradscaler says about failing trainings.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TRAININGS))
    parser.add_argument("--runs", type=Path, help="keep the run files in this folder")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(TRAININGS):
        parser.error(f"there is no training {min(unknown)!r}: choose from {', '.join(TRAININGS)}")
    if arguments.runs:
        try:
            arguments.runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--runs: cannot make the folder {arguments.runs}: {error.strerror}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names or TRAININGS:
            path = (arguments.runs or Path(temporary)) / f"{name}.jsonl"
            steps, verdict = train(TRAININGS[name], path)
            print(f"{name}, after {steps} steps: {verdict.kind}")
            print(fill(verdict.text, 80, initial_indent="    ", subsequent_indent="    "), "\n")


def train(make: Callable[[], Training], path: Path) -> tuple[int, Verdict]:
    """Train to the end or until stuck; return the number of steps and the verdict."""
    torch.manual_seed(0)
    model, loss_of, scaler, lr, optimizer, steps = make()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    warnings.simplefilter("ignore", FindingWarning)  # the verdict says the same
    with Monitor(scaler, model, every=10, path=path, on_stuck="raise") as monitor:
        try:
            for step in range(steps):
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(step, torch.randn(BATCH, FEATURES))
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        except StuckError:
            pass
        return monitor.history[-1].step, monitor.verdict


def network(**last: nn.Module) -> nn.Sequential:
    """Two layers."""
    hidden, output = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
    return nn.Sequential(OrderedDict(hidden=hidden, relu=nn.ReLU(), output=output, **last))


def sigmoids(depth: int) -> nn.Sequential:
    """Layers whose gradients shrink from each to the one before it."""
    layers = [
        layer for _ in range(depth) for layer in (nn.Linear(FEATURES, FEATURES), nn.Sigmoid())
    ]
    return nn.Sequential(*layers, nn.Linear(FEATURES, 1))


if __name__ == "__main__":
    main()
