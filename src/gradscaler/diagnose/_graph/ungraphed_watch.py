"""A watch of the operations without a graph, in the steps that they may make fail."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from gradscaler.diagnose._graph.budget import CREDIT, Budget
from gradscaler.diagnose._graph.call_origins import CallOrigins
from gradscaler.diagnose._graph.calls import Call, CallWatch
from gradscaler.diagnose._graph.constant_terms import ConstantTerms
from gradscaler.diagnose._graph.cut_terms import CutTerms
from gradscaler.diagnose._graph.graphless_gradients import GraphlessGradients
from gradscaler.diagnose._graph.hooks import weakly
from gradscaler.diagnose._graph.places import Module, Places
from gradscaler.diagnose._record.located import Located, is_exact
from gradscaler.diagnose._record.thresholds import FEW_SAMPLES

_MOST_IN_VAIN = 3  # failed steps: what three of them do not show is in the data, or hidden

# Steps to watch after a failure until another one: a watched step is not quite as without a watch,
# and what fails more rarely than one step in six is worth the second run of `--watch`.
_MOST_HEALTHY = 5
_MOST_SOUGHT = 4  # times to watch for a constant term, as most are numbers, or meant
_MOST_OTHERS = 10  # steps with the loss of another optimizer, which takes its turn meanwhile


class UngraphedWatch:
    """Watches the operations without a graph from a failure that the graph leaves open.

    Such is a failure whose graph reads a tensor that is already Inf or NaN, or hides a part of
    itself. The next five steps are watched then, each up to its optimizer's step, until a failure
    is located in one, or is not in three. What the watches add to these steps is at most 5 % of the
    time, and a second. One that would take longer breaks off, as it does if the model is evaluated
    meanwhile.

    A step is also watched for what makes a term of the loss constant, on demand.

    Args:
        model: the model, which names the places; None if there is none.
        is_on: whether to watch at all.

    Attributes:
        is_sought: whether the next step is to be watched for a term.
        seen: what was seen in the present step.
        terms: the constant terms of its losses, if they are sought.
        cuts: those that are cut off from what is trained, likewise.
        gradients: the gradients without a graph in its losses, likewise.
        calls: sees the calls.
        budget: the time of the watches.
    """

    def __init__(self, model: Module | None, is_on: bool) -> None:
        self._model = model
        self.budget = Budget(CREDIT)
        self._left = _MOST_IN_VAIN * is_on  # failures that may show nothing
        self._is_wanted = False
        self._healthy_left = 0  # steps to watch until another failure
        self._follows = False  # Inf and NaN in this step
        self.is_sought, self._num_found = False, 0  # a term in the next step; steps that had one
        self._seeks_left, self._others_left = _MOST_SOUGHT * is_on, _MOST_OTHERS
        self._seeks = False  # whether this step is watched for a term
        self._is_early = False  # whether the watch of the next step has begun
        self._forget()
        self.calls = CallWatch(weakly(self._see), weakly(self._may_continue))

    @property
    def is_on(self) -> bool:
        """Whether calls are seen."""
        return self.calls.is_on

    def seek_term(self) -> None:
        """Watch the next step for a constant term; not where PyTorch has compiled anything.

        Compiled code would run uncompiled meanwhile, and compute other bits.
        """
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if self._seeks_left and not (dynamo and dynamo.counters.get("frames")):
            self._seeks_left -= 1
            self.is_sought = True

    def note_term(self) -> None:
        """Note that this step had one, and watch the next one if a finding needs another."""
        self._num_found += 1
        self.is_sought = self._num_found < FEW_SAMPLES
        self._seeks_left *= self.is_sought

    def note_other(self) -> None:
        """Note that a loss of this step has no constant term, and look at the next one's too."""
        if self._seeks and self._others_left:
            self._others_left -= 1
            self.is_sought = True

    def begin(self, step: int) -> None:
        """Begin a step, before its forward pass, or before its backward pass."""
        self._seeks, self.is_sought = self.is_sought, False
        self._follows = bool(self._is_wanted and self._left and self._healthy_left)
        if self._is_early and not self._seeks:
            self.stop()
        if not self._is_early:
            self._start(step, self._follows or self._seeks)
        self._is_early = False

    def begin_early(self, step: int) -> None:
        """Begin the watch for a term in the step after one, whose optimizer has stepped.

        Where optimizers take turns, the forward pass comes before :meth:`begin`.
        """
        if not self._is_wanted:
            # Another loss of this step may read what was cut off before.
            self._start(step + 1, is_due=True, cuts=self.cuts)
            self.cuts.go_on()
            self._is_early = self.is_on

    def _start(self, step: int, is_due: bool, cuts: CutTerms | None = None) -> None:
        """Watch if it is due, and time is left."""
        seconds = self.budget.left(step - 1) if is_due else None
        if seconds is not None:
            self._forget(self._model, cuts)
            with suppress(RuntimeError):  # a compiled step: PyTorch changes no stance in it
                self.calls.start()
                self.budget.begin(seconds, self.budget.usual(step - 1))
                self._healthy_left -= self._follows

    def end_passes(self) -> None:
        """Stop seeing calls, as the step's forward and backward passes are over."""
        if self.calls.is_entered and not self._is_early:
            self.calls.stop()

    def step_ended(self, found: Located | None) -> None:
        """Note the end of a step, and the origin of the Inf or NaN in its loss, if any."""
        if is_over := self.budget.began is not None and not self._is_early:
            self.stop()
        was_watched = is_over and self._follows
        if found is not None:  # the verdict is that, whatever else the loss adds
            self._seeks_left, self.is_sought = 0, False
            self._is_wanted, self._healthy_left = not is_exact(found), _MOST_HEALTHY
        if found is not None and was_watched:
            self._left = self._left - 1 if self._is_wanted else 0

    def stop(self) -> None:
        """Stop watching, and forget what was seen."""
        self._is_early = False
        self.calls.stop()
        self.budget.end()
        self._forget()

    def _forget(self, model: Module | None = None, cuts: CutTerms | None = None) -> None:
        self.seen, self.terms = CallOrigins(Places(model)), ConstantTerms()
        self.cuts = CutTerms() if cuts is None else cuts
        self.gradients = GraphlessGradients()

    def _see(self, call: Call) -> None:
        if self._follows:
            self.seen.see(call)
        self.terms.see(call)
        self.cuts.see(call)
        self.gradients.see(call)

    def _may_continue(self) -> bool:
        """Whether to go on watching at a call; breaks the watch off if not."""
        if self.budget.is_used_up or self._is_evaluating():
            self.stop()
        return self.calls.is_on

    def _is_evaluating(self) -> bool:
        from torch import is_grad_enabled

        return self._model is not None and not (is_grad_enabled() or self._model.training)
