"""A watch of steps that may fail, which locates the first Inf or NaN."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from time import perf_counter as clock

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._locate.module_hooks import ModuleHooks, weakly
from gradscaler.diagnose._locate.operation_watch import OperationWatch
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.located import Located

SHARE = 0.05  # of the training time, for all watches together
_WATCHED = 20  # mean step times that a watch must be able to take
_LOOKED_AT = 2  # the same, if only the modules are watched
_PERIODIC = 3  # failures at equal distances after which the next one is expected


class FailureWatch:
    """Watches a model's modules and, in PyTorch, each operation, in the steps that may fail.

    A watch begins after the step before, if the budget allows it. Operations are watched until the
    step's passes are over, and modules until ``update``. The watch breaks off if the model is
    evaluated meanwhile, or if the budget is used up.

    Attributes:
        step: the latest watched step.
        located: the origin of the first Inf or NaN in the latest streak of skips; None if unknown.
    """

    def __init__(self, model: object, log: StepLog, sees_operations: bool) -> None:
        self._log = log
        self._hooks: ModuleHooks | None = None
        with suppress(TypeError):  # there may be no model
            self._hooks = ModuleHooks(model)
            self._hooks.may_continue = weakly(self._may_continue)
        self._operations: OperationWatch | None = None
        if sees_operations:
            self._operations = OperationWatch(self._hooks)
            self._operations.may_continue = weakly(self._is_within_budget)
        self._parts = [each for each in (self._hooks, self._operations) if each is not None]
        self._budget = Budget()
        self._next: float | None = None  # seconds for a watch of the next step, if wanted
        self._has_seen_streak = self._has_seen_period = False
        self._failures: deque[int] = deque(maxlen=_PERIODIC)
        self._is_whole = True  # False if the latest watch broke off
        self.step = 0
        self.located: Located | None = None

    @property
    def owners(self) -> tuple[object, ...]:
        """The objects whose methods run while an operation is watched."""
        return () if self._operations is None else (self._operations, self._operations.mode)

    @property
    def is_on(self) -> bool:
        """Whether a watch is running."""
        return self._budget.is_running

    def start_if_wanted(self, step: int) -> None:
        """Watch a step if :meth:`step_ended` found that worthwhile after the step before."""
        self._start(step, self._next)

    def start_again(self, step: int) -> None:
        """Watch the next call of a closure, on a batch that failed."""
        if self.step != step and self._may_locate:
            self._start(step, self._budget.left(step, _WATCHED))

    def _start(self, step: int, seconds: float | None) -> None:
        if seconds is not None:
            self._budget.begin(seconds)
            for each in self._parts:
                each.start()
            self.step, self._is_whole = step, True

    def look(self, step: int, see_output: Callable[[Tensor, str, str], None]) -> bool:
        """Give the outputs of a step's modules to ``see_output``.

        Returns:
            False if another watch is running, or if the budget does not allow this one.
        """
        seconds = self._budget.left(step, _LOOKED_AT)
        if self.is_on or seconds is None:
            return False
        self._budget.begin(seconds)
        if self._hooks is not None:
            self._hooks.see_output = see_output
            self._hooks.start()
        return True

    def end_passes(self, step: int) -> None:
        """Stop watching operations, as the step's forward and backward passes are over."""
        if self._operations is not None and self.step == step:
            self._operations.stop()

    def stop(self) -> None:
        """Stop watching."""
        self._budget.end()
        for each in self._parts:
            each.stop()

    def _may_continue(self) -> bool:
        """Whether to go on watching at a module's call."""
        is_evaluating = self._hooks is not None and self._hooks.is_evaluating
        return self._is_within_budget(is_evaluating)

    def _is_within_budget(self, is_over: bool = False) -> bool:
        """Whether to go on watching; breaks the watch off if not."""
        if is_over or self._budget.is_used_up:
            self.stop()
            self._is_whole = False
        return self.is_on

    def step_ended(self, step: int, is_verdict_late: bool) -> None:
        """Note whether a step failed, and decide whether to watch the next one.

        ``is_verdict_late`` says that a verdict waits for the next step.
        """
        self._budget.step_ended(step)
        if self._has_failed(step) and step not in self._failures:
            self._failures.append(step)
        self._next = None
        is_stuck = is_verdict_late or self._log.is_nearly_stuck
        may_fail = self._may_locate and self._may_fail(step + 1)
        if is_stuck or may_fail:
            self._next = self._budget.left(step, _WATCHED)
        # Two watches of a run have no time limit: their steps are most likely lost anyway.
        if is_stuck and not self._has_seen_streak:
            self._next, self._has_seen_streak = math.inf, True
        elif may_fail and self._period is not None and not self._has_seen_period:
            self._next, self._has_seen_period = math.inf, True

    @property
    def _may_locate(self) -> bool:
        """Whether operations can be watched, and none was located yet."""
        return self._operations is not None and self._log.counts.evidence.watched is None

    def _may_fail(self, step: int) -> bool:
        """Whether a step follows a failure or, if failures are periodic, the next one is due."""
        if not self._failures:
            return False
        since = step - self._failures[-1]
        return since == 1 if self._period is None else since % self._period == 0

    @property
    def _period(self) -> int | None:
        """The distance between the latest failures; None if they are too few, or not periodic."""
        gaps = {after - before for before, after in pairwise(self._failures)}
        return gaps.pop() if len(self._failures) == _PERIODIC and len(gaps) == 1 else None

    def _has_failed(self, step: int) -> bool:
        """Whether a step failed in a way that no loss scale fixes; False if it is not read yet.

        The step's loss is not finite; or its gradients hold NaN but no Inf, which an overflow would
        make; or its gradients are not finite at a scale of at most 1.
        """
        latest = self._log.history[-1] if self._log.history else None
        if latest is None or latest.step != step:
            return False
        found = latest.nonfinite or ()
        # If no step was applied, the scale may be far too large.
        was_applied = self._log.num_steps > self._log.counts.num_skipped
        is_nan = bool(found) and not any(each.num_inf for each in found)
        is_hopeless = is_nan or (bool(found) and latest.scale <= 1)
        return latest.has_bad_loss or (is_hopeless and was_applied)

    def keep_located(self) -> None:
        """Keep the origin located in the latest step, if that step failed and was watched."""
        latest = self._log.history[-1] if self._log.history else None
        if latest is None or not (latest.skipped or latest.has_bad_loss):
            self.located = None
        elif self.step == latest.step and self._is_whole and self._parts:
            # A failure that a lower scale may fix is not reported before there is a verdict.
            is_told = self._has_failed(latest.step) or self._log.stuck_streak is not None
            found = self._parts[-1].located if is_told else None
            self.located = found or self.located
            self._log.add_watched(found, {} if self._hooks is None else self._hooks.dtypes)


