"""Drop-ins for ``mindspore.amp``'s loss-scale managers, which keep a scale on the host."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from gradscaler.mindspore._spelling import (
    WindowAndFactor,
    as_number,
    dynamic_policy,
    fixed_scale,
    parameter,
    parameter_of,
)
from gradscaler.mindspore._state import constants_of
from gradscaler.mindspore.cells import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from gradscaler.policies import Policy, State, _checks, amax_interval, first_scale


class FixedLossScaleManager(mindspore.amp.FixedLossScaleManager):  # type: ignore[misc] # untyped base
    """A loss scale that never moves: a drop-in for ``mindspore.amp.FixedLossScaleManager``.

    Args:
        loss_scale: the loss scale, >= 1: a number, or a Tensor of one element.
        drop_overflow_update: whether an overflow skips its step. If not, pass the scale to the
            optimizer, too, as its own ``loss_scale``.

    Raises:
        ValueError: ``loss_scale`` is below 1, or not finite in float32.
        TypeError: ``loss_scale`` is neither a number nor a Tensor of numbers.

    >>> FixedLossScaleManager(1024.0).get_loss_scale()
    1024.0
    """

    def __init__(
        self, loss_scale: float | Tensor = 128.0, drop_overflow_update: bool = True
    ) -> None:
        super().__init__(fixed_scale("loss_scale", loss_scale), drop_overflow_update)

    def get_update_cell(self) -> FixedLossScaleUpdateCell | None:
        """A cell for the train step; None if ``drop_overflow_update`` is False."""
        if not self._drop_overflow_update:
            return None
        return FixedLossScaleUpdateCell(self._loss_scale)


class DynamicLossScaleManager(WindowAndFactor, mindspore.amp.DynamicLossScaleManager):  # type: ignore[misc] # untyped base
    """A loss scale that moves: a drop-in for ``mindspore.amp.DynamicLossScaleManager``.

    The scale backs off to ``max(loss_scale / scale_factor, 1)`` at each overflow, and grows to
    ``loss_scale * scale_factor`` whenever the number of steps since the last overflow is a multiple
    of ``scale_window``, unless float32 cannot hold the product.

    Args:
        init_loss_scale: the scale before the first step, >= 1: a number, or a Tensor of one
            element.
        scale_factor: the factor of growth, and the divisor of a backoff, > 1.
        scale_window: finite steps in a row before the scale grows.
        policy: the rule, in place of the three parameters: a :class:`gradscaler.DynamicScale`, a
            :class:`gradscaler.AmaxScale`, or any :class:`gradscaler.Policy` that moves the scale.
            An ``AmaxScale`` needs the largest gradient, which the train step of
            :class:`gradscaler.mindspore.Model`, or one with the cell of :meth:`get_update_cell`,
            passes to it.

    Attributes:
        loss_scale: the current scale.
        cur_iter: the number of the next step, from 1.
        last_overflow_iter: the number of the last step that overflowed; 0 before the first.
        bad_step: the number of overflows in a row up to now.
        bad_step_max: the largest number of overflows in a row; 1000.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind.

    >>> manager = DynamicLossScaleManager(init_loss_scale=8, scale_window=2)
    >>> for overflow in [True, False, False]:
    ...     manager.update_loss_scale(overflow)
    ...     print(manager.get_loss_scale())
    4.0
    4.0
    8.0
    """

    def __init__(
        self,
        init_loss_scale: float | Tensor = 2**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
        *,
        policy: Policy | None = None,
    ) -> None:
        init_loss_scale = as_number("init_loss_scale", init_loss_scale)
        self._policy = dynamic_policy(
            policy, "init_loss_scale", init_loss_scale, scale_factor, scale_window
        )
        self._loss_scale: float = first_scale(self._policy)
        self.cur_iter = 1
        self.last_overflow_iter = 0
        self.bad_step = 0
        # MindSpore's own limit, at which its manager raises, too.
        self.bad_step_max = 1000
        self._state: Any = self._policy.init()  # but for the scale and finite steps, kept above
        self._is_following = False  # whether a train step moves the scale

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(loss_scale={self.loss_scale!r}, cur_iter={self.cur_iter}, "
            f"last_overflow_iter={self.last_overflow_iter}, policy={self._policy!r})"
        )

    increase_ratio = parameter(
        "increase_ratio", "growth_factor", "The factor by which the scale grows."
    )
    decrease_ratio = parameter(
        "decrease_ratio", "backoff_factor", "The factor by which the scale backs off."
    )

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float | Tensor) -> None:
        loss_scale = as_number("loss_scale", loss_scale)
        bounds = (parameter_of(self._policy, name) for name in ("min_scale", "max_scale"))
        self._loss_scale = _checks.loss_scale("loss_scale", loss_scale, *bounds)

    def update_loss_scale(self, overflow: bool, amax: Tensor | float | None = None) -> None:
        """Move the scale after a step.

        Args:
            overflow: whether the step's gradients held an Inf or a NaN.
            amax: the largest magnitude of the unscaled gradients, a number or a Tensor of one
                element, from :func:`gradscaler.mindspore.amax`. Required by a policy with an
                ``amax_interval``, ignored by others.

        Raises:
            RuntimeError: more than ``bad_step_max`` steps in a row overflowed; nothing changes.
            TypeError: ``amax`` is missing in a finite step in which the policy needs it, or is not
                a number; nothing changes.
        """
        overflow = bool(overflow)
        bad_step = self.bad_step + 1 if overflow else 0
        if bad_step > self.bad_step_max:
            raise RuntimeError(
                f"Continuous overflow: {bad_step} steps in a row, down to a loss scale of "
                f"{self.loss_scale}; bad_step_max allows {self.bad_step_max}. Gradients that "
                "overflow at every scale come from Inf or NaN in the weights, the data or the loss"
            )
        if not (self._is_following and amax_interval(self._policy)):
            self._state = self._next_state(overflow, amax)
            self._loss_scale = float(self._state.scale)
        self.bad_step = bad_step
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def _next_state(self, overflow: bool, amax: Tensor | float | None) -> State:
        policy = self._policy
        finite_steps, interval = self._finite_steps(), amax_interval(policy)
        values = {"scale": np.float32(self.loss_scale), "finite_steps": finite_steps}
        state: State = self._state._replace(**values)
        if not interval:
            return policy.update(state, overflow)
        if amax is not None:
            amax = _checks.number("amax", as_number("amax", amax))
        elif not overflow and finite_steps % interval == 0:
            raise TypeError(
                "the policy needs the largest gradient, and a manager gets only the overflow "
                "flag: write update_loss_scale(overflow, amax(grads)), or train by "
                "gradscaler.mindspore's Model or TrainOneStepWithLossScaleCell"
            )
        looks: Any = policy  # takes `amax`, too
        moved: State = looks.update(state, overflow, amax=amax)
        return moved

    def _finite_steps(self) -> int:
        """The count of finite steps, from the numbers of steps that a user may set."""
        if not constants_of(self._policy):
            return int(self._state.finite_steps)  # its meaning is the policy's own
        steps, window = self.cur_iter - 1 - self.last_overflow_iter, int(self.scale_window)
        if not amax_interval(self._policy):
            return steps % window
        return (steps - 1) % window + 1 if steps else 0  # 1 after growth

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        """A cell for the train step, which starts from the manager's current scale."""
        cell = DynamicLossScaleUpdateCell(policy=self._policy)
        cell.loss_scale_value = self.loss_scale
        return cell
