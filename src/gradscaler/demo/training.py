"""One network, trained in fp32, in fp16, and in fp16 with loss scaling."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

MODES = ("fp32", "fp16", "fp16 + gradscaler")
LAYERS, WIDTH, BATCH, LEARNING_RATE = 6, 64, 512, 1e-2
GROWTH_INTERVAL = 100  # the default, 2000, is longer than the whole run
MEASUREMENTS = 10
SAMPLES = 40  # by the monitor


@dataclass
class Digits:
    """1,797 images of 8x8, standardised; three quarters to train on."""

    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor

    @classmethod
    def load(cls, device: str) -> Digits:
        """Read them from scikit-learn, where they are part of the package."""
        images, labels = load_digits(return_X_y=True)
        train, test, targets, test_targets = train_test_split(
            images, labels, test_size=0.25, random_state=0, stratify=labels
        )
        mean, deviation = train.mean(axis=0), np.maximum(train.std(axis=0), 1e-6)

        def tensor(pixels: np.ndarray) -> torch.Tensor:
            standard = (pixels - mean) / deviation
            return torch.tensor(standard, dtype=torch.float32, device=device)

        return cls(
            tensor(train),
            torch.tensor(targets, device=device),
            tensor(test),
            torch.tensor(test_targets, device=device),
        )


@dataclass
class Run:
    """What one training run was like.

    Attributes:
        mode: one of ``MODES``.
        losses: of each step.
        scales: of each step; empty without loss scaling.
        skipped: steps that overflowed.
        flushed: at each measurement, the share of weight gradients that fp16 flushed to zero.
        exponents: at all measurements, log2 of the magnitudes of the true weight gradients.
        accuracy: on the test images, in the run's own precision.
        seconds: of training, measurements excluded.
    """

    mode: str
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    flushed: list[float] = field(default_factory=list)
    exponents: np.ndarray = field(default_factory=lambda: np.empty(0))
    accuracy: float = 0.0
    seconds: float = 0.0

    @property
    def flushed_share(self) -> float:
        """The mean over the measurements."""
        return float(np.mean(self.flushed))


def make_network(seed: int) -> nn.Sequential:
    """A deep sigmoid network with PyTorch's own initialisation."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def train(
    mode: str,
    digits: Digits,
    seed: int,
    steps: int,
    advance: Callable[[float], None],
    record: Path | None = None,
) -> Run:
    """Train a network for a number of steps.

    Args:
        mode: one of ``MODES``.
        digits: to train and to test on.
        seed: of weights and batches.
        steps: how many.
        advance: called with the loss of each.
        record: where a monitor writes what it sees, if there is to be one.
    """
    device = digits.inputs.device
    network = make_network(seed).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    scaler = GradScaler(growth_interval=GROWTH_INTERVAL, enabled=mode == MODES[2])
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (0.2 * steps), (steps - step) / (0.3 * steps))
    )
    batches = torch.Generator().manual_seed(seed)
    run = Run(mode)

    def loss_on(batch: torch.Tensor, half: bool) -> torch.Tensor:
        with torch.autocast(device.type, torch.float16, enabled=half):
            outputs = network(digits.inputs[batch])
        return nn.functional.cross_entropy(outputs.float(), digits.targets[batch])

    every = max(1, steps // SAMPLES)
    with Monitor(scaler, network, every, record) if record else nullcontext():
        for step in range(steps):
            batch = torch.randint(len(digits.inputs), (BATCH,), generator=batches).to(device)
            if step % max(1, steps // MEASUREMENTS) == 0:
                _measure(run, network, loss_on, batch, scaler)
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_on(batch, mode != MODES[0])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            outcome = scaler.last_step(optimizer)
            run.losses.append(loss.item())
            run.seconds += time.perf_counter() - start
            run.skipped += outcome.skipped
            if scaler.is_enabled():
                run.scales.append(outcome.scale)
            if outcome.applied:
                scheduler.step()
            advance(run.losses[-1])
    with torch.no_grad(), torch.autocast(device.type, torch.float16, enabled=mode != MODES[0]):
        predicted = network(digits.test_inputs).argmax(dim=1)
    run.accuracy = (predicted == digits.test_targets).float().mean().item()
    return run


def _measure(
    run: Run,
    network: nn.Sequential,
    loss_on: Callable[[torch.Tensor, bool], torch.Tensor],
    batch: torch.Tensor,
    scaler: GradScaler,
) -> None:
    """Compare the run's gradients with fp32's at the same weights, changing neither."""
    true = _weight_gradients(network, loss_on(batch, False))
    if run.mode == MODES[0]:
        computed = true
    else:
        computed = _weight_gradients(network, loss_on(batch, True) * scaler.get_scale())
    run.flushed.append(flushed_share(true, computed))
    exponents = torch.log2(true[true != 0].abs().double()).cpu().numpy()
    run.exponents = np.concatenate([run.exponents, exponents])


def _weight_gradients(network: nn.Sequential, loss: torch.Tensor) -> torch.Tensor:
    weights = [parameter for parameter in network.parameters() if parameter.ndim == 2]
    gradients = torch.autograd.grad(loss, weights)
    return torch.cat([gradient.flatten() for gradient in gradients])


def flushed_share(true: torch.Tensor, computed: torch.Tensor) -> float:
    """Of the gradients that are not 0, the share that was computed as 0."""
    nonzero = true != 0
    if not nonzero.any():
        return 0.0
    return (computed[nonzero] == 0).float().mean().item()
