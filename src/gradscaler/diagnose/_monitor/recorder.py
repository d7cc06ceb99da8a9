"""The steps of a scaler that announces nothing, which the user records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradscaler.diagnose._gradients.arrays import Array, dtype_name, named_arrays
from gradscaler.diagnose._gradients.reading import inspect
from gradscaler.diagnose._graph.guard import guard
from gradscaler.diagnose._monitor.gradient_sample import fields_of, is_sampled, measure
from gradscaler.diagnose._monitor.parameters import eps_of
from gradscaler.diagnose._monitor.replay import Replay, Replays
from gradscaler.diagnose._monitor.step_log import Observations, StepLog
from gradscaler.diagnose._monitor.step_source import StepSource
from gradscaler.diagnose._monitor.streaks import MOST_NONFINITE
from gradscaler.diagnose._monitor.traced_scalers import ScalerState, number_of, policy_of, state_of
from gradscaler.diagnose._monitor.undivided import undivided, unskipped
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._record.lines import BadStep, Optimizers
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.step import Step
from gradscaler.outcome import HISTORY_LENGTH, NonfiniteGradient
from gradscaler.policies import Scalar


@dataclass
class RecordedStep:
    """A step, and the scaler before and after it.

    Attributes:
        is_sampled: whether its gradients are measured.
        is_inspected: whether its gradients are inspected if they hold an Inf or a NaN.
        missing: the names of parameters that have no gradient.
        events: what was seen of the step.
    """

    number: int
    after: ScalerState
    before: ScalerState
    policy: Any = None
    loss: Scalar | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None
    is_sampled: bool = False
    is_inspected: bool = False
    missing: tuple[str, ...] = ()
    events: tuple[Counted, ...] = ()

    @property
    def is_skipped(self) -> bool:
        """Whether the step's gradients held an Inf or a NaN; waits for the device."""
        return not self.after.was_finite(self.before, self.policy)

    def add_to(self, log: StepLog) -> None:
        """Add the step to a log; waits for the device."""
        loss = None if self.loss is None else number_of(self.loss)
        scale = number_of(self.before.scale)
        step = Step(self.number, scale, self.is_skipped, loss, self.nonfinite)
        log.add(step, None, *[Observations(self.events)] * bool(self.events))


