"""Findings from losses: they are not finite though steps are applied, or they explode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from gradscaler.diagnose._findings import gradient_values
from gradscaler.diagnose._findings.advice import at_line, of_operation, seen_in
from gradscaler.diagnose._findings.case import Case, now_and_then
from gradscaler.diagnose._findings.detector import Phase, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.optimizers import FROM_TARGETS, growth_of_rate
from gradscaler.diagnose._findings.over_time import are_many, place_of, when
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.located import Given, Made, MadeOutside
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import (
    EXPLODED,
    FAILS_OFTEN,
    FEW_EVENTS,
    LARGE_FROM_THE_START,
    LEAST_EXPLODED,
    LISTED,
    RAN_AWAY,
    RECENT,
    SOON,
    STILL_GROWS,
    WEIGHTS_GREW,
    WEIGHTS_GREW_A_LITTLE,
)


@detector(Phase.FAILURE)
def silent(evidence: Evidence) -> Finding | None:
    """Losses that are not finite in more applied steps than skipped ones."""
    count, num_caused = evidence.bad_and_applied, evidence.bad_and_skipped
    if evidence.is_elsewhere:  # another rank's gradients caused the skips, not these losses
        count, num_caused = count + num_caused, 0
    # One such loss does no harm: a mean of no elements is NaN, and its gradients are 0.
    if count <= num_caused or not are_many(count, count, evidence) or _has_left_range(evidence):
        return None
    steps = [
        step
        for step in evidence.past
        if step.has_bad_loss and (evidence.is_elsewhere or not step.skipped)
    ]
    loss = steps[-1].loss if steps else math.nan
    so = "no step is skipped for it" if evidence.is_elsewhere else "the steps are applied"
    if evidence.events.count(Event.UNCHANGED) >= count:
        so = "these steps left the weights as they were"
    if is_apart := evidence.events.place(Event.UNMOVED) == "apart":
        so = "it does not depend on the weights, whose gradients are exactly 0"
    how_often = "each step" if count == evidence.steps else f"{count} of {evidence.steps} steps"
    if count < evidence.steps:
        how_often += when(steps, evidence)
    located = evidence.watched
    at = seen_in(located)
    advice = of_operation(located) if isinstance(located, Made) else None
    if is_apart:
        action = FROM_TARGETS.removesuffix(".")
    elif advice is not None:
        action = advice
    elif isinstance(located, Given):
        action = "look for NaN or Inf in the batch, and in targets and terms of the loss"
    elif loss is not None and math.isinf(loss):
        action = (
            "compute the loss in float32 (outputs.float()) as a mean, and look for the logarithm "
            "of 0, as of a masked class under label smoothing: clamp it, or mask with a large "
            "finite number"
        )
    else:
        action = (
            "look for 0 * Inf and 0 / 0: the logarithm of a target of 0 (use kl_div or xlogy), "
            "label smoothing on a masked class, or a division by 0 elements (all labels are "
            "ignored)"
        )
    return Finding(
        "silent",
        f"The {'unscaled ' * evidence.has_scaler}loss is {loss:g} in {how_often}{at}, and {so}.",
        f"{action[0].upper()}{action[1:]}.",
        *place_of(located),
        tuple(step.step for step in steps[-LISTED:]),
        count,
    )


@detector(Phase.FAILURE)
def diverged(evidence: Evidence) -> Finding | None:
    """A loss or a norm of the weights that explodes, so that many steps are skipped."""
    return divergence(now_and_then(evidence))


def divergence(case: Case) -> Finding | None:
    """A loss or a norm of the weights that explodes before steps that fail."""
    evidence, has_failed = case.evidence, bool(case.failures)
    past = evidence.of_one_turn(case.past, case.last.step if has_failed else None)
    loss = explosion(past, in_streak=has_failed) or _explosion_at_once(case, past)
    weights = _growth(case)
    if weights is None and (loss is None or _is_in_another_module(case)):
        return None  # the trained weights stand; those of a teacher may have grown
    is_of_failures = has_failed or _fails_often(evidence) or _has_left_range(evidence)
    if not (is_of_failures or (weights and _has_not_recovered(evidence))):
        return None  # the loss may just follow its targets
    grew = []
    if loss is not None:
        first, last = (f"{step.loss:g} (step {step.step})" for step in loss)
        grew.append(f"loss grew from {first} to {last}")
    rate = growth_of_rate(evidence)
    if weights is not None and not (rate and grew):
        verb = "" if loss else " grew"
        grew.append(f"weights' norm{verb} from {weights[0]:g} to {weights[1]:g}")
    where, at = case.parameter if case.is_skipped else None, ""  # else it is an effect
    shown = where
    if where is None and isinstance(case.located, Made):
        where, shown = case.located.module or None, case.located.spoken_module
        at = at_line(case.located)
    became = f"left {evidence.range}" if evidence.range else "became Inf or NaN"
    if not case.is_skipped and loss is not None and _has_passed(loss[1], past):
        return None
    first_bad = f" (first in {shown}{at})" if shown else ""
    at_step = evidence.steps if loss is None else loss[1].step
    known = _rate_up_to(at_step, evidence)
    lower = f"lower the learning rate{known or ' or warm it up'}"
    if rate:
        lower = "lower the learning rate or what raises it"
    if loss is not None and (loss[1].loss or 0.0) < 0:
        lower = "look for a term with the wrong sign, lower the learning rate"
    end = case.with_numbers(case.outcome.of_numbers)
    is_early = loss is not None and loss[1].step <= SOON  # no checkpoint was written yet
    back = "" if is_early else "go back to an earlier checkpoint, "
    at_any = "It diverges at any scale: " if evidence.has_scaler else ""
    action = f"{at_any}{back}{lower}, and clip gradients."
    action = f"{action[0].upper()}{action[1:]}"
    if loss is not None and loss[0].step == 1 and _size(loss[0]) >= LARGE_FROM_THE_START:
        action = (
            "The loss is too large from the start: look at inputs and targets that are not "
            "normalized, and at the first weights (their initialization), before the learning rate."
        )
    return Finding(
        "divergence",
        f"The {' and the '.join(grew)}{rate}, until numbers {became}{first_bad} {end}.",
        action,
        where,
        count=evidence.skips_in_a_row,
    )


def _rate_up_to(step: int, evidence: Evidence) -> str:
    """The largest rate up to a step, and its optimizer's line: " of 0.1 at train.py:9", if known.

    Where optimizers take turns, nobody knows whose step failed.
    """
    rates = [] if evidence.takes_turns else [rate for at, rate in evidence.rates if at <= step]
    return f" of {max(rates):g}{evidence.at('optimizer')}" if rates else ""


def _growth(case: Case) -> tuple[float, float] | None:
    """The norm of the weights before and now, if it grew much; all are known in a streak alone."""
    weights = case.evidence.weights
    if weights is None and case.is_skipped and case.evidence.optimizers is not None:
        weights = case.evidence.optimizers.weights
    if weights is None or not 0 < WEIGHTS_GREW * weights[0] <= weights[1] < math.inf:
        return None
    return weights


def _has_left_range(evidence: Evidence) -> bool:
    """Whether the latest loss is Inf or NaN, and the finite ones before had grown up to there."""
    past = evidence.of_one_turn(evidence.past)
    finite = [step for step in past if _is_finite(step.loss)]
    if len(finite) < 2 or not evidence.past[-1].has_bad_loss:
        return False
    first, (before, last) = finite[0], finite[-2:]
    return 0 < RAN_AWAY * _size(first) <= _size(last) and _size(before) < _size(last)


def _fails_often(evidence: Evidence) -> bool:
    """Whether many of the latest steps were skipped or have a loss that is not finite."""
    latest = evidence.past[-RECENT:]
    return sum(step.skipped or step.has_bad_loss for step in latest) > FAILS_OFTEN * len(latest)


def _has_not_recovered(evidence: Evidence) -> bool:
    """Whether many steps in a row were skipped, and the latest losses are above the first.

    A loss that follows its targets has a skip now and then, as the scale falls with its growth.
    """
    first = evidence.first and evidence.first.loss
    latest = [step.loss or 0.0 for step in evidence.past[-RECENT:] if _is_finite(step.loss)]
    skips = [step.step for step in evidence.past if step.skipped]
    if first is None or not latest or len(skips) <= FEW_EVENTS:
        return False
    return len(skips) > FAILS_OFTEN * (skips[-1] - skips[0] + 1) and median(latest) > first


def _has_passed(peak: Step, past: Sequence[Step]) -> bool:
    """Whether the largest loss was a spike, as finite ones follow."""
    after = (step.step > peak.step and _is_finite(step.loss) for step in past)
    return sum(after) >= SOON


def _is_in_another_module(case: Case) -> bool:
    """Whether the first Inf or NaN was made in a module that is not the model's."""
    located = case.located or case.evidence.watched
    return isinstance(located, MadeOutside) and bool(located.type)


