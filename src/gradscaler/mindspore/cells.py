"""``mindspore.nn``'s loss-scale update cells: what the next scale is, kept on the device."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from gradscaler.mindspore._operations import as_flag, compiled
from gradscaler.mindspore._spelling import as_number, dynamic_policy, fixed_scale, nonfinite_steps
from gradscaler.policies import DynamicScale
from gradscaler.policies.rule import next_values


class FixedLossScaleUpdateCell(nn.FixedLossScaleUpdateCell):  # type: ignore[misc] # untyped base
    """A loss scale that never moves: a drop-in for ``mindspore.nn.FixedLossScaleUpdateCell``.

    Calling it with the loss scale and the overflow flag returns the flag.

    Args:
        loss_scale_value: the loss scale, 1 at least: a number, or a Tensor of one element.

    Raises:
        ValueError: it is below 1, or not finite in float32.
        TypeError: it is neither a number nor a Tensor of numbers.

    >>> FixedLossScaleUpdateCell(2**12).get_loss_scale()
    4096
    """

    def __init__(self, loss_scale_value: float | Tensor) -> None:
        super().__init__(fixed_scale("loss_scale_value", loss_scale_value))


class DynamicLossScaleUpdateCell(nn.DynamicLossScaleUpdateCell):  # type: ignore[misc] # untyped base
    """A loss scale that moves: a drop-in for ``mindspore.nn.DynamicLossScaleUpdateCell``.

    A train step calls it with the loss scale, a float32 Parameter of shape () or (1,), and the
    overflow flag, a bool or a bool Tensor of shape () or (1,). The call moves the scale and returns
    the flag. It is compiled in either mode. Parameters and checkpoints are those of MindSpore's.

    Args:
        loss_scale_value: the scale before the first step, 1 at least: a number, or a Tensor of
            one element.
        scale_factor: what growth multiplies and a backoff divides by, > 1.
        scale_window: finite steps in a row before the scale grows.
        policy: the rule as a whole, in place of the three parameters. A hysteresis above 1 adds a
            parameter, ``nonfinite_steps``.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not the kind of number it should be.

    >>> from mindspore import Parameter, Tensor
    >>> cell = DynamicLossScaleUpdateCell(loss_scale_value=8, scale_factor=2, scale_window=2)
    >>> scale = Parameter(Tensor(cell.get_loss_scale()))
    >>> for overflow in [True, False, False]:
    ...     _ = cell(scale, Tensor(overflow))
    ...     print(scale.asnumpy())
    4.0
    4.0
    8.0
    """

    def __init__(
        self,
        loss_scale_value: float | Tensor = 2**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
        *,
        policy: DynamicScale | None = None,
    ) -> None:
        loss_scale_value = as_number("loss_scale_value", loss_scale_value)
        policy = dynamic_policy(
            policy, "loss_scale_value", loss_scale_value, scale_factor, scale_window
        )
        super().__init__(policy.init_scale, policy.growth_factor, policy.growth_interval)
        self._constants = policy._constants
        self.nonfinite_steps = nonfinite_steps(policy)

    @compiled
    def construct(self, loss_scale: Any, overflow: Any) -> Any:
        """Assign the next loss scale to ``loss_scale``, and return ``overflow``."""
        finite_steps = self.cur_iter - 1 - self.last_overflow_iter
        state = loss_scale, finite_steps, self.nonfinite_steps
        scale, finite_steps, nonfinite_steps = next_values(
            self._constants, *state, as_flag(overflow), ops.where
        )
        ops.assign(loss_scale, scale)
        ops.assign(self.last_overflow_iter, self.cur_iter - finite_steps)
        ops.assign(self.cur_iter, self.cur_iter + 1)
        if self._constants.hysteresis > 1:
            ops.assign(self.nonfinite_steps, nonfinite_steps)
        return overflow