class Recorder(StepSource):
    """Records the steps of a scaler of JAX, Keras, tf-keras or MindSpore.

    The scale of a step is the scale that the scaler had after the step before.

    Attributes:
        noted: where a watch has found the failure of the step that is recorded next.
        is_applied: whether that step was applied although its gradients are not finite.
    """

    noted: Located | None = None
    is_applied = False

    def __post_init__(self) -> None:
        """Note the scaler's present state."""
        self._policy, first = policy_of(self.scaler), state_of(self.scaler)
        self.parameters = RecordedParameters(self.model, scaler=self.scaler)
        self.events = list[Counted]()  # of the step that is recorded next
        self._replays = Replays(self.log)
        # The first item is in the log already, or stands for the start. The list is replaced, not
        # changed, because other threads may read it.
        self._steps = [RecordedStep(self.log.counts.step, first, first)]

    @property
    def waiting(self) -> list[RecordedStep]:
        """The steps that are over; the latest may not be in the log yet."""
        return self._steps

    def note(self, events: Iterable[Counted]) -> None:
        """Note events of the step that is recorded next."""
        self.events += events

    def note_operations(self, broadcast: str, passes_none: str) -> None:
        """Note where a loss is broadcast, and what passes no gradient on, if they are not empty."""
        for event, place in ((Event.BROADCAST, broadcast), (Event.PASSES_NONE, passes_none)):
            self.events += [Counted(event), Counted(event, place)] * bool(place)

    def note_repeated(self) -> None:
        """Note that the step that is recorded next repeats that of a scaler."""
        self.events.append(Counted(Event.REPEATED))

    def record(
        self,
        scaler: object,
        finite: Scalar,
        gradients: object,
        loss: Scalar,
        parameters: object,
        replay: Replay | None,
    ) -> None:
        """Record one step; see :meth:`gradscaler.diagnose.Monitor.record`."""
        if self.parameters.latest is None:  # refuse a bad structure now, not when it is needed
            named_arrays(parameters)
        state = state_of(self.scaler if scaler is None else scaler)
        if finite is not None:
            state = replace(state, finite=finite)
        last = self._steps[-1]
        step = RecordedStep(last.number + 1, state, last.after, self._policy, loss)
        step.is_sampled = is_sampled(step.number, self.every, self.log.num_before)
        step.is_inspected = self.forensics > 0 and gradients is not None
        is_read = gradients is not None and (step.is_sampled or step.is_inspected)
        named = self._named(gradients) if is_read else None
        step.missing = self._missing(gradients) if step.is_sampled else ()
        if undivided.get(self.scaler, otherwise=False):
            self.events.append(Counted(Event.UNDIVIDED))
        if unskipped.get(self.scaler, otherwise=False):
            self.events.append(Counted(Event.UNSKIPPED))
        step.events = tuple(self.events)
        self.events.clear()
        self.parameters.latest = parameters
        try:  # without the guard's lock, as a replay may start threads that are watched
            self._add(step, named, replay)
        except Exception as error:
            guard.handle(error)

    def _add(
        self, step: RecordedStep, named: dict[str, Array] | None, replay: Replay | None
    ) -> None:
        """Add a step, and read what is due."""
        # From here on the step counts, even if an interrupt stops the rest.
        unread = (each for each in self._steps if each.number > self.log.counts.step)
        self._steps = [*unread, step]
        is_late = self.log.is_write_due or len(self._steps) > HISTORY_LENGTH
        must_know = replay is not None and self._replays.must_know(step.after.scale)
        if not (step.is_sampled or step.is_inspected or is_late or must_know):
            return
        self._add_to(self.log, self._steps[:-1])
        if named is not None and self._inspects_next_skip and step.is_skipped:
            step.nonfinite = inspect(named)
        self.read()
        if replay is not None:
            self._replays.see_latest(replay)
            self.located = self._replays.located
        latest = self.log.history[-1]
        if step.is_sampled:
            measured = [] if named is None else [measure(named, self.dtype, latest.scale, False)]
            measured = [replace(each, missing=step.missing) for each in measured]
            fields = {**fields_of(measured), "chance": self._chance(named or {})}
            self.log.add_sample(latest.loss, optimizers=self._optimizers, **fields)
        elif is_late:
            self.log.add_sample()
        if self.is_applied:
            self._add_bad(step, named or {}, self.noted)
            self.noted, self.is_applied = None, False
        self.log.check()

    def _add_bad(
        self,
        step: RecordedStep,
        bad: Mapping[str, Array],
        located: Located | None,
        parameter: str | None = None,
    ) -> None:
        """Report a step that was applied although gradients were not finite."""
        found = inspect(bad)
        listed, more = found[:MOST_NONFINITE], len(found[MOST_NONFINITE:])
        loss = self.log.history[-1].loss
        bad_step = BadStep(step.number, loss, listed, more, located, parameter=parameter)
        self.log.add_bad(replace(bad_step, lost_eps=getattr(self.scaler, "lost_eps", None)))

    @property
    def _optimizers(self) -> Optimizers | None:
        """What a sampled step shows of the optimizer that a scaler of Keras holds; else None."""
        inner = getattr(self.scaler, "inner_optimizer", None)
        eps = None if inner is None else eps_of(inner)
        return None if eps is None else Optimizers(eps=eps)

    def _chance(self, named: Mapping[str, Array]) -> float | None:
        """The loss of a guess, if the last layer may make logits; None if that is not known."""
        return None

    def _named(self, gradients: object) -> dict[str, Array]:
        """The gradients by name."""
        return named_arrays(self._with_names(gradients))

    def _missing(self, gradients: object) -> tuple[str, ...]:
        """The names of parameters whose gradient is None."""
        named = self._with_names(gradients)
        if isinstance(named, Mapping):
            named = list(named.items())
        pairs = named if isinstance(named, list) else []
        pairs = [each for each in pairs if isinstance(each, tuple) and len(each) == 2]
        return tuple(name for name, gradient in pairs if gradient is None)

    def _with_names(self, gradients: object) -> object:
        """A list as long as the model's parameters takes their names; others are as they are."""
        names = list(parameters_of(self.model))
        if isinstance(gradients, (list, tuple)) and len(names) == len(gradients):
            return list(zip(names, gradients, strict=True))
        return gradients


@dataclass
class RecordedParameters:
    """The parameters recorded with the latest step, else the model's."""

    model: Any
    latest: object = None
    scaler: object = None

    def of_optimizers(self, is_stuck: bool) -> dict[str, Any]:
        """What the scaler of Keras shows of its optimizer. No other one holds any."""
        return {"lost_eps": self._lost_eps()} if is_stuck else {}

    def _lost_eps(self) -> float | None:
        """The optimizer's eps if it is 0, also in its parameters' float16; else None."""
        eps = getattr(getattr(self.scaler, "inner_optimizer", None), "epsilon", None)
        if not isinstance(eps, (int, float)) or np.float16(eps):
            return None
        kinds = map(dtype_name, parameters_of(self.model).values())
        return float(eps) if not eps or "float16" in kinds else None

    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters that hold an Inf or a NaN."""
        given = self.latest
        parameters = parameters_of(self.model) if given is None else named_arrays(given)
        # JAX deletes an array that is donated to a jitted function.
        present = {n: p for n, p in parameters.items() if not getattr(p, "is_deleted", bool)()}
        return inspect(present)


def parameters_of(model: Any) -> dict[str, Array]:
    """The trained parameters of a Keras, tf-keras or MindSpore model, by their names."""
    if model is None:
        return {}
    if isinstance(model, Mapping):  # several models
        each = ((name, parameters_of(one)) for name, one in model.items())
        return {f"{name}.{own}": p for name, found in each for own, p in found.items()}
    if hasattr(model, "trainable_params"):  # MindSpore's
        return {parameter.name: parameter for parameter in model.trainable_params()}
    if not getattr(model, "built", True):  # by its first batch, before which tf_keras raises
        return {}
    return named_arrays(
        (getattr(variable, "path", None) or variable.name.partition(":")[0], variable)
        for variable in model.trainable_variables
    )
