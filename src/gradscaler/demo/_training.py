"""An autoencoder of photographs, trained in fp32, in fp16, and in fp16 with loss scaling.

It is not among the examples, because ``gradscaler demo`` also runs where only a wheel is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import nn

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

MODES = ("fp32", "fp16", "fp16 + gradscaler")
SIDE = 4  # pixels of a patch
WIDTHS = (3 * SIDE**2, 128, 64, 32, 16, 32, 64, 128, 3 * SIDE**2)
BATCH, LEARNING_RATE = 1024, 1e-2
HELD_OUT = slice(24, 64), slice(56, 96)  # rows and columns of the first photograph's patches
GROWTH_INTERVAL = 10  # the default, 2000, is longer than the whole run
# Points of each curve: each takes another forward and backward pass.
MEASUREMENTS = 10
SAMPLES = 40  # of gradients, by the monitor


@dataclass
class Photographs:
    """Two photographs in patches of 4x4 pixels, a row each, in float32 from 0 to 1."""

    patches: torch.Tensor  # the training set, shape (N, 48)
    held_out: torch.Tensor  # a square of the first photograph, row by row, shape (1600, 48)

    @classmethod
    def load(cls, device: str) -> Photographs:
        """Read the photographs, which are part of scikit-learn."""
        first, second = map(_patches, load_sample_images().images)
        inside = np.zeros(first.shape[:2], dtype=bool)
        inside[HELD_OUT] = True
        train = np.concatenate([first[~inside], second.reshape(-1, WIDTHS[0])])
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return cls(*(torch.tensor(pixels / 255, **options) for pixels in (train, first[inside])))


def _patches(image: np.ndarray) -> np.ndarray:
    """An image as rows and columns of patches, each flat."""
    rows, columns = image.shape[0] // SIDE, image.shape[1] // SIDE
    whole = image[: rows * SIDE, : columns * SIDE].reshape(rows, SIDE, columns, SIDE, 3)
    return np.asarray(whole.swapaxes(1, 2).reshape(rows, columns, -1))


def picture(patches: np.ndarray) -> np.ndarray:
    """The image, shape (height, width, 3), of a square of patches."""
    rows = int(len(patches) ** 0.5)
    grid = patches.reshape(rows, rows, SIDE, SIDE, 3).swapaxes(1, 2)
    return np.asarray(grid.reshape(rows * SIDE, rows * SIDE, 3))


@dataclass
class Run:
    """The record of one training run."""

    mode: str
    seed: int  # of the weights and the batches
    threads: int
    losses: list[float] = field(default_factory=list)  # of each step
    scales: list[float] = field(default_factory=list)  # of each step; empty without loss scaling
    skipped: int = 0  # steps that overflowed
    # The share of weight gradients that fp16 flushed to zero, at each measurement.
    flushed: list[float] = field(default_factory=list)
    # log2 of the magnitudes of the true weight gradients, at all measurements.
    exponents: np.ndarray = field(default_factory=lambda: np.empty(0))
    # The held-out patches after encoding and decoding, in the run's own precision.
    restored: np.ndarray = field(default_factory=lambda: np.empty(0))
    # 1 - error / error of the mean training patch, both errors squared and summed over the
    # held-out patches: 1 is a perfect copy, 0 is no better than that mean.
    explained: float = 0.0
    seconds: float = 0.0  # without the measurements

    @property
    def flushed_share(self) -> float:
        """The mean of ``flushed`` over the measurements."""
        return float(np.mean(self.flushed))


def make_network(seed: int) -> nn.Sequential:
    """A sigmoid autoencoder of eight layers with PyTorch's own initialisation."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers)


def train(
    mode: str,
    photographs: Photographs,
    seed: int,
    steps: int,
    advance: Callable[..., None],
    record: Path | None = None,
) -> Run:
    """Train an autoencoder.

    Args:
        mode: one of ``MODES``.
        photographs: the training set and the held-out patches.
        seed: of the weights and the batches.
        steps: how many steps to train.
        advance: called with ``loss=`` after each step.
        record: the file that a monitor writes; None for no monitor.
    """
    device = photographs.patches.device
    network = make_network(seed).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    scaler = GradScaler(growth_interval=GROWTH_INTERVAL, enabled=mode == MODES[2])
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (0.1 * steps), (steps - step) / (0.3 * steps))
    )
    batches = torch.Generator().manual_seed(seed)
    run = Run(mode, seed, torch.get_num_threads())

    def restore(patches: torch.Tensor, half: bool) -> torch.Tensor:
        with torch.autocast(device.type, torch.float16, enabled=half):
            restored: torch.Tensor = network(patches)
        return restored.float()

    def loss_on(batch: torch.Tensor, half: bool) -> torch.Tensor:
        return nn.functional.mse_loss(restore(batch, half), batch)

    every = max(1, steps // SAMPLES)
    with Monitor(scaler, network, every, record) if record else nullcontext():
        for step in range(steps):
            chosen = torch.randint(len(photographs.patches), (BATCH,), generator=batches)
            batch = photographs.patches[chosen.to(device)]
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
            advance(loss=run.losses[-1])
    true = photographs.held_out
    with torch.no_grad():
        restored = restore(true, mode != MODES[0])
    run.restored = restored.cpu().numpy()
    mean = photographs.patches.mean(dim=0)
    run.explained = 1 - ((restored - true).square().sum() / (mean - true).square().sum()).item()
    return run


def _measure(
    run: Run,
    network: nn.Sequential,
    loss_on: Callable[[torch.Tensor, bool], torch.Tensor],
    batch: torch.Tensor,
    scaler: GradScaler,
) -> None:
    """Compare the run's gradients with fp32's at the same weights. This changes neither."""
    true = computed = _weight_gradients(network, loss_on(batch, False))
    if run.mode != MODES[0]:
        computed = _weight_gradients(network, loss_on(batch, True) * scaler.get_scale())
    run.flushed.append(flushed_share(true, computed))
    exponents = torch.log2(true[true != 0].abs().double()).cpu().numpy()
    run.exponents = np.concatenate([run.exponents, exponents])


def _weight_gradients(network: nn.Sequential, loss: torch.Tensor) -> torch.Tensor:
    weights = [parameter for parameter in network.parameters() if parameter.ndim == 2]
    gradients = torch.autograd.grad(loss, weights)
    return torch.cat([gradient.flatten() for gradient in gradients])


def flushed_share(true: torch.Tensor, computed: torch.Tensor) -> float:
    """The share of the nonzero gradients that was computed as 0."""
    nonzero = true != 0
    if not nonzero.any():
        return 0.0
    return (computed[nonzero] == 0).float().mean().item()
