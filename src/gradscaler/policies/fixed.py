"""A loss scale that never moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscaler.policies import _checks
from gradscaler.policies.state import Scalar, ScaleState, Where


@dataclass(frozen=True)
class FixedScale:
    """The scale never moves; an overflow still skips its step.

    Args:
        scale: the loss scale, between 2**-126 and the largest float32; kept in float32.

    Raises:
        TypeError: ``scale`` is not a number.
        ValueError: ``scale`` is not positive and finite, or its reciprocal would not be.

    >>> policy = FixedScale(128.0)
    >>> policy.update(policy.init(), found_inf=True) == policy.init()
    True
    """

    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _checks.loss_scale("scale", self.scale))

    def init(self) -> ScaleState:
        """The state before the first step, and after every other."""
        return ScaleState(np.float32(self.scale), 0, 0)

    def update(
        self, state: ScaleState, found_inf: Scalar, where: Where | None = None
    ) -> ScaleState:
        """``state``, unchanged."""
        return state
