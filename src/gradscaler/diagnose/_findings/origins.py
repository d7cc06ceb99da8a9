"""Where the first Inf or NaN of steps that failed began: one text for each origin."""

from __future__ import annotations

import math
import re

from gradscaler.diagnose._findings.advice import (
    at_any_scale,
    at_line,
    is_inf_in_float16,
    of_backward,
    of_forward,
    of_gradient,
    of_own,
    of_result_alone,
    seen_in,
)
from gradscaler.diagnose._findings.case import Case, Outcome
from gradscaler.diagnose._findings.evidence import STATISTICS, Evidence
from gradscaler.diagnose._findings.nan_skips import is_nan
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with, row_of
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.located import (
    BadGradient,
    Given,
    Located,
    Made,
    MadeOutside,
    is_exact,
)
from gradscaler.diagnose._record.thresholds import EXPLODED, LARGE_FROM_THE_START, SET_AGAIN

EXPLAIN_ALL = (
    "To see which, explain the files of all ranks together: gradscaler run writes one of each, and "
    'so do monitors with path="run.{rank}.jsonl".'
)
WARNED = "after NumPy warned of"
BY_EPS = "the optimizer divides by an eps of"
_DIVIDES = names_with(Role.DIVIDES)
_KEPT = "kept from step to step (averaged weights, statistics, a queue)"
# PowerSGD adds to each gradient what it left out of the last one, so one Inf stays in its memory.
_KEPT_OF_PROCESSES = f"{_KEPT[:-1]}, the memory of a communication hook such as PowerSGD's)"
_UNTRAINED = "look at what writes its weights: an average's decay must be below 1"
_UNTRAINED_IN_FLOAT16 = f"run it in float32 (autocast(enabled=False)), or {_UNTRAINED}"
_LOOK_AT = (
    "look at what makes it, in the data, the model or the loss, such as 0 / 0 (a deviation, sum or "
    "count of 0, the deviation of one element), the logarithm of 0, or 0 * Inf (a mask)"
)
_NOT_RECORDED = (
    "Whether they overflow or are NaN at every scale is not known: give monitor.record() loss= and "
    "gradients="
)
_IN_FLOAT16 = (
    "numbers beyond 65504 are Inf in float16: scale the loss by a GradScaler, which skips such "
    "steps, or train in bfloat16"
)
_KEEP_FLOAT32 = (
    "Go back to an earlier checkpoint, and keep the parameters in float32, with the forward pass "
    "under autocast"
)
_SCALED_BY_HAND = (
    "the script multiplies its loss by {scale:g}, which makes gradients larger than the 65504 that "
    "float16 ends at: lower it, and skip each step with an Inf or NaN, which isfinite() shows and "
    "a comparison with Inf does not; or leave both to a GradScaler"
)
# As optax names them, in a path such as "opt_state.0.nu.dense.kernel" or "state[0].nu['w']".
_SECOND_MOMENT = re.compile(r"[.\])](nu|nu_max|sum_of_squares|v|v_row|v_col)([.\[]|$)")
_UNSKIPPED = (
    "Without the loss scale, the gradients are finite: skip each step whose gradients are not, and "
    "lower the scale."
)
_OVERFLOW = (
    "look for a division by a number near 0 or an exponential, lower the learning rate or warm it "
    "up, and clip gradients"
)


def within(case: Case) -> Finding | None:
    """A loss that exploded among the evaluations of one step of an optimizer."""
    bad = case.evidence.bad_step
    first, largest = (None if bad is None else bad.evaluated) or (0.0, 0.0)
    if not 0 < EXPLODED * abs(first) < abs(largest):
        return None
    this = case.with_numbers("{this}")
    return Finding(
        "divergence",
        f"The loss grew from {first:g} to {largest:g} within {this}, which evaluated it several "
        "times, until numbers became Inf or NaN.",
        'Let the optimizer search along its line (LBFGS: line_search_fn="strong_wolfe"), or lower '
        "the learning rate; go back to a checkpoint from before it.",
    )


