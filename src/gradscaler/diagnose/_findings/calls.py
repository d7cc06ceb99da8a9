"""Findings of misuse that raises no error, such as wrong calls of a scaler."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from gradscaler.diagnose._findings.detector import Phase, Role, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.events import Event, Events
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.formats import format_named
from gradscaler.diagnose._record.lines import Sample
from gradscaler.diagnose._record.step import Before, Step
from gradscaler.diagnose._record.thresholds import (
    ALMOST_ALL,
    EXACT,
    EXACT_POWER,
    FEW_CALLS,
    FEW_EVENTS,
    FEW_SAMPLES,
    HALF,
    LARGEST_CLIP,
    MANY,
    MOST,
    SAME_NORM,
    SCALE_JUMPED,
    WARM_UP,
    ZEROED_SAMPLES,
)


@detector(Phase.WRITES_NAN, in_streak=Role.CAUSE, at_bad_step=Role.CAUSE)
def repeated(evidence: Evidence) -> Finding | None:
    """Steps that an optimizer takes once more, beside those of its scaler."""
    count = evidence.events.count(Event.REPEATED)
    # Of a scaler's loop, only the step beside it can have been applied in spite of an Inf or NaN.
    is_bad = evidence.bad_step is not None and not evidence.bad_step.is_left_out
    if count < (1 if is_bad else FEW_CALLS):
        return None
    times = f"{count} time{'s' * (count > 1)}"
    return Finding(
        "misuse",
        f"optimizer.step() was called {times} beside step(optimizer) of the scaler, with the "
        "same gradients: each step is taken twice, and one that is skipped for an Inf or a NaN is "
        "taken all the same.",
        "Leave out optimizer.step(): step(optimizer) of the scaler calls it. If the weights are "
        "Inf or NaN, go back to a checkpoint.",
        count=count,
    )


_ASTRAY = {  # why an optimizer never finds a gradient, and what to do
    "parameters": (
        "the loss depends on other parameters than it holds",
        "Make the optimizer{} after the model of the loss, of its parameters: a copy of a model, "
        "or one made again, has others. If it holds what is meant, look for "
        "detach() between that and the loss.",
    ),
    "others": (
        "the loss does not depend on the tensors that it holds, but on parameters of a model",
        "Look for detach(), .data, .item(), numpy(), torch.tensor() between the tensors of the "
        "optimizer{} and the loss: the result has no history. Or give the optimizer these "
        "parameters, if they are what is meant to be trained.",
    ),
    "held": (
        "they are gone between the backward pass and the step",
        "Do not clear them there: call zero_grad() before the backward pass.",
    ),
    "tensors": (
        "the loss depends on no parameter, and its graph begins at a tensor that was made anew",
        "Look for detach(), .data, .item(), numpy(), torch.tensor() between the parameters of the "
        "optimizer{} and the loss: the result has no history, even if it requires a gradient.",
    ),
}


@detector(Phase.MISUSE)
def unused(evidence: Evidence) -> Finding | None:
    """Optimizers that never step because they have no gradients."""
    count = evidence.events.count(Event.IDLE)
    if evidence.steps or not count:
        return None
    step = "step(optimizer)" if evidence.has_scaler else "optimizer.step()"
    astray, line = evidence.astray
    if astray:
        why, action = _ASTRAY[astray]
        return Finding(
            "misuse",
            f"{step} found no gradient in {count} calls, as {why}, so nothing is trained.",
            action.format(f" (made at {line})" if line else ""),
            line=line or None,
            count=count,
        )
    return Finding(
        "misuse",
        f"{step} found no gradient in {count} calls, so nothing is trained.",
        "Give the optimizer the parameters of the model that the loss comes from, not those of a "
        "copy; look for item(), numpy() or detach() before the loss; and call zero_grad() before "
        "the backward pass, not after it.",
        count=count,
    )


_AT_START = {  # why statistics are those of their start, and what to do
    "momentum": (
        "momentum=0 keeps the running statistics of {layers} where they began, at 0 and 1, by "
        "which the model normalizes in evaluation mode, though batches passed it in training mode",
        "Leave momentum out, which is 0.1 then: in PyTorch it is the share of the new batch, so "
        "that 0.99 of Keras is 0.01 here; and None is the mean of all batches.",
    ),
    "copy": (
        "In evaluation mode, a second {model} normalizes in {layers} by the statistics of its "
        "start (0 and 1), though its weights are trained: a copy or an average of the parameters "
        "alone lacks the buffers",
        "Copy buffers(), too, where the parameters are copied, as AveragedModel does, or call "
        "update_bn() before the second model is evaluated.",
    ),
}


@detector(Phase.MISUSE)
def at_start(evidence: Evidence) -> Finding | None:
    """Normalizations in evaluation mode whose statistics no batch has moved."""
    if not (place := evidence.events.place(Event.AT_START)):
        return None
    kind, model, count, name = place.split(" ", 3)
    layers = f"{count} layers ({name} first)" if int(count) > 1 else name
    why, action = _AT_START[kind]
    return Finding("misuse", f"{why.format(layers=layers, model=model)}.", action, name)


@detector(Phase.MISUSE)
def disabled(evidence: Evidence) -> Finding | None:
    """A scaler that is disabled in float16."""
    count = evidence.events.count(Event.DISABLED)
    if evidence.steps or count < FEW_CALLS:
        return None
    return Finding(
        "misuse",
        f"The scaler is disabled (enabled=False), and {count} forward passes computed in float16: "
        "gradients below 6e-8 are flushed to 0, and no step is skipped if they overflow.",
        "Enable the scaler, or run autocast with dtype=torch.bfloat16.",
        count=count,
    )


@detector(Phase.MISUSE, in_streak=Role.CAUSE, at_bad_step=Role.BESIDE)
def unzeroed(evidence: Evidence) -> Finding | None:
    """Gradients that were not zeroed after a step, whether it was applied or skipped."""
    count, steps = evidence.events.count(Event.UNZEROED), evidence.steps
    if count < max(FEW_CALLS, MANY * steps):
        return None
    where = evidence.events.place(Event.UNZEROED) or None
    whose = f" (those of {where})" if where else ""
    added, so, step = "to the gradients", "the sum of all gradients so far", "optimizer.step()"
    if evidence.has_scaler:
        step = "step(optimizer) and update()"
        if evidence.scale != 1 or evidence.min_scale != 1:
            added, so = "scaled gradients to the unscaled ones", "a sum of unlike parts"
    return Finding(
        "misuse",
        f"In {count} of {steps} steps, the backward pass added {added}{whose} that the step before "
        f"had used, so each step uses {so}, and an Inf or NaN stays.",
        f"Call optimizer.zero_grad() after each step{f' (for {where})' if where else ''}"
        f"{evidence.at('step')}; with micro-batches, call {step} once, after the last one.",
        where,
        line=evidence.line_of("step"),
        count=count,
    )


@detector(Phase.MODE)
def zeroed(evidence: Evidence) -> Finding | None:
    """Backward passes whose gradients are zeroed before the next one, as of micro-batches."""
    seen = [Events().after(each.calls).count(Event.ZEROED) > 0 for each in evidence.measured]
    places = evidence.events.places(Event.ZEROED)
    passes, count = next(iter(places.items()), ("", 0))
    if count < ZEROED_SAMPLES or sum(seen) < MOST * len(seen):
        return None
    call = "zero" if evidence.at("zero") else "backward"
    return Finding(
        "misuse",
        f"In {count} samples, {passes} backward passes of a step lost their gradients, which were "
        f"zeroed before the next one{evidence.at(call)}, so the step used only those of the last.",
        "If these are micro-batches, zero gradients once a step, before the first one; gradients "
        "that are read before they are zeroed may be meant so.",
        line=evidence.line_of(call),
        count=count,
        is_certain=False,
    )


@detector(Phase.MISUSE)
def emptied(evidence: Evidence) -> Finding | None:
    """Gradients that were set to 0 between each backward pass and the step that follows it."""
    if not evidence.are_emptied:
        return None
    count = evidence.events.count(Event.EMPTIED)
    return Finding(
        "misuse",
        f"In {count} samples, the backward pass made gradients that are not 0, and all of them "
        f"were 0 when the optimizer stepped{evidence.at('step')}, so nothing is trained.",
        "Look at what runs between the two: call zero_grad() before the backward pass, not after "
        "it; and a clip of your own multiplies by 0 where its norm is Inf, as a sum of float16 "
        "squares beyond 65504 is: take the norm in float32.",
        line=evidence.line_of("step"),
        count=count,
    )


@detector(Phase.MISUSE)
def unfit(evidence: Evidence) -> Finding | None:
    """A state dict of which no key fits, which ``strict=False`` lets pass."""
    place = evidence.events.place(Event.UNFIT)
    if not place:
        return None
    return Finding(
        "misuse",
        f"A state dict was loaded with strict=False, and none of its {place} fits the module, so "
        "nothing was loaded.",
        "Load it without strict=False, which raises an error; take the model's part out of the "
        'checkpoint, as by checkpoint["model"], and a prefix such as module. off the keys.',
        line=place.rpartition(" at ")[2] if " at " in place else None,
    )


@detector(Phase.MISUSE)
def onto_itself(evidence: Evidence) -> Finding | None:
    """States that are loaded again and again, of the module that has them."""
    count = evidence.events.count(Event.ONTO_ITSELF)
    if count < FEW_EVENTS:
        return None
    line = evidence.events.place(Event.ONTO_ITSELF)
    at = f" at {line}" if line else ""
    return Finding(
        "misuse",
        f"load_state_dict(){at} copied a model onto itself, {count} times: its state has the "
        "model's own tensors, so the call changes nothing.",
        "If both models are one object (target = model), make the other by copy.deepcopy(model). "
        "To keep a state, take copy.deepcopy(model.state_dict()), as each step changes the tensors "
        "in state_dict() itself.",
        line=line or None,
        count=count,
        is_certain=False,
    )


@detector(Phase.MISUSE, needs_scaler=True, in_streak=Role.CAUSE)
def scaled_in_loss(evidence: Evidence) -> Finding | None:
    """A loss that depends on the loss scale, such as by a penalty on scaled gradients."""
    # A skip leaves the parameters as they are, so the loss should stay about the same.
    falls: list[Step] = []
    latest: list[Step] = []
    for before, after in pairwise(evidence.past):
        is_fall = before.skipped and after.scale < before.scale and before.falls_to(after)
        latest = [*(latest or [before]), after] if is_fall else []
        falls = max(falls, latest, key=len)
    if len(falls) < FEW_CALLS:
        return None
    powers = [
        math.log(before.loss / after.loss) / math.log(before.scale / after.scale)
        for before, after in pairwise(falls)
        if before.loss and after.loss
    ]
    power = median(powers)
    if min(abs(power - 1), abs(power - 2)) > EXACT_POWER:  # the powers of a norm and its square
        return None
    first, last = falls[0], falls[-1]
    return Finding(
        "misuse",
        f"The loss falls with the loss scale, from {first.loss:g} at {first.scale:g} in step "
        f"{first.step} to {last.loss:g} at {last.scale:g} in step {last.step}, so it holds "
        "something that is multiplied by the scale, as a penalty on gradients does.",
        "Multiply the gradients of autograd.grad(scaler.scale(loss), ...) by 1 / "
        "scaler.get_scale() before the penalty, and call scale() once for each loss.",
        steps=(first.step, last.step),
        count=len(falls),
    )


@detector(Phase.MISUSE, needs_scaler=True, in_streak=Role.BESIDE)
def still_scaled(evidence: Evidence) -> Finding | None:
    """Recorded gradients that were not divided by the scale: times the scale, they leave the dtype.

    In a step that was applied, no gradient that is computed in the dtype can. Some may be computed
    in float32, so it has to be most of them.
    """
    if not evidence.framework.is_recorded:  # else the monitor reads them itself
        return None
    skipped = {step.step for step in evidence.past if step.skipped}
    applied = [sample for sample in evidence.measured if sample.step not in skipped]
    bad = [sample for sample in applied if _leave_dtype(sample, evidence.dtype)]
    if len(bad) < FEW_SAMPLES:
        return None
    step, scale, largest = bad[-1].step, bad[-1].scale, bad[-1].largest
    return Finding(
        "misuse",
        f"In step {step}, most of the recorded gradients, of up to {largest:g}, leave "
        f"{evidence.dtype} if they are multiplied by the loss scale of {scale:g}, and yet the step "
        "was applied: they are multiplied by it already, or not computed in that dtype.",
        "Give record() unscaled gradients: divide them by the scale that the step began with, in "
        "Keras by optimizer.loss_scale before apply(). If nothing is computed in "
        f"{evidence.dtype}, leave loss scaling out.",
        steps=tuple(sample.step for sample in bad[-2:]),
        count=len(bad),
        is_certain=False,
    )


def _leave_dtype(sample: Sample, dtype: str) -> bool:
    """Whether more than half of the gradients of a sample leave a dtype, times the loss scale."""
    bins = [each.histogram for each in sample.parameters.values() if each.histogram.counts]
    largest = [math.ldexp(sample.scale, own.first + len(own.counts) - 1) for own in bins]
    beyond = sum(each > format_named(dtype).largest for each in largest)
    return sample.scale > 1 and beyond > HALF * len(bins)


def _one_limit(values: list[float]) -> float | None:
    """The two-digit number that all values agree with, such as a clipping limit, or None."""
    if not values or not 0 < min(values) <= max(values) < math.inf:
        return None
    limit = float(f"{values[0]:.2g}")
    is_one = all(abs(value - limit) <= SAME_NORM * limit for value in values)
    return limit if is_one and limit <= LARGEST_CLIP else None


@detector(Phase.MISUSE)
def divided_twice(evidence: Evidence) -> Finding | None:
    """Gradients that a script divides twice by a loss scale of its own."""
    seen = [found for each in evidence.measured if (found := _divided(each)) is not None]
    factors = [used * scale * scale / norm for scale, norm, used in seen]
    if evidence.has_scaler or len(seen) < FEW_SAMPLES or max(factors) > 1 + EXACT:
        return None
    # Beside exact ones, there may be some that were clipped after the first division.
    both = zip(factors, seen, strict=True)
    clipped = [used * scale for factor, (scale, _, used) in both if factor < 1 - EXACT]
    if clipped and (_one_limit(clipped) is None or _one_limit([used for *_, used in seen])):
        return None
    scale, norm, used = seen[-1]
    return Finding(
        "misuse",
        f"In {len(seen)} samples, the script's own loss scale, {scale:g} now, has divided the "
        f"gradients twice before the step{evidence.at('step')}: their norm is "
        f"{norm:.2g} after the backward pass, and {used:.2g} then.",
        "Divide them once: look for a second call of what unscales them, as in the step() of a "
        "wrapper.",
        line=evidence.line_of("step"),
        count=len(seen),
    )


def _divided(sample: Sample) -> tuple[float, float, float] | None:
    """A script's own loss scale, and the norm of the gradients before and at a step, if known."""
    scales = Events().after(sample.calls).places(Event.BY_HAND)
    used = None if sample.optimizers is None else sample.optimizers.used
    if len(scales) != 1 or not used or not sample.norm:
        return None
    return float(*scales), sample.norm, used


