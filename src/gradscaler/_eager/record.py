"""What is known of one optimizer's gradients in the current iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from itertools import starmap
from typing import Any

from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler.errors import CallOrderError
from gradscaler.policies import State


class Stage(Enum):
    """What is true of an optimizer's gradients."""

    SCALED = auto()
    """They are as the backward pass left them."""
    MEASURED = auto()
    """They are still scaled; their norm and found_inf are known."""
    UNSCALED_TO_CLIP = auto()
    """``clip_grad_norm_`` divided them by the scale; ``unscale_`` may still be called."""
    UNSCALED = auto()
    """They are divided by the scale, and found_inf is known."""
    STEPPED = auto()
    """The optimizer has stepped, or skipped its step."""
    INTERRUPTED = auto()
    """A call ended on the way: some may be unscaled, and some not."""

    __hash__ = object.__hash__  # Enum's takes as long as the rest of a look-up


_SCALED = (Stage.SCALED, Stage.MEASURED)

UNKNOWN_GRADIENTS = (
    "a call raised in this iteration, or a loss was scaled after it, so some gradients may be "
    "unscaled: clear the gradients, call scaler.update(), and repeat the iteration"
)

_BEFORE_ATTEMPTS = (
    "attempts() is being called after unscale_() or clip_grad_norm_(): call those after the last "
    "backward pass, and step(optimizer) and update() before the next iteration"
)

TRANSITIONS: dict[tuple[Stage, str], Stage | str] = {
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
    (Stage.INTERRUPTED, "unscale_"): UNKNOWN_GRADIENTS,
    (Stage.INTERRUPTED, "clip_grad_norm_"): UNKNOWN_GRADIENTS,
    (Stage.INTERRUPTED, "step"): UNKNOWN_GRADIENTS,
    (Stage.SCALED, "attempts"): Stage.SCALED,
    (Stage.MEASURED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.UNSCALED_TO_CLIP, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.UNSCALED, "attempts"): _BEFORE_ATTEMPTS,
    (Stage.STEPPED, "attempts"): (
        "attempts() is being called after step(): call update() once per iteration, after "
        "step(optimizer)"
    ),
    (Stage.INTERRUPTED, "attempts"): UNKNOWN_GRADIENTS,
    # What a call does on its way.
    (Stage.SCALED, "measured"): Stage.MEASURED,
    (Stage.UNSCALED, "unscaled to clip"): Stage.UNSCALED_TO_CLIP,
    (Stage.SCALED, "unscaled to clip"): Stage.UNSCALED_TO_CLIP,  # a subclass's own unscale_
    (Stage.MEASURED, "multiplied"): Stage.UNSCALED_TO_CLIP,
    (Stage.UNSCALED_TO_CLIP, "multiplied"): Stage.UNSCALED_TO_CLIP,
    (Stage.UNSCALED, "multiplied"): Stage.UNSCALED,
    **{(stage, "interrupted"): Stage.INTERRUPTED for stage in Stage},
}
"""Every way from one stage to the next, by what happens."""


_FRAMEWORK_STAGES = {
    "READY": Stage.SCALED,
    "UNSCALED": Stage.UNSCALED,
    "STEPPED": Stage.STEPPED,
}