def of_eps(eps: float) -> tuple[str, str]:
    """What an optimizer's eps does that is 0, also in float16, and what to do."""
    if not eps:
        return (
            f": {BY_EPS} 0, and 0 / 0 is NaN where a gradient is 0",
            "Go back to an earlier checkpoint, and set eps to 1e-8.",
        )
    return (
        f": {BY_EPS} {eps:g}, which is 0 in the float16 of its parameters",
        f"{_KEEP_FLOAT32}, or set eps to 1e-4.",
    )


def parameter(case: Case) -> Finding | None:
    """A parameter or a buffer that is itself not finite."""
    evidence, bad = case.evidence, case.evidence.bad_step
    located, name, whose = case.located, case.parameter, "The model's"
    if name is None and located is not None:
        name = located.bad_parameter
        if isinstance(located, MadeOutside):  # such as a teacher
            whose = f"Another module's ({located.type})"
    if name is None:
        return None
    why = since = ""
    wrote, line = evidence.watched, None
    if case.lost_eps is not None:
        why, action = of_eps(case.lost_eps)
    elif name.endswith(STATISTICS):
        undone = ": no skip undoes that" if evidence.has_scaler else ""
        watched = evidence.watched
        read = seen_in(watched) if isinstance(watched, Given) else ""
        action = at_any_scale(
            "reset it or go back to an earlier checkpoint, and look for the batch whose forward "
            f"pass wrote Inf or NaN into it{read}{undone}",
            evidence,
        )
    elif bad is not None and bad.is_from_start:
        since = ", and was before the first step"
        action = "Repair it in the checkpoint that was loaded, or in what initializes it."
    elif isinstance(wrote, MadeOutside) and wrote.parameter is None and is_exact(wrote):
        why = f": {wrote.operation} at {wrote.line} wrote it in {wrote.dtype}"
        action = f"{at_any_scale(of_forward(wrote), evidence)} Go back to a checkpoint."
        line = wrote.line
    else:
        action = at_any_scale(
            "go back to a checkpoint, and find what wrote it: " + _what_wrote(evidence),
            evidence,
        )
    so = case.with_numbers(case.outcome.of_parameter)
    cause = f"{whose} {name} is itself Inf or NaN{since}, {so}{why}."
    return Finding("parameter", cause, action, name, line)


def _what_wrote(evidence: Evidence) -> str:
    """What may have written an Inf or NaN into a parameter."""
    code = "code (a mean of no elements, a division by a norm of 0)"
    start = "numbers not finite from the start"
    if evidence.has_scaler and evidence.skipped >= evidence.steps:  # none was applied
        return "optimizer.step() without the scaler, or weights that were not finite at first"
    bad = evidence.bad_step
    first = [start, code] if bad is not None and bad.step == 1 else [code, start]
    return f"{', '.join(first)}, or too large a learning rate"


def update(case: Case) -> Finding | None:
    """An optimizer that makes an Inf or NaN of finite gradients, as by an eps that is 0."""
    found, name = case.located, case.parameter
    if not case.failures or isinstance(found, Given) or found is None or not found.optimizer:
        return None
    is_division, is_narrow = found.operation in _DIVIDES, found.dtype == "float16"
    if not (is_division or is_narrow):
        return None
    nan = case.last.nan
    name = name or nan or next((each.name for each in case.last.nonfinite or ()), None)
    why = "it divides 0 by 0, as by an eps of 0 where a gradient is 0"
    action = "Go back to an earlier checkpoint, and set eps to 1e-8."
    if is_narrow:
        why, action = "squares of gradients beyond 255 are Inf there", f"{_KEEP_FLOAT32}."
    if is_narrow and is_division:
        why = "an eps below 3e-8 is 0 there, so 0 / 0 is NaN where a gradient is 0"
        action = f"{_KEEP_FLOAT32}, or set eps to 1e-4."
    at = f" at {found.line}" if found.line else ""
    what = "Inf" if nan is None else "NaN"
    so = case.with_numbers(case.outcome.of_gradient)
    return Finding(
        "parameter",
        f"{found.optimizer}{at} makes {name or 'a parameter'} {what} in {found.dtype}{so}: {why}.",
        action,
        name,
        found.line,
    )