class Budget:
    """Limits the time of all watches to a share of the training time."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # the first step, and when it ended
        self._began: float | None = None  # the start of the running watch
        self._may_take = 0.0  # seconds for the running watch
        self._spent = 0.0
        self._longest = 0.0

    def step_ended(self, step: int) -> None:
        """Note the time if this is the end of the first step."""
        if self._first is None:
            self._first = step, clock()

    def left(self, step: int, factor: int) -> float | None:
        """The seconds that are left for a watch after a step; None if they are not enough.

        A watch must be able to take ``factor`` times the mean step time. If operations are watched
        too (``_WATCHED``), it must be able to take as long as the longest watch so far.
        """
        if self._first is None:
            return None
        first, began = self._first
        total = clock() - began
        left = SHARE * total - self._spent
        expected = factor * total / max(step - first, 1)
        if factor == _WATCHED:
            expected = max(expected, self._longest)
        return left if expected <= left else None

    @property
    def is_running(self) -> bool:
        """Whether a watch is running."""
        return self._began is not None

    @property
    def is_used_up(self) -> bool:
        """Whether the running watch has exceeded its time."""
        return self._began is not None and clock() - self._began > self._may_take

    def begin(self, seconds: float) -> None:
        """Begin a watch that may take ``seconds``."""
        self.end()
        self._began, self._may_take = clock(), seconds

    def end(self) -> None:
        """End the running watch.

        A watch that exceeded its time was cut off. A complete one is assumed to take twice as long.
        """
        if self._began is not None:
            took = clock() - self._began
            self._spent += took
            self._longest = max(self._longest, 2 * took if took > self._may_take else took)
            self._began = None