def owner_of(optimizer: Optimizer) -> Optimizer:
    """The innermost optimizer that owns ``param_groups``: trainers wrap it, and step either.

    A wrapper's ``optimizer`` has the same list of groups.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return optimizer
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if (
            inner is None
            or inner is optimizer
            or getattr(inner, "param_groups", None) is not groups
        ):
            return optimizer
        optimizer = inner


class OptimizerRecord:
    """The state of one optimizer in one iteration.

    Attributes:
        optimizer: the owner of its parameters; kept alive until the iteration ends, so that its id
            stays its own.
        stage: what is true of its gradients.
        found_inf: its own flags; None until its gradients were checked.
        overflowed: whether a flag is set, once a step has read that on the host.
        amax: their largest magnitude once unscaled; None where the policy does not look at it.
        result: what ``optimizer.step`` returned, in a list; empty until it has, None until it is
            called.
        scale: the scale that its gradients are unscaled by.
        inv_scale: 1/scale if the gradients are MEASURED, else None.
        clip_coefficient: what clipping still has to multiply the gradients by, or None.
        made_with: the state that its gradients were made with, if ``attempts`` backed off; None for
            the scaler's own.
        is_exhausted: whether the gradients overflowed in each of the latest ``attempts``.
        has_raised: whether a call of this optimizer raised, and could be repeated.
        is_outdated: whether a loss was scaled since clip_grad_norm_().
        stale: the gradients when a call was interrupted, or a loss was scaled after it, or None.
    """

    # Values of the class, until something sets them: each iteration makes a record.
    optimizer: Optimizer = None
    stage: Stage = Stage.SCALED
    found_inf: FoundInf | None = None
    overflowed: bool | None = None
    amax: Tensor | None = None
    scale: Any = None
    inv_scale: Tensor | None = None
    clip_coefficient: Tensor | None = None
    made_with: State | None = None
    is_exhausted: bool = False
    has_raised: bool = False
    is_outdated: bool = False
    stale: list[Tensor] | None = None

    result: list[Any] | None = None

    def apply(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's ``step``, and keep what it returns in ``result``.

        ``extend`` is one call into C, so no interrupt comes between the two: a step that has
        returned is never taken for one that has not.
        """
        result: list[Any] = []
        self.result = result
        result.extend(starmap(partial(step, **kwargs), (args,)))
        return result[0]

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients are still multiplied by the loss scale."""
        return self.stage in _SCALED

    @property
    def awaits_step(self) -> bool:
        """Whether the gradients are to be clipped in a step that has not come.

        After an error, or with another loss, ``update`` ends what is not worth a step.
        """
        is_over = self.stage in (Stage.STEPPED, Stage.INTERRUPTED)
        given_up = self.has_raised or self.is_outdated
        return self.clip_coefficient is not None and not is_over and not given_up

    @property
    def framework_stage(self) -> str:
        """The name of the stage that frameworks know, and may set: READY, UNSCALED or STEPPED."""
        if self.is_scaled:
            return "READY"
        return "STEPPED" if self.stage is Stage.STEPPED else "UNSCALED"

    @framework_stage.setter
    def framework_stage(self, name: str) -> None:
        self.stage = _FRAMEWORK_STAGES[name]

    def check(self, event: str) -> None:
        """Whether an event may come now; the record stays as it is.

        Raises:
            CallOrderError: the user's call may not come now; the message names the missing one.
        """
        after = TRANSITIONS[self.stage, event]
        if isinstance(after, str):
            raise CallOrderError(after)

    def move(self, event: str) -> None:
        """Go to the stage after an event; raises as ``check`` does."""
        after = TRANSITIONS[self.stage, event]
        if isinstance(after, str):
            raise CallOrderError(after)
        self.stage = after

    def interrupt(self, gradients: list[Tensor]) -> None:
        """Note that only some of these gradients may be unscaled."""
        self.move("interrupted")
        self.stale = gradients

    def pending(self) -> Tensor:
        """What the gradients are yet to be multiplied by: 1/scale, clipping's, or both."""
        if self.clip_coefficient is None or self.inv_scale is None:
            return self.inv_scale if self.clip_coefficient is None else self.clip_coefficient
        return self.clip_coefficient * self.inv_scale


class Records(defaultdict[int, OptimizerRecord]):
    """Records by the ids of their optimizers; a wrapper's id finds that of the optimizer in it.

    Attributes:
        next_state: the state that ``update`` moves to, once it has decided.
    """

    next_state: State | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wrapped: dict[int, tuple[Optimizer, Optimizer]] = {}  # kept alive, so ids stay theirs

    def wrap(self, wrapper: Optimizer, owner: Optimizer) -> None:
        """Let a wrapper share its owner's record, also one that a user asked for before."""
        made = self.pop(id(wrapper), None)
        if made is not None:
            self.setdefault(id(owner), made)
        self._wrapped[id(wrapper)] = wrapper, owner

    def __missing__(self, key: int) -> OptimizerRecord:
        if key not in self._wrapped:
            return super().__missing__(key)
        _, owner = self._wrapped[key]
        return self[id(owner)]