def large_numbers(case: Case) -> Finding | None:
    """A forward pass that overflows after losses that were very large from the first step on."""
    located, losses = case.located, [step.loss for step in case.past]
    first = next((loss for loss in losses if loss is not None), 0.0)
    is_made = located is None or isinstance(located, Made)
    if case.is_skipped or not is_made or not LARGE_FROM_THE_START <= first < math.inf:
        return None
    if located is None:
        last = case.last.loss
        if last is None or math.isfinite(last):
            return None
    elif located.enlarged_by is not None:  # an exponential did that
        return None
    so = case.with_numbers(case.outcome.of_forward)
    return Finding(
        "activations",
        f"The forward pass makes numbers that are too large from the start (the first loss is "
        f"{first:g}), and then Inf or NaN{at_line(located)}, {so}.",
        "Look at inputs that are not normalized, and at the first weights (those of a recurrent "
        "layer multiply at each time step: use a smaller gain); use a normalization layer, and "
        "clip gradients.",
        located.module or None if located else None,
        located.line if located else None,
    )


def forward(case: Case) -> Finding | None:
    """An Inf or NaN that a forward pass makes, in the model or outside, or reads as an input."""
    evidence, located = case.evidence, case.located
    if located is None or isinstance(located, BadGradient):
        return None
    loss = case.last.loss
    is_of_gradient = isinstance(located, Given) and not evidence.has_scaler
    is_finite = loss is not None and math.isfinite(loss) and not evidence.are_kept
    if is_finite and located.module is None and not is_of_gradient:
        return None  # it did not reach the loss; user code may have changed the gradients
    if isinstance(located, Given):
        return _given(case, located, ", though the loss is finite" * is_finite)
    module, kind = located.module, "activations"
    maker = f"The forward pass of {located.spoken_module or 'the model'}"
    if module is None:
        kind = "loss"
        outside = "Code outside of the model"
        if _is_replayed(evidence):
            outside = f"The {_function(located)}"
        maker = f"Another module ({located.type})" if located.type else outside
    counts = (located.num_inf, "Inf"), (located.num_nan, "NaN")
    numbers = " and ".join(f"{count} {what}" for count, what in counts if count)
    action, so = of_forward(located), case.with_numbers(case.outcome.of_forward)
    if module is None and located.type:
        action = _UNTRAINED_IN_FLOAT16 if located.dtype == "float16" else _UNTRAINED
    return Finding(
        kind,
        f"{maker} makes {numbers} in {located.dtype}{at_line(located)}{_from(located)}, {so}.",
        at_any_scale(action, evidence),
        "the model" if module == "" else module,
        located.line,
    )


def _is_replayed(evidence: Evidence) -> bool:
    """Whether a function was run again, as in JAX, and not a model."""
    return evidence.framework.finder == "locate_jax()"


def _function(located: Located) -> str:
    """A function that was run again, by its name if that is known."""
    return f"function {located.function}" if located.function else "replayed function"


def _from(located: Located) -> str:
    """What an operation made an Inf or NaN from; it may have been given one that was not seen."""
    comma = "," if located.operation else ""
    if math.isnan(located.largest_input):
        return ", or by an operation before it" if located.operation else ""
    inputs = f"{comma} from finite inputs up to {located.largest_input:g}"
    if located.smallest_divisor is not None:
        inputs += f", divided by {located.smallest_divisor:g}"
    return inputs


def _has_hooks(evidence: Evidence) -> bool:
    """Whether processes of PyTorch train together, whose gradients may pass a hook."""
    return evidence.world_size > 1 and evidence.framework.name == "torch"


