"""The cause of a long streak of skips, from what was found in its last steps."""

from __future__ import annotations

import math
from dataclasses import replace

from gradscaler.diagnose._findings.advice import (
    at_any_scale,
    at_line,
    of_backward,
    of_forward,
    of_gradient,
    seen_in,
)
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.losses import diverged
from gradscaler.diagnose._findings.nan_skips import LARGE_LOSS, is_nan
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.located import Located

EXPLAIN_ALL = (
    "To see which, explain the files of all ranks together: gradscaler run writes one of each, and "
    'so do monitors with path="run.{rank}.jsonl".'
)
_STATISTICS = "running_mean", "running_var"  # buffers that forward passes write
_KEPT = "kept from step to step (averaged weights, statistics, a queue)"
_UNTRAINED = "look at what writes its weights: an average's decay must be below 1"
_UNTRAINED_IN_FLOAT16 = f"run it in float32 (autocast(enabled=False)), or {_UNTRAINED}"
_LOOK_AT = (
    "look at the data and how they are prepared, such as 0 / 0 (a deviation, sum or count of 0, "
    "the deviation of one element), the logarithm of 0, or 0 * Inf (a mask)"
)
_NOT_RECORDED = (
    "Whether they overflow or are NaN at every scale is not known: give monitor.record() loss= and "
    "gradients=, and in JAX replay="
)


def of_skips(evidence: Evidence) -> Finding:
    """The finding that explains a long streak of skips."""
    skipped = f"the last {evidence.skips_in_a_row} steps were skipped"
    finding = (
        (None if evidence.lost_eps is not None else diverged(evidence))
        or bad_parameter(evidence, f"so {skipped}")
        or of_forward_pass(evidence, skipped)
        or of_loss(evidence, skipped)
        or _of_nan(evidence, skipped)
        or _of_overflow(evidence, skipped)
    )
    return replace(finding, count=evidence.skips_in_a_row)


def bad_parameter(evidence: Evidence, so: str) -> Finding | None:
    """A parameter or a buffer that is itself not finite."""
    located, parameter, whose = evidence.located, evidence.parameter, "The model's"
    if parameter is None and located is not None and located.kind == "forward":
        parameter = located.bad_parameter
        if located.module is None:  # such as a teacher
            whose = f"Another module's ({located.type})"
    if parameter is None:
        return None
    why = since = ""
    if evidence.lost_eps == 0:
        why = ": the optimizer divides by an eps of 0, and 0 / 0 is NaN where a gradient is 0"
        action = "Go back to an earlier checkpoint, and set eps to 1e-8."
    elif evidence.lost_eps is not None:
        why = (
            f": the optimizer divides by an eps of {evidence.lost_eps:g}, which is 0 in the "
            "float16 of its parameters"
        )
        action = (
            "Go back to an earlier checkpoint, and keep the parameters in float32, with the "
            "forward pass under autocast, or set eps to 1e-4."
        )
    elif parameter.endswith(_STATISTICS):
        undone = ": no skip undoes that" if evidence.has_scaler else ""
        watched = evidence.watched
        read = seen_in(watched) if watched is not None and watched.kind == "input" else ""
        action = at_any_scale(
            "reset it or go back to an earlier checkpoint, and look for the batch whose forward "
            f"pass wrote Inf or NaN into it{read}{undone}",
            evidence,
        )
    elif evidence.bad_step is not None and evidence.bad_step.is_from_start:
        since = ", and was before the first step"
        action = "Repair it in the checkpoint that was loaded, or in what initializes it."
    else:
        action = at_any_scale(
            "go back to a checkpoint, and find what wrote it: " + _what_wrote(evidence),
            evidence,
        )
    cause = f"{whose} {parameter} is itself Inf or NaN{since}, {so}{why}."
    return Finding("parameter", cause, action, parameter)


def _what_wrote(evidence: Evidence) -> str:
    """What may have written an Inf or NaN into a parameter."""
    code = "code (a mean of no elements, a division by a norm of 0)"
    start = "numbers not finite from the start"
    if evidence.has_scaler and evidence.skipped >= evidence.steps:  # none was applied
        return "optimizer.step() without the scaler, or weights that were not finite at first"
    bad = evidence.bad_step
    first = [start, code] if bad is not None and bad.step == 1 else [code, start]
    return f"{', '.join(first)}, or too large a learning rate"


def bad_state(evidence: Evidence) -> Finding | None:
    """An optimizer's state that is not finite. Skipping steps does not repair it."""
    if evidence.state is None:
        return None
    taken = "whose gradients were not finite"
    if evidence.has_scaler:
        taken = (
            "that was taken without the scaler, or on gradients that were changed after unscale_()"
        )
    elif "_sq of" in evidence.state:
        taken += ", or beyond 1e19, as their squares leave float32 (normalize the inputs)"
    return Finding(
        "state",
        f"The optimizer's {evidence.state} is Inf or NaN, so each of its steps writes that into "
        "the parameter, or cannot move it.",
        at_any_scale(f"go back to an earlier checkpoint, and look for a step {taken}", evidence),
        evidence.state,
    )


