"""A watch of steps that may fail, which locates the first Inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.watch import is_exact
from gradscaler.diagnose._locate.budget import LOOKED_AT, WATCHED, Budget
from gradscaler.diagnose._locate.module_hooks import ModuleHooks, weakly
from gradscaler.diagnose._locate.operation_watch import OperationWatch
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.located import Located


class FailureWatch:
    """Watches a model's modules and, in PyTorch, each operation, in the steps that may fail.

    It finds what no graph of a loss shows: operations without a gradient, such as those that
    prepare a batch, and the modules of TensorPlay and Paddle. A watch begins after the step before,
    if the budget allows it. Operations are watched until the step's passes are over, and modules
    until ``update``. The watch breaks off if the model is evaluated meanwhile, or if the budget is
    used up.

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
        self._has_seen_streak = self._has_seen_row = False
        self._failed = 0  # the latest step that failed
        self._is_whole = True  # False if the latest watch broke off
        self._may_locate = sees_operations  # until an operation that made an Inf or NaN is known
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
        seconds = self._budget.left(step, LOOKED_AT)
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
        """Decide whether to watch the step after this one.

        ``is_verdict_late`` says that a verdict waits for the next step.
        """
        self._budget.step_ended(step)
        self._next = None
        is_stuck = self._log.is_nearly_stuck and (self._may_locate or self._operations is None)
        may_fail = self._may_locate and self.has_failed(step)
        if is_verdict_late or is_stuck or may_fail:
            self._next = self._budget.left(step, WATCHED)
        # Two watches of a run have no time limit, as their steps are most likely lost anyway.
        is_in_a_row = may_fail and self._failed == step - 1
        self._failed = step if may_fail else self._failed
        if (is_verdict_late or is_stuck) and not self._has_seen_streak:
            self._next, self._has_seen_streak = math.inf, True
        elif is_in_a_row and not self._has_seen_row:
            self._next, self._has_seen_row = math.inf, True

    def has_failed(self, step: int) -> bool:
        """Whether a step failed in a way that no loss scale fixes; False if it is not read yet."""
        latest = self._log.history[-1] if self._log.history else None
        if latest is None or latest.step != step:
            return False
        was_applied = self._log.num_steps > self._log.counts.num_skipped
        return latest.has_bad_loss or (latest.is_hopeless and was_applied)

    def keep_located(self, in_graph: Located | None) -> None:
        """Keep the origin located in the latest step, if that step failed.

        ``in_graph`` is the origin that the graphs of the step's losses show. A likely one is that
        of an earlier failure.
        """
        latest = self._log.history[-1] if self._log.history else None
        known = self._log.counts.evidence.watched
        if latest is None or not (latest.skipped or latest.has_bad_loss):
            self.located = None
            if in_graph is not None and in_graph.is_likely and known is None:
                self._log.add_watched(in_graph, {})
            return
        found = in_graph
        if not is_exact(in_graph):  # a watch of the operations may have found more, now or before
            before = None if self._may_locate else known
            found = self._watched(latest.step) or (in_graph and before) or in_graph
        is_watched = self.step == latest.step and self._is_whole
        self._may_locate &= not (is_exact(found) or (is_watched and found is not None))
        self.located = found or self.located
        dtypes = self._hooks.dtypes if self._hooks is not None and is_watched else {}
        self._log.add_watched(found, dtypes)

    def _watched(self, step: int) -> Located | None:
        """The origin that a watch of a step found."""
        if self.step != step or not self._is_whole or not self._parts:
            return None
        # A failure that a lower scale may fix is not reported before there is a verdict.
        is_told = self.has_failed(step) or self._log.stuck_streak is not None
        return self._parts[-1].located if is_told else None
