"""The iterations of an eager scaler, from the first loss to the log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._monitor.gradient_check import LateCheck
from gradscaler.diagnose._monitor.gradient_sample import GradientSample, fields_of, is_sampled
from gradscaler.diagnose._monitor.scaled_losses import ScaledLosses
from gradscaler.diagnose._monitor.step_log import Observations, StepLog
from gradscaler.diagnose._record.lines import Optimizers
from gradscaler.diagnose._record.step import Step
from gradscaler.outcome import StepOutcome


@dataclass
class Iteration:
    """One iteration of the training loop; optimizers are given by their ids."""

    number: int  # of the iteration's step, if an optimizer steps
    is_first: bool  # whether this is the first observed iteration
    is_sampled: bool
    calls: list[str]  # calls that suggest misuse; see Sample
    optimizers: dict[int, object] = field(default_factory=dict)  # optimizers that stepped
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)  # given to scale(), without their graphs
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
    added_to: dict[str, Tensor] = field(default_factory=dict)  # magnitudes, by optimizers' names
    checks: list[LateCheck] = field(default_factory=list)  # without a scaler, on a device

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
        step = Step(self.number, last.scale, was_skipped, loss, nonfinite)
        calls = *self.calls, *["unzeroed"] * bool(unzeroed), *["lossless"] * (not self.losses)
        calls = *calls, *(f"unzeroed {name}" for name in unzeroed)
        calls = *calls, *self.scaled.calls(loss)
        is_overwritten = 2 * sum(map(bool, self.overwritten)) > len(self.overwritten)
        calls = *calls, *["overwritten"] * is_overwritten
        num_losses = len(self.losses)
        has_any = calls or self.backward or self.cut is not None or num_losses > 1
        observed = Observations(calls, frozenset(self.backward), self.cut, max(num_losses, 1))
        log.add(step, skipped, *[observed] * bool(has_any))
        if self.measured:
            seen = self.seen and replace(self.seen, unscaled=tuple(self.unscaled))
            log.add_sample(loss, optimizers=seen, **fields_of(self.measured.values()))

    def loss(self) -> float | None:
        """The first loss that is not finite, else the latest loss."""
        value = None
        for loss in self.losses:
            value = float(loss.item())
            if not math.isfinite(value):
                break
        return value


def _stays(held: float, was_skipped: bool) -> bool:
    """Whether a magnitude that a gradient held is still in it; an Inf or a NaN makes it skip."""
    return held != 0 and (math.isfinite(held) or was_skipped)


class Iterations:
    """The present iteration, and the ended iterations that are not in the log yet.

    An interrupt may come anywhere, so each change is a single assignment that may be repeated. An
    iteration ends when the next one is appended. The log adds each number once. If an interrupt
    kept the scaler from announcing a step, the step is found in the scaler.
    """

    def __init__(self, scaler: Any, log: StepLog, every: int) -> None:
        self._scaler, self._log, self._every = scaler, log, every
        self._first = log.counts.step + 1
        self._all = [self._new(self._first)]  # replaced, not changed: other threads read it
        latest = scaler.observed.last_steps()
        self._noted = {id(optimizer): outcome for optimizer, outcome in latest}

    def _new(self, number: int, *calls: str) -> Iteration:
        is_due = is_sampled(number, self._every, before=self._first - 1)
        return Iteration(number, number == self._first, is_due, list(calls))

    @property
    def latest(self) -> Iteration:
        """The present iteration."""
        return self._all[-1]

    @property
    def ended(self) -> int:
        """The number of the latest iteration that ended."""
        return self._all[-1].number - 1

    @property
    def waiting(self) -> list[Iteration]:
        """The iterations that ended and may not be in the log yet."""
        return self._all[:-1]

    def note(self, optimizer: object, outcome: StepOutcome) -> None:
        """Note a step of the latest iteration."""
        self.latest.optimizers[id(optimizer)] = optimizer
        self.latest.outcomes[id(optimizer)] = outcome

    def note_missed(self) -> None:
        """Note each step that an interrupt kept the scaler from announcing."""
        latest = self._scaler.observed.last_steps()
        for optimizer, outcome in latest:
            is_new = outcome is not self._noted.get(id(optimizer))
            if is_new and outcome.known_reason not in ("no_gradients", "disabled"):
                self.note(optimizer, outcome)
        self._noted = {id(optimizer): outcome for optimizer, outcome in latest}

    def note_call(self, name: str) -> None:
        """Note a call that led to no step, if no step came before it; see ``Sample``."""
        if self.latest.is_first:
            self.latest.calls.append(name)
            self._log.note_calls(self.latest.calls)

    def end(self) -> None:
        """End the latest iteration; if no optimizer stepped, the next one takes its number."""
        latest = self.latest
        unread = [each for each in self.waiting if each.number > self._log.counts.step]
        if latest.outcomes:
            self._all = [*unread, latest, self._new(latest.number + 1)]
        else:
            unstepped = ["unstepped"] * latest.is_unscaled
            following = self._new(latest.number, *latest.calls, *unstepped)
            following.follows_unstepped = latest.is_unscaled
            self._all = [*unread, following]
            if unstepped and latest.is_first:
                self._log.note_calls(self.latest.calls)