def _given(case: Case, located: Given, though: str) -> Finding:
    """A tensor that already held an Inf or NaN when the first operation read it."""
    evidence, kind, what = case.evidence, "loss", "A tensor without a gradient holds"
    after = ""
    if _is_replayed(evidence):  # a parameter is an argument, too
        holder = f"the argument {located.parameter}" if located.parameter else "a constant"
        what = f"In the {_function(located)}, {holder} holds"
        action = (
            "if it is a parameter, go back to an earlier checkpoint; if it is the batch, look at "
            "the data and how they are prepared"
        )
    elif located.is_number:
        what = "A number from outside of the framework, as of NumPy, is"
        action = "look at what computes it, such as 0 / 0 or the logarithm of 0"
    elif located.warned is not None:
        kind = "data"
        text, _, line = located.warned.rpartition(" at ")
        after = f', {WARNED} "{text}" at {line}'
        action = (
            f"look at {line} first, which may have made it: a logarithm or a quotient of 0 needs "
            "an eps, or a clip of what it takes, and a mean of no elements another value"
        )
    elif not evidence.has_scaler:
        kind, action = "data", f"{_LOOK_AT}; if it is {_KEPT}, reset it"
    elif evidence.steps > evidence.skipped:  # good batches came before
        kept = _KEPT_OF_PROCESSES if _has_hooks(evidence) else _KEPT
        action = f"if it is {kept}, reset it, as no skip does; else look at the data"
    elif is_inf_in_float16(located):
        kind, what = "data", "In float16, the batch holds"
        action = "normalize or clip numbers beyond 65504, or look for Inf in the data"
    else:
        kind, what = "data", "The batch itself holds"
        action = _LOOK_AT
    rows = f" in {located.rows}" if located.rows else ""
    layer = f" before the forward pass of {located.spoken_module}" if located.module else ""
    seen, so = at_line(located, "first seen in"), case.with_numbers(case.outcome.of_forward)
    return Finding(
        kind,
        f"{what} Inf or NaN{rows}{layer}{seen}{though}{after}, {so}.",
        at_any_scale(action, evidence),
        line=located.line,
    )


def loss(case: Case) -> Finding | None:
    """Losses that are mostly not finite. No more specific cause is known."""
    evidence = case.evidence
    losses = [each.loss for each in case.failures if each.loss is not None]
    num_finite = sum(map(math.isfinite, losses))
    if not losses or math.isfinite(losses[-1]) or 2 * num_finite > len(losses):
        return None
    so = case.with_numbers(case.outcome.of_loss)
    return Finding(
        "loss",
        f"The {'unscaled ' * evidence.has_scaler}loss is itself {losses[-1]:g}, {so}.",
        at_any_scale(
            "look for Inf or NaN in the batch, and in the loss for a logarithm (take a loss of "
            "logits), an exponential, a power, or a division by 0: compute it in float32",
            evidence,
        ),
        is_certain=False,
    )


def squared(case: Case) -> Finding | None:
    """An optimizer of JAX whose second moments alone are Inf, as results of a step: squares."""
    found, last = case.located, case.last if case.failures else None
    bad = () if last is None else last.nonfinite or ()
    is_finite = last is not None and last.loss is not None and math.isfinite(last.loss)
    if case.outcome is not Outcome.APPLIED or not bad or not is_finite:
        return None
    if not all(each.num_inf and _SECOND_MOMENT.search(each.name) for each in bad):
        return None
    before = None if found is None else found.enlarged_by
    large, action = "", "look at the scale of inputs and targets"
    if before is not None:
        large = f" after {before}"
        action = "clamp what that takes (the logarithm of a variance to at most 20)"
    return Finding(
        "state",
        f"The optimizer's state {bad[0].name} is Inf, though the loss is finite "
        f"({case.last.loss:g}){case.with_numbers(case.outcome.of_gradient)}.",
        f"The gradients are so large{large} that their squares leave float32: {action}, and "
        "normalize the inputs. No later step repairs that state: begin again, or go back to a "
        "checkpoint.",
        bad[0].name,
        before.rpartition(" at ")[2] if before and " at " in before else None,
    )