def of_forward_pass(evidence: Evidence, skipped: str) -> Finding | None:
    """An Inf or NaN that a forward pass makes, in the model or outside, or reads as an input."""
    located = evidence.located
    if located is None or located.kind == "backward":
        return None
    loss = evidence.skips[-1].loss
    is_outside = located.module is None or located.kind == "input"
    if is_outside and loss is not None and math.isfinite(loss):
        return None  # it did not reach the loss; user code may have changed the gradients
    if located.kind == "input":
        return _of_input(evidence, located, skipped)
    module, kind = located.module, "activations"
    maker = f"The forward pass of {module or 'the model'}"
    if module is None:
        kind = "loss"
        outside = "The replayed function" if evidence.is_replayed else "Code outside of the model"
        maker = f"Another module ({located.type})" if located.type else outside
    counts = (located.num_inf, "Inf"), (located.num_nan, "NaN")
    made = " and ".join(f"{count} {what}" for count, what in counts if count)
    action = of_forward(located)
    if module is None and located.type:
        action = _UNTRAINED_IN_FLOAT16 if located.dtype == "float16" else _UNTRAINED
    return Finding(
        kind,
        f"{maker} makes {made} in {located.dtype}{at_line(located)}{_from(located)}, so {skipped}.",
        at_any_scale(action, evidence),
        "the model" if module == "" else module,
        located.line,
    )


def _from(located: Located) -> str:
    """What an operation made an Inf or NaN from; it may have been given one that was not seen."""
    comma = "," if located.operation else ""
    if math.isnan(located.largest_input):
        return ", or by an operation before it" if located.operation else ""
    inputs = f"{comma} from finite inputs up to {located.largest_input:g}"
    if located.smallest_divisor is not None:
        inputs += f", divided by {located.smallest_divisor:g}"
    return inputs


def _of_input(evidence: Evidence, located: Located, skipped: str) -> Finding:
    """A tensor that already held an Inf or NaN when the first operation read it."""
    kind, what = "loss", "A tensor that is not the model's holds"
    if evidence.is_replayed:  # a parameter is an argument, too
        what = f"In the replayed function, {located.parameter or 'a constant'} holds"
        action = (
            "if it is a parameter, go back to an earlier checkpoint; if it is the batch, look at "
            "the data and how they are prepared"
        )
    elif not evidence.has_scaler:
        kind, action = "data", f"{_LOOK_AT}; if it is {_KEPT}, reset it"
    elif evidence.steps > evidence.skipped:  # good batches came before
        action = f"if it is {_KEPT}, reset it, as no skip does; else look at the data"
    else:
        kind, what = "data", "The batch itself holds"
        action = _LOOK_AT
    rows = f" in {located.rows}" if located.rows else ""
    seen = at_line(located, "first seen in")
    return Finding(
        kind,
        f"{what} Inf or NaN{rows} before the forward pass{seen}, so {skipped}.",
        at_any_scale(action, evidence),
        line=located.line,
    )


def of_loss(evidence: Evidence, skipped: str) -> Finding | None:
    """Losses that are mostly not finite. No more specific cause is known."""
    losses = [skip.loss for skip in evidence.skips if skip.loss is not None]
    num_finite = sum(map(math.isfinite, losses))
    if not losses or math.isfinite(losses[-1]) or 2 * num_finite > len(losses):
        return None
    return Finding(
        "loss",
        f"The {'unscaled ' * evidence.has_scaler}loss is itself {losses[-1]:g}, so {skipped}.",
        at_any_scale(
            "look for Inf or NaN in the batch, and in the loss for a logarithm (take a loss of "
            "logits), an exponential, a power, or a division by 0: compute it in float32",
            evidence,
        ),
        is_certain=False,
    )


def _of_nan(evidence: Evidence, skipped: str) -> Finding | None:
    """A gradient that is NaN at every scale."""
    if _is_elsewhere(evidence) or _has_large_loss(evidence):
        return None
    name, found = _nan_in_all(evidence), evidence.located
    if found is not None and found.kind != "backward":
        found = None
    if name is None and found is not None and of_gradient(found) is not None:
        name = _nan_at_1(evidence)
    if name is None:
        return None
    at = at_line(found, "by the gradient of")
    name_it = "" if at else "; anomaly detection names the operation"
    scale = evidence.skips[-1].scale
    where = "at every loss scale" if scale <= 1 else f"and none is Inf at a scale of {scale:g}"
    return Finding(
        "nan",
        f"The gradient of {name} is NaN {where}{at}, though the loss is finite: {skipped}.",
        at_any_scale(f"{of_backward(found if at else None)}{name_it}", evidence),
        name,
        None if found is None else found.line,
        is_certain=scale <= 1,
    )


