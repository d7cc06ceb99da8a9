"""What the evidence says about a run: why steps are skipped, or what a small scale loses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gradscaler.diagnose._gradients.formats import format_named
from gradscaler.diagnose._gradients.module_hooks import Located
from gradscaler.diagnose._run.lines import Sample, Skip

Kind = Literal["normal", "loss", "parameter", "activations", "nan", "floor", "underflow"]
KindOfRanks = Literal["elsewhere", "ranks"]  # only where several processes train together

_LOST = 0.05  # of the gradients: flushed, or so small that many more must be flushed
_FEW = 20  # skips that any loss scale may need to settle
_HEADROOM = 4.0  # a larger scale fits if the largest gradient can double this often
_EXPLAIN_ALL = (
    'To see which, give each rank\'s monitor a file of its own (path="run.{rank}.jsonl"), and '
    "explain all of them together."
)


@dataclass(frozen=True)
class Verdict:
    """What happened, and what to try.

    Attributes:
        kind: ``"normal"``: overflows that lower scales cure. ``"underflow"``: the scale is too
            small. No lower scale cures the others. ``"parameter"``: a parameter or a buffer is
            itself not finite. ``"activations"``: a module makes Inf or NaN from finite inputs.
            ``"loss"``: the unscaled loss is not finite. ``"nan"``: a gradient is NaN at every
            scale, even at 1 or less. ``"floor"``: the scale cannot fall further, or is below 1,
            where it no longer makes gradients larger. With several processes also
            ``"elsewhere"``: another rank's gradients keep the scale at its floor, and this rank's
            are finite; and ``"ranks"``: ranks hold different scales, or skipped different steps.
        text: two sentences: what happened, with the evidence, and what to try. From the files of
            several ranks, it also names the rank at fault, and where ranks differ.
        where: the name of the parameter or the module that caused it, if one did.
    """

    kind: str
    text: str
    where: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Evidence:
    """What is known about a run when it is judged."""

    steps: int
    skipped: int  # of the steps
    dtype: str = "float16"  # what the gradients are computed in
    scale: float | None = None  # the last step's, if known
    skips_in_a_row: int = 0  # the last steps of an optimizer, if too many
    first_scale: float | None = None  # of those
    skips: tuple[Skip, ...] = ()  # the latest of those
    min_scale: float | None = None  # the scale's lower limit, if known
    parameter: str | None = None  # the name of a parameter or a buffer that is not finite
    located: Located | None = None  # the module whose output was the first that was not finite
    sample: Sample | None = None  # the latest with shares
    world_size: int = 1  # how many processes train together
    is_finite_here: bool = False  # this rank's gradients, in all skipped steps that were inspected


def judge(evidence: Evidence) -> Verdict:
    """The verdict on too many skips in a row, if there are; else on the run as a whole."""
    if evidence.skips:
        return _of_skips(evidence)
    return _of_sample(evidence) or _normal(evidence)


def _of_skips(evidence: Evidence) -> Verdict:
    first, last = evidence.skips[0], evidence.skips[-1]
    fell = f"the last {evidence.skips_in_a_row} steps in a row were skipped"
    highest = first.scale if evidence.first_scale is None else evidence.first_scale
    if highest != last.scale:
        fell += f" while the loss scale fell from {highest:g} to {last.scale:g}"
    losses = [skip.loss for skip in evidence.skips if skip.loss is not None]
    located = evidence.located
    parameter = evidence.parameter
    if parameter is None and located is not None and located.kind == "forward":
        parameter = located.parameter and f"{located.module}.{located.parameter}".lstrip(".")
    if parameter is not None:
        return Verdict(
            "parameter",
            f"The model's {parameter} is itself Inf or NaN, so {fell}. Changing the loss scale "
            "won't fix this: go back to an earlier checkpoint, and look for the step that wrote it "
            "(a learning rate that is too large, weights changed without the scaler).",
            parameter,
        )
    if located is not None and located.kind == "forward" and located.module is not None:
        module = located.module or "the model"
        return Verdict(
            "activations",
            f"The forward pass of {module} makes {located.num_inf} Inf and {located.num_nan} NaN "
            f"in {located.dtype} from finite inputs of at most {located.largest_input:g}, "
            f"so {fell}. Changing the loss scale won't fix this: run this module in bfloat16 or "
            "float32, which a model trained in those may need, or lower its inputs.",
            module,
        )
    if losses and not any(map(math.isfinite, losses)):
        return Verdict(
            "loss",
            f"The unscaled loss is itself {losses[-1]:g}, so {fell}. Changing the loss scale won't "
            "fix this: look for Inf or NaN in the batch, and for a logarithm, a division or a "
            "power in the loss that float16 or a value of 0 makes infinite.",
        )
    inspected = [skip.nonfinite for skip in evidence.skips if skip.nonfinite is not None]
    is_elsewhere = evidence.world_size > 1 and inspected[-1:] == [()]
    name = None if is_elsewhere else _nan_in_all(evidence.skips)
    if name is not None:
        return Verdict(
            "nan",
            f"The gradient of {name} is NaN at every loss scale though the loss is finite: {fell}. "
            "Changing the loss scale won't fix this: look in its backward pass for 0 * Inf or "
            "0 / 0, such as the square root or norm of 0, and let anomaly detection name the "
            "operation.",
            name,
        )
    nonfinite = last.nonfinite or ()
    where = next((gradient.name for gradient in nonfinite), None)
    overflow = f"The gradients overflow in {where}"
    if is_elsewhere:
        overflow = "Another rank's gradients, but not this one's, are Inf or NaN"
    elif where is None:
        overflow = "The gradients are Inf or NaN"  # not inspected
    elif not any(gradient.num_inf for gradient in nonfinite):
        overflow = f"The gradient of {where} is NaN"
    at_floor = evidence.min_scale is not None and last.scale <= evidence.min_scale
    limit = "enlarges no gradient, so a lower one won't fix this"
    if at_floor or last.scale > 1:
        limit = "cannot fall further"
    if at_floor or last.scale <= 1 or (len(evidence.skips) > 1 and first.scale == last.scale):
        what = f"{overflow} at a loss scale of {last.scale:g}, which {limit}: {fell}."
        if is_elsewhere:
            return Verdict("elsewhere", f"{what} {_EXPLAIN_ALL}")
        return Verdict(
            "floor",
            f"{what} Look for what makes them so large (the learning rate, a sum in place of a "
            "mean, a division by 0), allow a lower scale if this one is above 1, or train in "
            "bfloat16.",
            where,
        )
    return Verdict(
        "normal",
        f"{overflow}, and {fell}. The scale is still falling, and a lower one may fix this: "
        "start from a lower init_scale to get there sooner.",
        where,
    )


def _nan_in_all(skips: tuple[Skip, ...]) -> str | None:
    """A parameter whose gradient was NaN in all skips that were inspected.

    None at a scale above 1, or if a gradient holds an Inf. Overflow makes NaN too, as Inf - Inf
    and 0 * Inf, and far above the right scale it leaves nothing else.
    """
    inspected = [(skip.scale, skip.nonfinite) for skip in skips if skip.nonfinite]
    if not inspected:
        return None
    scale, latest = inspected[-1]
    if scale > 1 or any(gradient.num_inf for gradient in latest):
        return None
    common = set.intersection(*({g.name for g in found if g.num_nan} for _, found in inspected))
    return next((g.name for _, found in inspected for g in found if g.name in common), None)


def _of_sample(evidence: Evidence) -> Verdict | None:
    """Underflow, if the latest sample shows it and a larger scale would fit."""
    sample = evidence.sample
    if sample is None or sample.shares is None or sample.histogram is None:
        return None
    if not 0 < sample.scale < math.inf:  # as a run file may say
        return None
    shares, bins = sample.shares, sample.histogram
    form = format_named(evidence.dtype)
    nonzero = 1 - shares.zero - shares.nonfinite
    small = shares.flushed + shares.subnormal
    # Zeros prove nothing, as a ReLU makes them too. Together with many small gradients they do.
    lost = shares.flushed >= _LOST or (shares.zero >= _LOST and small > nonzero / 4)
    if bins.counts:
        largest = bins.first + len(bins.counts) + math.log2(sample.scale)
        headroom = math.log2(form.largest) - largest
    else:
        lost, headroom = shares.zero == 1, math.inf
    if not lost or headroom < _HEADROOM:
        return None
    factor = "" if math.isinf(headroom) else f" by a factor of up to 2**{math.floor(headroom) - 1}"
    worst = sample.worst[0] if sample.worst else None
    try_ = f"The scale is too small: raise it{factor}, or let it grow sooner (growth_interval)."
    if _are_many(evidence):
        try_ = (
            f"The scale is too small because {evidence.skipped} of {evidence.steps} steps were "
            "skipped, and each skip lowers it: look at what the skipped steps have in common, such "
            "as an optimizer, a batch or a parameter, for Inf and NaN that occur at every scale."
        )
    return Verdict(
        "underflow",
        f"At a loss scale of {sample.scale:g}, {shares.zero + shares.flushed:.0%} of the gradients "
        f"are zero in {form.name} and {shares.subnormal:.0%} subnormal, in step {sample.step}. "
        f"{try_}",
        worst,
    )


def _are_many(evidence: Evidence) -> bool:
    """Whether more steps were skipped than a loss scale needs to settle."""
    return evidence.skipped > max(_FEW, evidence.steps / 10)


def _normal(evidence: Evidence) -> Verdict:
    if not evidence.skipped:
        text = f"None of {evidence.steps} steps was skipped. Nothing needs fixing."
        return Verdict("normal", text)
    were = "was" if evidence.skipped == 1 else "were"
    text = f"{evidence.skipped} of {evidence.steps} steps {were} skipped"
    scale = evidence.scale
    is_unusual = _are_many(evidence) or (scale is not None and scale < 1)
    if evidence.world_size > 1 and evidence.is_finite_here:
        text += ", because another rank's gradients overflowed while this one's were finite"
        what_to_do = _EXPLAIN_ALL if is_unusual else "Nothing needs fixing."
        return Verdict("normal", f"{text}. {what_to_do}")
    if is_unusual:
        now = "" if scale is None else f", and the loss scale is {scale:g}"
        text += (
            f"{now}. If they are the first steps, start from a lower init_scale; else look at what "
            "they have in common: an optimizer, a batch, a parameter."
        )
    else:
        text += (
            " while the loss scale settled, and a lower scale cured each overflow. "
            "Nothing needs fixing."
        )
    return Verdict("normal", text)
