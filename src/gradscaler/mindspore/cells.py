"""Drop-ins for ``mindspore.nn``'s loss-scale update cells, which move a scale on the device."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn, ops

from gradscaler.mindspore._operations import as_amax, as_flag, compiled
from gradscaler.mindspore._spelling import as_number, dynamic_policy, fixed_scale, parameter_of
from gradscaler.mindspore._state import (
    assign,
    constants_of,
    move,
    next_values,
    own_leaves,
    own_parameters,
)
from gradscaler.policies import Policy, amax_interval, first_scale


class FixedLossScaleUpdateCell(nn.FixedLossScaleUpdateCell):  # type: ignore[misc] # untyped base
    """A loss scale that never moves: a drop-in for ``mindspore.nn.FixedLossScaleUpdateCell``.

    Calling it with the loss scale and the overflow flag returns the flag.

    Args:
        loss_scale_value: the loss scale, >= 1: a number, or a Tensor of one element.

    Raises:
        ValueError: ``loss_scale_value`` is below 1, or not finite in float32.
        TypeError: ``loss_scale_value`` is neither a number nor a Tensor of numbers.

    >>> FixedLossScaleUpdateCell(2**12).get_loss_scale()
    4096
    """

    def __init__(self, loss_scale_value: float | Tensor) -> None:
        super().__init__(fixed_scale("loss_scale_value", loss_scale_value))


class DynamicLossScaleUpdateCell(nn.DynamicLossScaleUpdateCell):  # type: ignore[misc] # untyped base
    """A loss scale that moves: a drop-in for ``mindspore.nn.DynamicLossScaleUpdateCell``.

    A train step calls it with the loss scale, a float32 Parameter of shape () or (1,), and the
    overflow flag, a bool or a bool Tensor of shape () or (1,). The call moves the scale and returns
    the flag. It is compiled in graph mode and in PyNative mode. Its Parameters have the names of
    MindSpore's own cell, so checkpoints fit either class.

    Args:
        loss_scale_value: the scale before the first step, >= 1: a number, or a Tensor of one
            element.
        scale_factor: the factor of growth, and the divisor of a backoff, > 1.
        scale_window: finite steps in a row before the scale grows.
        policy: the rule, in place of the three parameters: a :class:`gradscaler.DynamicScale`, a
            :class:`gradscaler.AmaxScale`, or any :class:`gradscaler.Policy` that moves the scale. A
            hysteresis above 1 adds a Parameter, ``nonfinite_steps``; an ``AmaxScale`` adds
            ``nonfinite_steps``, ``peak`` and ``reach``, and needs a train step that also passes the
            largest gradient, as :class:`gradscaler.mindspore.TrainOneStepWithLossScaleCell` does.

    Attributes:
        amax_interval: the policy needs the largest gradient every so many finite steps; 0 if it
            never does.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind.

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
        policy: Policy | None = None,
    ) -> None:
        loss_scale_value = as_number("loss_scale_value", loss_scale_value)
        policy = dynamic_policy(
            policy, "loss_scale_value", loss_scale_value, scale_factor, scale_window
        )
        rule = (parameter_of(policy, name) for name in ("growth_factor", "growth_interval"))
        super().__init__(first_scale(policy), *rule)
        self._constants = constants_of(policy)
        self._policy, self._kind = policy, type(policy.init())
        self._moved = () if self._constants else own_parameters(policy)
        self.amax_interval = amax_interval(policy)
        self._own_leaves = own_leaves(policy)
        for leaf in self._own_leaves:
            setattr(self, leaf.name, leaf)

    @compiled
    def construct(
        self, loss_scale: Parameter, overflow: Tensor | bool, amax: Tensor | float | None = None
    ) -> Tensor | bool:
        """Assign the next loss scale to ``loss_scale``, and return ``overflow``.

        ``amax`` is the largest magnitude of the unscaled gradients, for a policy that needs it.
        """
        finite_steps = self.cur_iter - 1 - self.last_overflow_iter
        leaves = (loss_scale.reshape(()), finite_steps, *self._own_leaves)
        largest = as_amax(amax, self.amax_interval)
        found_inf = as_flag(overflow)
        if self._constants:
            moved = next_values(self._constants, leaves, found_inf, largest)
        else:
            moved = (*self._moved, *self._own_leaves)
            move(self._policy, self._kind, moved, leaves, found_inf, largest)
        ops.assign(loss_scale, moved[0].reshape(loss_scale.shape))
        ops.assign(self.last_overflow_iter, self.cur_iter - moved[1])
        ops.assign(self.cur_iter, self.cur_iter + 1)
        if self._constants:
            assign(self._own_leaves, moved[2:])
        return overflow
