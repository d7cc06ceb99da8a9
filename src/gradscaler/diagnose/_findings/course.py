"""What the steps of a run say one after another: their losses, their skips and their scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from gradscaler.diagnose._findings.advice import at_line
from gradscaler.diagnose._findings.evidence import Evidence, Past, Verdict

_EXPLODED = 50.0  # times the loss before
_GREW = 10.0  # times the norm of the first weights
_RECENT = 20  # steps
_FEW = 3  # skips that prove nothing
_CURED = "floor", "nan"  # verdicts that a lower scale proved wrong
_MOST_SKIPPED = 0.01  # of the steps, once the scale has settled


def silent(evidence: Evidence) -> Verdict | None:
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
        how_often += _when(steps)
    at = at_line(evidence.watched, ", first seen in")
    if loss is not None and math.isinf(loss):
        try_ = (
            "It is larger than float16 can hold, or holds the logarithm of 0, as where label "
            "smoothing meets a masked class of -inf: compute the loss in float32 (outputs.float()) "
            "as a mean, and mask a class with a large finite number"
        )
    else:
        try_ = (
            "Look for 0 * Inf and 0 / 0 in what has no gradient: the logarithm of a target that "
            "is 0 (use kl_div or xlogy), label smoothing on a masked class of -inf, a mean over no "
            "element (a division by 0, as where all labels are ignored)"
        )
    return Verdict(
        "silent",
        f"The unscaled loss is {loss:g} in {how_often}{at}, and the gradients are finite, so "
        f"{so} and nothing else tells that the loss is not what it should be. "
        f"{try_}.",
    )


def diverged(evidence: Evidence) -> Verdict | None:
    """A loss that explodes, if steps are skipped for it; ``past`` ends with a streak or not."""
    loss = explosion(evidence.past, in_streak=bool(evidence.skips))
    weights = evidence.weights if _has_grown(evidence.weights) else None
    if loss is None and weights is None:
        return None
    if not evidence.skips and not has_settled_and_skips(evidence):
        return None
    grew = []
    if loss is not None:
        first, last = loss
        grew.append(
            f"The loss grew from {first.loss:g} in step {first.step} to {last.loss:g} in "
            f"step {last.step}"
        )
    if weights is not None:
        the = "and the" if loss else "The"
        grew.append(f"{the} weights grew from a norm of {weights[0]:g} at first to {weights[1]:g}")
    where, at = evidence.parameter, ""
    if where is None and evidence.located is not None and evidence.located.kind == "forward":
        where = evidence.located.module or where
        at = at_line(evidence.located)
    skips = "steps are skipped"
    if evidence.skips:
        skips = f"the last {evidence.skips_in_a_row} steps in a row were skipped"
    first_bad = f" (first in {where}{at})" if where else ""
    return Verdict(
        "divergence",
        f"{' '.join(grew)}, before numbers left the range of "
        f"float16{first_bad} and {skips}. The training diverges, at any loss "
        "scale: go back to an earlier checkpoint, lower the learning rate or warm it up, and clip "
        "the norm of the gradients.",
        where,
    )


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


def data(evidence: Evidence) -> Verdict | None:
    """Skips that no lower scale cures."""
    if evidence.world_size > 1 and evidence.is_finite_here:
        return None
    bad = [step for step in evidence.past if step.skipped and step.is_bad]
    skips = bad or unexplained(evidence.past)
    if not evidence.bad_and_skipped and not has_settled_and_skips(evidence):
        return None
    were = "was" if evidence.skipped == 1 else "were"
    text = f"{evidence.skipped} of {evidence.steps} steps {were} skipped{_when(skips)}"
    losses = [step.loss for step in evidence.past if not step.skipped and _is_finite(step.loss)]
    usual = f" (that of other steps is about {median(losses):g})" if losses else ""  # type: ignore[type-var]
    own = [step.loss for step in skips if step.loss is not None]
    now = "" if evidence.scale is None else f"; the loss scale is {evidence.scale:g} now"
    at = at_line(evidence.watched, ", first seen in")
    if bad or not skips:
        loss = f"{own[-1]:g}" if own else "NaN or Inf"
        count = evidence.bad_and_skipped
        these = "all of them" if count == evidence.skipped else f"{count} of them"
        return Verdict(
            "data",
            f"{text}, in {these} because the loss itself was {loss}{at}{usual}{now}. Look at "
            "the batches of these steps, and leave out or repair what is wrong before the forward "
            "pass: NaN or Inf in inputs and labels, an empty batch or mask (0 / 0), a sequence "
            "that is masked entirely, a class without weight, a sequence too long for a sum in "
            "float16.",
        )
    if own and losses and median(map(abs, own)) >= 10 * median(map(abs, losses)):  # type: ignore[arg-type]
        return Verdict(
            "data",
            f"{text}, whose loss is about {median(own):g}{usual}{now}. Look at the batches of "
            "these steps for outliers in inputs and labels, and leave out, clip or normalise them; "
            "a loss that grows less for large errors (Huber's) helps too.",
        )
    if not own:
        return Verdict(
            "data",
            f"{text} after the scale had settled{now}, and their losses were not seen. Look at the "
            "batches of these steps for Inf and NaN in inputs, labels and masks, for outliers, and "
            "for what makes the backward pass alone fail, such as the square root or norm of 0: "
            "locate() on one of them names it.",
        )
    return Verdict(
        "data",
        f"{text} after the scale had settled, though their loss is like that of other steps{usual}"
        f"{now}. Look at the batches of these steps for what makes the backward pass alone fail, "
        "such as the square root or norm of 0 where two rows are equal, or a rare class or long "
        "sequence whose gradient is large: locate() on one of them names it.",
    )


def lowered(evidence: Evidence) -> Verdict | None:
    """An earlier verdict, or a scale below 1."""
    earlier, scale = evidence.earlier, evidence.scale
    if scale is not None and scale < 1 and (earlier is None or earlier.verdict in _CURED):
        if evidence.world_size > 1 and evidence.is_finite_here:
            return None
        return Verdict(
            "floor",
            f"The loss scale is {scale:g}: the gradients overflow at a scale of 1, and one below 1 "
            "cures it. The loss is too large for float16: divide it (a mean in place of a sum, "
            "targets in larger units); or start from this init_scale, which saves the skipped "
            "steps.",
            None if earlier is None else earlier.where,
        )
    if earlier is None:
        return None
    what, _, try_ = earlier.text.partition(". ")
    return Verdict(
        earlier.verdict,
        f"Up to step {earlier.step}: {what}; later steps were applied. {try_}",
        earlier.where,
    )


def has_settled_and_skips(evidence: Evidence) -> bool:
    """Whether more than 1 % of the latest steps were skipped, and no growth explains it."""
    past = evidence.past
    if not past:
        return evidence.has_many_skips
    late = past[len(past) // 2 :]
    found = [step.step for step in unexplained(past)]
    # Skips in a row are one event: what the gradients are like has changed, and the scale settles.
    count = sum(n >= late[0].step and n - 1 not in found for n in found)
    return count > max(_FEW - 1, _MOST_SKIPPED * len(late))


def unexplained(past: Sequence[Past]) -> list[Past]:
    """The skips since the first step that was applied that do not undo a growth of the scale."""
    first = next((i for i, step in enumerate(past) if not step.skipped), len(past))
    found, growths = [], 0
    for before, step in pairwise(past[first:]):
        growths += step.scale > before.scale
        if step.skipped and growths:
            growths -= 1
        elif step.skipped:
            found.append(step)
    return found


def _when(skips: Sequence[Past]) -> str:
    """How steps follow one another, if that has a pattern."""
    numbers = [step.step for step in skips]
    firsts = [n for i, n in enumerate(numbers) if not i or n - numbers[i - 1] > 1]
    gaps = [after - before for before, after in pairwise(firsts)]
    if len(gaps) < 2:
        return ""
    (gap, count), *_ = Counter(gaps).most_common(1)
    bursts = "" if len(firsts) > 0.7 * len(numbers) else "some in a row, "
    listed = ", ".join(map(str, firsts[-3:]))
    if gap > 1 and count >= 0.6 * len(gaps):
        return f", {bursts}every {gap} steps (such as {listed})"
    return f", {bursts}at irregular steps (such as {listed})"


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _size(step: Past) -> float:
    return abs(step.loss or 0.0)
