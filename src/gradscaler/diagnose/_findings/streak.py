"""What many skips in a row say, with what was found in the last of their steps."""

from __future__ import annotations

import math

from gradscaler.diagnose._findings.advice import at_line, of_forward
from gradscaler.diagnose._findings.course import diverged
from gradscaler.diagnose._findings.evidence import Evidence, Verdict
from gradscaler.diagnose._run.lines import Skip

EXPLAIN_ALL = (
    'To see which, give each rank\'s monitor a file of its own (path="run.{rank}.jsonl"), and '
    "explain all of them together."
)
_LARGE_LOSS = 65504.0  # whose gradients overflow by themselves, which makes NaN of them too
_WONT = "Changing the loss scale won't fix this:"


def of_streak(evidence: Evidence) -> Verdict:
    """The verdict on too many skips in a row."""
    first, last = evidence.skips[0], evidence.skips[-1]
    fell = f"the last {evidence.skips_in_a_row} steps in a row were skipped"
    highest = first.scale if evidence.first_scale is None else evidence.first_scale
    if highest != last.scale:
        fell += f" while the loss scale fell from {highest:g} to {last.scale:g}"
    return (
        (None if evidence.lost_eps is not None else diverged(evidence))
        or _of_parameter(evidence, fell)
        or _of_forward(evidence, fell)
        or _of_loss(evidence, fell)
        or _of_gradients(evidence, fell)
    )


def _of_parameter(evidence: Evidence, fell: str) -> Verdict | None:
    located, parameter = evidence.located, evidence.parameter
    if parameter is None and located is not None and located.kind == "forward":
        parameter = located.parameter and f"{located.module}.{located.parameter}".lstrip(".")
    if parameter is None:
        return None
    if evidence.lost_eps is not None:
        return Verdict(
            "parameter",
            f"The model's {parameter} is itself Inf or NaN, so {fell}: the optimizer divides by "
            f"a root plus an eps of {evidence.lost_eps:g}, which is 0 in the float16 of its "
            "parameters. Go back to an earlier checkpoint, and keep the parameters in float32, "
            "with the forward pass under autocast, or set eps to 1e-4.",
            parameter,
        )
    return Verdict(
        "parameter",
        f"The model's {parameter} is itself Inf or NaN, so {fell}. {_WONT} go back to an earlier "
        "checkpoint, and look for the step that wrote it (a learning rate that is too large, "
        "weights changed without the scaler).",
        parameter,
    )


def _of_forward(evidence: Evidence, fell: str) -> Verdict | None:
    located = evidence.located
    if located is None or located.kind == "backward":
        return None
    loss = evidence.skips[-1].loss
    is_outside = located.module is None or located.kind == "input"
    if is_outside and loss is not None and math.isfinite(loss):
        return None  # it reached the gradients, and not by the loss: the user may change them
    if located.kind == "input":
        seen = at_line(located, ", first seen in")
        return Verdict(
            "data",
            f"The batch itself holds Inf or NaN before the forward pass{seen}, so "
            f"{fell}. {_WONT} look at the data and how they are prepared, such as a division by a "
            "deviation of 0.",
        )
    made = f"{located.num_inf} Inf and {located.num_nan} NaN in {located.dtype}{at_line(located)}"
    comma = "," if located.operation else ""
    made += f"{comma} from finite inputs of at most {located.largest_input:g}"
    try_ = f"{_WONT} {of_forward(located)}."
    if located.module is None:
        return Verdict("loss", f"Code outside of the model makes {made}, so {fell}. {try_}")
    module = located.module or "the model"
    return Verdict(
        "activations",
        f"The forward pass of {module} makes {made}, so {fell}. {try_}",
        module,
    )


def _of_loss(evidence: Evidence, fell: str) -> Verdict | None:
    losses = [skip.loss for skip in evidence.skips if skip.loss is not None]
    if not losses or any(map(math.isfinite, losses)):
        return None
    return Verdict(
        "loss",
        f"The unscaled loss is itself {losses[-1]:g}, so {fell}. {_WONT} look for Inf or NaN in "
        "the batch, and in the loss for a logarithm (take a loss of logits instead), an "
        "exponential (raise the temperature), a power, or a division by 0 (clamp the divisor; a "
        "small constant such as 1e-8 is 0 in float16), which float16 makes infinite sooner: "
        "compute it in float32.",
    )


def _of_gradients(evidence: Evidence, fell: str) -> Verdict:
    first, last = evidence.skips[0], evidence.skips[-1]
    inspected = [skip.nonfinite for skip in evidence.skips if skip.nonfinite is not None]
    is_elsewhere = evidence.world_size > 1 and inspected[-1:] == [()]
    is_large = any(abs(skip.loss or 0.0) > _LARGE_LOSS for skip in evidence.skips)
    name = None if is_elsewhere or is_large else _nan_in_all(evidence.skips)
    if name is not None:
        found = evidence.located
        is_backward = found is not None and found.kind == "backward"
        at = at_line(found, ", by the gradient of") if is_backward else ""
        name_it = "" if at else ", and let anomaly detection name the operation"
        return Verdict(
            "nan",
            f"The gradient of {name} is NaN at every loss scale{at}, though the loss is finite: "
            f"{fell}. {_WONT} look in its backward pass for 0 * Inf or 0 / 0, such as the square "
            "root or norm of 0 (add a small number under the root) or the branch that where() does "
            f"not take{name_it}.",
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
    is_fixed = len(evidence.skips) > 1 and first.scale == last.scale
    if not (at_floor or is_fixed or last.scale <= 1):
        return Verdict(
            "normal",
            f"{overflow}, and {fell}. The scale is still falling, and a lower one may fix this: "
            "start from a lower init_scale to get there sooner.",
            where,
        )
    limit = (
        "which cannot fall further"
        if at_floor or is_fixed
        else "which no longer enlarges gradients"
    )
    loss = f" (the loss is {last.loss:g})" if is_large else ""
    what = f"{overflow}{loss} at a loss scale of {last.scale:g}, {limit}: {fell}."
    if is_elsewhere:
        return Verdict("elsewhere", f"{what} {EXPLAIN_ALL}")
    lower = "a scale below 1 may cure that" if last.scale <= 1 else "a lower scale may cure that"
    if at_floor or is_fixed:
        lower += ", if you allow it (min_scale, or another policy)"
    return Verdict(
        "floor",
        f"{what} The gradients may be too large for float16 as they are: divide the loss (a mean "
        f"in place of a sum, targets in larger units), and {lower}; if they are Inf at every "
        "scale, look for a division by 0, or train in bfloat16.",
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