@detector(Phase.MISUSE, needs_scaler=True, in_streak=Role.BESIDE)
def mixed(evidence: Evidence) -> Finding | None:
    """Steps on gradients of which a part is still scaled."""
    count = evidence.events.count(Event.MIXED)
    if not count:
        return None
    return Finding(
        "misuse",
        f"In {count} of {evidence.steps} steps, the backward pass of a scaled loss came after "
        "unscale_(optimizer), and added scaled gradients to the unscaled ones: they were applied "
        "multiplied by the loss scale.",
        "Call unscale_(optimizer) after the last backward pass that reaches its parameters, or "
        "step(optimizer) before another optimizer's loss.",
        count=count,
    )


@detector(Phase.MISUSE, needs_scaler=True, in_streak=Role.BESIDE)
def clipped_while_scaled(evidence: Evidence) -> Finding | None:
    """Gradients that are clipped to a limit while they are still scaled."""
    samples = evidence.measured
    norms = [s.norm * s.scale for s in samples if s.norm is not None]
    largest = [s.largest * s.scale for s in samples if s.largest is not None]
    what, function = "norm", "clip_grad_norm_"
    limit = _one_limit(norms)
    if limit is None and len(largest) > 1:
        what, function = "largest magnitude", "clip_grad_value_"
        limit = _one_limit(largest)
    if limit is None or _one_limit([limit / samples[-1].scale]) is not None:
        return None  # clipped after unscaling, at a scale that did not move
    scale = samples[-1].scale
    return Finding(
        "misuse",
        f"The {what} of the gradients is {limit:g} in each sample while they are still multiplied "
        f"by the loss scale, so they are clipped to {limit:g} / {scale:g} = {limit / scale:g}.",
        "Call scaler.unscale_(optimizer) after the backward pass and before "
        f"{function}{evidence.at('clip')}, or scaler.clip_grad_norm_(optimizer, max_norm) in its "
        "place.",
        line=evidence.line_of("clip"),
    )