def _nan_at_1(evidence: Evidence) -> str | None:
    """The name of a gradient that is NaN in the latest skip, at a scale of at most 1, or None.

    Beside an Inf it proves nothing, unless an operation was located whose slope can be Inf.
    """
    latest = evidence.skips[-1]
    if latest.scale > 1:
        return None
    return next((each.name for each in latest.nonfinite or () if each.num_nan), None)


def _of_overflow(evidence: Evidence, skipped: str) -> Finding:
    """Gradients that overflow. The scale may still fall, or is at its lower limit."""
    first, last = evidence.skips[0], evidence.skips[-1]
    highest = first.scale if evidence.first_scale is None else evidence.first_scale
    if highest != last.scale:
        skipped += f" while the scale fell from {highest:g} to {last.scale:g}"
    where, overflow = _overflow(evidence)
    at_floor = evidence.min_scale is not None and last.scale <= evidence.min_scale
    at_floor = at_floor or (len(evidence.skips) > 1 and first.scale == last.scale)
    if not at_floor and last.scale > 1:
        return Finding(
            "normal",
            f"{overflow}, and {skipped}.",
            "The scale is still falling, and a lower one may fix this: start from a lower "
            "init_scale to get there sooner.",
            where,
        )
    is_large = _has_large_loss(evidence)
    loss = f" (the loss is {last.loss:g})" if is_large else ""
    limit = "which cannot fall further" if at_floor else "which no longer enlarges gradients"
    found = evidence.located
    is_shown = found is not None and found.kind == "backward"
    if not is_shown or is_large or _is_elsewhere(evidence):
        found = None
    at = at_line(found, "first in the gradient of")
    overflow += at and f"{at},"
    cause = f"{overflow}{loss} at a loss scale of {last.scale:g}, {limit}: {skipped}."
    if _is_elsewhere(evidence):
        return Finding("elsewhere", cause, EXPLAIN_ALL)
    divide = "ivide the loss (a mean in place of a sum, targets in larger units)"
    allow = "llow a lower scale (min_scale, or DynamicScale if it is fixed)"
    if last.scale > 1 and last.nonfinite and not any(each.num_inf for each in last.nonfinite):
        action = f"A{allow}; if NaN is left at a scale of 1, it is no overflow"
    elif last.scale > 1:
        action = f"A{allow}, or d{divide}"
    else:
        lower = "allow a lower scale (min_scale)" if at_floor else "start from a scale below 1"
        action = f"D{divide}, or {lower}"
        if not is_large:
            action += f"; or look {'there ' if at else ''}for a division by 0"
    if last.loss is None and not last.nonfinite and not at:  # only record() may leave out both
        action = f"{_NOT_RECORDED}. If they overflow, {action[0].lower()}{action[1:]}"
    line = None if found is None else found.line
    return Finding("floor", cause, f"{action}.", where, line, is_certain=False)


def _overflow(evidence: Evidence) -> tuple[str | None, str]:
    """The name of the first gradient that is not finite, and a clause that says so."""
    if _is_elsewhere(evidence):
        return None, "Another rank's gradients, but not this one's, are Inf or NaN"
    nonfinite = evidence.skips[-1].nonfinite
    if not nonfinite:
        return None, "The gradients are Inf or NaN"  # not inspected
    where = nonfinite[0].name
    if any(gradient.num_inf for gradient in nonfinite):
        return where, f"The gradients overflow in {where}"
    return where, f"The gradient of {where} is NaN"


def _is_elsewhere(evidence: Evidence) -> bool:
    """Whether this rank's gradients are finite in the latest skip that was inspected."""
    inspected = [skip.nonfinite for skip in evidence.skips if skip.nonfinite is not None]
    return evidence.world_size > 1 and inspected[-1:] == [()]


def _has_large_loss(evidence: Evidence) -> bool:
    return any(abs(skip.loss or 0.0) > LARGE_LOSS for skip in evidence.skips)


def _nan_in_all(evidence: Evidence) -> str | None:
    """The name of a parameter whose gradient was NaN in all inspected skips, or None.

    It is also None if the last inspected skip may be an overflow; see :func:`is_nan`.
    """
    inspected = [skip.nonfinite for skip in evidence.skips if skip.nonfinite]
    latest = next((skip for skip in reversed(evidence.skips) if skip.nonfinite), None)
    if latest is None or not is_nan(latest, evidence):
        return None
    common = set.intersection(*({g.name for g in found if g.num_nan} for found in inspected))
    return next((g.name for found in inspected for g in found if g.name in common), None)
