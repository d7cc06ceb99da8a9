"""Findings from the values of gradients in the latest sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import takewhile

from gradscaler.diagnose._findings.advice import at_any_scale
from gradscaler.diagnose._findings.detector import Phase, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._gradients.fitting_scales import Fit, fades, fit_of
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.events import Event, Events
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.formats import format_named
from gradscaler.diagnose._record.lines import ParameterSample, Sample
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import (
    DEAD,
    FEW_SAMPLES,
    HEADROOM,
    LARGE_LOSS,
    LARGE_SCALE,
    LOST,
    SETTLED,
    STOOD,
    UNFED_SAMPLES,
)

_STEPS, _SATURATED = names_with(Role.STEPS), names_with(Role.SATURATES)
ENDED = names_with(Role.ENDS)
ENDS_UNITS = _SATURATED | ENDED  # if a step was too large
BLOCKS = _STEPS | ENDS_UNITS  # what may block a gradient
CHECKPOINT = "checkpoint"  # stands for a reentrant one whose inputs require no gradient
CUT = ""  # stands for an operation where the graph is cut, such as by detach()
LEFT_OUT = "left out"  # stands for a loss that does not reach what a module makes


@detector(Phase.DEAD)
def off(evidence: Evidence) -> Finding | None:
    """Gradients that are all 0 as a ReLU gives nothing but 0, by the graph of the loss."""
    sample = evidence.sample
    if sample is None or sample.shares is None or sample.shares.zero < 1:
        return None
    place = Events().after(sample.calls).place(Event.OFF)
    if not place or evidence.are_emptied or _may_be_learned(sample, evidence):
        return None
    before = _had_one(next(iter(sample.parameters), ""), evidence)
    rate = f" of {evidence.rates[-1][1]:g}" if evidence.rates else ""
    return Finding(
        "dead",
        f"All gradients are exactly 0 in step {sample.step}, as {place}, where its slope is 0"
        f"{f'; in step {before} they were not' if before else ', too'}.",
        _whatever_the_scale(
            f"take a function whose slope is not 0 (softplus), lower the learning rate{rate} or "
            "warm it up, or let the bias before it begin at a larger number",
            evidence,
        ),
        line=place.partition(" at ")[2].partition(" gives ")[0] or None,
        is_certain=False,
    )


@detector(Phase.DEAD)
def cut_off(evidence: Evidence) -> Finding | None:
    """Parameters that the model uses but no gradient reaches."""
    sample = evidence.sample
    cut = {name: by for name, by in evidence.cut.items() if by != LEFT_OUT}
    if sample is None or not cut:
        return None
    operations = Counter(cut.values())
    ((by, _),) = operations.most_common(1)
    may_cut_all = by in _STEPS | ENDED and _has_stood(evidence.first, sample)
    if not may_cut_all and not sample.parameters.keys() - cut.keys():
        return None
    names = [name for name, operation in cut.items() if operation == by]
    where = names[-1].rpartition(".")[0] or None
    whose = f"{len(names)} of {len(sample.parameters) + len(sample.missing)} parameters"
    if by == CUT:
        place = evidence.events.place(Event.PASSES_NONE)
        look = (
            f"look behind {where or names[-1]} for what cuts the graph, such as detach(), .data, "
            ".item(), numpy(), torch.tensor(), argmax or a comparison"
        )
        return Finding(
            "dead",
            f"{whose}, {names[0]} first, have no gradient, though their modules run before others "
            f"that have one{f': {place} cuts them off' if place else ''}.",
            at_any_scale(
                f"{'unless it is meant, leave that call out' if place else look}; if they should "
                "stay as they are, call requires_grad_(False) on them",
                evidence,
            ),
            where,
            line=place.partition(" at ")[2] or None,
        )
    if by == CHECKPOINT:
        return Finding(
            "dead",
            f"{whose}, {names[0]} first, have no gradient, though their modules run in each step: "
            "they are in a reentrant checkpoint of which no input requires a gradient.",
            at_any_scale(
                "pass use_reentrant=False to checkpoint(), or call requires_grad_(True) on its "
                "input (enable_input_require_grads())",
                evidence,
            ),
            where,
        )
    whole = "everywhere" if by in _STEPS else "for all of its inputs"
    try_ = (
        "look at the biases before it and the learning rate, normalise its inputs, or take a "
        "function with a slope on both sides (leaky_relu, gelu)"
    )
    if (before := _had_one(names[0], evidence)) and by not in _STEPS:
        whole += f"; in step {before} they were not"
        rate = f" of {evidence.rates[-1][1]:g}" if evidence.rates else ""
        is_last = len(names) == len(sample.parameters)
        ends = f"if {by} makes the outputs, leave it out, as targets beyond it are out of reach; "
        try_ = (
            f"{ends * is_last}lower the learning rate{rate} or warm it up, look at the biases "
            "before it, normalise its inputs, or take a function with a slope on both sides "
            "(leaky_relu, gelu)"
        )
    if by in _STEPS:
        try_ = (
            "take a smooth function in its place (tanh for sign), or let the gradient pass as if "
            f"it were not there: x + (x.{by}() - x).detach()"
        )
    elif by in _SATURATED:
        try_ = (
            "they are too far from 0 or from each other: normalise them, start from smaller "
            "weights, or lower the learning rate"
        )
    return Finding(
        "dead",
        f"The gradients of {whose}, {names[0]} first, are exactly 0, because they pass {by}, "
        f"whose slope is 0 {whole}.",
        _whatever_the_scale(try_, evidence),
        where,
    )


def _had_one(name: str, evidence: Evidence) -> int | None:
    """The latest sampled step whose gradient of a parameter was not 0; None without one."""
    seen = (
        each.step
        for each in reversed(evidence.measured)
        if name in each.parameters and each.parameters[name].zero < 1
    )
    return next(seen, None)


def _has_stood(first: Step | None, sample: Sample) -> bool:
    """Whether a loss has not fallen, as a hinge loss does until its gradients end."""
    if first is None or first.loss is None or sample.loss is None:
        return False
    return abs(sample.loss) > STOOD * abs(first.loss)


def _may_be_learned(sample: Sample, evidence: Evidence) -> bool:
    """Whether a loss may have nothing left to improve: it is 0, or fell to a floor of its own."""
    if sample.loss == 0 and not evidence.has_no_loss:
        return True
    is_at_floor = Events().after(sample.calls).count(Event.FLOORED) > 0
    return is_at_floor and not _has_stood(evidence.first, sample)


@detector(Phase.DEAD)
def dead(evidence: Evidence) -> Finding | None:
    """Gradients that are exactly 0 for another reason than underflow."""
    sample = evidence.sample
    if sample is None or sample.shares is None or sample.shares.zero < DEAD:
        return None
    if evidence.are_emptied:  # it is no operation that makes them 0
        return None
    if _may_be_learned(sample, evidence):
        return None
    parameters = sample.parameters
    zeros = [name for name, found in parameters.items() if found.zero == 1]
    is_all = sample.shares.zero == 1
    if not evidence.has_scaler and not evidence.is_in_float16:
        is_small = False  # nothing underflows
    elif is_all:  # zeros right after large gradients are no underflow: a softmax may saturate
        is_small = sample.scale < LARGE_SCALE and not evidence.reached_one(sample.scale)
        is_small = is_small and not evidence.is_scaled_by_hand
    else:
        is_small = any(map(fades, parameters.values()))
    if is_small or not (is_all or len(zeros) > len(parameters) / 2):
        return None
    at_scale = f", at a loss scale of {sample.scale:g}" if evidence.has_scaler else ""
    which, zeroed = (
        "All gradients",
        "zero_grad() between backward() and step(), a clip by a norm of Inf, or ",
    )
    where, none_small = None, ""
    if not is_all:
        where = _nearest_the_loss(parameters)
        which = f"The gradients of {len(zeros)} of {len(parameters)} parameters, {zeros[0]} first,"
        zeroed, none_small = "", ", and no gradient is small"
    cause = f"{which} are exactly 0 in step {sample.step}{at_scale}{none_small}"
    try_ = (
        f"look for {zeroed}an operation without a slope before the loss: ReLUs that are all off "
        "(biases, learning rate), a clamp, rounding, argmax, a saturated function, or detach()"
    )
    if sample.loss == 0:
        cause += ", and so is the loss, as in all samples"
        try_ = (
            "look at what the loss multiplies or leaves out: advantages of equal rewards, targets "
            "that are all ignored, a mask or weights of 0, a margin that all pairs keep"
        )
    blank = () if sample.optimizers is None else sample.optimizers.blank
    if len(blank) > 1:
        where = blank[0]
        cause += (
            f": {len(blank)} matrices, {where} and {blank[1]} first, are all 0 themselves, and the "
            "gradient of each is a product with another"
        )
        try_ = (
            "start all but one factor of a product from random numbers (of LoRA's A and B, only B "
            "from 0)"
        )
    return Finding(
        "dead",
        f"{cause}.",
        _whatever_the_scale(try_, evidence),
        where,
        is_certain=False,
    )


@detector(Phase.DEAD)
def alike(evidence: Evidence) -> Finding | None:
    """Units of a layer that stay one unit, as they begin with the same weights."""
    seen = [sample.optimizers.alike for sample in evidence.measured if sample.optimizers]
    name = next(iter(seen[-1]), "") if seen else ""
    # A gradient that is 0 but for rounding differs from unit to unit in the first steps.
    count = len([*takewhile(lambda names: name in names, reversed(seen))])
    if not name or count < FEW_SAMPLES:
        return None
    return Finding(
        "dead",
        f"All units of {name} have the same weights and the same gradients in the latest {count} "
        "samples, so they stay one unit.",
        "Start them from random numbers, as PyTorch's own layers do: a constant, or a row that is "
        "repeated, gives each unit the same gradient for ever.",
        name.rpartition(".")[0] or name,
        is_certain=False,
    )


@detector(Phase.DEAD)
def unfed(evidence: Evidence) -> Finding | None:
    """A layer whose inputs are all 0: its bias has a gradient, and its weight has none."""
    latest = [sample for sample in evidence.measured if sample.step >= SETTLED]
    if len(latest) < UNFED_SAMPLES:
        return None
    names = (name for name in latest[-1].parameters if name.rpartition(".")[2] == "weight")
    name = next((name for name in names if all(_is_unfed(name, each) for each in latest)), None)
    if name is None:
        return None
    return Finding(
        "dead",
        f"The gradient of {name} is exactly 0 in step {latest[-1].step}, and that of its bias is "
        f"not, as in {len(latest)} samples: all inputs of this layer are 0 (or equal, if it "
        "normalizes them), or a hook changes its gradient.",
        _whatever_the_scale(
            "look at the data and how they are prepared (uint8 // 255 is 0), and at what comes "
            "before this layer, such as ReLUs that are all off",
            evidence,
        ),
        name.rpartition(".")[0] or name,
        is_certain=False,
    )


def _is_unfed(weight: str, sample: Sample) -> bool:
    found = sample.parameters.get(weight)
    bias = sample.parameters.get(weight.removesuffix("weight") + "bias")
    return found is not None and found.zero == 1 and bias is not None and bias.zero < DEAD


def _whatever_the_scale(action: str, evidence: Evidence) -> str:
    if evidence.has_scaler:
        return f"A larger scale would not help: {action}."
    return f"{action[0].upper()}{action[1:]}."


def _nearest_the_loss(parameters: Mapping[str, ParameterSample]) -> str | None:
    """The last module whose own parameters all have gradients of 0, or None."""
    modules: dict[str, bool] = {}
    for name, found in parameters.items():
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, True) and found.zero == 1
    return next((module for module in reversed(modules) if modules[module] and module), None)


@detector(Phase.SIZE, needs_scaler=True)
def too_small(evidence: Evidence) -> Finding | None:
    """Underflow if a larger scale would fit, or a range that no scale fits."""
    sample = evidence.sample
    if sample is None or sample.shares is None or sample.histogram is None:
        return None
    is_wider = evidence.dtype == "float16" and evidence.is_in_float16 is False
    if is_wider or not 0 < sample.scale < math.inf:  # a run file may hold 0 or Inf
        return None
    shares, bins = sample.shares, sample.histogram
    form = format_named(evidence.dtype)
    nonzero = 1 - shares.zero - shares.nonfinite
    small = shares.flushed + shares.subnormal
    # A ReLU makes zeros too. Only zeros beside many small gradients show underflow.
    lost = shares.flushed >= LOST or (shares.zero >= LOST and small > nonzero / 4)
    headroom = math.inf
    if bins.counts:
        largest = bins.first + len(bins.counts) + math.log2(sample.scale)
        headroom = math.log2(form.largest) - largest
        fit = fit_of(evidence.sizes, evidence.dtype)
        if fit is not None and fit.is_hopeless:
            return _range(fit, sample.loss or 0.0)
    elif shares.zero != 1 or _has_no_loss(sample, evidence) or _is_absorbed(evidence):
        return None
    else:
        lost = True
    if not lost or headroom < HEADROOM:
        return None
    factor = "" if math.isinf(headroom) else f" by a factor of up to 2**{math.floor(headroom) - 1}"
    worst = sample.worst[0] if sample.worst else None
    try_ = (
        f"The scale is too small: raise it{factor}, or let it grow sooner (growth_interval) or "
        "further (max_scale)."
    )
    if evidence.has_many_skips:
        try_ = (
            f"The scale is too small because {evidence.skipped} of {evidence.steps} steps were "
            "skipped, and each skip lowers it: look for what the skipped steps have in common, "
            "such as an optimizer, a batch or a parameter."
        )
    return Finding(
        "underflow",
        f"At a loss scale of {sample.scale:g}, {shares.zero + shares.flushed:.0%} of the gradients "
        f"are zero in {form.name} and {shares.subnormal:.0%} subnormal, in step {sample.step}.",
        try_,
        worst,
        is_certain=False,
    )


def _has_no_loss(sample: Sample, evidence: Evidence) -> bool:
    """Whether gradients are 0 because the loss is 0, such as when all rewards are equal."""
    if sample.loss != 0:
        return False
    fit = fit_of(evidence.sizes, evidence.dtype)
    fits = fit is not None and sample.scale >= 2.0**fit.whole.low
    return fits or sample.scale >= LARGE_SCALE


def _is_absorbed(evidence: Evidence) -> bool:
    """Whether gradients are 0 because a divisor was Inf."""
    return evidence.events.count(Event.ABSORBED) >= FEW_SAMPLES


def _range(fit: Fit, loss: float) -> Finding:
    """The finding that no scale fits all parameters, in a sample with this loss."""
    where = fit.gone[0] if fit.gone else fit.lowest
    edge = 2.0 ** (fit.common.edge + 1)
    highest = fit.highest or "the model"
    what = (
        f"at {2.0**fit.common.high:g}, the largest with room, {fit.lost:.0%} of the gradients of "
        f"{where or highest} are flushed or subnormal, and those of {highest} overflow from "
        f"{edge:g} on"
    )
    if fit.gone:
        what = (
            f"at {fit.own:g}, all gradients of {len(fit.gone)} of {len(fit.parameters)} parameters "
            f"are flushed to 0 ({where} first), while those of {highest} overflow at "
            f"{edge / fit.own:g} times that"
        )
    closer = (
        "Bring the layers closer together (norms, residual connections, ReLU in place of "
        "sigmoids, loss terms of like weight)"
    )
    if abs(loss) > LARGE_LOSS:
        closer = f"Divide the term that makes the loss {loss:.2g} (a mean in place of a sum)"
    return Finding(
        "range",
        f"No loss scale fits: {what}.",
        f"{closer}, give each head its own scaler and optimizer, or train in bfloat16.",
        where or None,
        is_certain=False,
    )