@detector(Phase.FAILURE)
def ran_away(evidence: Evidence) -> Finding | None:
    """A loss and weights that grow, stay finite and do not come back.

    A script that changes its loss is not meant. Its loss grows in one step, long before the weights
    do.
    """
    first, weights = evidence.first, evidence.optimizers and evidence.optimizers.weights
    losses = [step for step in evidence.past if _is_finite(step.loss)]
    if first is None or first.loss is None or not 0 < _size(first) < math.inf or not weights:
        return None
    most = max(RAN_AWAY * _size(first), LEAST_EXPLODED)  # one of centred advantages is near 0
    if losses and (losses[-1].loss or 0) < first.loss:  # as a log density may, from one near 0
        most = max(most, RAN_AWAY)
    low = [place for place, step in enumerate(losses) if _size(step) < most]
    start = low[-1] + 1 if low else 0
    since, before = losses[start:], losses[max(start - RECENT, 0) : start]
    # Weights that grow a little are enough if the loss is far from all that can be meant.
    grew = WEIGHTS_GREW_A_LITTLE if since and _size(since[-1]) > RAN_AWAY * most else WEIGHTS_GREW
    if len(since) < RECENT or not 0 < grew * weights[0] <= weights[1]:
        return None
    is_sudden = bool(before) and _size(since[0]) > EXPLODED * max(map(_size, before))
    if is_sudden and since[0].step > SOON and not growth_of_rate(evidence):
        return None
    last, middle = since[-1], since[len(since) // 2]
    if (last.loss or 0.0) < 0 and _size(last) < STILL_GROWS * _size(middle):
        return None  # it comes to an end
    action = (
        "Go back to an earlier checkpoint, lower the learning rate or warm it up, and clip "
        "gradients; look for a loss without a lower bound, or with the wrong sign."
    )
    if (last.loss or 0.0) < 0:
        action = (
            "Look for a loss without a lower bound, or a term with the wrong sign; else lower the "
            "learning rate, and clip gradients. Go back to an earlier checkpoint."
        )
    return Finding(
        "divergence",
        f"The loss went from {first.loss:g} to {last.loss:g} (step {last.step}) and the weights' "
        f"norm from {weights[0]:g} to {weights[1]:g}{growth_of_rate(evidence)}, and neither comes "
        "back.",
        action,
        count=len(since),
        is_certain=False,
    )


@detector(Phase.FAILURE)
def died(evidence: Evidence) -> Finding | None:
    """A loss that exploded and left gradients of exactly 0, as a step that is too large does."""
    cut, first = gradient_values.cut_off(evidence), evidence.first
    weights = evidence.optimizers and evidence.optimizers.weights
    if not weights or weights[1] < WEIGHTS_GREW_A_LITTLE * weights[0]:
        return None  # no step was large
    is_ended = not gradient_values.ENDS_UNITS.isdisjoint(evidence.cut.values())
    dead = cut if is_ended and cut is not None else gradient_values.dead(evidence)
    losses = [step for step in evidence.past if _is_finite(step.loss)]
    if dead is None or first is None or not _is_finite(first.loss) or not losses:
        return None
    peak = max(losses, key=_size)
    factor = EXPLODED if peak.step <= first.step + SOON else RAN_AWAY
    if not 0 < factor * _size(first) <= _size(peak):
        return None
    return Finding(
        "divergence",
        f"The loss grew from {first.loss:g} (step {first.step}) to {peak.loss:g} (step "
        f"{peak.step}){growth_of_rate(evidence)}. {dead.cause}",
        "Lower the learning rate or warm it up, and clip gradients: a step that is too large left "
        "units that are always off.",
        dead.where,
        count=dead.count,
    )


def explosion(past: Sequence[Step], in_streak: bool) -> tuple[Step, Step] | None:
    """A step with the usual loss and one with the exploded loss; None if no loss exploded.

    In a streak of skips, the losses of skipped steps count too.
    """
    end = len(past)
    while end and in_streak and past[end - 1].skipped:
        end -= 1
    seen = [step for step in past[:end] if not step.skipped and _is_finite(step.loss)]
    late = seen[-RECENT:] + [step for step in past[end:] if _is_finite(step.loss)]
    if not seen:
        return None
    usual = sorted(seen[: -(len(seen) // 2) or None], key=_size)
    base = usual[len(usual) // 2]
    if in_streak:
        peak = max(late, key=_size)
    else:
        latest = sorted(late[-RECENT // 2 :], key=_size)
        peak = latest[len(latest) // 2]
    usually = max(_size(base), _size(seen[0]))
    if peak.step <= base.step or not 0 < EXPLODED * usually < _size(peak):
        return None  # a usual loss of 0 is nothing to compare with
    return base, peak


def _explosion_at_once(case: Case, past: Sequence[Step]) -> tuple[Step, Step] | None:
    """The first step and the largest later loss, if the loss exploded in a few steps and stays.

    In these, the large loss of a bad step is rather that of a too large step than of a bad batch.
    """
    seen = [step for step in past if _is_finite(step.loss)]
    if not case.is_skipped and case.last.step <= SOON and _is_finite(case.last.loss):
        seen.append(Step(case.last.step, 1.0, skipped=False, loss=case.last.loss))
    later = seen[min(SOON, len(seen) // 2) :]
    if len(seen) < 2:
        return None
    least = max(EXPLODED * _size(seen[0]), LEAST_EXPLODED)
    peak = max(later, key=_size)
    is_applied = not all(step.skipped for step in later)  # else the scale may settle yet
    return (seen[0], peak) if is_applied and min(map(_size, later)) > least else None


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _size(step: Step) -> float:
    return abs(step.loss or 0.0)
