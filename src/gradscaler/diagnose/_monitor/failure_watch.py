"""Which steps a monitor watches for what makes them fail, and what it finds."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import pairwise
from time import perf_counter as clock
from typing import Any

from gradscaler.diagnose._locate.located import Located
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.diagnose._locate.operation_watch import OperationWatch
from gradscaler.diagnose._monitor.step_log import StepLog

SHARE = 0.05  # of the time that training takes, which such steps may take in all
_ALLOWANCE = 0.5  # seconds beyond that, in the steps in which a failure is likely
_PERIODIC = 3  # failures at equal distances that make the next one expected


class FailureWatch:
    """Watches a model's modules and, in PyTorch, each operation, in the steps that may fail.

    Attributes:
        step: the latest step that is watched, or was.
        located: what made the first Inf or NaN in the latest streak of skips, if that was seen.
    """

    def __init__(self, model: Any, log: StepLog, sees_operations: bool) -> None:
        self._log = log
        self._hooks: ModuleHooks | None = None
        with suppress(TypeError):  # there may be no model
            self._hooks = ModuleHooks(model)
        self._operations = OperationWatch(self._hooks) if sees_operations else None
        self._budget = WatchBudget()
        self._is_next_wanted = False
        self.step = 0
        self.located: Located | None = None

    @property
    def model(self) -> Any:
        """The model, if its modules can be watched."""
        return None if self._hooks is None else self._hooks.model

    @property
    def owners(self) -> tuple[Any, ...]:
        """The objects whose methods run while it watches an operation."""
        return () if self._operations is None else (self._operations, self._operations.mode)

    def start(self, step: int) -> None:
        """Watch a step from here on."""
        for each in (self._hooks, self._operations):
            if each is not None:
                each.start()
        self.step = step

    def start_if_wanted(self, step: int) -> None:
        """Watch a step, if the one before has made that likely to help."""
        if self._is_next_wanted:
            self.start(step)

    def end_passes(self, step: int) -> None:
        """Watch no more operations, as the step's forward and backward passes are over."""
        if self._operations is not None and self.step == step:
            self._operations.stop()

    def stop(self) -> None:
        """Watch no more."""
        for each in (self._hooks, self._operations):
            if each is not None:
                each.stop()

    def step_ended(self, step: int, is_verdict_late: bool) -> None:
        """Note what an ended step shows, and whether to watch the next one.

        ``is_verdict_late`` says that a verdict waits for it.
        """
        self._budget.step_ended(step, self.step == step, self._has_failed(step))
        may_see_more = self._operations is not None and self._log.counts.evidence.watched is None
        self._is_next_wanted = (
            self._log.is_nearly_stuck
            or is_verdict_late
            or (may_see_more and self._budget.allows(step + 1))
        )

    def _has_failed(self, step: int) -> bool:
        """Whether a step failed as no scale cures, if that was read already.

        Its loss is not finite, or its gradients hold NaN and no Inf, as an overflow makes.
        """
        latest = next(reversed(self._log.history), None)
        if latest is None or latest.step != step:
            return False
        found = latest.nonfinite or ()
        # If no step was applied, the scale may be far too large.
        was_applied = self._log.num_steps > self._log.counts.num_skipped
        is_nan = bool(found) and not any(each.num_inf for each in found)
        return latest.has_bad_loss or (is_nan and was_applied)

    def keep_located(self) -> None:
        """Keep what was located in the latest step, if it failed and was watched."""
        latest = self._log.history[-1] if self._log.history else None
        if latest is None or not (latest.skipped or latest.has_bad_loss):
            self.located = None
        elif self.step == latest.step:
            source = self._hooks if self._operations is None else self._operations
            found = None if source is None else source.located
            self.located = found or self.located
            self._log.add_watched(found, {} if self._hooks is None else self._hooks.dtypes)


class WatchBudget:
    """Looks for failures that come now and then, in as much time as there is.

    A watched step counts with all of its time, from the end of the step before to its own. The
    next one may take as long as the latest. The first failure is worth a watch whatever that takes,
    and later ones, or the step when one is due, what is left of half a second.
    """

    def __init__(self) -> None:
        self._begin: float | None = None  # the end of the first step
        self._end = 0.0  # the end of the latest step
        self._spent = 0.0  # in steps that were watched
        self._latest = 0.0  # in the latest of them
        self._count = 0  # of them
        self._failures: deque[int] = deque(maxlen=_PERIODIC)

    def step_ended(self, step: int, watched: bool, failed: bool) -> None:
        """Note how long a step took; ``failed`` if it is one of those to be located."""
        now = clock()
        if self._begin is None:
            self._begin = now
        elif watched:
            self._latest = now - self._end
            self._spent += self._latest
            self._count += 1
        self._end = now
        if failed and step not in self._failures:
            self._failures.append(step)

    def allows(self, step: int) -> bool:
        """Whether to watch a step after a failure; where they are periodic, the next one alone."""
        if not self._failures or self._begin is None:
            return False
        gaps = {after - before for before, after in pairwise(self._failures)}
        is_periodic = len(self._failures) == _PERIODIC and len(gaps) == 1
        if is_periodic and (step - self._failures[-1]) % gaps.pop():
            return False
        spent, share = self._spent + self._latest, SHARE * (self._end - self._begin)
        is_likely = is_periodic or step == self._failures[-1] + 1
        return spent < share or (is_likely and (not self._count or spent < _ALLOWANCE + share))
