"""Whether the learning rate of an optimizer of Keras is 0, in ``fit`` and ``train_on_batch``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from gradscaler.diagnose._graph.call_site import is_of_user, shown_line
from gradscaler.diagnose._monitor.traced_scalers import number_of
from gradscaler.diagnose._record.thresholds import FEW_STILL, MANY

Optimizer = Any


class FitRates:
    """Since which step the learning rate of an optimizer is 0.

    A schedule may end at 0, so a rate counts only if it was 0 before a step, too.

    Attributes:
        latest: the latest rate; None if it is not known.
    """

    def __init__(self) -> None:
        self._first = 0  # the first of the latest steps that were taken at a rate of 0
        self._where = self._setter = ""
        self._was_0 = False
        self.latest: float | None = None

    def begin(self, optimizer: Optimizer) -> None:
        """See the rate before an epoch, or before a call of ``train_on_batch``."""
        self._was_0 = _rate_of(optimizer) == 0

    def end(
        self, optimizer: Optimizer, callbacks: Sequence[Any], first: int, where: str = ""
    ) -> None:
        """See it after that, by the number of its first step, and by the words for it."""
        self.latest = _rate_of(optimizer)
        if not (self._was_0 and self.latest == 0):
            self._first = 0
        elif not self._first:
            self._first, self._where = first, where
            self._setter = _setter_of(optimizer, callbacks)

    def still(self, num_steps: int) -> str:
        """What says that the rate is 0, after so many steps; empty if it is not."""
        count = num_steps - self._first + 1
        if not self._first or count < max(FEW_STILL, MANY * num_steps):
            return ""
        by = self._setter and f": {self._setter} makes it 0"
        return (
            f"The learning rate is 0 from step {self._first:,} on{self._where}, so nothing moves "
            f"in {count:,} of {num_steps:,} steps{by}. Set that to another number; if the rate is "
            "meant to end at 0, let the schedule count as many steps (or epochs) as the run has."
        )


def _rate_of(optimizer: Optimizer) -> float | None:
    """The learning rate; None if code of the user's computes it, or a wrapped optimizer has it."""
    rate = _given_to(optimizer)
    if callable(rate):
        is_known = not is_of_user(rate)
        return number_of(rate(optimizer.iterations)) if is_known else None
    return None if rate is None else number_of(rate)


def _given_to(optimizer: Optimizer) -> Any:
    """The variable of the learning rate, or the schedule that gives it."""
    own = getattr(optimizer, "_learning_rate", None)
    return getattr(optimizer, "learning_rate", None) if own is None else own


def _setter_of(optimizer: Optimizer, callbacks: Sequence[Any]) -> str:
    """What sets the rate: a schedule, or a callback that has one; empty if none is known."""
    rate = _given_to(optimizer)
    if callable(rate):
        return type(rate).__name__
    for each in callbacks:
        schedule = getattr(each, "schedule", None)
        code = getattr(inspect.unwrap(schedule), "__code__", None) if schedule else None
        if code is not None:
            at = shown_line(code.co_filename, code.co_firstlineno)
            return f"{type(each).__name__}, by {code.co_name}() at {at},"
    return ""
