"""The first step that was applied with gradients of Inf or NaN, or left out with such a loss."""

from __future__ import annotations

import math
from dataclasses import replace

from gradscaler.diagnose._findings.advice import at_any_scale, at_line, of_backward
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.losses import EXPLODED, diverged
from gradscaler.diagnose._findings.skips_in_a_row import (
    EXPLAIN_ALL,
    bad_parameter,
    of_forward_pass,
    of_loss,
)
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.lines import BadStep, Skip
from gradscaler.diagnose._record.located import Located, is_exact

_LARGE = 1e9  # a loss; a usual one of sums over a batch of images is below 1e6
_GO_BACK = "Its weights are lost: go back to a checkpoint from before it."
_IN_FLOAT16 = (
    "numbers beyond 65504 are Inf in float16: scale the loss by a GradScaler, which skips such "
    "steps, or train in bfloat16"
)
_SCALED_BY_HAND = (
    "the script multiplies its loss by a scale of its own, which makes gradients larger than the "
    "65504 that float16 ends at: leave that to a GradScaler, which skips such steps and lowers its "
    "scale, or lower it"
)
_OVERFLOW = (
    "look for a division by a number near 0 or an exponential, lower the learning rate or warm it "
    "up, and clip gradients"
)


def applied(evidence: Evidence) -> Finding | None:
    """The cause of the first bad step, which destroyed the weights if it was applied to them."""
    bad = evidence.bad_step
    if bad is None:
        return None
    skip = Skip(bad.step, 1.0, bad.loss, bad.nonfinite, bad.more)  # as if it had been skipped
    past = tuple(step for step in evidence.past if step.step < bad.step)
    then = replace(
        evidence,
        skips=(skip,),
        located=_place(bad, evidence),
        past=past,
        parameter=None,
        lost_eps=bad.lost_eps,
    )
    this = f"{evidence.step_word} {bad.step}"
    so = so_of_loss = f"{this} was applied with gradients of Inf or NaN"
    if bad.is_left_out:
        so = f"the loss of {this} is {bad.loss:g}, and no backward pass took it"
        so_of_loss = f"no backward pass took it in {this}"
    finding = (
        _within(bad, this)
        or bad_parameter(then, f"so {so}")
        or (None if _is_input(then.located) else diverged(then))
        or bad_parameter(replace(then, parameter=bad.parameter), f"so {so}")
        or _of_large_numbers(then, so)
        or of_forward_pass(then, so)
        or of_loss(then, so_of_loss)
        or _of_gradients(then, bad)
    )
    is_said = bad.is_left_out or "checkpoint" in finding.action
    action = finding.action if is_said else f"{finding.action} {_GO_BACK}"
    return replace(finding, action=action, steps=(bad.step,), count=1, is_certain=True)


def _within(bad: BadStep, this: str) -> Finding | None:
    """A loss that exploded among the evaluations of one step of an optimizer."""
    first, largest = bad.evaluated or (0.0, 0.0)
    if not 0 < EXPLODED * abs(first) < abs(largest):
        return None
    return Finding(
        "divergence",
        f"The loss grew from {first:g} to {largest:g} within {this}, which evaluated it several "
        "times, until numbers became Inf or NaN.",
        'Let the optimizer search along its line (LBFGS: line_search_fn="strong_wolfe"), or lower '
        "the learning rate; go back to a checkpoint from before it.",
    )


def _of_large_numbers(evidence: Evidence, so: str) -> Finding | None:
    """A forward pass that overflows after losses that were very large from the first step on."""
    found, losses = evidence.located, [step.loss for step in evidence.past]
    first = next((loss for loss in losses if loss is not None), 0.0)
    if found is None or found.kind != "forward" or not _LARGE <= first < math.inf:
        return None
    if found.enlarged_by is not None:  # an exponential did that
        return None
    return Finding(
        "activations",
        f"The forward pass makes numbers that are too large from the start (the first loss is "
        f"{first:g}), and then Inf or NaN{at_line(found)}, so {so}.",
        "Look at inputs that are not normalized, and at the first weights (those of a recurrent "
        "layer multiply at each time step: use a smaller gain); use a normalization layer, and "
        "clip gradients.",
        found.module or None,
        found.line,
    )


def _place(bad: BadStep, evidence: Evidence) -> Located | None:
    """The place of a bad step, or what a watch has shown since, if the step's own is not exact."""
    found, later = bad.located, evidence.watched
    if later is None or _is_whole(found):
        return found
    if later.kind == "backward":
        return later if found is None or found.kind == "backward" else found
    is_made = later.kind == "forward" and later.parameter is None
    return later if is_made else found


def _is_whole(found: Located | None) -> bool:
    """Whether a place is that of the maker itself, as all of its inputs were seen."""
    if found is None:
        return False
    is_seen = found.kind == "backward" or not math.isnan(found.largest_input)
    return found.bad_parameter is not None or (is_exact(found) and is_seen)


def _is_input(found: Located | None) -> bool:
    return found is not None and found.kind == "input"


def _of_gradients(evidence: Evidence, bad: BadStep) -> Finding:
    """Gradients that are not finite though the loss is."""
    nan = next((each for each in bad.nonfinite if each.num_nan), None)
    first, found = nan or bad.nonfinite[0], evidence.located
    if found is not None and found.kind != "backward":
        found = bad.located
    what = "NaN" if first.num_nan else "Inf"
    at = at_line(found, "by the gradient of")
    this = f"{evidence.step_word} {bad.step}"
    loss = ", though the loss is finite" if bad.loss is not None else ""
    if evidence.world_size > 1 and (found is None or found.is_likely):
        cause = (
            f"The gradient of {first.name} is {what}{loss} on this rank, and {this} was applied "
            "with it: it may come from another rank."
        )
        return Finding("elsewhere", cause, EXPLAIN_ALL, first.name)
    action = of_backward(found)
    if not first.num_nan and not at:
        action = _IN_FLOAT16 if evidence.is_in_float16 else _OVERFLOW
        if evidence.is_scaled_by_hand:
            action = _SCALED_BY_HAND
    return Finding(
        "nan",
        f"The gradient of {first.name} is {what}{at}{loss}, and {this} was applied with it.",
        at_any_scale(action, evidence),
        first.name,
        None if found is None else found.line,
    )