@detector(Phase.MISUSE, needs_scaler=True)
def bypassed(evidence: Evidence) -> Finding | None:
    """Backward passes that do not take the loss that scale() returned."""
    count = evidence.events.count(Event.BYPASSED)
    if count < FEW_SAMPLES:
        return None
    return Finding(
        "misuse",
        f"In {count} samples, no backward pass{evidence.at('backward')} took the loss that scale() "
        f"returned, and step() divided the gradients by {evidence.scale:g} all the same, so each "
        "step is that much too small.",
        "Take the backward pass of what scale() returns: the loss that it was given stays as it "
        "is.",
        line=evidence.line_of("backward"),
        count=count,
    )


@detector(Phase.MISUSE, needs_scaler=True)
def shrunk(evidence: Evidence) -> Finding | None:
    """Gradients that are divided by the loss scale before the scaler divides them."""
    count = evidence.events.count(Event.SHRUNK)
    if count < FEW_SAMPLES:
        return None
    return Finding(
        "misuse",
        f"In {count} samples, the code divided the gradients by {evidence.scale:g}, which is the "
        f"loss scale, and the scaler{evidence.at('step')} then divided them once more.",
        "Unless that number is meant, such as a count of tokens, leave out the division: "
        "scaler.unscale_(optimizer) makes it, and step() does not divide again then.",
        line=evidence.line_of("step"),
        count=count,
        is_certain=False,
    )