def gradient(case: Case) -> Finding | None:
    """A gradient that is not finite though the loss is."""
    evidence = case.evidence
    located: Located | None = case.backward
    is_applied = case.outcome is Outcome.APPLIED
    is_unscaled = is_applied or not evidence.has_scaler  # so that no scale makes an Inf
    if is_applied and located is None and evidence.bad_step is not None:
        located = evidence.bad_step.located
    where = name_it = ""
    what, name = "NaN", case.last.nan if case.failures else None
    if case.outcome is Outcome.IN_A_ROW and evidence.has_scaler:
        if (name := _always_nan(case, located)) is None and not _fails_unscaled(case):
            return None
        where = _at_scales(name, case.last.scale)
        finder = "" if at_line(located) else evidence.framework.finder
        name_it = finder and f"; {finder} names the operation"
    elif name is None and is_unscaled and case.last.nonfinite:
        what, name = "Inf", case.last.nonfinite[0].name
    of_forward_pass = of_result_alone(located) if _is_replayed(evidence) else None
    by = "by the gradient of" if of_forward_pass is None else "made in the forward pass by"
    at, so = at_line(located, by), case.with_numbers(case.outcome.of_gradient)
    though = ", though the loss is finite"
    if (is_applied and case.last.loss is None) or evidence.are_kept:
        though = ""
    if is_applied and evidence.world_size > 1 and (located is None or located.is_likely):
        cause = (
            f"{_gradient_of(name)} is {what}{though} on this rank{so}: it may come from another "
            "rank."
        )
        return Finding("elsewhere", cause, EXPLAIN_ALL, name)
    bad = "A gradient is NaN or Inf" if name is None else f"{_gradient_of(name)} is {what}"
    action = of_forward_pass or f"{of_backward(located)}{name_it}"
    # An overflow makes NaN, too, as Inf - Inf, unless a slope that can be Inf is seen.
    is_open = located is None or (
        located.is_likely and not (of_gradient(located) or of_own(located))
    )
    if evidence.is_scaled_by_hand and is_open:
        scale = max(map(float, evidence.events.places(Event.BY_HAND)))
        at, located, action = "", None, _SCALED_BY_HAND.format(scale=scale)
    elif what == "Inf" and not at:
        action = _IN_FLOAT16 if evidence.is_in_float16 else _OVERFLOW
    is_of_scale = is_applied and evidence.events.count(Event.UNSKIPPED) > 0
    return Finding(
        "nan",
        f"{bad}{where}{at}{though}{so}.",
        _UNSKIPPED if is_of_scale else at_any_scale(action, evidence),
        name,
        None if located is None else located.line,
        is_certain=case.outcome is not Outcome.IN_A_ROW or case.last.scale <= 1,
    )


def _always_nan(case: Case, located: Located | None) -> str | None:
    """The name of a gradient that is NaN at every scale, in skips in a row; None if none is.

    Beside an Inf, a NaN at a scale of at most 1 proves nothing, unless an operation was located
    whose slope can be Inf.
    """
    if case.is_elsewhere or case.has_large_loss:
        return None
    name = _nan_in_all(case)
    if name is None and located is not None and of_gradient(located) is not None:
        name = case.last.nan if case.last.scale <= 1 else None
    return name


def _at_scales(name: str | None, scale: float) -> str:
    """At which loss scales a gradient is NaN, the smallest of which is given."""
    if scale <= 1:
        return " at every loss scale"
    return "" if name is None else f" and none is Inf at a scale of {scale:g}"


def _fails_unscaled(case: Case) -> bool:
    """Whether a gradient was seen to fail without a loss scale, as a replay has none.

    It is NaN there, or Inf by an operation whose slope has a pole, which no lower scale moves.
    """
    found = case.backward
    if found is None or found.is_likely or not case.evidence.framework.is_recorded:
        return False
    row = row_of(found.operation or "")
    is_pole = found.num_nan > 0 or (row is not None and bool(row.steep_at))
    is_known = is_pole and of_gradient(found) is not None
    return is_known and not (case.is_elsewhere or case.has_large_loss)


