"""The steps of a loop without a scaler, in a framework whose loop is recorded step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradscaler.diagnose._gradients.arrays import Array, shape_of
from gradscaler.diagnose._gradients.reading import are_finite, read
from gradscaler.diagnose._monitor.recorder import RecordedStep, Recorder
from gradscaler.diagnose._monitor.replay import Replay
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._record.lines import BadStep, Optimizers
from gradscaler.outcome import HISTORY_LENGTH


def _unknown() -> None:
    """Nothing is known of the weights."""


@dataclass(eq=False)
class Unscaled:
    """Stands for the scaler of a loop that has none.

    Attributes:
        framework: what the loop trains in, such as ``"paddle"``.
        is_before: whether a step is recorded before it is applied, so that the parameters are still
            those of its gradients.
        eps: the eps of the optimizer, the smallest of several; None if one has none, or if it is
            not known.
        policy: None.
        unmoved: why the step that is recorded next leaves its weights as they were, as each one
            does: they are ``"returned"`` as they were, or ``"given"`` again, or new ones are
            ``"dropped"``, or a copy of them changes (``"copied"``), or their gradients are all
            ``"zero"``, or depend on nothing (``"apart"``); empty if none is.
        num_unmoved: how many of the latest steps do so by then, as the first are not known to.
        stood: the first of the steps since which weights are returned as they were, to the bit, and
            the gradients of one of them: ``"zero"``, ``"apart"`` or ``"some"``, if they are known;
            empty if the step that is recorded next moved them, or none has.
        is_unchanged: whether the step that is recorded next left them so for its Inf or NaN.
        is_summed: whether the gradients of the step that is recorded next are those of all results
            of a function together.
        outside: the parameters of the model that have a gradient and that no optimizer holds.
        lost_eps: that eps, if it is 0 in the float16 in which the optimizer steps.
        weights: the norm of the matrices before the first step, and now; None if it is unknown.
        stale: a part of a state that the step returns as it was given, though it computes a new
            one; empty if none is.
    """

    framework: str
    is_before: bool = True
    eps: float | None = None
    policy: None = None
    unmoved: str = ""
    num_unmoved: int = 1
    stood: str = ""
    is_unchanged: bool = False
    is_summed: bool = False
    outside: tuple[str, ...] = ()
    lost_eps: float | None = None
    weights: Callable[[], tuple[float, float] | None] = _unknown
    stale: str = ""


class RecordedLoop(Recorder):
    """Records the steps of a loop without a scaler, which are all applied.

    A step whose gradients hold an Inf or a NaN is written at once.

    Attributes:
        is_left_out: whether the step that is recorded next left the weights as they were.
    """

    is_left_out = False

    def __post_init__(self) -> None:
        """Begin without a step."""
        super().__post_init__()
        self._num_idle = Counter[tuple[str, ...]]()  # by the names of an optimizer's parameters
        self._have_stepped = set[tuple[str, ...]]()

    def record(self, scaler: object, finite: Any, gradients: object, *rest: Any) -> None:
        """Record one step; a call of an optimizer whose gradients are all None makes none."""
        if isinstance(gradients, Mapping) and gradients:
            names = tuple(gradients)
            if all(each is None for each in gradients.values()):
                self._note_idle(names)
                return
            self._have_stepped.add(names)
        if why := self.scaler.unmoved:
            seen = [Counted(Event.UNMOVED), Counted(Event.UNMOVED, why)]
            self.events += seen * self.scaler.num_unmoved
        if since := self.scaler.stood:
            self.events += [Counted(Event.STOOD), Counted(Event.STOOD, since)]
        self.events += [Counted(Event.UNCHANGED)] * self.scaler.is_unchanged
        self.events += [Counted(Event.SUMMED)] * self.scaler.is_summed
        if part := self.scaler.stale:
            self.events += [Counted(Event.STALE), Counted(Event.STALE, part)]
        super().record(scaler, finite, gradients, *rest)

    def _note_idle(self, names: tuple[str, ...]) -> None:
        """Note that an optimizer of parameters of some names found no gradient."""
        self._num_idle[names] += 1
        if not self.log.num_steps:
            early = [Counted(Event.IDLE)] * min(self._num_idle.total(), HISTORY_LENGTH)
            self.log.note_early(early)
        elif names in self._have_stepped:
            self.read()
            self.log.note_stopped(self.log.counts.step, "")

    def note_stayed(self, name: str, count: int) -> None:
        """Note backward passes without a step, before which a gradient held an Inf or NaN."""
        self.read()
        self.log.note_stayed(name, count)

    @property
    def _optimizers(self) -> Optimizers | None:
        """The optimizers that have made no step, the eps of the others, and what none holds."""
        idle = {
            names[0].rpartition(".")[0] or names[0]: count
            for names, count in self._num_idle.items()
            if names not in self._have_stepped
        }
        eps, outside, weights = self.scaler.eps, self.scaler.outside, self.scaler.weights()
        is_known = idle or outside or weights or eps is not None
        return Optimizers(idle, outside, weights=weights, eps=eps) if is_known else None

    def _chance(self, named: Mapping[str, Array]) -> float | None:
        """The logarithm of the number of outputs, as far as the last bias shows it."""
        shape = shape_of(list(named.values())[-1]) if named else ()
        return math.log(shape[0]) if len(shape) == 1 and shape[0] > 1 else None

    def _add(
        self, step: RecordedStep, named: dict[str, Array] | None, replay: Replay | None
    ) -> None:
        """Add a step, and report it if its gradients are not finite."""
        bad = {}
        if named and not are_finite(named.values()):
            bad = {name: each for name, each in named.items() if read(each).bad}
        super()._add(step, named, None if bad else replay)
        if bad:
            located = self.noted
            if replay is not None and self.log.counts.bad != step.number - 1:  # else it is known
                located = self._replays.locate(replay)
            given = next(iter(self.parameters.nonfinite()), None) if self.scaler.is_before else None
            self._add_bad(step, bad, located, None if given is None else given.name)
        elif self.noted is not None and self.is_left_out:
            loss = self.log.history[-1].loss
            self.log.add_bad(BadStep(step.number, loss, located=self.noted, is_left_out=True))
        elif self.noted is not None:  # its loss alone is bad
            self.log.add_made(self.noted)
        self.noted, self.is_left_out = None, False
