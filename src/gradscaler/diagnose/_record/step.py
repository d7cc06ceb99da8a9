"""A step of a training, and the end of the run before it."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradscaler.outcome import NonfiniteGradient


class Step(NamedTuple):
    """One step of the training.

    Attributes:
        step: its number, from 1.
        scale: the loss scale that it used.
        skipped: whether its gradients held an Inf or a NaN.
        loss: the unscaled loss, if it was read.
        nonfinite: the gradients that held an Inf or a NaN, if the step was skipped and inspected;
            else None.
    """

    step: int
    scale: float
    skipped: bool
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss was read, and is NaN or Inf."""
        return self.loss is not None and not math.isfinite(self.loss)


class Before(NamedTuple):
    """The previous run in the same file: its last scale, and its usual first and last loss."""

    scale: float
    first_loss: float
    last_loss: float
