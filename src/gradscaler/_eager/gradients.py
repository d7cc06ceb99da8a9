"""One optimizer's gradients in one iteration: what is true of them, what is yet to be done."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Protocol

from gradscaler._eager.operations import (
    FoundInf,
    GradientsRefusedError,
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
    """What gradients were multiplied by, and by which state all decide about them.

    Attributes:
        scale: of their loss.
        state: the scaler's, which all processes that decide together hold alike.
        amax_interval: at how many finite steps the policy looks at the largest gradient; 0 for
            never.
    """

    scale: Tensor
    state: State
    amax_interval: int


class Unscaler(Protocol):
    """How one optimizer's gradients are divided by the scale, and checked.

    An adapter hands the engine one that calls what users have put in place of its methods.
    """

    @property
    def is_plain(self) -> bool:
        """Whether that is all that happens, so that a norm of scaled gradients may tell as much.

        A replacement may reduce flags over processes, for example.
        """

    def unscale_(self, inverse: Any, /) -> FoundInf:
        """Divide them in place, whatever is found, and flag those that are not finite.

        ``inverse`` is the second that :meth:`Operations.inverse` gives.
        """

    def check(self) -> FoundInf:
        """Flag those that are not finite; all stay as they are."""


class Gradients:
    """One optimizer's gradients in one iteration: the only place where their stage moves.

    Attributes:
        optimizer: the owner of their parameters; kept alive until the iteration ends, so that its
            id stays its own.
        stage: what is true of them.
        found_inf: their flags; None until they were checked.
        overflowed: ``have_overflowed``, once a step has read that on the host; else None.
        amax: their largest magnitude once unscaled; None where the policy does not look at it.
        scale: the scale that they are unscaled by.
        clip_coefficient: what clipping still has to multiply them by, or None.
        made_with: the state that they were made with, if ``attempts`` backed off; None for the
            scaler's own.
        is_attempted: whether a loop over ``attempts`` made them.
        is_exhausted: whether they overflowed in each of the latest ``attempts``.
        result: what ``optimizer.step`` returned, in a list; empty until it has, None until it is
            called.
    """

    # Values of the class, until something sets them: each iteration makes new ones.
    optimizer: Optimizer = None
    stage: Stage = Stage.SCALED
    found_inf: FoundInf | None = None
    overflowed: bool | None = None
    amax: Tensor | None = None
    scale: Any = None
    clip_coefficient: Tensor | None = None
    made_with: State | None = None
    is_attempted: bool = False
    is_exhausted: bool = False
    result: list[Any] | None = None
    _standing: Standing = Standing.LASTING
    _inverse: Tensor | None = None  # 1/scale, if they are MEASURED
    _stale: list[Tensor] | None = None  # those that were there when they became UNKNOWN

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    # What is true of them.

    def must_allow(self, call: str) -> None:
        """Raise CallOrderError if a user's call may not come now; its message says why."""
        refusal = REFUSALS.get((self.stage, call))
        if refusal is None and self._standing is not Standing.LASTING:
            refusal = REFUSALS.get((self._standing, call))
        if refusal is not None:
            raise CallOrderError(refusal)

    @property
    def is_scaled(self) -> bool:
        """Whether they are still multiplied by the loss scale."""
        return self.stage in _IS_SCALED

    @property
    def are_measured(self) -> bool:
        """Whether they are scaled, and their norm and found_inf are known."""
        return self.stage is Stage.MEASURED

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has stepped, or nothing is known of them any more."""
        return self.stage in _IS_OVER

    @property
    def await_step(self) -> bool:
        """Whether they are to be clipped in a step that has not come.

        After an error, or with another loss, ``update`` ends what is not worth a step.
        """
        is_clipped = self._standing is Standing.CLIPPED and self.clip_coefficient is not None
        return is_clipped and not self.is_over

    @property
    def have_overflowed(self) -> bool:
        """Whether a flag is set; may wait for the device."""
        return self._operations.any_set(self.found_inf or {})

    @property
    def are_replaced(self) -> bool:
        """Whether all come from another loss than those that became UNKNOWN."""
        current = self._operations.current_gradients(self.optimizer)
        return self._operations.are_new(current, self._stale or [])

    @property
    def framework_stage(self) -> str:
        """The name of the stage that frameworks know, and may set: READY, UNSCALED or STEPPED."""
        if self.is_scaled:
            return "READY"
        return "STEPPED" if self.stage is Stage.STEPPED else "UNSCALED"

    @framework_stage.setter
    def framework_stage(self, name: str) -> None:
        self.stage = _FRAMEWORK_STAGES[name]

    # What is done with them.

    def move(self, event: str) -> None:
        """Go to the stage after an event."""
        self.stage = STAGE_AFTER[self.stage, event]

    def unscale(self, scaling: Scaling, unscaler: Unscaler, deciders: Deciders) -> None:
        """Divide them by the scale, in place, and check them."""
        try:
            self.scale, inverse = self._operations.inverse(scaling.scale)
            found_inf = unscaler.unscale_(inverse)
            if self.stage is not Stage.MEASURED:  # whose flags all have settled already
                self.settle(found_inf, scaling, deciders)
            self._inverse = None  # that of a norm; what clipping is to multiply by stays
            self.move("unscaled")
        except GradientsRefusedError:  # before any has changed
            raise
        except BaseException:
            self.interrupt()
            raise

    def check(self, scaling: Scaling, unscaler: Unscaler, deciders: Deciders) -> None:
        """Find whether they are finite; they stay as they are."""
        scale = scaling.scale if self.is_scaled else None
        self.settle(unscaler.check(), scaling, deciders, scale=scale)

    def measure(self, scaling: Scaling, parts: Parts, deciders: Deciders) -> Tensor | None:
        """Find the norm that they will have once unscaled, and whether they are finite.

        None where one reading cannot tell; nothing is known then.
        """
        norms, found_infs = [], []
        for part in parts.parts:
            measured = self._operations.measure(part, scaling.scale)
            if measured is None:  # another process may go on: unscaling has the same collectives
                return None
            norm, scale, inverse, found_inf = measured
            norms.append(norm)
            found_infs.append(found_inf)
        # The flags of one part stay by their devices; those of several are merged into one.
        found_inf = found_infs[0] if len(found_infs) == 1 else self._operations.merge(found_infs)
        # All decide before their norms are added up, as they do where unscaling comes first.
        self.settle(found_inf, scaling, deciders, scale=scaling.scale)
        self.scale, self._inverse = scale, inverse
        self.move("measured")
        return parts.norm(norms, 2.0)

    def norm(self, parts: Parts, norm_type: float) -> Tensor:
        """The norm of them as they are, those of the processes that hold other parts included."""
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
        """Record what all that decide together found in them.

        Args:
            found_inf: what this process found.
            scaling: as for the others.
            deciders: those who decide.
            scale: what they are still multiplied by, if they are.
            amax: their largest, where that is known already.
        """
        if scaling.amax_interval and amax is None and self.amax_is_due(found_inf, scaling):
            amax = self._operations.amax(self.optimizer, scale)
        self.found_inf, self.amax = deciders.agree(scaling.state, found_inf, amax)

    def amax_is_due(self, found_inf: FoundInf, scaling: Scaling) -> bool:
        """Whether the policy looks at the largest gradient of this step."""
        if not scaling.amax_interval:
            return False
        steps = self._operations.finite_steps(scaling.state)
        if steps is None:  # to read it would wait for the device
            return True
        return steps % scaling.amax_interval == 0 and not self._operations.any_set(found_inf)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Have them multiplied in ``step``, so that their norm is at most ``max_norm``."""
        coefficient = self._operations.clip_coefficient(max_norm, norm)
        self._standing = standing_after(self._standing, "clipped")
        self.clip_coefficient = None if math.isinf(max_norm) else coefficient  # inf only measures

    def must_be_finite(self, norm: Tensor, norm_type: float, deciders: Deciders) -> None:
        """Raise on all processes where the norm or a gradient of one is not finite.

        Their norms may differ, and a norm of finite gradients may overflow.
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
        """Multiply them by what is pending: 1/scale, the clip coefficient, or both."""
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

    def apply(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the optimizer's ``step``, and keep what it returns in ``result``.

        ``extend`` is one call into C, so no interrupt comes between the two: a step that has
        returned is never taken for one that has not.
        """
        result: list[Any] = []
        self.result = result
        result.extend(starmap(partial(step, **kwargs), (args,)))
        return result[0]

    def finish(self, reason: Reason | None = None) -> StepOutcome:
        """End their iteration, once nothing can raise any more; what happened in it.

        ``reason`` is that of a skip that found_inf does not tell.
        """
        if self.found_inf is not None and not self.found_inf:
            reason = "no_gradients"
        if self.is_exhausted and self.have_overflowed:
            reason = "retries_exhausted"
        flag: bool | Callable[[], bool] | None = self.overflowed
        if flag is None:  # no step has read it, so the outcome does when it is asked
            flag = self._operations.readable(self.found_inf) if self.found_inf else False
        self.stage = Stage.STEPPED
        return StepOutcome(self.scale, flag, reason)

    # What happens to them.

    def interrupt(self) -> None:
        """A call ended on the way: only some may be unscaled."""
        # The tensors themselves, so that no new gradient can lie where one of them did.
        self._stale = self._operations.current_gradients(self.optimizer)
        self.move("interrupted")

    def note_raised(self, error: BaseException) -> None:
        """A call raised: it may be repeated, until another loss is scaled."""
        if self.result:
            self.stage = Stage.STEPPED  # it came after the optimizer's step
            return
        if self.result is not None and not isinstance(error, Exception):
            self.interrupt()  # the optimizer may have applied some, or all
        elif self.stage not in _IS_KNOWN:
            return
        self._standing = standing_after(self._standing, "raised")

    def note_others(self) -> None:
        """A closure has made others in their place, which are not as these were."""
        if self.stage in _IS_KNOWN:
            self.interrupt()

    def note_loss(self) -> None:
        """Another loss is scaled, and may change them."""
        if self._standing in (Standing.LASTING, Standing.OUTDATED):
            return
        is_known = self._standing is not Standing.CLIPPED and self.stage in _IS_KNOWN
        if is_known or self.stage is Stage.UNKNOWN:
            self.interrupt()  # with those that were not cleared until now
        self._standing = standing_after(self._standing, "another loss")


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


