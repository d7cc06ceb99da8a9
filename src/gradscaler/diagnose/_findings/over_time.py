"""Findings from the skips and the scales of a whole run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from gradscaler.diagnose._findings.advice import (
    OF_INPUT_IN_FLOAT16,
    at_line,
    is_inf_in_float16,
    of_backward,
    of_forward,
    of_gradient,
    of_own,
    seen_in,
)
from gradscaler.diagnose._findings.detector import Phase, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.nan_skips import (
    are_mostly_nan,
    nan_skips,
    uncured,
)
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.located import BadGradient, Given, Located, Made
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import (
    BAD_IN_A_ROW,
    CLOSE_TO_OVERFLOW,
    FEW_EVENTS,
    HALF,
    MOST,
    MOST_SKIPPED,
    OUTLIER,
)

_CURED = "floor", "nan"  # verdicts that a lower scale proved wrong
_IN_INPUTS = "look in these batches for NaN or Inf in inputs and labels"
_WITHOUT_GRADIENT = (
    "look for NaN or Inf in {}, targets, masks and weights (0 / 0, std of one element)"
)
_IN_LOSSES = "an empty mask, a fully masked row, or a sum that overflows"
_LEAVE_OUT = (
    "look in these batches for outliers, and leave out, clip or normalise them (Huber's loss "
    "helps, too), or lower the weight of a term that only they add"
)
_FAILS_BACKWARD = (
    "what fails in the backward pass alone, such as the root or norm of 0 (equal rows), or a rare "
    "class with a large gradient"
)


@detector(Phase.FAILURE)
def data(evidence: Evidence) -> Finding | None:
    """Skips that a lower scale does not cure, or that happen at the smallest scale allowed."""
    if evidence.is_elsewhere:
        return None
    bad = [step for step in evidence.past if step.skipped and step.has_bad_loss]
    skips = bad or _of_large_losses(evidence) or unexplained(evidence)
    is_nan = not bad and are_mostly_nan(evidence)
    is_often = has_settled_and_skips(evidence) or _are_outliers(skips, evidence)
    is_often = is_often or (is_nan and evidence.scale is not None and evidence.scale < 1)
    if not _are_several(bad, evidence) and not is_often:
        return None
    lowest = evidence.min_scale
    is_lowest = lowest is not None and all(step.scale <= lowest for step in skips)
    located = evidence.watched
    if skips and not bad and not is_nan and is_lowest and not _seen_in(located, is_loss=False)[1]:
        return _at_floor(evidence, skips)
    count = max(len(skips), evidence.skipped)
    if bad:
        count = evidence.bad_and_skipped
        of_them = "each" if count == evidence.skipped else f"{count} of them"
        losses, action = f"{of_them} with a loss of {bad[-1].loss:g}", f"{_IN_INPUTS}, {_IN_LOSSES}"
        if isinstance(located, Given):
            action = _WITHOUT_GRADIENT.format("such rows" if located.rows else "these batches")
        if is_inf_in_float16(located):
            action = OF_INPUT_IN_FLOAT16
    else:
        losses, action = _losses_of(skips, evidence)
        alone = [skip for skip in uncured(evidence) if skip.step in {each.step for each in skips}]
        if 2 * len(alone) > len(skips):
            losses += f", and with NaN and no Inf in the gradient of {alone[-1].nan}"
    if is_nan:
        losses = f"with NaN and no Inf in the gradient of {nan_skips(evidence)[-1].nan}"
        action = of_backward(None)
    at, advice = _seen_in(located, is_loss=bool(bad))
    if advice is not None:
        is_of_few = _are_few(evidence.skipped, evidence) and not is_nan
        action = f"in these batches, {advice}" if is_of_few else advice
    now = _now(evidence, has_overflow=not bad and not is_nan)
    cause = f"{evidence.are_skipped}{when(skips, evidence)}, {losses}{at}{now}."
    return Finding(
        "data",
        f"{cause[0].upper()}{cause[1:]}",
        f"{action[0].upper()}{action[1:]}.",
        *place_of(located),
        tuple(step.step for step in skips[-FEW_EVENTS:]),
        count,
        is_certain=_are_several(bad, evidence) or (is_nan and len(skips) >= FEW_EVENTS),
    )


def _now(evidence: Evidence, has_overflow: bool) -> str:
    """A clause about the end of the run: the loss scale, or since when no step was taken."""
    if not evidence.has_scaler:
        return evidence.no_step_since
    is_told = has_overflow and evidence.scale is not None
    return f"; the loss scale is {evidence.scale:g} now" if is_told else ""


def _losses_of(skips: Sequence[Step], evidence: Evidence) -> tuple[str, str]:
    """A clause about the losses of skips, which are finite or not seen, and what to try."""
    own, others = _usual_losses(skips, evidence)
    finder = evidence.framework.finder
    fails_backward = _FAILS_BACKWARD + (finder and f": {finder} on one names it")
    if own is None:
        action = f"{_IN_INPUTS}, for outliers, and for {fails_backward}"
        return "and with losses that were not seen", action
    if others is None or abs(own) < OUTLIER * abs(others):
        return "with losses as usual", f"look in these batches for {fails_backward}"
    return f"whose loss is about {own:g} (elsewhere about {others:g})", _LEAVE_OUT


def _seen_in(located: Located | None, is_loss: bool) -> tuple[str, str | None]:
    """A clause that says where a watched step failed, or ``""``, and what to try, or None."""
    if located is None or located.operation is None:
        return "", None
    if is_loss:
        of_kind = of_forward if isinstance(located, Made) else of_backward
        return seen_in(located), None if isinstance(located, Given) else of_kind(located)
    advice = of_gradient(located) or of_own(located) if isinstance(located, BadGradient) else None
    return ("" if advice is None else at_line(located, "first seen in the gradient of")), advice


def _at_floor(evidence: Evidence, skips: Sequence[Step]) -> Finding:
    """The finding for skips at a scale that cannot fall further."""
    earlier = evidence.earlier
    return Finding(
        "floor",
        f"{len(skips)} of {evidence.steps} steps were skipped at a loss scale of "
        f"{skips[-1].scale:g}, the smallest that its policy allows.",
        "Allow a lower one (min_scale, or DynamicScale if it is fixed), or divide the loss (a mean "
        "in place of a sum, targets in larger units).",
        None if earlier is None else earlier.where,
        steps=tuple(step.step for step in skips[-FEW_EVENTS:]),
        count=len(skips),
    )


def _usual_losses(skips: Sequence[Step], evidence: Evidence) -> tuple[float | None, float | None]:
    """The median finite loss of some skips, and of the applied steps; None if not seen."""
    applied = (step for step in evidence.past if not step.skipped)
    own, others = (
        [step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)]
        for steps in (skips, applied)
    )
    return median(own) if own else None, median(others) if others else None


def _are_outliers(skips: Sequence[Step], evidence: Evidence) -> bool:
    """Whether skips with unusually large losses are too many to be an accident.

    Such skips stop once the scale has fallen far enough. It is then too small for other steps.
    """
    own, others = _usual_losses(skips, evidence)
    if own is None or others is None or not abs(own) >= OUTLIER * abs(others) > 0:
        return False
    return len(skips) > max(FEW_EVENTS, MOST_SKIPPED * evidence.steps)


def _of_large_losses(evidence: Evidence) -> list[Step]:
    """The skips since the first applied step, if all have large losses that no step applies.

    The scale may explain each of them: it grows until such a step comes, as with a term that is
    added in one of 16 steps.
    """
    past = _since_applied(evidence)
    skips = [step for step in past if step.skipped]
    _, usual = _usual_losses(skips, evidence)
    if usual is None or not _are_outliers(skips, evidence):
        return []
    are_large = [step.loss is None or step.loss >= OUTLIER * abs(usual) for step in past]
    return skips if are_large == [step.skipped for step in past] else []


def _since_applied(evidence: Evidence) -> Sequence[Step]:
    """The steps from the first one that was applied."""
    past = evidence.past
    first = next((i for i, step in enumerate(past) if not step.skipped), len(past))
    return past[first:]


def _are_few(count: int, evidence: Evidence) -> bool:
    """Whether steps are few enough, at most half of all, to look for a pattern in them."""
    return 2 * count <= evidence.steps


def place_of(located: Located | None) -> tuple[str | None, str | None]:
    """The module and the line of a located Inf or NaN; each is None if unknown."""
    return (None, None) if located is None else (located.module, located.line)


def _are_several(bad: Sequence[Step], evidence: Evidence) -> bool:
    """Whether batches whose loss is not finite are too many to be an accident."""
    if evidence.bad_and_skipped >= max(evidence.steps, FEW_EVENTS):
        return True
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(bad), 1) if b.step - a.step > 1)]
    events = len(starts) * bool(bad)
    if len(bad) - starts[-1] >= BAD_IN_A_ROW:
        return True
    return are_many(events, evidence.bad_and_skipped, evidence)


def are_many(events: int, count: int, evidence: Evidence) -> bool:
    """Whether so many events, with ``count`` steps in all, are too many to be an accident."""
    is_frequent = count > 2 * MOST_SKIPPED * evidence.steps
    return events >= FEW_EVENTS or (events == FEW_EVENTS - 1 and is_frequent)


@detector(Phase.SCALE, needs_scaler=True)
def lowered(evidence: Evidence) -> Finding | None:
    """A loss scale below 1."""
    if evidence.is_elsewhere:
        return None
    earlier, scale = evidence.earlier, evidence.scale
    if scale is None or scale >= 1 or (earlier is not None and earlier.verdict not in _CURED):
        return None
    if 2 * evidence.bad_and_skipped > evidence.skipped or are_mostly_nan(evidence):
        return None  # bad losses or NaN lowered the scale, not an overflow
    return Finding(
        "floor",
        f"The loss scale is {scale:g}: the gradients overflow at a scale of 1, and one below 1 "
        "cures it.",
        "The loss is too large for float16: divide it (a mean in place of a sum, targets in larger "
        "units); or start from this init_scale, which saves the skipped steps.",
        None if earlier is None else earlier.where,
        count=evidence.skipped,
        is_certain=False,
    )


@detector(Phase.SCALE)
def earlier(evidence: Evidence) -> Finding | None:
    """The finding of an earlier streak of skips, which has ended."""
    line = evidence.earlier
    if line is None or (
        line.verdict in _CURED and evidence.scale is not None and evidence.scale < 1
    ):
        return None
    what, _, action = line.text.partition(". ")
    return Finding(
        line.verdict,
        f"Up to step {line.step}: {what}; later steps were applied.",
        action,
        line.where,
        is_certain=False,
    )


def has_settled_and_skips(evidence: Evidence) -> bool:
    """Whether more than 1 % of the latest steps were skipped without an explanation."""
    past = evidence.past
    if not past:
        return evidence.has_many_skips
    late = past[len(past) // 2 :]
    found = {step.step for step in unexplained(evidence)}
    # Skips in a row are one event: the gradients have changed, and the scale settles again.
    count = sum(n >= late[0].step and n - 1 not in found for n in found)
    return count > max(FEW_EVENTS - 1, MOST_SKIPPED * len(late))


def unexplained(evidence: Evidence) -> list[Step]:
    """The skips since the first applied step that the loss scale does not explain.

    The scale explains a skip that undoes a growth of the scale. It also explains a skip while
    gradients are large: at the skip's scale, the nearest sample comes close to overflow. If the
    scale does not fall after such skips, as under hysteresis, it explains only a few of them. Large
    gradients do not explain NaN without Inf, and nothing explains it at the lowest scale.
    """
    past = _since_applied(evidence)
    found, growths = [], 0
    nan = {skip.step for skip in nan_skips(evidence)}
    alone = {skip.step for skip in uncured(evidence)}
    backed_off = _backed_off(past, evidence)
    num_close: Counter[float] = Counter()  # by scale
    for before, step in pairwise(past):
        growths += step.scale > before.scale
        if step.skipped and growths and step.step not in nan:
            growths -= 1
        elif step.skipped:
            has_inf = not step.has_bad_loss and step.step not in nan | alone
            is_close = has_inf and evidence.is_close_to_overflow(step, CLOSE_TO_OVERFLOW)
            num_close[step.scale] += is_close
            if has_inf and step.step in backed_off:
                continue
            if not is_close or num_close[step.scale] > FEW_EVENTS:
                found.append(step)
    return found


def _backed_off(past: Sequence[Step], evidence: Evidence) -> set[int]:
    """The steps left out after which a script's own loss scale fell, as the loss shows that has it.

    They are few where that scale settles, or grows and backs off.
    """
    if not evidence.is_scaled_by_hand or len(evidence.events.places(Event.BY_HAND)) < 2:
        return set()
    both = pairwise(past)
    found = {step.step for step, after in both if step.skipped and step.falls_to(after)}
    return set() if evidence.are_many_skips(len(found)) else found


def when(steps: Sequence[Step], evidence: Evidence) -> str:
    """A clause that says how steps follow one another; empty if there are too many or too few."""
    if not _are_few(len(steps), evidence):
        return ""
    numbers = [step.step for step in steps]
    firsts = [n for i, n in enumerate(numbers) if not i or n - numbers[i - 1] > 1]
    gaps = [after - before for before, after in pairwise(firsts)]
    if len(gaps) < 2:
        return ""
    (gap, count), *_ = Counter(gaps).most_common(1)
    bursts = "" if len(firsts) > 0.7 * len(numbers) else "in bursts "
    listed = ", ".join(map(str, firsts[-3:]))
    of_period = Counter(number % gap for number in firsts).most_common(1)[0][1]
    if gap > 1 and count >= HALF * len(gaps) and of_period >= MOST * len(firsts):
        return f", {bursts}every {gap} steps (such as {listed})"
    return f", {bursts}at irregular steps (such as {listed})"
