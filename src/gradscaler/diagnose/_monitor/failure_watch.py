"""A watch of the operations in steps that decide a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.budget import CREDIT, LOOKED_AT, WATCHED, Budget
from gradscaler.diagnose._graph.hooks import weakly
from gradscaler.diagnose._locate.locate import seam_of
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.located import Located, is_exact
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._seams.eager import EagerSeam

# Seconds: too few to be missed, and enough to look at a short run's first steps.
_CREDIT_OF_MODULES = 0.1


class _Operations(ModuleHooks):
    """Finds the first operation of TensorPlay or Paddle whose Inf or NaN reaches a result."""

    located: Located | None = None
    _seam: EagerSeam | None = None

    def start(self) -> None:
        """Begin to see the operations of this thread."""
        self.stop()
        self.located, self._seam = None, seam_of(self.model)
        self._seam.may_continue = self.may_continue
        self._seam.start()

    def stop(self) -> None:
        """See no more, and let go of the graph."""
        seam, self._seam = self._seam, None
        if seam is not None:
            seam.stop()
            self.located = seam.located


class FailureWatch:
    """Watches a model in the steps that decide a verdict, and keeps what was located.

    In TensorPlay and Paddle it finds the operation that made an Inf or NaN; in PyTorch, the graph
    of a loss shows it, and only the step's gradients are inspected. A watch begins after the step
    before, if the budget allows it, and ends with ``update``. It breaks off if the budget is used
    up.

    Args:
        model: the model.
        log: the log of its steps.
        finds_operations: whether to read what operations make.

    Attributes:
        step: the latest watched step.
        located: the origin of the first Inf or NaN in the latest streak of skips; None if unknown.
    """

    def __init__(self, model: object, log: StepLog, finds_operations: bool) -> None:
        self._log, self._finds_operations = log, finds_operations
        self._hooks: ModuleHooks | None = None
        with suppress(TypeError):  # there may be no model
            self._hooks = _Operations(model) if finds_operations else ModuleHooks(model)
            self._hooks.may_continue = weakly(self._may_continue)
        self._budget = Budget(CREDIT if finds_operations else _CREDIT_OF_MODULES)
        self._next: float | None = None  # seconds for a watch of the next step, if wanted
        self._has_seen_failure = False
        self._is_sought = False  # whether a failed step has shown no operation yet
        self._is_whole = True  # False if the latest watch broke off
        self._is_located = False  # whether an operation that made an Inf or NaN is known
        self.step = 0
        self.located: Located | None = None

    @property
    def is_on(self) -> bool:
        """Whether a watch is running."""
        return self._budget.began is not None

    def start_if_wanted(self, step: int) -> None:
        """Watch a step if :meth:`step_ended` found that worthwhile after the step before."""
        if self._next is not None and self._hooks is not None:
            if self._finds_operations:
                self._hooks.start()  # the first one looks for all functions, which is done once
                self._budget.begin(self._next)
            self.step, self._is_whole = step, True

    def look(self, step: int, see_output: Callable[[Tensor, str], None]) -> bool:
        """Give the outputs of a step's modules to ``see_output``.

        Returns:
            False if another watch is running, or if the budget does not allow this one.
        """
        seconds = self._budget.left(step, LOOKED_AT)
        if seconds is None or self.is_on:
            return False
        self._budget.begin(seconds)
        if self._hooks is not None:
            self._hooks.see_output = see_output
            self._hooks.start()
        return True

    def stop(self) -> None:
        """Stop watching."""
        self._budget.end()
        if self._hooks is not None:
            self._hooks.stop()

    def _may_continue(self) -> bool:
        """Whether to see a module's call, or an operation; may break the watch off.

        An operation of an evaluation is passed over: it reaches no loss.
        """
        is_evaluating = self._hooks is not None and self._hooks.is_evaluating
        if is_evaluating and self._finds_operations:
            return False
        if is_evaluating or self._budget.is_used_up:
            self.stop()
            self._is_whole = False
        return self.is_on

    def step_ended(self, step: int, is_verdict_late: bool) -> None:
        """Decide whether to watch the step after this one.

        ``is_verdict_late`` says that a verdict waits for the next step.
        """
        self._budget.step_ended(step)
        self._next = None
        is_wanted = self._log.is_nearly_stuck or self._is_sought
        if not is_verdict_late and (self._is_located or not is_wanted):
            return
        # Of operations, the longest watch so far tells what the next one takes.
        self._next = self._budget.left(step, 0.0 if self._finds_operations else WATCHED)
        if not self._has_seen_failure:  # without a limit, as the step is most likely lost anyway
            self._next, self._has_seen_failure = math.inf, True

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
                self._log.add_watched(in_graph)
            return
        self._is_sought |= self._finds_operations and (latest.has_bad_loss or latest.is_hopeless)
        found = in_graph or self._in_watch(latest)
        if in_graph is not None and self._is_located and not is_exact(in_graph):
            found = known
        self._is_located |= is_exact(found)
        self.located = found or self.located
        self._log.add_watched(found)

    def _in_watch(self, step: Step) -> Located | None:
        """The operation that a watch of a step found."""
        is_read = self._finds_operations and self.step == step.step and self._is_whole
        if not is_read or not isinstance(self._hooks, _Operations):
            return None
        # A failure that a lower scale may fix is not reported before there is a verdict.
        is_told = self._log.has_failed(step) or self._log.stuck_streak is not None
        return self._hooks.located if is_told else None
