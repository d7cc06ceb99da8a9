"""What many skips in a row say, with what was found in the last of their steps."""

from __future__ import annotations

import math

from gradscaler.diagnose._findings.advice import at_line, of_backward, of_forward
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.finding import Finding
from gradscaler.diagnose._findings.over_time import diverged
from gradscaler.diagnose._run.lines import Skip

EXPLAIN_ALL = (
    'To see which, give each rank\'s monitor a file of its own (path="run.{rank}.jsonl"), and '
    "explain all of them together."
)
_LARGE_LOSS = 65504.0  # whose gradients overflow by themselves, which makes NaN of them too
_STATISTICS = "running_mean", "running_var"  # which forward passes write
_WONT = "No loss scale fixes this:"


def of_skips(evidence: Evidence) -> Finding:
    """What explains too many skips in a row."""
    first, last = evidence.skips[0], evidence.skips[-1]
    skipped = f"the last {evidence.skips_in_a_row} steps were skipped"
    highest, fell = first.scale if evidence.first_scale is None else evidence.first_scale, ""
    if highest != last.scale:
        fell = f" while the scale fell from {highest:g} to {last.scale:g}"
    return (
        (None if evidence.lost_eps is not None else diverged(evidence))
        or bad_parameter(evidence, skipped)
        or _of_forward(evidence, skipped)
        or _of_loss(evidence, skipped)
        or _of_gradients(evidence, skipped, fell)
    )


def bad_parameter(evidence: Evidence, so: str) -> Finding | None:
    """A parameter or a buffer that is itself not finite."""
    located, parameter, whose = evidence.located, evidence.parameter, "The model's"
    if parameter is None and located is not None and located.kind == "forward":
        parameter = located.parameter and f"{located.module or ''}.{located.parameter}".lstrip(".")
        if located.module is None:  # as a teacher's
            whose = f"Another module's ({located.type})"
    if parameter is None:
        return None
    cause = f"{whose} {parameter} is itself Inf or NaN, so {so}"
    count = evidence.skips_in_a_row
    if evidence.lost_eps is not None:
        return Finding(
            "parameter",
            f"{cause}: the optimizer divides by an eps of {evidence.lost_eps:g}, which is 0 in the "
            "float16 of its parameters.",
            "Go back to an earlier checkpoint, and keep the parameters in float32, with the "
            "forward pass under autocast, or set eps to 1e-4.",
            parameter,
            count=count,
        )
    if parameter.endswith(_STATISTICS):
        return Finding(
            "parameter",
            f"{cause}.",
            f"{_WONT} reset it or go back to an earlier checkpoint, and look for the batch whose "
            "forward pass wrote Inf or NaN into it: no skip undoes that.",
            parameter,
            count=count,
        )
    wrote = "a learning rate that is too large, weights changed without the scaler"
    if evidence.skipped >= evidence.steps:  # no step has written it
        wrote = "weights that are changed by hand, or were not finite at first"
    return Finding(
        "parameter",
        f"{cause}.",
        f"{_WONT} go back to an earlier checkpoint, and look for what wrote it ({wrote}).",
        parameter,
        count=count,
    )


def bad_state(evidence: Evidence) -> Finding | None:
    """An optimizer's state that is not finite, which no skip repairs."""
    if evidence.state is None:
        return None
    return Finding(
        "state",
        f"The optimizer's {evidence.state} is Inf or NaN, so each of its steps writes that into "
        "the parameter, or leaves it where it is for ever.",
        f"{_WONT} go back to an earlier checkpoint, and look for a step that was taken without the "
        "scaler, or on gradients that were changed after unscale_().",
        evidence.state,
    )


