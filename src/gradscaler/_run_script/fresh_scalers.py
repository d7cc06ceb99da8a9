"""A script that makes a new scaler for each step."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_FEW = 5  # scalers of one optimizer; a script may make one for each fold or stage
_BRIEF = 2  # steps of one scaler

CAUSE = (
    "The script makes a new GradScaler for each step, so a scale that an overflow has lowered is "
    "never kept: each step begins at init_scale again."
)
ACTION = "Make the scaler once, before the loop."


class FreshScalers:
    """Counts the steps that each scaler makes with one optimizer."""

    def __init__(self) -> None:
        self._steps = WeakKeyDictionary[Optimizer, Counter[int]]()  # by the scaler's id

    def note(self, scaler: int, optimizer: Optimizer) -> None:
        """Note a step of an optimizer by the scaler of an id."""
        self._steps.setdefault(optimizer, Counter())[scaler] += 1

    @property
    def are_made_each_step(self) -> bool:
        """Whether an optimizer was stepped by several scalers, a step or two by each."""
        return any(
            len(steps) >= _FEW and max(steps.values()) <= _BRIEF for steps in self._steps.values()
        )
