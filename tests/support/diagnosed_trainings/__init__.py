"""Short trainings in fp16 on the CPU, as users write them, with the verdict that each must get.

Each is a plain function of a :class:`Setting`, which varies its numbers and makes its monitor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

VARIANTS = 2

T = TypeVar("T")


class Setting:
    """Variant 0 or 1 of a training: its numbers, and a monitor that writes a file."""

    def __init__(self, variant: int, path: Path) -> None:
        self._variant = variant
        self.path = path
        torch.manual_seed(variant)

    def pick(self, *options: T) -> T:
        """The option of this variant; they repeat if there are fewer than variants."""
        return options[self._variant % len(options)]

    def monitor(
        self, scaler: GradScaler | None, model: nn.Module | None, every: int = 0
    ) -> Monitor:
        every = every or self.pick(100, 40)
        self.watching = Monitor(scaler, model, every, self.path)
        return self.watching


class DiagnosedTraining(NamedTuple):
    """A training, and the verdict that it must get.

    ``kind`` may hold several, the best first. ``where`` is the culprit's name, or a part of it; it
    is None if the verdict must name nothing. ``advice`` is a regular expression found in the text.
    """

    run: Callable[[Setting], None]
    kind: str
    where: str | None
    advice: str


TRAININGS: dict[str, DiagnosedTraining] = {}


def training(kind: str, where: str | None = None, advice: str = "") -> Callable[..., None]:
    """Enter a function into :data:`TRAININGS`."""

    def enter(run: Callable[[Setting], None]) -> None:
        known = TRAININGS.get(run.__name__)  # pytest imports a file again for its doctests
        assert known is None or known.run.__code__.co_filename == run.__code__.co_filename
        TRAININGS[run.__name__] = DiagnosedTraining(run, kind, where, advice)

    return enter


def fit(
    setting: Setting,
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: int,
    *,
    lr: float = 1e-2,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    dtype: torch.dtype | None = torch.float16,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """The plain loop; ``loss_of`` takes the step and runs under autocast, unless dtype is None."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    scaler = scaler or GradScaler("cpu")
    setting.monitor(scaler, model)
    for step in range(1, steps + 1):
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = loss_of(step)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after(step)


def fit_by_own_scale(
    setting: Setting, *, divisions: int = 1, limit: float = 1.0, passes: int = 1
) -> None:
    """A loop that scales its loss itself, and clips gradients after the first division by it."""
    model, scale = mlp(16, 32, 1), setting.pick(2.0**10, 2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    setting.monitor(None, model)
    for _ in range(120):
        optimizer.zero_grad()
        for _ in range(passes):
            with torch.autocast("cpu", torch.float16):
                loss = regression(model, torch.randn(64, 16)) / passes
            (loss * scale).backward()
        for division in range(divisions):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / scale)
            if division == 0:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""

    def layers() -> Iterator[nn.Module]:
        for i, (before, after) in enumerate(pairwise(widths)):
            if i:
                yield act()
            yield nn.Linear(before, after)

    return nn.Sequential(*layers())


def regression(model: nn.Module, inputs: Tensor) -> Tensor:
    """The mean squared error to the sum of the inputs, in float32."""
    return nn.functional.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True))