def _nan_in_all(case: Case) -> str | None:
    """The name of a parameter whose gradient was NaN in all inspected skips, or None.

    It is also None if the last inspected skip may be an overflow; see :func:`is_nan`.
    """
    inspected = [each for each in case.failures if each.nonfinite]
    if not inspected or not is_nan(inspected[-1], case.evidence):
        return None
    bad = [[g.name for g in each.nonfinite or () if g.num_nan] for each in inspected]
    common = set.intersection(*map(set, bad))
    return next((name for name in bad[0] if name in common), None)


def overflow(case: Case) -> Finding:
    """Gradients that overflow. The scale may still fall, or is at its lower limit."""
    evidence, first, last = case.evidence, case.failures[0], case.last
    skipped = case.with_numbers(case.outcome.of_forward).removeprefix("so ")
    highest = first.scale if evidence.first_scale is None else evidence.first_scale
    if highest != last.scale:
        skipped += f" while the scale fell from {highest:g} to {last.scale:g}"
    where, overflowed = _overflowed(case)
    lowest = evidence.min_scale
    is_lowest = lowest is not None and last.scale <= lowest
    at_floor = is_lowest or (len(case.failures) > 1 and first.scale == last.scale)
    is_set = at_floor and not is_lowest and lowest is not None and len(case.failures) >= SET_AGAIN
    if not at_floor and last.scale > 1:
        return Finding(
            "normal",
            f"{overflowed}, and {skipped}.",
            "The scale is still falling, and a lower one may fix this: start from a lower "
            "init_scale to get there sooner.",
            where,
        )
    is_large = case.has_large_loss
    loss = f" (the loss is {last.loss:g})" if is_large else ""
    limit = "which cannot fall further" if at_floor else "which no longer enlarges gradients"
    limit = "which something sets again after each skip" if is_set else limit
    backward = None if is_large or case.is_elsewhere else case.backward
    at = at_line(backward, "first in the gradient of")
    overflowed += at and f"{at},"
    cause = f"{overflowed}{loss} at a loss scale of {last.scale:g}, {limit}: {skipped}."
    if case.is_elsewhere:
        return Finding("elsewhere", cause, EXPLAIN_ALL)
    divide = "ivide the loss (a mean in place of a sum, targets in larger units)"
    allow = "llow a lower scale (min_scale, or DynamicScale if it is fixed)"
    if is_set:
        action = (
            f"Leave out what sets it, such as update({last.scale:g}), as update() lowers it by "
            f"itself; or d{divide}"
        )
    elif last.scale > 1 and last.nonfinite and not last.has_inf:
        action = f"A{allow}; if NaN is left at a scale of 1, it is no overflow"
    elif last.scale > 1:
        action = f"A{allow}, or d{divide}"
    else:
        lower = "allow a lower scale (min_scale)" if at_floor else "start from a scale below 1"
        action = f"D{divide}, or {lower}"
        if not is_large:
            action += f"; or look {'there ' if at else ''}for a division by 0"
    if last.loss is None and not last.nonfinite and not at:  # only record() may leave out both
        replay = ", and replay=" * evidence.framework.has_replay
        action = f"{_NOT_RECORDED}{replay}. If they overflow, {action[0].lower()}{action[1:]}"
    line = None if backward is None else backward.line
    return Finding("floor", cause, f"{action}.", where, line, is_certain=False)


def _overflowed(case: Case) -> tuple[str | None, str]:
    """The name of the first gradient that is not finite, and a clause that says so."""
    if case.is_elsewhere:
        return None, "Another rank's gradients, but not this one's, are Inf or NaN"
    nonfinite = case.last.nonfinite
    if not nonfinite:
        return None, "The gradients are Inf or NaN"  # not inspected
    where = nonfinite[0].name
    if case.last.has_inf:
        return where, f"The gradients overflow in {where}" if where else "The gradients overflow"
    return where, f"{_gradient_of(where)} is NaN"


def _gradient_of(name: str | None) -> str:
    """The gradient of a parameter; in JAX, one array that is all parameters has no name."""
    return f"The gradient of {name}" if name else "The gradient"
