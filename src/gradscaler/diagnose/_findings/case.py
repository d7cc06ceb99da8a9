"""Steps that failed as one case: what became of them, and where the first Inf or NaN was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.failure import Failure
from gradscaler.diagnose._record.lines import BadStep
from gradscaler.diagnose._record.located import BadGradient, Located, Made, is_exact
from gradscaler.diagnose._record.step import Step


class Outcome(Enum):
    """What became of steps that failed, as clauses of a finding's cause.

    Attributes:
        of_forward: after an Inf or NaN in the forward pass.
        of_parameter: after a parameter that is not finite.
        of_loss: after a loss that is not finite.
        of_numbers: after numbers that left their dtype.
        of_gradient: after a gradient that is not finite.
    """

    IN_A_ROW = ("so {the_last}",)
    NOW_AND_THEN = (
        "so {some}",
        "and the loss was NaN or Inf in {bad} of {steps} steps",
        None,
        "and {become}",
    )
    APPLIED = (
        "so {this} was applied with gradients of Inf or NaN",
        None,
        None,
        "and {this} was applied with them",
        ", and {this} was applied with it",
    )
    LEFT_OUT = (
        "so the loss of {this} is {loss:g}, and no backward pass took it",
        None,
        "so no backward pass took it in {this}",
        "and {this} has a loss of {loss:g}",
    )
    # The gradient of a relu() may leave the loss's NaN out.
    FINITE = ("so the loss of {this} is {loss:g}, and its gradients are finite",)
    UNCHANGED = ("so {this} left the weights as they were",)  # by itself

    def __init__(
        self,
        of_forward: str,
        of_parameter: str | None = None,
        of_loss: str | None = None,
        of_numbers: str | None = None,
        of_gradient: str | None = None,
    ) -> None:
        plain = of_forward.removeprefix("so ")
        self.of_forward = of_forward
        self.of_parameter = of_parameter or of_forward
        self.of_loss = of_loss or of_forward
        self.of_numbers = of_numbers or f"and {plain}"
        self.of_gradient = of_gradient or f": {plain}"


@dataclass(frozen=True)
class Case:
    """Steps that failed.

    Attributes:
        evidence: the evidence about their run.
        outcome: what became of them.
        failures: the steps, the latest last; empty where single ones are not looked at.
        located: where the first Inf or NaN was; None if that was not seen.
        parameter: the name of a parameter or a buffer that is not finite; None if none is known.
        lost_eps: an optimizer's eps that is 0, also in its parameters' float16; None if none is.
    """

    evidence: Evidence
    outcome: Outcome
    failures: tuple[Failure, ...] = ()
    located: Located | None = None
    parameter: str | None = None
    lost_eps: float | None = None

    @property
    def last(self) -> Failure:
        """The latest step that failed."""
        return self.failures[-1]

    @property
    def is_skipped(self) -> bool:
        """Whether a loss scaler skipped the steps."""
        return self.outcome in (Outcome.IN_A_ROW, Outcome.NOW_AND_THEN)

    @property
    def past(self) -> Sequence[Step]:
        """The latest steps; before the failure, if a single step failed."""
        past = self.evidence.past
        return past if self.is_skipped else [step for step in past if step.step < self.last.step]

    @property
    def backward(self) -> BadGradient | None:
        """Where the backward pass made the first Inf or NaN; None if it is elsewhere."""
        return self.located if isinstance(self.located, BadGradient) else None

    @property
    def is_elsewhere(self) -> bool:
        """Whether this rank's gradients are finite in the latest step that was inspected."""
        inspected = [each.nonfinite for each in self.failures if each.nonfinite is not None]
        return self.evidence.world_size > 1 and inspected[-1:] == [()]

    @property
    def has_large_loss(self) -> bool:
        """Whether a loss is so large that its gradients overflow anyway."""
        return any(each.has_large_loss for each in self.failures)

    def with_numbers(self, clause: str) -> str:
        """A clause of the outcome, with the numbers of this case."""
        evidence = self.evidence
        last = self.failures[-1] if self.failures else None
        bad = evidence.bad_and_applied + evidence.bad_and_skipped
        the_last, become = f"the last {evidence.skips_in_a_row} steps were skipped", "are skipped"
        if not evidence.has_scaler:
            were = "was" if bad == 1 else "were"
            lost = f"{bad} of {evidence.steps} losses {were} NaN or Inf"
            the_last = (lost if bad else evidence.are_skipped) + evidence.no_step_since
            become = "are left out" if evidence.skipped else "are applied"
        return clause.format(
            the_last=the_last,
            some=evidence.are_skipped,
            steps=evidence.steps,
            become=f"steps {become}" if evidence.has_scaler else f"the steps {become}",
            bad=bad,
            this=f"{evidence.step_word} {last.step if last else evidence.steps}",
            loss=math.nan if last is None or last.loss is None else last.loss,
        )


def in_a_row(evidence: Evidence) -> Case:
    """The case of a long streak of skips."""
    failures = tuple(skip.failure for skip in evidence.skips)
    known = evidence.located, evidence.parameter, evidence.lost_eps
    return Case(evidence, Outcome.IN_A_ROW, failures, *known)


def now_and_then(
    evidence: Evidence, failures: Sequence[Failure] = (), located: Located | None = None
) -> Case:
    """The case of steps that failed among others."""
    known = located, evidence.parameter, evidence.lost_eps
    return Case(evidence, Outcome.NOW_AND_THEN, tuple(failures), *known)


def of_bad_step(bad: BadStep, evidence: Evidence) -> Case:
    """The case of a step that was applied although it failed, or of a loss that was left out."""
    outcome = Outcome.LEFT_OUT if bad.is_left_out else Outcome.APPLIED
    if bad.is_left_out and evidence.framework.is_recorded:
        outcome = Outcome.UNCHANGED
    elif bad.is_left_out and any(step.step == bad.step for step in evidence.past[-1:]):
        outcome = Outcome.IN_A_ROW  # its backward pass was made
    elif evidence.framework.is_recorded and not bad.nonfinite and bad.parameter is None:
        outcome = Outcome.FINITE
    known = _place(bad, evidence), bad.parameter, bad.lost_eps
    return Case(evidence, outcome, (bad.failure,), *known)


def _place(bad: BadStep, evidence: Evidence) -> Located | None:
    """The place of a bad step, or what a watch has shown since, if the step's own is not exact."""
    own, later = bad.located, evidence.watched
    if later is None or _is_whole(own):
        return own
    if isinstance(later, BadGradient):
        return later if own is None or isinstance(own, BadGradient) else own
    is_made = isinstance(later, Made) and later.parameter is None
    return later if is_made else own


def _is_whole(located: Located | None) -> bool:
    """Whether a place is that of the maker itself, as all of its inputs were seen."""
    if located is None:
        return False
    is_seen = isinstance(located, BadGradient) or not math.isnan(located.largest_input)
    return located.bad_parameter is not None or (is_exact(located) and is_seen)
