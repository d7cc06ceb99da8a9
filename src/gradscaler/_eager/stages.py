"""The stages of an optimizer's gradients, the events between them, and the calls they forbid."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    """The stage of an optimizer's gradients, between the backward pass and the step."""

    SCALED = auto()
    """They are as the backward pass left them."""
    MEASURED = auto()
    """They are still scaled; their norm and found_inf are known."""
    DIVIDED = auto()
    """``clip_grad_norm_`` or ``step`` divided them; ``unscale_`` may still be called."""
    UNSCALED = auto()
    """They are divided by the scale, and found_inf is known."""
    STEPPED = auto()
    """The optimizer has stepped, or skipped its step."""
    UNKNOWN = auto()
    """A call was interrupted: some may be unscaled, or applied, and others not."""

    __hash__ = object.__hash__  # Enum's own takes as long as the rest of a look-up


class Validity(Enum):
    """Whether the measured norm and found_inf still hold once another loss is scaled."""

    LASTING = auto()
    """Another loss changes nothing: no clipping is pending, and no call raised."""
    CLIPPED = auto()
    """``clip_grad_norm_`` was called."""
    RAISED = auto()
    """A call raised. It may be repeated until another loss is scaled."""
    OUTDATED = auto()
    """Another loss was scaled after the gradients were measured."""
    RAISED_OUTDATED = auto()
    """Another loss was scaled, then a call raised. Only ``clip_grad_norm_`` may not be repeated."""

    __hash__ = object.__hash__


UNKNOWN_GRADIENTS = (
    "a call raised in this iteration, or a loss was scaled after it, so some gradients may be "
    "unscaled: clear the gradients, call scaler.update(), and repeat the iteration"
)

_CLIPPED_BEFORE_LOSS = (
    "clip_grad_norm_() was called for this optimizer before the latest loss was scaled: call it "
    "once per iteration, after the last backward pass, and call update() at the end of each "
    "iteration, also of one without a step. To go on now, clear the gradients, call "
    "scaler.update(), and repeat the iteration"
)

MIXED_GRADIENTS = (
    "the backward pass of a scaled loss came after unscale_() or clip_grad_norm_() of this "
    "optimizer, and added gradients that are multiplied by the loss scale to its unscaled ones: "
    "call unscale_() and clip_grad_norm_() after the last backward pass that reaches the "
    "optimizer's parameters, or step(optimizer) before another optimizer's loss. To go on now, "
    "clear the gradients, call scaler.update(), and repeat the iteration"
)

_BEFORE_ATTEMPTS = (
    "attempts() is being called after unscale_() or clip_grad_norm_(): call those after the last "
    "backward pass, and step(optimizer) and update() before the next iteration"
)

REFUSALS: dict[tuple[Stage | Validity, str], str] = {
    # The calls that each stage forbids, with the error's text. All others are allowed.
    (Stage.UNSCALED, "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update(), or since "
        "its loss was scaled: call it once between two calls of update(), after the last backward "
        "pass before step(): with accumulation, only in the iteration that steps. A loop that "
        "leaves out a step for its gradients still calls update()"
    ),
    (Stage.STEPPED, "unscale_"): (
        "unscale_() is being called after step(): call update() first, or unscale_() before step()"
    ),
    (Stage.STEPPED, "clip_grad_norm_"): (
        "clip_grad_norm_() is being called after step(): call it before step(optimizer), and call "
        "update() at the end of each iteration"
    ),
    (Stage.STEPPED, "step"): (
        "step() has already been called since the last update(): call update() once per iteration, "
        "after step(optimizer)"
    ),
    (Stage.UNKNOWN, "unscale_"): UNKNOWN_GRADIENTS,
    (Stage.UNKNOWN, "clip_grad_norm_"): UNKNOWN_GRADIENTS,
    (Stage.UNKNOWN, "step"): UNKNOWN_GRADIENTS,
    (Stage.MEASURED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.DIVIDED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.UNSCALED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.STEPPED, "attempts"): (
        "attempts() is being called after step(): call update() once per iteration, after "
        "step(optimizer)"
    ),
    (Stage.UNKNOWN, "attempts"): UNKNOWN_GRADIENTS,
    (Validity.OUTDATED, "clip_grad_norm_"): _CLIPPED_BEFORE_LOSS,
    (Validity.RAISED_OUTDATED, "clip_grad_norm_"): _CLIPPED_BEFORE_LOSS,
}

STAGE_AFTER: dict[tuple[Stage, str], Stage] = {
    (Stage.SCALED, "measured"): Stage.MEASURED,
    (Stage.SCALED, "unscaled"): Stage.UNSCALED,
    (Stage.MEASURED, "unscaled"): Stage.UNSCALED,
    (Stage.DIVIDED, "unscaled"): Stage.UNSCALED,
    (Stage.UNSCALED, "unscaled"): Stage.UNSCALED,  # a replaced method may have set it already
    (Stage.MEASURED, "multiplied"): Stage.DIVIDED,
    (Stage.DIVIDED, "multiplied"): Stage.DIVIDED,
    (Stage.UNSCALED, "multiplied"): Stage.UNSCALED,
    (Stage.UNSCALED, "unscaled to clip"): Stage.DIVIDED,
    (Stage.SCALED, "unscaled to clip"): Stage.DIVIDED,  # by a subclass's own unscale_
    **{(stage, "interrupted"): Stage.UNKNOWN for stage in Stage},
}

_VALIDITY_AFTER: dict[tuple[Validity, str], Validity] = {
    (Validity.LASTING, "clipped"): Validity.CLIPPED,
    (Validity.CLIPPED, "another loss"): Validity.OUTDATED,
    (Validity.RAISED, "another loss"): Validity.OUTDATED,
    (Validity.RAISED_OUTDATED, "another loss"): Validity.OUTDATED,
    (Validity.LASTING, "raised"): Validity.RAISED,
    (Validity.CLIPPED, "raised"): Validity.RAISED,
    (Validity.OUTDATED, "raised"): Validity.RAISED_OUTDATED,
}


def validity_after(validity: Validity, event: str) -> Validity:
    """The validity after an event; most events leave it unchanged."""
    return _VALIDITY_AFTER.get((validity, event), validity)
