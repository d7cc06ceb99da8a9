"""``mindspore.amp``'s functional scalers, for training loops of one's own."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mutable, ops

from gradscaler.mindspore import spelling
from gradscaler.mindspore.gradients import as_flag, compiled, scaled, unscaled
from gradscaler.policies import DynamicScale, Policy
from gradscaler.policies.rule import Constants, next_values
from gradscaler.policies.spelling import changed

_map = ops.HyperMap()
_partial = ops.Partial()


# Functions, and none of them a method: MindSpore keeps what it compiled of a method by the id of
# the object, and takes it for that of a later object with the same id.


@compiled
def _scale(scale: Any, inputs: Any) -> Any:
    return _map(_partial(scaled, scale), inputs)


@compiled
def _unscale(scale: Any, inputs: Any) -> Any:
    return _map(_partial(unscaled, scale), inputs)


@compiled
def _adjust(parameters: Any, scale: Any, counter: Any, nonfinite: Any, grads_finite: Any) -> None:
    constants = Constants(*parameters)
    next_scale, finite_steps, nonfinite_steps = next_values(
        constants,
        scale,
        counter,
        nonfinite,
        ops.logical_not(grads_finite),
        ops.where,
    )
    ops.assign(scale, next_scale)
    ops.assign(counter, finite_steps)
    if constants.hysteresis > 1:
        ops.assign(nonfinite, nonfinite_steps)


class _Scaling(mindspore.amp.LossScaler):  # type: ignore[misc] # untyped base
    """Multiplies and divides by ``scale_value``."""

    scale_value: Any

    def scale(self, inputs: Any) -> Any:
        """``inputs * scale_value``, in the dtype of each.

        Args:
            inputs: a tensor, or tensors in tuples, lists and dicts: a loss, or gradients.
        """
        return _scale(self.scale_value, mutable(_tensors(inputs)))

    def unscale(self, inputs: Any) -> Any:
        """``inputs / scale_value``, in the dtype of each.

        Args:
            inputs: a tensor, or tensors in tuples, lists and dicts: a loss, or gradients.
        """
        return _unscale(self.scale_value, mutable(_tensors(inputs)))


def _tensors(inputs: Any) -> Any:
    if not isinstance(inputs, (Tensor, tuple, list, dict)):
        raise TypeError("inputs must be a tensor, or tensors in tuples, lists and dicts")
    return inputs


class StaticLossScaler(_Scaling, mindspore.amp.StaticLossScaler):  # type: ignore[misc] # untyped base
    """A loss scale that never moves: a drop-in for ``mindspore.amp.StaticLossScaler``.

    Args:
        scale_value: the loss scale, 1 at least.

    Raises:
        ValueError: it is below 1, or not finite in float32.
        TypeError: it is not a number.

    >>> from mindspore import Tensor
    >>> scaler = StaticLossScaler(scale_value=1024)
    >>> print(scaler.scale(Tensor([1.5])), scaler.unscale((Tensor(2048.0),))[0])
    [1536.] 2.0
    """

    def __init__(self, scale_value: float) -> None:
        super().__init__(spelling.loss_scale("scale_value", scale_value))


class DynamicLossScaler(_Scaling, mindspore.amp.DynamicLossScaler):  # type: ignore[misc] # untyped base
    """A loss scale that moves: a drop-in for ``mindspore.amp.DynamicLossScaler``.

    All methods work in either mode and inside ``mindspore.jit``.

    Args:
        scale_value: the scale before the first step, 1 at least.
        scale_factor: what growth multiplies and a backoff divides by, > 1.
        scale_window: finite steps in a row before the scale grows.
        policy: the rule as a whole, in place of the three parameters. A hysteresis above 1 adds a
            parameter, ``nonfinite_steps``.

    Attributes:
        scale_value: the scale now, a Parameter of shape () and float32.
        counter: finite steps in a row, a Parameter of shape () and int32.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not the kind of number it should be.

    >>> from mindspore import Tensor
    >>> scaler = DynamicLossScaler(scale_value=1024, scale_factor=2, scale_window=1)
    >>> scaler.adjust(Tensor(False))
    True
    >>> print(scaler.scale_value.asnumpy())
    512.0
    """

    def __init__(
        self,
        scale_value: float = 2**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
        *,
        policy: Policy | None = None,
    ) -> None:
        policy = spelling.dynamic_policy(
            policy, scale_value=scale_value, scale_factor=scale_factor, scale_window=scale_window
        )
        self.scale_value = Parameter(
            Tensor(policy.init_scale, mindspore.float32), name="scale_value"
        )
        self._set_policy(policy)
        self.counter = Parameter(Tensor(0, mindspore.int32), name="counter")
        self.nonfinite_steps = spelling.nonfinite_steps(policy)

    def _set_policy(self, policy: DynamicScale) -> None:
        self._policy = policy
        self._constants = tuple(policy._constants)  # a class is compiled anew at each call

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(scale_value={self.scale_value.asnumpy().item()!r}, "
            f"counter={self.counter.asnumpy().item()!r}, policy={self._policy!r})"
        )

    @property
    def policy(self) -> DynamicScale:
        """The rule by which the scale moves."""
        return self._policy

    @property
    def scale_window(self) -> int:
        """Finite steps in a row before the scale grows. A compiled ``adjust`` keeps its own."""
        return self._policy.growth_interval

    @scale_window.setter
    def scale_window(self, scale_window: int) -> None:
        fields = {"scale_window": "growth_interval"}
        self._set_policy(changed(self._policy, fields, scale_window=scale_window))

    @property
    def scale_factor(self) -> float:
        """What growth multiplies the scale by. A compiled ``adjust`` keeps its own."""
        return self._policy.growth_factor

    @scale_factor.setter
    def scale_factor(self, scale_factor: float) -> None:
        self._set_policy(spelling.with_factor(self._policy, scale_factor))

    def adjust(self, grads_finite: Any) -> bool:
        """Move the scale after a step.

        Args:
            grads_finite: whether all gradients were finite, a bool or a bool Tensor of shape () or
                (1,).

        Returns:
            True.

        Raises:
            TypeError: it is neither; nothing changes.
        """
        flag = as_flag(grads_finite)
        _adjust(self._constants, self.scale_value, self.counter, self.nonfinite_steps, flag)
        return True
