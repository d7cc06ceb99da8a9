"""A script that makes a new scaler for each step."""

from __future__ import annotations

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
    """Counts the scalers that step one optimizer."""

    def __init__(self) -> None:
        # By optimizer, the latest scaler's id, the number of scalers, and that of all steps.
        self._counts = WeakKeyDictionary[Optimizer, tuple[int, int, int]]()

    def note(self, scaler: int, optimizer: Optimizer) -> None:
        """Note a step of an optimizer by the scaler of an id."""
        latest, scalers, steps = self._counts.get(optimizer, (0, 0, 0))
        self._counts[optimizer] = scaler, scalers + (scaler != latest), steps + 1

    @property
    def are_made_each_step(self) -> bool:
        """Whether an optimizer was stepped by several scalers, a step or two by each."""
        return any(
            scalers >= _FEW and steps <= _BRIEF * scalers
            for _, scalers, steps in self._counts.values()
        )
