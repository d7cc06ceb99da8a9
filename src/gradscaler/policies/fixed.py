"""A loss scale that never moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscaler.policies import _checks
from gradscaler.policies.state import Scalar, ScaleState, Where


@dataclass(frozen=True)
class FixedScale:
    """A loss scale that never moves. An overflow still skips its step.

    Args:
        scale: the loss scale, between 2**-126 and the largest float32. It is kept in float32.

    Raises:
        TypeError: ``scale`` is not a number.
        ValueError: ``scale`` is not positive and finite in float32, or is below 2**-126.

    >>> policy = FixedScale(128.0)
    >>> policy.update(policy.init(), found_inf=True) == policy.init()
    True
    """

    fixed: ClassVar[bool] = True

    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _checks.loss_scale("scale", self.scale))

    def init(self) -> ScaleState:
        """The state, which is the same before and after every step."""
        return ScaleState(np.float32(self.scale), 0, 0)

    def update(
        self, state: ScaleState, found_inf: Scalar, where: Where | None = None
    ) -> ScaleState:
        """Return ``state`` unchanged."""
        return state
