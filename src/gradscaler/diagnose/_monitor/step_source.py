"""What adds the steps of a scaler, or of a loop without one, to a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.events import Counted
from gradscaler.diagnose._record.located import Located


@dataclass(eq=False, repr=False)
class StepSource:
    """The base class of objects that add a scaler's steps to a log."""

    scaler: Any  # in its state before the first step; or a loop without one
    framework: str  # such as "torch"
    model: Any  # gives the parameters their names, or None
    log: StepLog
    every: int  # steps from one sample to the next
    forensics: int  # inspect every n-th skipped step; 0 disables
    dtype: str  # the format for samples
    world_size: int  # processes that train together
    located: Located | None = field(init=False, default=None)  # in the latest streak of skips

    def __post_init__(self) -> None:
        """Note the scaler's present state."""

    @property
    def waiting(self) -> Sequence[Any]:
        """The steps that are over; the latest may not be in the log yet."""
        raise NotImplementedError

    def note(self, events: Iterable[Counted]) -> None:
        """Note events of the step that is not over."""
        raise NotImplementedError

    def note_repeated(self) -> None:
        """Note a step that an optimizer makes beside that of its scaler."""
        raise NotImplementedError

    def read(self) -> None:
        """Add the waiting steps to the log; waits for the device."""
        self._add_to(self.log, self.waiting)

    def snapshot(self) -> StepLog:
        """A copy of the log as :meth:`read` would leave it; any thread may call this."""
        waiting = self.waiting  # before the copy, as the log may add some meanwhile
        log = self.log.copy()
        self._add_to(log, waiting)
        return log

    @staticmethod
    def _add_to(log: StepLog, steps: Sequence[Any]) -> None:
        for step in steps:
            if step.number > log.counts.step:
                step.add_to(log)

    def break_off(self) -> None:
        """Add the waiting steps to the log after an error, as far as that can be done."""
        with suppress(Exception):
            self.read()

    def close(self, finish: Callable[[], None]) -> None:
        """Stop observing, add the waiting steps to the log, and call ``finish``."""
        self.read()
        finish()

    @property
    def _inspects_next_skip(self) -> bool:
        return self.forensics > 0 and (self.log.counts.num_skipped + 1) % self.forensics == 0
