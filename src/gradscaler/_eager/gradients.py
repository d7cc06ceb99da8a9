"""One optimizer's gradients in one iteration: their stage, and the work that is left."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Protocol, SupportsFloat

from gradscaler._eager.loss import Loss
from gradscaler._eager.operations import (
    Args,
    FoundInf,
    GradientsRefusedError,
    Kwargs,
    Operations,
    Optimizer,
    Tensor,
)
from gradscaler._eager.processes import Deciders, Parts
from gradscaler._eager.stages import REFUSALS, STAGE_AFTER, Stage, Standing, standing_after
from gradscaler.errors import CallOrderError
from gradscaler.outcome import Reason, StepOutcome
from gradscaler.policies import Policy, State, amax_interval

_IS_SCALED = (Stage.SCALED, Stage.MEASURED)
_IS_KNOWN = (Stage.MEASURED, Stage.DIVIDED, Stage.UNSCALED)
_IS_OVER = (Stage.STEPPED, Stage.UNKNOWN)

_FRAMEWORK_STAGES = {
    "READY": Stage.SCALED,
    "UNSCALED": Stage.UNSCALED,
    "STEPPED": Stage.STEPPED,
}


class Scaling(NamedTuple):
    """The scale of an optimizer's gradients, and the state by which processes decide about them.

    Attributes:
        scale: the scale that their loss was multiplied by.
        state: the scaler's state, the same in all processes that decide together.
        amax_interval: the policy needs the largest gradient every so many finite steps; 0 if it
            never does.
    """

    scale: Tensor
    state: State
    amax_interval: int


class Unscaler(Protocol):
    """Divides one optimizer's gradients by the scale, and checks them.

    An adapter's unscaler calls the methods that users have replaced.
    """

    @property
    def is_plain(self) -> bool:
        """Whether it only divides and checks, so that ``measure`` may be used instead.

        A user's replacement may do more, such as reduce the flags over processes.
        """

    def unscale_(self, inverse: Tensor, /) -> FoundInf:
        """Divide the gradients in place, finite or not, and flag those that are not finite.

        ``inverse`` is the second value that :meth:`Operations.inverse` returns.
        """

    def check(self) -> FoundInf:
        """Flag gradients that are not finite, and change none."""


class Gradients:
    """One optimizer's gradients in one iteration. Only this class changes their stage.

    Attributes:
        optimizer: the owner of their parameters. It is kept alive until the iteration ends, so
            that no other object gets its id.
        stage: their stage between the backward pass and the step.
        found_inf: the flags of the check; None before it.
        overflowed: the value of ``have_overflowed`` once a step has read it on the host, else None.
        amax: the largest unscaled magnitude; None if the policy does not need it.
        scale: the scale that they are divided by.
        clip_coefficient: the factor by which ``step`` still has to clip them, or None.
        made_with: the state whose scale they were made with, if ``attempts`` backed off; None for
            the scaler's own state.
        is_attempted: whether a loop over ``attempts`` made them.
        is_exhausted: whether they overflowed in each of the latest ``attempts``.
        is_counted: whether an ``update`` has counted their found_inf.
        is_untouched: whether a few parameters are as they were when the gradients were clipped;
            None if that is not watched.
        result: None before ``optimizer.step`` is called, an empty list until it returns, then a
            list of the value that it returned.
    """

    # Defaults stand on the class: every iteration makes new objects, and they are cheap this way.
    optimizer: Optimizer = None
    stage: Stage = Stage.SCALED
    found_inf: FoundInf | None = None
    overflowed: bool | None = None
    amax: Tensor | None = None
    scale: SupportsFloat | None = None
    clip_coefficient: Tensor | None = None
    made_with: State | None = None
    is_attempted: bool = False
    is_exhausted: bool = False
    is_counted: bool = False
    is_untouched: Callable[[], bool] | None = None
    result: list[object] | None = None
    _standing: Standing = Standing.LASTING
    _inverse: Tensor | None = None  # 1/scale, if they are MEASURED
    _stale: list[Tensor] | None = None  # the tensors at the time that they became UNKNOWN

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    # Their state.

    def must_allow(self, call: str) -> None:
        """Raise CallOrderError, with the reason, if a user may not make this call now."""
        refusal = REFUSALS.get((self.stage, call))
        if refusal is None and self._standing is not Standing.LASTING:
            refusal = REFUSALS.get((self._standing, call))
        if refusal is not None:
            raise CallOrderError(refusal)

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients are still multiplied by the loss scale."""
        return self.stage in _IS_SCALED

    @property
    def are_measured(self) -> bool:
        """Whether the gradients are still scaled, and their norm and found_inf are known."""
        return self.stage is Stage.MEASURED

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has stepped, or the gradients' state is unknown."""
        return self.stage in _IS_OVER

    @property
    def awaits_step(self) -> bool:
        """Whether they await their step, and were checked or made at a scale of their own."""
        is_made_apart = self.stage is Stage.SCALED and self.made_with is not None
        return is_made_apart or self.stage in _IS_KNOWN

    @property
    def await_clipping(self) -> bool:
        """Whether they await the step that clips them, and no error or other loss came since."""
        is_clipped = self._standing is Standing.CLIPPED and self.clip_coefficient is not None
        return is_clipped and not self.is_over

    @property
    def were_applied_elsewhere(self) -> bool:
        """Whether a step that is not the scaler's came after clipping; may wait for the device."""
        watch = self.is_untouched
        return watch is not None and self.await_clipping and not watch()

    @property
    def have_overflowed(self) -> bool:
        """Whether a flag is set; may wait for the device."""
        return self._operations.any_set(self.found_inf or {})

    @property
    def are_replaced(self) -> bool:
        """Whether new gradients have replaced all those that became UNKNOWN."""
        current = self._operations.current_gradients(self.optimizer)
        return self._operations.are_new(current, self._stale or [])

    @property
    def framework_stage(self) -> str:
        """The stage under frameworks' names: READY, UNSCALED or STEPPED. Frameworks may set it."""
        if self.is_scaled:
            return "READY"
        return "STEPPED" if self.stage is Stage.STEPPED else "UNSCALED"

    @framework_stage.setter
    def framework_stage(self, name: str) -> None:
        self.stage = _FRAMEWORK_STAGES[name]

    # Operations on them.

    def move(self, event: str) -> None:
        """Move to the stage that follows an event."""
        self.stage = STAGE_AFTER[self.stage, event]

    def unscale(self, scaling: Scaling, unscaler: Unscaler, deciders: Deciders) -> None:
        """Divide the gradients by the scale, in place, and check them."""
        try:
            self.scale, inverse = self._operations.inverse(scaling.scale)
            found_inf = unscaler.unscale_(inverse)
            if self.stage is not Stage.MEASURED:  # the flags of measured ones are settled already
                self.settle(found_inf, scaling, deciders)
            self._inverse = None  # the clip coefficient stays
            self.move("unscaled")
        except GradientsRefusedError:  # raised before any gradient has changed
            raise
        except BaseException:
            self.interrupt()
            raise

    def check(self, scaling: Scaling, unscaler: Unscaler, deciders: Deciders) -> None:
        """Check whether the gradients are finite, and change none."""
        scale = scaling.scale if self.is_scaled else None
        self.settle(unscaler.check(), scaling, deciders, scale=scale)

    def measure(self, scaling: Scaling, parts: Parts, deciders: Deciders) -> Tensor | None:
        """The norm that the gradients will have once unscaled; checks them in the same pass.

        None if one pass is not enough; then nothing is recorded.
        """
        norms, found_infs = [], []
        for part in parts.parts:
            measured = self._operations.measure(part, scaling.scale)
            # Another process may measure its parts while this one unscales: both run the same
            # collectives.
            if measured is None:
                return None
            norm, scale, inverse, found_inf = measured
            norms.append(norm)
            found_infs.append(found_inf)
        # The flags of one part stay by their devices; those of several are merged into one.
        found_inf = found_infs[0] if len(found_infs) == 1 else self._operations.merge(found_infs)
        # Processes decide before their norms are added up, as they do if gradients are unscaled.
        self.settle(found_inf, scaling, deciders, scale=scaling.scale)
        self.scale, self._inverse = scale, inverse
        self.move("measured")
        return parts.norm(norms, 2.0)

    def norm(self, parts: Parts, norm_type: float) -> Tensor:
        """The norm of the gradients as they are, over all processes that hold parts of them."""
        total_norm = self._operations.total_norm
        return parts.norm([total_norm(part, norm_type) for part in parts.parts], norm_type)

    def settle(
        self,
        found_inf: FoundInf,
        scaling: Scaling,
        deciders: Deciders,
        *,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        """Record the check of all processes that decide together.

        Args:
            found_inf: what this process found.
            scaling: as in ``unscale``.
            deciders: the processes that decide together.
            scale: the scale that the gradients are still multiplied by, if any.
            amax: their largest magnitude, if it is already known.
        """
        if scaling.amax_interval and amax is None and self.amax_is_due(found_inf, scaling):
            amax = self._operations.amax(self.optimizer, scale)
        self.found_inf, self.amax = deciders.agree(scaling.state, found_inf, amax)

    def amax_is_due(self, found_inf: FoundInf, scaling: Scaling) -> bool:
        """Whether the policy needs the largest gradient of this step."""
        if not scaling.amax_interval:
            return False
        steps = self._operations.finite_steps(scaling.state)
        if steps is None:  # reading it would wait for the device
            return True
        return steps % scaling.amax_interval == 0 and not self._operations.any_set(found_inf)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Let ``step`` multiply the gradients so that their norm is at most ``max_norm``."""
        coefficient = self._operations.clip_coefficient(max_norm, norm)
        self._standing = standing_after(self._standing, "clipped")
        self.clip_coefficient = None if math.isinf(max_norm) else coefficient  # inf: only measure

    def must_be_finite(self, norm: Tensor, norm_type: float, deciders: Deciders) -> None:
        """Raise on all processes if the norm or a gradient of any of them is not finite.

        Norms may differ between processes, and a norm of finite gradients may overflow.
        """
        is_finite = math.isfinite(float(norm))
        if not deciders.is_anywhere(not is_finite or self.have_overflowed):
            return
        elsewhere = " here, and not finite on another process" if is_finite else ""
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(norm)}{elsewhere}, so "
            "they cannot be clipped; with error_if_nonfinite=False the step is skipped instead"
        )

    def multiply(self) -> None:
        """Multiply the gradients by the factors that are pending: 1/scale, clipping, or both."""
        factor = self.clip_coefficient if self._inverse is None else self._inverse
        if factor is None:
            return
        if self._inverse is not None and self.clip_coefficient is not None:
            factor = self.clip_coefficient * self._inverse
        try:
            self._operations.multiply_gradients_(self.optimizer, factor)
            self.clip_coefficient = self._inverse = None
            self.move("multiplied")
        except GradientsRefusedError:
            raise
        except BaseException:
            self.interrupt()  # some may be multiplied, and multiplying twice would be wrong
            raise

    def apply(self, step: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
        """Call the optimizer's ``step``, and keep what it returns in ``result``.

        ``extend`` calls ``step`` and keeps the value in one call into C. So no interrupt comes
        between the return and the record of it.
        """
        result: list[object] = []
        self.result = result
        result.extend(starmap(partial(step, **kwargs), (args,)))
        return result[0]

    def finish(self, reason: Reason | None = None) -> StepOutcome:
        """End the gradients' iteration, after all calls that may raise, and return its outcome.

        ``reason`` is the reason of a skip for which found_inf is not set.
        """
        if self.found_inf is not None and not self.found_inf:
            reason = "no_gradients"
        if self.is_exhausted and self.have_overflowed:
            reason = "retries_exhausted"
        flag: bool | Callable[[], bool] | None = self.overflowed
        if flag is None:  # no step has read it, so the outcome reads it when a user asks
            flag = self._operations.readable(self.found_inf) if self.found_inf else False
        self.stage = Stage.STEPPED
        assert self.scale is not None
        return StepOutcome(self.scale, flag, reason)

    # Events.

    def interrupt(self) -> None:
        """Note that a call was interrupted, so that only some gradients may be unscaled."""
        # The tensors, not their ids: a new gradient must not get the id of an old one.
        self._stale = self._operations.current_gradients(self.optimizer)
        self.move("interrupted")

    def note_raised(self, error: BaseException) -> None:
        """Note that a call raised. The user may repeat it until another loss is scaled."""
        if self.result:
            self.stage = Stage.STEPPED  # the error came after the optimizer's step
            return
        if self.result is not None and not isinstance(error, Exception):
            self.interrupt()  # the optimizer may have applied some gradients, or all
        elif self.stage not in _IS_KNOWN:
            return
        self.overflowed = None
        self._standing = standing_after(self._standing, "raised")

    def note_others(self) -> None:
        """Note that a closure has made new gradients in place of these."""
        if self.stage in _IS_KNOWN:
            self.interrupt()

    def note_loss(self) -> None:
        """Note that another loss was scaled, whose backward pass may add to these gradients."""
        if self._standing in (Standing.LASTING, Standing.OUTDATED):
            return
        is_known = self._standing is not Standing.CLIPPED and self.stage in _IS_KNOWN
        if is_known or self.stage is Stage.UNKNOWN:
            self.interrupt()  # the gradients that are there now are stale
        self._standing = standing_after(self._standing, "another loss")


def owner_of(optimizer: Optimizer) -> Optimizer:
    """The innermost optimizer with these ``param_groups``.

    Trainers wrap optimizers, and step the wrapper or the optimizer. A wrapper has the optimizer in
    its attribute ``optimizer``, and the same list of groups.
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


class Iteration(defaultdict[int, Any]):
    """The gradients of each optimizer since the last ``update``, by the optimizer's id.

    A wrapper's id finds the gradients of the optimizer that it wraps. Frameworks expose this dict,
    and may put dicts of their own into it.

    Attributes:
        next_state: the state that ``update`` has decided to move to, else None.
        loss: the latest loss, of this iteration or an earlier one; None if there was none.
        left_out: the ids of the optimizers whose step the iteration before left out after clipping.
    """

    next_state: State | None = None
    loss: Loss | None = None
    left_out: frozenset[int] = frozenset()
    _owners: dict[int, tuple[Optimizer, Optimizer]] | None = None  # with wrappers, by their ids

    def following(self) -> Iteration:
        """The next iteration. Gradients that were checked, and not stepped, await their step."""
        following = Iteration(self.default_factory)
        following.loss = self.loss
        for key, each in self.items():
            if isinstance(each, Gradients):  # else a framework has put it here
                following._follow(key, each)
        return following

    def _follow(self, key: int, gradients: Gradients) -> None:
        """Note an optimizer's gradients of the iteration before."""
        gradients.is_counted = gradients.found_inf is not None
        if not gradients.is_over and gradients.await_clipping:
            self.left_out |= {key}
        if self.loss is not None:
            self.loss.outlive_update(key, gradients)

    def of(self, optimizer: Optimizer) -> Gradients:
        """The optimizer's gradients, or a new object that is not in the dict yet.

        Raises:
            TypeError: ``optimizer`` is not an optimizer.
        """
        owner = owner_of(optimizer)
        if owner is not optimizer:
            self._wrap(optimizer, owner)
        found: Gradients | None = self.get(id(owner))
        if found is None and self.loss is not None:
            found = self.loss.waiting.get(id(owner))
        if found is None or (found.stage is Stage.UNKNOWN and found.are_replaced):
            if not hasattr(owner, "step"):
                raise TypeError(
                    "a scaler takes the optimizer that owns the gradients, as in "
                    "scaler.clip_grad_norm_(optimizer, max_norm), scaler.unscale_(optimizer) and "
                    f"scaler.step(optimizer), got {type(optimizer).__name__}"
                )
            assert self.default_factory is not None
            found = self.default_factory()
        found.optimizer = owner  # a framework may have made the entry, given only the id
        return found

    def of_another_loss(self, optimizer: Optimizer) -> Gradients:
        """Like ``of``, but for a loss that is still to come.

        So gradients that were checked before the latest ``update`` don't count.
        """
        found = self.of(optimizer)
        if found.stage is Stage.SCALED or id(found.optimizer) in self:
            return found
        assert self.default_factory is not None
        new: Gradients = self.default_factory()
        new.optimizer = found.optimizer
        return new

    def keep(self, gradients: Gradients) -> None:
        """Put these gradients into the dict, until the iteration ends."""
        self[id(gradients.optimizer)] = gradients

    def drop(self, gradients: Gradients) -> None:
        """Remove these gradients from the dict."""
        self.pop(id(gradients.optimizer), None)

    def renew(self, key: int) -> None:
        """Forget the gradients of the optimizer with this id, because it gets new ones."""
        self.pop(key, None)
        if self.loss is not None:
            self.loss.forget(key)

    def kept(self, gradients: Gradients) -> Gradients:
        """Keep these gradients, or return those that a user's method has already kept."""
        found: Gradients = self.setdefault(id(gradients.optimizer), gradients)
        found.optimizer = gradients.optimizer  # they may have been made, given only the id
        return found

    def known(self) -> list[Gradients]:
        """All gradients in the dict, without the entries that a framework has put there."""
        return [each for each in self.values() if isinstance(each, Gradients)]

    def found_infs(self) -> list[FoundInf]:
        """The flags of all gradients that were checked.

        Raises:
            CallOrderError: none were checked.
        """
        found, were_checked = [], False
        for each in self.values():
            if not isinstance(each, Gradients):  # a framework has put it here
                continue
            if each.found_inf and not each.is_counted:
                found.append(each.found_inf)
            elif each.found_inf is not None or each.stage is Stage.UNKNOWN:
                were_checked = True  # the optimizer had none, or their state is unknown
        if not found and not were_checked:
            raise CallOrderError(
                "No inf checks were recorded prior to update(): call step(optimizer) or "
                "unscale_(optimizer) before update()"
            )
        return found

    def amaxes(self, policy: Policy) -> list[Tensor]:
        """Each optimizer's largest gradient; empty if the policy does not need them."""
        if not amax_interval(policy):
            return []
        uncounted = (each for each in self.known() if not each.is_counted)
        return [each.amax for each in uncounted if each.amax is not None]

    def note_raised(self, optimizer: Optimizer, error: BaseException) -> None:
        """Note that a call for an optimizer raised."""
        gradients = self.get(id(owner_of(optimizer)))
        if gradients is not None:
            gradients.note_raised(error)

    def uncounted(self) -> set[int]:
        """The ids of the optimizers that no ``update`` has counted yet."""
        return {key for key, each in self.items() if not getattr(each, "is_counted", False)}

    def must_be_applied_by_scaler(self) -> None:
        """Raise CallOrderError if the user has stepped an optimizer whose step was to clip."""
        if any(each.were_applied_elsewhere for each in self.known()):
            raise CallOrderError(
                "parameters have changed between clip_grad_norm_() and update(), without "
                "scaler.step(optimizer): if optimizer.step() changed them, call "
                "scaler.step(optimizer) in its place, which unscales and clips the gradients; to "
                "leave out a step, change no parameters before update()"
            )

    def _wrap(self, wrapper: Optimizer, owner: Optimizer) -> None:
        """Let a wrapper share its optimizer's gradients, including ones looked up earlier."""
        made = self.pop(id(wrapper), None)
        if made is not None:
            self.setdefault(id(owner), made)
        self._owners = self._owners or {}
        # Both are kept alive, so that no other object gets their ids.
        self._owners[id(wrapper)] = owner, wrapper

    def __missing__(self, key: int) -> Gradients:
        found: Gradients
        if self._owners is not None and key in self._owners:
            found = self[id(self._owners[key][0])]
        elif self.loss is not None and key in self.loss.waiting:
            found = self.setdefault(key, self.loss.waiting[key])
        else:
            found = super().__missing__(key)
        return found
