"""A step of a training, and the end of the run before it."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradscaler.diagnose._record.thresholds import FELL_WITH_SCALE
from gradscaler.outcome import NonfiniteGradient


class Step(NamedTuple):
    """One step of the training.

    Attributes:
        step: its number, from 1.
        scale: the loss scale that it used; 1 if there is no scaler.
        skipped: whether its gradients held an Inf or a NaN, so that the scaler skipped it, or a
            script without one.
        loss: the unscaled loss, if it was read.
        nonfinite: the gradients that held an Inf or a NaN, if the step was skipped and inspected,
            or was applied all the same; else None.
        batch: the epoch and the batch in it, both from 1; None if they are unknown.
    """

    step: int
    scale: float
    skipped: bool
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None
    batch: tuple[int, int] | None = None

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss was read, and is NaN or Inf."""
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def is_hopeless(self) -> bool:
        """Whether its gradients fail in a way that a lower loss scale does not fix.

        They hold NaN but no Inf, which an overflow would make; or they are not finite at a scale of
        at most 1. If no step was applied yet, the scale may still be far too large.
        """
        found = self.nonfinite or ()
        if self.scale <= 1:
            return self.skipped or bool(found)
        return bool(found) and not any(each.num_inf for each in found)

    def falls_to(self, after: Step) -> bool:
        """Whether a finite loss fell from this step to another, as one that follows the scale."""
        if not self.loss or not after.loss or self.has_bad_loss or after.has_bad_loss:
            return False
        return self.loss > FELL_WITH_SCALE * after.loss > 0


class Before(NamedTuple):
    """The previous run in the same file: its last scale, and its usual first and last loss."""

    scale: float
    first_loss: float
    last_loss: float