class Iteration(defaultdict[int, Any]):
    """What is known since the last ``update``: the gradients of each optimizer, by its id.

    A wrapper's id finds those of the optimizer in it. Frameworks show it, and may put dicts of
    their own into it.

    Attributes:
        next_state: the state that ``update`` moves to, once it has decided.
    """

    next_state: State | None = None
    _owners: dict[int, tuple[Optimizer, Optimizer]] | None = None  # with wrappers, by their ids

    def of(self, optimizer: Optimizer) -> Gradients:
        """The optimizer's gradients, or new ones that are not kept yet.

        Raises:
            TypeError: it is no optimizer.
        """
        owner = owner_of(optimizer)
        if owner is not optimizer:
            self._wrap(optimizer, owner)
        found: Gradients | None = self.get(id(owner))
        if found is None or (found.stage is Stage.UNKNOWN and found.are_replaced):
            if not hasattr(owner, "step"):
                raise TypeError(
                    "a scaler takes the optimizer that owns the gradients, as in "
                    "scaler.clip_grad_norm_(optimizer, max_norm), scaler.unscale_(optimizer) and "
                    f"scaler.step(optimizer), got {type(optimizer).__name__}"
                )
            assert self.default_factory is not None
            found = self.default_factory()
        found.optimizer = owner  # frameworks' code may have made them, by the id alone
        return found

    def keep(self, gradients: Gradients) -> None:
        """Know these gradients until the iteration ends."""
        self[id(gradients.optimizer)] = gradients

    def drop(self, gradients: Gradients) -> None:
        """Know nothing of these gradients."""
        self.pop(id(gradients.optimizer), None)

    def kept(self, gradients: Gradients) -> Gradients:
        """These, or those that a replaced method has kept in their place; known from now on."""
        found: Gradients = self.setdefault(id(gradients.optimizer), gradients)
        found.optimizer = gradients.optimizer  # made by the id alone, they do not know it
        return found

    def known(self) -> list[Gradients]:
        """All that are known, without what a framework has put here."""
        return [each for each in self.values() if isinstance(each, Gradients)]

    def found_infs(self) -> list[FoundInf]:
        """The flags of those that have any.

        Raises:
            CallOrderError: none were checked.
        """
        found, were_checked = [], False
        for each in self.values():
            if not isinstance(each, Gradients):  # a framework has put it here
                continue
            if each.found_inf:
                found.append(each.found_inf)
            elif each.found_inf is not None or each.stage is Stage.UNKNOWN:
                were_checked = True  # there were none, or nothing is known of them any more
        if not found and not were_checked:
            raise CallOrderError(
                "No inf checks were recorded prior to update(): call step(optimizer) or "
                "unscale_(optimizer) before update()"
            )
        return found

    def amaxes(self, policy: Policy) -> list[Tensor]:
        """Each optimizer's largest gradient, for a policy that looks at them."""
        if not amax_interval(policy):
            return []
        return [each.amax for each in self.known() if each.amax is not None]

    def note_raised(self, optimizer: Optimizer, error: BaseException) -> None:
        """A call for an optimizer raised."""
        gradients = self.get(id(owner_of(optimizer)))
        if gradients is not None:
            gradients.note_raised(error)

    def must_await_no_step(self) -> None:
        """Raise CallOrderError if gradients are to be clipped in a step that has not come."""
        for each in self.values():
            if isinstance(each, Gradients) and each.await_step:
                raise CallOrderError(
                    "update() was called after clip_grad_norm_(), which clips in step(optimizer), "
                    "and without that step: call scaler.step(optimizer) in place of "
                    "optimizer.step()"
                )

    def _wrap(self, wrapper: Optimizer, owner: Optimizer) -> None:
        """Let a wrapper share its owner's gradients, also those that a user asked for before."""
        made = self.pop(id(wrapper), None)
        if made is not None:
            self.setdefault(id(owner), made)
        self._owners = self._owners or {}
        self._owners[id(wrapper)] = owner, wrapper  # both kept alive, so that ids stay theirs

    def __missing__(self, key: int) -> Gradients:
        if self._owners is None or key not in self._owners:
            made: Gradients = super().__missing__(key)
            return made
        found: Gradients = self[id(self._owners[key][0])]
        return found