@detector(Phase.MISUSE, needs_scaler=True, in_streak=Role.BESIDE)
def updated_too_often(evidence: Evidence) -> Finding | None:
    """Calls of ``update`` between micro-batches, or between optimizers."""
    events, steps = evidence.events, evidence.steps
    # A guard leaves out steps with a large norm, and their gradients are zeroed.
    unstepped = events.count(Event.UNSTEPPED) - events.count(Event.LEFT_OUT)
    if unstepped >= max(FEW_CALLS, MANY * (unstepped + steps)):
        return Finding(
            "misuse",
            f"update() was called {unstepped} times after unscale_(optimizer) without a step, "
            f"and {steps} times after a step: gradients that are accumulated over micro-batches "
            "are divided by the loss scale again and again.",
            "Call unscale_(optimizer), step(optimizer) and update() once each, after the last "
            "micro-batch's backward pass.",
            count=unstepped,
        )
    switched, unscaled = events.count(Event.SWITCHED), events.count(Event.UNSCALED)
    if unscaled < max(FEW_CALLS, MANY * steps) and switched < max(FEW_CALLS, ALMOST_ALL * steps):
        return None
    return Finding(
        "misuse",
        "update() is called after the step of each of several optimizers: growth_interval counts "
        "each iteration twice, and a skip of one lowers it for both.",
        "Step all optimizers, then call update() once at the end of the iteration; or give each "
        "optimizer and its loss a scaler of its own.",
    )


