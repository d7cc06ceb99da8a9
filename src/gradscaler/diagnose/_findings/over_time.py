"""What the steps of a run say one after another: their losses, their skips and their scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from gradscaler.diagnose._findings.advice import (
    at_line,
    of_backward,
    of_forward,
    of_gradient,
    of_operation,
)
from gradscaler.diagnose._findings.evidence import Evidence, Past
from gradscaler.diagnose._findings.finding import Finding
from gradscaler.diagnose._locate.located import Located

_EXPLODED = 50.0  # times the loss before
_GREW = 10.0  # times the norm of the first weights
_RECENT = 20  # steps
_FEW = 3  # skips that prove nothing
_CURED = "floor", "nan"  # verdicts that a lower scale proved wrong
_MOST_SKIPPED = 0.01  # of the steps, once the scale has settled
_OFTEN = 0.3  # of the latest steps, which a training that diverges skips
_CLOSE = 2.0**-5  # of the largest number: gradients of one step may be that much larger
_JUMPED = 4.0  # times the scale of the run before


def silent(evidence: Evidence) -> Finding | None:
    """Losses that are not finite, in more steps that were applied than skipped."""
    count, num_caused = evidence.bad_and_applied, evidence.bad_and_skipped
    is_elsewhere = evidence.world_size > 1 and evidence.is_finite_here
    if is_elsewhere:  # these losses caused no skip: another rank's gradients did
        count, num_caused = count + num_caused, 0
    if count <= num_caused:
        return None
    steps = [step for step in evidence.past if step.is_bad and (is_elsewhere or not step.skipped)]
    loss = steps[-1].loss if steps else math.nan
    so = "no step is skipped for it" if is_elsewhere else "the steps are applied"
    how_often = "each step" if count == evidence.steps else f"{count} of {evidence.steps} steps"
    if count < evidence.steps:
        how_often += when(steps)
    found = evidence.watched
    at = at_line(found, ", first seen in")
    advice = None if found is None or found.kind != "forward" else of_operation(found)
    if advice is not None:
        action = advice
    elif loss is not None and math.isinf(loss):
        action = (
            "compute the loss in float32 (outputs.float()) as a mean, and mask a class with a "
            "large finite number, not -inf: label smoothing takes its logarithm"
        )
    else:
        action = (
            "look for 0 * Inf and 0 / 0: the logarithm of a target of 0 (use kl_div or xlogy), "
            "label smoothing on a masked class, or a division by 0 elements (all labels are "
            "ignored)"
        )
    return Finding(
        "silent",
        f"The unscaled loss is {loss:g} in {how_often}{at}, and the gradients are finite, so {so}.",
        f"{action[0].upper()}{action[1:]}.",
        found.module if found is not None else None,
        found.line if found is not None else None,
        tuple(step.step for step in steps[-_FEW:]),
        count,
    )


def diverged(evidence: Evidence) -> Finding | None:
    """A loss that explodes, if steps are skipped for it; ``past`` ends with a streak or not."""
    loss = explosion(evidence.past, in_streak=bool(evidence.skips))
    weights = evidence.weights if _has_grown(evidence.weights) else None
    if loss is None and weights is None:
        return None
    if not evidence.skips and not _fails_often(evidence.past[-_RECENT:]):
        return None  # a loss may grow as its targets do
    grew = []
    if loss is not None:
        first, last = loss
        grew.append(
            f"The loss grew from {first.loss:g} (step {first.step}) to {last.loss:g} "
            f"(step {last.step})"
        )
    if weights is not None:
        the = "and the" if loss else "The"
        grew.append(f"{the} weights' norm from {weights[0]:g} to {weights[1]:g}")
        if not loss:
            grew = [f"The weights' norm grew from {weights[0]:g} to {weights[1]:g}"]
    where, at = evidence.parameter, ""
    if where is None and evidence.located is not None and evidence.located.kind == "forward":
        where = evidence.located.module or where
        at = at_line(evidence.located)
    skips = "steps are skipped"
    if evidence.skips:
        skips = f"the last {evidence.skips_in_a_row} steps were skipped"
    first_bad = f" (first in {where}{at})" if where else ""
    return Finding(
        "divergence",
        f"{' '.join(grew)}, until numbers left float16{first_bad} and {skips}.",
        "It diverges at any scale: go back to an earlier checkpoint, lower the learning rate "
        "or warm it up, and clip the gradients.",
        where,
        count=evidence.skips_in_a_row,
    )


def _fails_often(steps: Sequence[Past]) -> bool:
    return sum(step.skipped or step.is_bad for step in steps) > _OFTEN * len(steps)


def _has_grown(weights: tuple[float, float] | None) -> bool:
    return weights is not None and 0 < _GREW * weights[0] <= weights[1] < math.inf


def explosion(past: Sequence[Past], in_streak: bool) -> tuple[Past, Past] | None:
    """A step with the usual loss, and one with the exploded loss, if it has exploded.

    In a streak of skips, the losses of skipped steps count too.
    """
    end = len(past)
    while end and in_streak and past[end - 1].skipped:
        end -= 1
    seen = [step for step in past[:end] if not step.skipped and _is_finite(step.loss)]
    late = seen[-_RECENT:] + [step for step in past[end:] if _is_finite(step.loss)]
    if not seen:
        return None
    usual = sorted(seen[: -(len(seen) // 2) or None], key=_size)
    base = usual[len(usual) // 2]
    if in_streak:
        peak = max(late, key=_size)
    else:
        latest = sorted(late[-_RECENT // 2 :], key=_size)
        peak = latest[len(latest) // 2]
    if peak.step <= base.step or _size(peak) < _EXPLODED * max(_size(base), _size(seen[0])):
        return None
    return base, peak


def data(evidence: Evidence) -> Finding | None:
    """Skips that no lower scale cures."""
    if evidence.world_size > 1 and evidence.is_finite_here:
        return None
    bad = [step for step in evidence.past if step.skipped and step.is_bad]
    if not _are_several(bad, evidence) and not has_settled_and_skips(evidence):
        return None
    skips = bad or unexplained(evidence)
    if skips and all(_is_at_floor(step, evidence) for step in skips) and not bad:
        return None
    were = "was" if evidence.skipped == 1 else "were"
    text = f"{evidence.skipped} of {evidence.steps} steps {were} skipped{when(skips)}"
    describe = _of_bad_losses if bad else _of_bad_gradients
    return describe(evidence, skips, text)


def _of_bad_losses(evidence: Evidence, bad: Sequence[Past], text: str) -> Finding:
    found, count = evidence.watched, evidence.bad_and_skipped
    these = "each" if count == evidence.skipped else f"{count} of them"
    action = (
        "Look in these batches for NaN or Inf in inputs and labels, an empty mask, a fully masked "
        "row, or a sum too long for float16."
    )
    if found is not None and found.operation is not None and found.kind != "input":
        of_kind = of_forward if found.kind == "forward" else of_backward
        action = f"In these batches, {of_kind(found)}."
    return Finding(
        "data",
        f"{text}, {these} with a loss of {bad[-1].loss:g}{at_line(found, ', first seen in')}.",
        action,
        *_place_of(found),
        tuple(step.step for step in bad[-_FEW:]),
        count,
        is_certain=len(bad) >= _FEW,
    )


def _of_bad_gradients(evidence: Evidence, skips: Sequence[Past], text: str) -> Finding:
    """Skips whose loss was finite, or was not seen."""
    found, named = evidence.watched, ""
    if found is not None and found.kind == "backward":
        named = at_line(found, ", first seen in the gradient of")
    settled = f"{text} after the scale had settled{named}"
    now = "" if evidence.scale is None else f"; the loss scale is {evidence.scale:g} now"
    own = [step.loss for step in skips if step.loss is not None]
    applied = [step.loss for step in evidence.past if not step.skipped and step.loss is not None]
    others = [loss for loss in applied if math.isfinite(loss)]
    usual = f" (elsewhere about {median(others):g})" if others else ""
    if named and found is not None and (advice := of_gradient(found)) is not None:
        cause = f"{settled}, though their loss is finite."
        action = f"In these batches, {advice}."
    elif own and others and median(map(abs, own)) >= 10 * median(map(abs, others)):
        cause = f"{text}, whose loss is about {median(own):g}{usual}{now}."
        action = (
            "Look at these batches for outliers in inputs and labels, and leave out, clip or "
            "normalise them; a loss that grows less for large errors (Huber's) helps too."
        )
    elif own:
        cause = f"{settled}, though their loss is like that of other steps{usual}{now}."
        action = (
            "Look at these batches for what makes the backward pass alone fail, such as the root "
            "or norm of 0 where two rows are equal, or a rare class or long sequence whose "
            "gradient is large: locate() on one of them names it."
        )
    else:
        cause = f"{settled}{now}, and their losses were not seen."
        action = (
            "Look at these batches for Inf and NaN in inputs, labels and masks, for outliers, and "
            "for what makes the backward pass alone fail, such as the root or norm of 0: locate() "
            "on one of them names it."
        )
    steps = tuple(step.step for step in skips[-_FEW:])
    count = max(len(skips), evidence.skipped)
    return Finding("data", cause, action, *_place_of(found), steps, count, is_certain=False)


def _place_of(found: Located | None) -> tuple[str | None, str | None]:
    """The module and the line of what a watched step showed."""
    return (None, None) if found is None else (found.module, found.line)


def _are_several(bad: Sequence[Past], evidence: Evidence) -> bool:
    """Whether batches whose loss is not finite are more than an accident."""
    if evidence.bad_and_skipped >= max(evidence.steps, _FEW):
        return True
    events = sum(after.step - before.step > 1 for before, after in pairwise(bad)) + bool(bad)
    is_frequent = evidence.bad_and_skipped > 2 * _MOST_SKIPPED * evidence.steps
    return events >= _FEW or (events == _FEW - 1 and is_frequent)


def floor(evidence: Evidence) -> Finding | None:
    """A scale that may not fall further, and at which steps are skipped."""
    if evidence.world_size > 1 and evidence.is_finite_here:
        return None
    earlier = evidence.earlier
    skips = unexplained(evidence)
    if (
        has_settled_and_skips(evidence)
        and skips
        and not any(step.is_bad for step in skips)
        and all(_is_at_floor(step, evidence) for step in skips)
    ):
        return Finding(
            "floor",
            f"{len(skips)} of {evidence.steps} steps were skipped at a loss scale of "
            f"{skips[-1].scale:g}, the smallest that its policy allows.",
            "Allow a lower one (min_scale, or a policy that moves it), or make the loss smaller: a "
            "mean in place of a sum, targets in larger units.",
            None if earlier is None else earlier.where,
            steps=tuple(step.step for step in skips[-_FEW:]),
            count=len(skips),
        )
    return None


def lowered(evidence: Evidence) -> Finding | None:
    """A scale below 1."""
    if evidence.world_size > 1 and evidence.is_finite_here:
        return None
    earlier, scale = evidence.earlier, evidence.scale
    if scale is None or scale >= 1 or (earlier is not None and earlier.verdict not in _CURED):
        return None
    if 2 * evidence.bad_and_skipped > evidence.skipped:  # it has sunk for no gradient
        return None
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


def _is_at_floor(step: Past, evidence: Evidence) -> bool:
    return evidence.min_scale is not None and step.scale <= evidence.min_scale


def earlier(evidence: Evidence) -> Finding | None:
    """What was found in an earlier streak of skips."""
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


def restarted(evidence: Evidence) -> Finding | None:
    """A run that goes on where another ended, at another scale."""
    before, first = evidence.before, evidence.first
    load = (
        "Save scaler.state_dict() with the model and the optimizer, and load it where they are "
        "loaded."
    )
    if evidence.calls.get("resumed") and first is not None and first.skipped:
        return Finding(
            "restart",
            "The optimizer goes on with the state of an earlier run, and the scaler starts anew, "
            f"from a loss scale of {first.scale:g} that overflows in its first step, so the "
            "scaler's state was not loaded.",
            load,
            steps=(first.step,),
        )
    if before is None or first is None or first.loss is None:
        return None
    if not (first.scale >= _JUMPED * before.scale or first.scale * _JUMPED <= before.scale):
        return None
    improved = abs(before.first_loss - before.last_loss)
    if not abs(first.loss - before.last_loss) < improved / 2:  # it is another training
        return None
    return Finding(
        "restart",
        f"The run before ended at a loss scale of {before.scale:g}, and this one continues its "
        f"training from {first.scale:g} in step {first.step}, so the scaler's state was not "
        "loaded.",
        load,
        steps=(first.step,),
    )


def has_settled_and_skips(evidence: Evidence) -> bool:
    """Whether more than 1 % of the latest steps were skipped, and nothing explains it."""
    past = evidence.past
    if not past:
        return evidence.has_many_skips
    late = past[len(past) // 2 :]
    found = {step.step for step in unexplained(evidence)}
    # Skips in a row are one event: what the gradients are like has changed, and the scale settles.
    count = sum(n >= late[0].step and n - 1 not in found for n in found)
    return count > max(_FEW - 1, _MOST_SKIPPED * len(late))


def unexplained(evidence: Evidence) -> list[Past]:
    """The skips since the first step that was applied, but for those that a scale explains.

    Those undo a growth of the scale, or come as gradients grow: the samples show some that are
    close to the largest number at the scale of the skip.
    """
    past = evidence.past
    first = next((i for i, step in enumerate(past) if not step.skipped), len(past))
    found, growths = [], 0
    for before, step in pairwise(past[first:]):
        growths += step.scale > before.scale
        if step.skipped and growths:
            growths -= 1
        elif step.skipped and (step.is_bad or not evidence.is_close_to_overflow(step, _CLOSE)):
            found.append(step)
    return found


def when(skips: Iterable[Past]) -> str:
    """How steps follow one another, if that has a pattern."""
    numbers = [step.step for step in skips]
    firsts = [n for i, n in enumerate(numbers) if not i or n - numbers[i - 1] > 1]
    gaps = [after - before for before, after in pairwise(firsts)]
    if len(gaps) < 2:
        return ""
    (gap, count), *_ = Counter(gaps).most_common(1)
    bursts = "" if len(firsts) > 0.7 * len(numbers) else "in bursts "
    listed = ", ".join(map(str, firsts[-3:]))
    if gap > 1 and count >= 0.6 * len(gaps):
        return f", {bursts}every {gap} steps (such as {listed})"
    return f", {bursts}at irregular steps (such as {listed})"


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _size(step: Past) -> float:
    return abs(step.loss or 0.0)