def _of_forward(evidence: Evidence, skipped: str) -> Finding | None:
    located, count = evidence.located, evidence.skips_in_a_row
    if located is None or located.kind == "backward":
        return None
    loss = evidence.skips[-1].loss
    is_outside = located.module is None or located.kind == "input"
    if is_outside and loss is not None and math.isfinite(loss):
        return None  # it reached the gradients, and not by the loss: the user may change them
    if located.kind == "input":
        seen = at_line(located, ", first seen in")
        if located.made_by is not None:
            return Finding(
                "loss",
                f"A tensor that {located.made_by} computed outside of the model holds Inf or NaN "
                f"before the forward pass{seen}, so {skipped}.",
                f"{_WONT} call locate() with the module that computes it.",
                line=located.line,
                count=count,
            )
        return Finding(
            "data",
            f"The batch itself holds Inf or NaN before the forward pass{seen}, so {skipped}.",
            f"{_WONT} look at the data and how they are prepared, such as a division by a "
            "deviation of 0.",
            line=located.line,
            count=count,
        )
    counts = (located.num_inf, "Inf"), (located.num_nan, "NaN")
    made = " and ".join(f"{count} {what}" for count, what in counts if count)
    made += f" in {located.dtype}{at_line(located)}"
    comma = "," if located.operation else ""
    made += f"{comma} from finite inputs up to {located.largest_input:g}"
    if located.smallest_divisor is not None:
        made += f", divided by {located.smallest_divisor:g}"
    action = f"{_WONT} {of_forward(located)}."
    if located.module is None:
        maker = f"Another module ({located.type})" if located.type else "Code outside of the model"
        cause = f"{maker} makes {made}, so {skipped}."
        return Finding("loss", cause, action, line=located.line, count=count)
    module = located.module or "the model"
    cause = f"The forward pass of {module} makes {made}, so {skipped}."
    return Finding("activations", cause, action, module, located.line, count=count)


def _of_loss(evidence: Evidence, skipped: str) -> Finding | None:
    losses = [skip.loss for skip in evidence.skips if skip.loss is not None]
    if not losses or any(map(math.isfinite, losses)):
        return None
    return Finding(
        "loss",
        f"The unscaled loss is itself {losses[-1]:g}, so {skipped}.",
        f"{_WONT} look for Inf or NaN in the batch, and in the loss for a logarithm (take a loss "
        "of logits), an exponential, a power, or a division by 0: compute it in float32.",
        count=evidence.skips_in_a_row,
        is_certain=False,
    )


def _of_gradients(evidence: Evidence, skipped: str, fell: str) -> Finding:
    first, last = evidence.skips[0], evidence.skips[-1]
    inspected = [skip.nonfinite for skip in evidence.skips if skip.nonfinite is not None]
    is_elsewhere = evidence.world_size > 1 and inspected[-1:] == [()]
    is_large = any(abs(skip.loss or 0.0) > _LARGE_LOSS for skip in evidence.skips)
    name = None if is_elsewhere or is_large else _nan_in_all(evidence.skips)
    found, count = evidence.located, evidence.skips_in_a_row
    is_backward = found is not None and found.kind == "backward"
    line = found.line if found is not None and is_backward else None
    if name is not None:
        at = at_line(found, ", by the gradient of") if is_backward else ""
        name_it = "" if at else ", and let anomaly detection name the operation"
        return Finding(
            "nan",
            f"The gradient of {name} is NaN at every loss scale{at}, though the loss is finite: "
            f"{skipped}.",
            f"{_WONT} {of_backward(found if at else None)}{name_it}.",
            name,
            line,
            count=count,
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
        return Finding(
            "normal",
            f"{overflow}, and {skipped}{fell}.",
            "The scale is still falling, and a lower one may fix this: start from a lower "
            "init_scale to get there sooner.",
            where,
            count=count,
        )
    limit = (
        "which cannot fall further"
        if at_floor or is_fixed
        else "which no longer enlarges gradients"
    )
    loss = f" (the loss is {last.loss:g})" if is_large else ""
    is_shown = is_backward and not (is_elsewhere or is_large)
    at = at_line(found if is_shown else None, ", first in the gradient of")
    overflow += at and f"{at},"
    cause = f"{overflow}{loss} at a loss scale of {last.scale:g}, {limit}: {skipped}{fell}."
    if is_elsewhere:
        return Finding("elsewhere", cause, EXPLAIN_ALL, count=count)
    lower = "start from a scale below 1" if last.scale <= 1 else "start from a lower scale"
    if at_floor or is_fixed:
        lower = "allow a lower scale (min_scale)"
    divide = f"Divide the loss (a mean in place of a sum, targets in larger units), or {lower}"
    if not is_large:
        look = "look there" if at else "look"
        divide += f"; if gradients are Inf at every scale, {look} for a division by 0"
    return Finding(
        "floor",
        cause,
        f"{divide}.",
        where,
        line,
        count=count,
        is_certain=False,
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