@detector(Phase.MISUSE, needs_scaler=True)
def unscaled_loss(evidence: Evidence) -> Finding | None:
    """Losses that are not scaled although their gradients are unscaled."""
    count, steps = evidence.events.count(Event.LOSSLESS), evidence.steps
    if evidence.world_size > 1 or count < max(FEW_CALLS, ALMOST_ALL * steps):
        return None  # in several processes, another one may scale the loss
    return Finding(
        "misuse",
        f"In {count} of {steps} steps, no loss was given to scale(), and step() divided the "
        "gradients by the loss scale all the same, so they are that much too small.",
        f"Call scaler.scale(loss).backward() in place of loss.backward(){evidence.at('backward')}.",
        line=evidence.line_of("backward"),
        count=count,
        is_certain=False,
    )


@detector(Phase.RESTART, needs_scaler=True, in_streak=Role.BESIDE)
def restarted(evidence: Evidence) -> Finding | None:
    """A run that continues an earlier one without the state of its scaler."""
    before, first = evidence.before, evidence.first
    if first is None:
        return None
    if evidence.events.count(Event.RESUMED) and first.skipped:
        cause = (
            "The optimizer has the state of an earlier run, but the scaler starts from "
            f"{first.scale:g}, which overflows in its first step"
        )
    elif before is not None and _continues(first, before):
        cause = (
            f"The run before ended at a loss scale of {before.scale:g}, and this one continues its "
            f"training from {first.scale:g} in step {first.step}"
        )
    else:
        return None
    return Finding(
        "restart",
        f"{cause}, so the scaler's state was not loaded.",
        "Save scaler.state_dict() with the model and the optimizer, and load it where they are "
        "loaded.",
        steps=(first.step,),
    )


def _continues(first: Step, before: Before) -> bool:
    """Whether a first step continues the previous run's training at a different scale."""
    if first.loss is None or 1 / SCALE_JUMPED < first.scale / before.scale < SCALE_JUMPED:
        return False
    improved = abs(before.first_loss - before.last_loss)
    return abs(first.loss - before.last_loss) < improved / 2


