"""One optimizer's gradients in one iteration: their stage, and the work that is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Protocol, SupportsFloat
from weakref import ref

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
from gradscaler._eager.stages import (
    MIXED_GRADIENTS,
    REFUSALS,
    STAGE_AFTER,
    Stage,
    Validity,
    validity_after,
)
from gradscaler.errors import CallOrderError
from gradscaler.outcome import Reason, StepOutcome
from gradscaler.policies import State

_IS_SCALED = (Stage.SCALED, Stage.MEASURED)
_IS_KNOWN = (Stage.MEASURED, Stage.DIVIDED, Stage.UNSCALED)
_IS_OVER = (Stage.STEPPED, Stage.UNKNOWN)

_FRAMEWORK_STAGES = {
    "READY": Stage.SCALED,
    "UNSCALED": Stage.UNSCALED,
    "STEPPED": Stage.STEPPED,
}


class GradientScale(NamedTuple):
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
        attempt_state: the state whose scale they were made with, if ``attempts`` backed off; None
            for the scaler's own state.
        is_attempted: whether a loop over ``attempts`` made them.
        is_exhausted: whether they overflowed in each of the latest ``attempts``.
        is_counted: whether an ``update`` has counted their found_inf.
        is_mixed: whether a backward pass of a scaled loss has added to them since they were
            unscaled or measured.
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
    attempt_state: State | None = None
    is_attempted: bool = False
    is_exhausted: bool = False
    is_counted: bool = False
    is_mixed: bool = False
    is_untouched: Callable[[], bool] | None = None
    result: list[object] | None = None
    _validity: Validity = Validity.LASTING
    _inverse: Tensor | None = None  # 1/scale, if they are MEASURED
    _stale: list[Tensor] | None = None  # the tensors when they became UNKNOWN, or were refused

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    # Their state.

    def must_allow(self, call: str) -> None:
        """Raise CallOrderError, with the reason, if a user may not make this call now."""
        refusal = REFUSALS.get((self.stage, call))
        if refusal is None and self._validity is not Validity.LASTING:
            refusal = REFUSALS.get((self._validity, call))
        if refusal is not None:
            raise CallOrderError(refusal)

    def must_not_be_mixed(self) -> None:
        """Raise CallOrderError if scaled gradients were added to unscaled ones."""
        if self.is_mixed:
            self._stale = self._operations.current_gradients(self.optimizer)
            raise CallOrderError(MIXED_GRADIENTS)

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients are still multiplied by the loss scale."""
        return self.stage in _IS_SCALED

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has stepped, or the gradients' state is unknown."""
        return self.stage in _IS_OVER

    @property
    def awaits_step(self) -> bool:
        """Whether they await their step, and were checked or made at a scale of their own."""
        is_made_apart = self.stage is Stage.SCALED and self.attempt_state is not None
        return is_made_apart or self.stage in _IS_KNOWN

    @property
    def await_clipping(self) -> bool:
        """Whether they await the step that clips them, and no error or other loss came since."""
        is_clipped = self._validity is Validity.CLIPPED and self.clip_coefficient is not None
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
        """Whether new gradients have replaced all those that became UNKNOWN, or were refused."""
        if self._stale is None:
            return False
        current = self._operations.current_gradients(self.optimizer)
        return self._operations.are_new(current, self._stale)

    @property
    def framework_stage(self) -> str:
        """The stage under frameworks' names: READY, UNSCALED or STEPPED. Frameworks may set it."""
        if self.is_scaled:
            return "READY"
        return "STEPPED" if self.stage is Stage.STEPPED else "UNSCALED"

    @framework_stage.setter
    def framework_stage(self, name: str) -> None:
        self.stage = _FRAMEWORK_STAGES[name]

    @property
    def is_known(self) -> bool:
        """Whether they were unscaled or measured, and await their step."""
        return self.stage in _IS_KNOWN

    # Operations on them.

    def move(self, event: str) -> None:
        """Move to the stage that follows an event."""
        self.stage = STAGE_AFTER[self.stage, event]

    def unscale(
        self, gradient_scale: GradientScale, unscaler: Unscaler, deciders: Deciders
    ) -> None:
        """Divide the gradients by the scale, in place, and check them."""
        try:
            self.scale, inverse = self._operations.inverse(gradient_scale.scale)
            found_inf = unscaler.unscale_(inverse)
            if self.stage is not Stage.MEASURED:  # the flags of measured ones are settled already
                self.record_check(found_inf, gradient_scale, deciders)
            self._inverse = None  # the clip coefficient stays
            self.move("unscaled")
        except GradientsRefusedError:  # raised before any gradient has changed
            raise
        except BaseException:
            self.interrupt()
            raise

    def check(self, gradient_scale: GradientScale, unscaler: Unscaler, deciders: Deciders) -> None:
        """Check whether the gradients are finite, and change none."""
        scale = gradient_scale.scale if self.is_scaled else None
        self.record_check(unscaler.check(), gradient_scale, deciders, scale=scale)

    def measure(
        self, gradient_scale: GradientScale, parts: Parts, deciders: Deciders
    ) -> Tensor | None:
        """The norm that the gradients will have once unscaled; checks them in the same pass.

        None if one pass is not enough; then nothing is recorded.
        """
        norms, found_infs = [], []
        for part in parts.parts:
            measured = self._operations.measure(part, gradient_scale.scale)
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
        self.record_check(found_inf, gradient_scale, deciders, scale=gradient_scale.scale)
        self.scale, self._inverse = scale, inverse
        self.move("measured")
        return parts.norm(norms, 2.0)

    def norm(self, parts: Parts, norm_type: float) -> Tensor:
        """The norm of the gradients as they are, over all processes that hold parts of them."""
        total_norm = self._operations.total_norm
        return parts.norm([total_norm(part, norm_type) for part in parts.parts], norm_type)

    def record_check(
        self,
        found_inf: FoundInf,
        gradient_scale: GradientScale,
        deciders: Deciders,
        *,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        """Record the check of all processes that decide together.

        Args:
            found_inf: what this process found.
            gradient_scale: as in ``unscale``.
            deciders: the processes that decide together.
            scale: the scale that the gradients are still multiplied by, if any.
            amax: their largest magnitude, if it is already known.
        """
        if (
            gradient_scale.amax_interval
            and amax is None
            and self.amax_is_due(found_inf, gradient_scale)
        ):
            amax = self._operations.amax(self.optimizer, scale)
        self.found_inf, self.amax = deciders.agree(gradient_scale.state, found_inf, amax)

    def amax_is_due(self, found_inf: FoundInf, gradient_scale: GradientScale) -> bool:
        """Whether the policy needs the largest gradient of this step."""
        if not gradient_scale.amax_interval:
            return False
        steps = self._operations.finite_steps(gradient_scale.state)
        # A policy may use the maximum every n-th finite step only, because finding it takes a pass.
        if steps is None:  # reading it would wait for the device
            return True
        return steps % gradient_scale.amax_interval == 0 and not self._operations.any_set(found_inf)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Let ``step`` multiply the gradients so that their norm is at most ``max_norm``."""
        coefficient = self._operations.clip_coefficient(max_norm, norm)
        self._validity = validity_after(self._validity, "clipped")
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

    def apply_if_finite(self, step: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
        """Call the optimizer's ``step`` if there are gradients, and the check found all finite.

        Returns:
            What it returned; None after a skip.

        Raises:
            CallOrderError: they were not checked.
        """
        if self.found_inf is None:  # a subclass or its user has set the stage only
            raise CallOrderError(
                "No inf checks were recorded for this optimizer: set its found_inf_per_device with "
                "its stage, or call unscale_(optimizer)"
            )
        if not self.found_inf:
            return None
        if self.overflowed is None:
            self.overflowed = self.have_overflowed
        if self.overflowed:
            return None
        self.multiply()
        return self.apply(step, args, kwargs)

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
        self._validity = validity_after(self._validity, "raised")

    def watch(self, scaled: Tensor) -> None:
        """Note it if a backward pass of a scaled loss adds to these gradients from now on."""
        # Weakly: a loss that the user keeps must not keep an optimizer alive.
        self._operations.watch_backward(scaled, ref(self))

    def note_mixed(self) -> None:
        """Note that a backward pass of a scaled loss has added to these gradients."""
        self.is_mixed = self.is_mixed or self.is_known

    def note_others(self) -> None:
        """Note that a closure has made new gradients in place of these."""
        if self.stage in _IS_KNOWN:
            self.interrupt()

    def note_loss(self) -> None:
        """Note that another loss was scaled, whose backward pass may add to these gradients."""
        if self._validity in (Validity.LASTING, Validity.OUTDATED):
            return
        is_known = self._validity is not Validity.CLIPPED and self.stage in _IS_KNOWN
        if is_known or self.stage is Stage.UNKNOWN:
            self.interrupt()  # the gradients that are there now are stale
        self._validity = validity_after(self._validity, "another loss")
