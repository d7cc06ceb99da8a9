"""The iterations of an eager scaler, from the first loss to the log."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.nodes import MOST_LOSSES
from gradscaler.diagnose._monitor.gradient_check import HostCopy, LateCheck
from gradscaler.diagnose._monitor.gradient_sample import GradientSample, fields_of, is_sampled
from gradscaler.diagnose._monitor.made_gradients import MadeGradient
from gradscaler.diagnose._monitor.scaled_losses import ScaledLosses
from gradscaler.diagnose._monitor.step_log import Observations, StepLog
from gradscaler.diagnose._monitor.zeroed_passes import ZeroedPasses
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._record.lines import Optimizers
from gradscaler.diagnose._record.step import Step
from gradscaler.outcome import HISTORY_LENGTH, StepOutcome


@dataclass
class Iteration:
    """One iteration of the training loop; optimizers are given by their ids."""

    number: int  # of the iteration's step, if an optimizer steps
    is_first: bool  # whether this is the first observed iteration
    is_sampled: bool
    events: list[Counted]
    optimizers: dict[int, object] = field(default_factory=dict)  # optimizers that stepped
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)  # without graphs; see `add_loss`
    measured: dict[int, GradientSample] = field(default_factory=dict)
    backward: set[str] = field(default_factory=set)  # dtypes, if first or sampled
    cut: Mapping[str, str] | None = None  # see Sample
    begun: set[int] = field(default_factory=set)  # optimizers that unscaled or began a step
    new: set[int] = field(default_factory=set)  # optimizers that began a step without a state
    overwritten: list[Tensor] = field(default_factory=list)  # a flag for each parameter
    is_unscaled: bool = False  # whether any gradients were unscaled
    follows_unstepped: bool = False  # whether the gradients before it were unscaled, and no step
    scaled: ScaledLosses = field(default_factory=ScaledLosses)  # if sampled, in PyTorch
    seen: Optimizers | None = None  # if sampled
    unscaled: list[str] = field(default_factory=list)  # see Optimizers
    num_losses: int = 0
    kind: type | None = None  # of the node that the latest loss has in PyTorch
    passes: ZeroedPasses = field(default_factory=ZeroedPasses)  # likewise
    made: MadeGradient | None = None  # of what optimizers hold, likewise, beside a scaler
    batch: tuple[int, int] | None = None  # see BadStep
    added_to: dict[str, Tensor] = field(default_factory=dict)  # magnitudes, by optimizers' names
    checks: list[LateCheck] = field(default_factory=list)  # without a scaler, on a device

    @property
    def is_long(self) -> bool:
        """Whether the graphs of its losses need not be looked at any more."""
        return self.num_losses > MOST_LOSSES

    def add_loss(self, loss: Tensor) -> None:
        """Add a loss that was given to scale(), without its graph.

        Of many losses, the first, the latest, and the first that is not finite or else the largest
        are kept.
        """
        self.num_losses += 1
        self.losses.append(loss)
        if len(self.losses) > MOST_LOSSES:
            self.losses[1:3] = [_graver(*self.losses[1:3])]

    def note(self, event: Event, where: str = "") -> None:
        """Note an event of this iteration."""
        self.events.append(Counted(event, where))

    def place_of(self, optimizer: object) -> int:
        """The number of other optimizers that have stepped so far."""
        return len(self.optimizers.keys() - {id(optimizer)})

    def add_to(self, log: StepLog) -> None:
        """Add the iteration, and its sample if one was due, to a log; waits for the device."""
        skipped = {key: outcome.skipped for key, outcome in self.outcomes.items()}
        loss = self.loss()
        *_, last = self.outcomes.values()
        found = [o.nonfinite for o in self.outcomes.values() if o.nonfinite is not None]
        nonfinite = tuple(chain(*found)) if found else None
        was_skipped = any(skipped.values())
        unzeroed = [n for n, held in self.added_to.items() if _stays(float(held), was_skipped)]
        step = Step(self.number, last.scale, was_skipped, loss, nonfinite, self.batch)
        events = [*self.events]
        if unzeroed and Counted(Event.UNZEROED) not in events:
            events.append(Counted(Event.UNZEROED))
        if not self.losses:
            events.append(Counted(Event.LOSSLESS))
        if 2 * sum(map(bool, self.overwritten)) > len(self.overwritten):
            events.append(Counted(Event.OVERWRITTEN))
        if unzeroed:
            events += [Counted(Event.UNZEROED, name) for name in unzeroed if name]
        if self.is_first or self.is_sampled:  # the graphs of no others are looked into
            events += self.scaled.events(loss)
        num_losses = max(self.num_losses, 1)
        if events or self.backward or self.cut is not None or num_losses > 1:
            backward = frozenset(self.backward)
            log.add(step, skipped, Observations(tuple(events), backward, self.cut, num_losses))
        else:
            log.add(step, skipped)
        if self.measured:
            seen = self.seen and replace(self.seen, unscaled=tuple(self.unscaled))
            fields = {**fields_of(self.measured.values()), **self.scaled.fields()}
            log.add_sample(loss, optimizers=seen, **fields)

    def loss(self) -> float | None:
        """The first loss that is not finite, else the latest loss."""
        value = None
        for loss in self.losses:
            value = float(loss.item())
            if not math.isfinite(value):
                break
        return value


def _graver(first: Any, second: Any) -> Any:
    """Of two losses the first that is not finite, else the larger; waits for no device."""
    both = [loss.values() if isinstance(loss, HostCopy) else loss for loss in (first, second)]
    first, second = both
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(first, torch.Tensor)
    if is_torch:
        second = second.to(first.device)
    is_kept = (abs(first) >= abs(second)) | (first - first != 0)  # Inf - Inf is NaN
    if torch is not None and is_torch:
        return torch.where(is_kept, first, second)
    return first if is_kept else second


def _stays(held: float, was_skipped: bool) -> bool:
    """Whether a magnitude that a gradient held is still in it; an Inf or a NaN makes it skip."""
    return held != 0 and (math.isfinite(held) or was_skipped)


class _Present(NamedTuple):
    """All iterations that are kept, in one object, so that no interrupt can split them."""

    waiting: list[Iteration]  # replaced, not changed: other threads read it
    latest: Iteration


class Iterations:
    """The present iteration, and the ended iterations that are not in the log yet.

    An interrupt may come anywhere, so each change is a single assignment that may be repeated. An
    iteration ends when the next one is appended. The log adds each number once. If an interrupt
    kept the scaler from announcing a step, the step is found in the scaler.

    Attributes:
        latest: the present iteration.
        waiting: the iterations that ended and may not be in the log yet.
    """

    # Each step asks for them a dozen times, so no Python function reads them.
    latest: Iteration = property(attrgetter("_present.latest"))  # type: ignore[assignment]
    waiting: list[Iteration] = property(attrgetter("_present.waiting"))  # type: ignore[assignment]

    def __init__(self, scaler: Any, log: StepLog, every: int) -> None:
        self._observed, self._log, self._every = scaler.observed, log, every
        self._first = log.counts.step + 1
        self._present = _Present([], self._new(self._first))
        latest = self._observed.last_steps()
        self._noted = {id(optimizer): outcome for optimizer, outcome in latest}

    def _new(self, number: int, *events: Counted) -> Iteration:
        is_due = is_sampled(number, self._every, before=self._first - 1)
        return Iteration(number, number == self._first, is_due, list(events))

    @property
    def ended(self) -> int:
        """The number of the latest iteration that ended."""
        return self.latest.number - 1

    def note(self, optimizer: object, outcome: StepOutcome) -> None:
        """Note a step of the latest iteration."""
        self.latest.optimizers[id(optimizer)] = optimizer
        self.latest.outcomes[id(optimizer)] = outcome

    def note_missed(self) -> None:
        """Note each step that an interrupt kept the scaler from announcing."""
        latest = self._observed.last_steps()
        for optimizer, outcome in latest:
            is_new = outcome is not self._noted.get(id(optimizer))
            if is_new and outcome.known_reason not in ("no_gradients", "disabled"):
                self.note(optimizer, outcome)
        self._noted = {id(optimizer): outcome for optimizer, outcome in latest}

    def note_call(self, event: Event, where: str = "") -> None:
        """Note a call that led to no step, if no step came before it.

        The first 1,000 are counted.
        """
        if self.latest.is_first and len(self.latest.events) < HISTORY_LENGTH:
            self.latest.note(event, where)
            self._log.note_early(self.latest.events)

    def end(self) -> None:
        """End the latest iteration; if no optimizer stepped, the next one takes its number."""
        latest = self.latest
        unread = [each for each in self.waiting if each.number > self._log.counts.step]
        if latest.outcomes:
            self._present = _Present([*unread, latest], self._new(latest.number + 1))
        else:
            unstepped = [Counted(Event.UNSTEPPED)] * latest.is_unscaled
            following = self._new(latest.number, *latest.events[:HISTORY_LENGTH], *unstepped)
            following.follows_unstepped = latest.is_unscaled
            self._present = _Present(unread, following)
            if unstepped and latest.is_first:
                self._log.note_early(self.latest.events)
