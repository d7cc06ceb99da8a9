"""What may be true of an optimizer's gradients, and every way from one stage to the next."""

from __future__ import annotations

from enum import Enum, auto

from gradscaler.errors import CallOrderError


class Stage(Enum):
    """What is true of an optimizer's gradients."""

    SCALED = auto()
    """They are as the backward pass left them."""
    MEASURED = auto()
    """They are still scaled; their norm and found_inf are known."""
    UNSCALED_TO_CLIP = auto()
    """``clip_grad_norm_`` or ``step`` divided them; ``unscale_`` may still be called."""
    UNSCALED = auto()
    """They are divided by the scale, and found_inf is known."""
    STEPPED = auto()
    """The optimizer has stepped, or skipped its step."""
    UNKNOWN = auto()
    """A call was interrupted: some may be unscaled, or applied, and some not."""

    __hash__ = object.__hash__  # Enum's takes as long as the rest of a look-up


class Standing(Enum):
    """Whether what is known of the gradients holds if another loss is scaled."""

    LASTING = auto()
    """Nothing depends on it: they are not to be clipped, and no call raised."""
    CLIPPED = auto()
    """``clip_grad_norm_`` has: until another loss is scaled, ``update`` would lose it."""
    RAISED = auto()
    """A call raised: it may be repeated until another loss is scaled."""
    OUTDATED = auto()
    """Another loss was scaled, whose gradients were not measured."""
    RAISED_OUTDATED = auto()
    """Then a call raised: it may be repeated, but nothing measured anew."""

    __hash__ = object.__hash__


UNKNOWN_GRADIENTS = (
    "a call raised in this iteration, or a loss was scaled after it, so some gradients may be "
    "unscaled: clear the gradients, call scaler.update(), and repeat the iteration"
)

_BEFORE_ATTEMPTS = (
    "attempts() is being called after unscale_() or clip_grad_norm_(): call those after the last "
    "backward pass, and step(optimizer) and update() before the next iteration"
)

_AFTER_STAGE: dict[tuple[Stage, str], Stage | str] = {
    # A user's call: the stage after it, or the error that it raises.
    (Stage.SCALED, "unscale_"): Stage.UNSCALED,
    (Stage.SCALED, "clip_grad_norm_"): Stage.SCALED,  # until it has measured or unscaled
    (Stage.SCALED, "step"): Stage.STEPPED,
    (Stage.MEASURED, "unscale_"): Stage.UNSCALED,
    (Stage.MEASURED, "clip_grad_norm_"): Stage.MEASURED,
    (Stage.MEASURED, "step"): Stage.STEPPED,
    (Stage.UNSCALED_TO_CLIP, "unscale_"): Stage.UNSCALED,
    (Stage.UNSCALED_TO_CLIP, "clip_grad_norm_"): Stage.UNSCALED_TO_CLIP,
    (Stage.UNSCALED_TO_CLIP, "step"): Stage.STEPPED,
    (Stage.UNSCALED, "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update(): call "
        "update() once per iteration, after step(optimizer)"
    ),
    (Stage.UNSCALED, "clip_grad_norm_"): Stage.UNSCALED,
    (Stage.UNSCALED, "step"): Stage.STEPPED,
    (Stage.STEPPED, "unscale_"): (
        "unscale_() is being called after step(): call update() first, or unscale_() before step()"
    ),
    (Stage.STEPPED, "clip_grad_norm_"): (
        "clip_grad_norm_() is being called after step(): call it before step(optimizer)"
    ),
    (Stage.STEPPED, "step"): (
        "step() has already been called since the last update(): call update() once per iteration, "
        "after step(optimizer)"
    ),
    (Stage.UNKNOWN, "unscale_"): UNKNOWN_GRADIENTS,
    (Stage.UNKNOWN, "clip_grad_norm_"): UNKNOWN_GRADIENTS,
    (Stage.UNKNOWN, "step"): UNKNOWN_GRADIENTS,
    (Stage.SCALED, "attempts"): Stage.SCALED,
    (Stage.MEASURED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.UNSCALED_TO_CLIP, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.UNSCALED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.STEPPED, "attempts"): (
        "attempts() is being called after step(): call update() once per iteration, after "
        "step(optimizer)"
    ),
    (Stage.UNKNOWN, "attempts"): UNKNOWN_GRADIENTS,
    # What a call does on its way.
    (Stage.SCALED, "measured"): Stage.MEASURED,
    (Stage.UNSCALED, "unscaled to clip"): Stage.UNSCALED_TO_CLIP,
    (Stage.SCALED, "unscaled to clip"): Stage.UNSCALED_TO_CLIP,  # a subclass's own unscale_
    (Stage.MEASURED, "multiplied"): Stage.UNSCALED_TO_CLIP,
    (Stage.UNSCALED_TO_CLIP, "multiplied"): Stage.UNSCALED_TO_CLIP,
    (Stage.UNSCALED, "multiplied"): Stage.UNSCALED,
    **{(stage, "interrupted"): Stage.UNKNOWN for stage in Stage},
}

_AFTER_STANDING: dict[tuple[Standing, str], Standing | str] = {
    # Where an event is not here, nothing changes.
    (Standing.LASTING, "clipped"): Standing.CLIPPED,
    (Standing.OUTDATED, "clip_grad_norm_"): UNKNOWN_GRADIENTS,
    (Standing.RAISED_OUTDATED, "clip_grad_norm_"): UNKNOWN_GRADIENTS,
    (Standing.CLIPPED, "another loss"): Standing.OUTDATED,
    (Standing.RAISED, "another loss"): Standing.OUTDATED,
    (Standing.RAISED_OUTDATED, "another loss"): Standing.OUTDATED,
    (Standing.LASTING, "raised"): Standing.RAISED,
    (Standing.CLIPPED, "raised"): Standing.RAISED,
    (Standing.OUTDATED, "raised"): Standing.RAISED_OUTDATED,
}


def after(stage: Stage, event: str) -> Stage:
    """The stage after an event.

    Raises:
        CallOrderError: the user's call may not come now; the message names the missing one.
    """
    found = _AFTER_STAGE[stage, event]
    if isinstance(found, str):
        raise CallOrderError(found)
    return found


def standing_after(standing: Standing, event: str) -> Standing:
    """The standing after an event; raises as ``after`` does."""
    found = _AFTER_STANDING.get((standing, event), standing)
    if isinstance(found, str):
        raise CallOrderError(found)
    return found
