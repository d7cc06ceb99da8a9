"""A watch of the modules in steps that decide a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.budget import LOOKED_AT, WATCHED, Budget
from gradscaler.diagnose._graph.hooks import weakly
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.located import Located, is_exact
from gradscaler.diagnose._record.step import Step

_CREDIT = 0.1  # seconds: too few to be missed, and enough to look at a short run's first steps


class FailureWatch:
    """Watches a model's modules in the steps that decide a verdict, and keeps what was located.

    It finds what no graph of a loss shows: the modules of TensorPlay and Paddle, and the dtypes
    that autocast chose. A watch begins after the step before, if the budget allows it, and ends
    with ``update``. It breaks off if the model is evaluated meanwhile, or if the budget is used up.

    Attributes:
        step: the latest watched step.
        located: the origin of the first Inf or NaN in the latest streak of skips; None if unknown.
    """

    def __init__(self, model: object, log: StepLog) -> None:
        self._log = log
        self._hooks: ModuleHooks | None = None
        with suppress(TypeError):  # there may be no model
            self._hooks = ModuleHooks(model)
            self._hooks.may_continue = weakly(self._may_continue)
        self._budget = Budget(_CREDIT)
        self._next: float | None = None  # seconds for a watch of the next step, if wanted
        self._has_seen_streak = False
        self._is_whole = True  # False if the latest watch broke off
        self._is_located = False  # whether an operation that made an Inf or NaN is known
        self.step = 0
        self.located: Located | None = None

    @property
    def is_on(self) -> bool:
        """Whether a watch is running."""
        return self._budget.is_running

    def start_if_wanted(self, step: int) -> None:
        """Watch a step if :meth:`step_ended` found that worthwhile after the step before."""
        if self._next is not None and self._hooks is not None:
            self._budget.begin(self._next)
            self._hooks.start()
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

    def stop(self) -> None:
        """Stop watching."""
        self._budget.end()
        if self._hooks is not None:
            self._hooks.stop()

    def _may_continue(self) -> bool:
        """Whether to go on watching at a module's call; breaks the watch off if not."""
        is_evaluating = self._hooks is not None and self._hooks.is_evaluating
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
        if not is_verdict_late and (self._is_located or not self._log.is_nearly_stuck):
            return
        self._next = self._budget.left(step, WATCHED)
        if not self._has_seen_streak:  # without a limit, as the step is most likely lost anyway
            self._next, self._has_seen_streak = math.inf, True

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
        found = in_graph or self._in_modules(latest)
        if in_graph is not None and self._is_located and not is_exact(in_graph):
            found = known
        self._is_located |= is_exact(found)
        self.located = found or self.located
        is_watched = self.step == latest.step and self._is_whole
        dtypes = self._hooks.dtypes if self._hooks is not None and is_watched else {}
        self._log.add_watched(found, dtypes)

    def _in_modules(self, step: Step) -> Located | None:
        """The module that a watch of a step found."""
        if self.step != step.step or not self._is_whole or self._hooks is None:
            return None
        # A failure that a lower scale may fix is not reported before there is a verdict.
        is_told = self._log.has_failed(step) or self._log.stuck_streak is not None
        return self._hooks.located if is_told else None