@detector(Phase.LOSS)
def uncalled(evidence: Evidence) -> Finding | None:
    """A module that has a gradient of its own, as it seems, of which PyTorch knows nothing."""
    place = evidence.events.place(Event.UNCALLED)
    if not place:
        return None
    return Finding(
        "misuse",
        f"The module {place} has a method backward(), which PyTorch never calls: the gradient is "
        "that of its forward().",
        "Write an autograd Function with static methods forward(ctx, ...) and backward(ctx, "
        "...), and call its apply() in the module's forward().",
        line=place.partition(" at ")[2] or None,
        is_certain=False,
    )


@detector(Phase.MODE)
def evaluating(evidence: Evidence) -> Finding | None:
    """Steps of a model that was left in evaluation mode."""
    count, steps = evidence.events.count(Event.EVALUATING), evidence.steps
    if count < max(FEW_CALLS, MANY * steps):
        return None
    line = evidence.line_of("eval")
    called = f" (it is called at {line})" if line else ""
    return Finding(
        "misuse",
        f"In {count} of {steps} steps, the model was in evaluation mode, after others in training "
        "mode: dropout drops nothing, and batch normalization keeps its old statistics.",
        "Call model.train() after each validation, before the next batch. To keep some layers in "
        f"evaluation mode, call eval() on those alone{called}.",
        line=line,
        count=count,
        is_certain=False,
    )


@detector(Phase.STALLED, in_streak=Role.BESIDE)
def stalled(evidence: Evidence) -> Finding | None:
    """16-bit parameters whose updates are lost in rounding."""
    shares = evidence.unmoved[-FEW_SAMPLES:]
    if not shares or min(shares) < HALF:
        return None
    return Finding(
        "stalled",
        f"{shares[-1]:.0%} of the 16-bit parameters did not move between two samples, though they "
        "have gradients: their updates are below half an ulp, and are rounded away.",
        "Keep the parameters in float32, with the forward pass under autocast, or step them by "
        "gradscaler.torch.MasterWeights; a larger learning rate only hides it.",
        is_certain=False,
    )


@detector(Phase.DTYPE, needs_scaler=True)
def full_precision(evidence: Evidence) -> Finding | None:
    """Backward passes that compute nothing in float16."""
    dtypes = evidence.backward
    if evidence.steps <= WARM_UP:
        return None
    if evidence.dtype != "float16" or not dtypes or dtypes & {"float16", "unknown"}:
        return None
    if evidence.scale == evidence.min_scale == 1:  # a scale fixed at 1 changes nothing
        return None
    so = "so loss scaling has nothing to protect"
    action = (
        "Run the forward pass and the loss under torch.autocast(device, dtype=torch.float16), or "
        "leave the scaler out (enabled=False)."
    )
    if "bfloat16" in dtypes:
        so = (
            "and bfloat16 has the range of float32: loss scaling gains nothing, and a skip loses a "
            "step"
        )
        action = "Leave the scaler out (enabled=False), or run autocast with dtype=torch.float16."
    listed = " and ".join(sorted(dtypes))
    return Finding(
        "misuse",
        f"The backward pass computes in {listed} and nothing in float16, {so}.",
        action,
        is_certain=False,
    )


@detector(Phase.DTYPE, at_bad_step=Role.BESIDE)
def without_scaling(evidence: Evidence) -> Finding | None:
    """Backward passes in float16 whose loss nothing scales."""
    bad = evidence.bad_step
    if evidence.has_scaler or not evidence.is_in_float16 or evidence.is_scaled_by_hand:
        return None
    if bad is not None and bad.lost_eps is not None:
        return None  # PyTorch scales no loss of float16 weights, which need another eps first
    sample, lost = evidence.sample, ""
    is_sound = bad is None or bad.is_left_out or (sample is not None and sample.step < bad.step)
    if sample is not None and sample.shares is not None and is_sound:
        zero = sample.shares.zero + sample.shares.flushed
        lost = (
            f" In step {sample.step}, {zero:.0%} of the gradients are zero in float16 and "
            f"{sample.shares.subnormal:.0%} subnormal."
        )
    return Finding(
        "misuse",
        "The backward pass computes in float16 and nothing scales the loss, so gradients below "
        f"6e-8 are flushed to 0, and those beyond 65504 become Inf.{lost}",
        "Scale the loss by a GradScaler (a disabled one, as PyTorch's is without CUDA, scales "
        "nothing), or train in bfloat16 (torch.autocast(device, dtype=torch.bfloat16)).",
        is_certain=False,
    )
