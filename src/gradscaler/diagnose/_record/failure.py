"""A step whose numbers were not finite, whatever became of it."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradscaler.diagnose._record.thresholds import LARGE_LOSS
from gradscaler.outcome import NonfiniteGradient


class Failure(NamedTuple):
    """A step whose loss or gradients held an Inf or a NaN: a skip, or a step that was applied.

    Attributes:
        step: its number.
        scale: the loss scale that it used; 1 if there is no scaler.
        loss: the unscaled loss; None if it was not seen.
        nonfinite: the gradients that held an Inf or a NaN; None if the step was not inspected.
    """

    step: int
    scale: float
    loss: float | None
    nonfinite: tuple[NonfiniteGradient, ...] | None

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss was seen, and is NaN or Inf."""
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def has_large_loss(self) -> bool:
        """Whether the loss is so large that its gradients overflow anyway."""
        return abs(self.loss or 0.0) > LARGE_LOSS

    @property
    def nan(self) -> str | None:
        """The name of the first gradient that held a NaN."""
        return next((each.name for each in self.nonfinite or () if each.num_nan), None)

    @property
    def has_inf(self) -> bool:
        """Whether a gradient held an Inf, as an overflow leaves most often."""
        return any(each.num_inf for each in self.nonfinite or ())

    @property
    def has_nan_alone(self) -> bool:
        """Whether gradients held NaN and no Inf, behind a loss that is not too large."""
        is_usual = not (self.has_bad_loss or self.has_large_loss)
        return is_usual and self.nan is not None and not self.has_inf
