"""Drop-ins for ``mindspore.amp``'s functional scalers, for custom training loops."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mutable, ops

from gradscaler.errors import ParameterError
from gradscaler.mindspore._operations import as_amax, as_flag, compiled, in_turn, scaled, unscaled
from gradscaler.mindspore._spelling import WindowAndFactor, dynamic_policy
from gradscaler.mindspore._state import assign, constants_of, move, next_values, own_leaves
from gradscaler.policies import Policy, Scalar, _checks, amax_interval, first_scale

Tensors = Any
"""A tensor, or tensors in tuples, lists and dicts."""

_map = ops.HyperMap()
_partial = ops.Partial()


# Functions of tensors, which all scalers share, instead of methods and Parameters. MindSpore caches
# a compiled method by the id of its object, and would use it for a later object with the same id.
# And it compiles a function again for each Parameter.
@compiled
def _scale(scale: Tensor, inputs: Tensors) -> Tensors:
    return _map(_partial(scaled, scale), inputs)


@compiled
def _unscale(scale: Tensor, inputs: Tensors) -> Tensors:
    return _map(_partial(unscaled, scale), inputs)


@compiled
def _adjusted(
    parameters: tuple[Scalar, ...],
    grads_finite: Tensor,
    amax: Tensor | None,
    *leaves: Tensor,
) -> tuple[Tensor, ...]:
    return next_values(parameters, leaves, ops.logical_not(grads_finite), amax)


class _Scaling(mindspore.amp.LossScaler):  # type: ignore[misc] # untyped base
    """Multiplies and divides by ``scale_value``."""

    @in_turn
    def scale(self, inputs: Tensors) -> Tensors:
        """``inputs * scale_value``, each tensor in its own dtype.

        Args:
            inputs: a tensor, or tensors in tuples, lists and dicts: a loss, or gradients.
        """
        return _scale(_value_of(self.scale_value), _tensors(inputs))

    @in_turn
    def unscale(self, inputs: Tensors) -> Tensors:
        """``inputs / scale_value``, each tensor in its own dtype.

        Args:
            inputs: a tensor, or tensors in tuples, lists and dicts: a loss, or gradients.
        """
        return _unscale(_value_of(self.scale_value), _tensors(inputs))


def _value_of(scale: Tensor | float) -> Tensor:
    """The scale as a tensor: a static scaler's may be a number."""
    return scale.value() if isinstance(scale, Parameter) else scale


def _tensors(inputs: Tensors) -> Tensors:
    if not isinstance(inputs, (Tensor, tuple, list, dict)):
        raise TypeError("inputs must be a tensor, or tensors in tuples, lists and dicts")
    return mutable(inputs)


class StaticLossScaler(_Scaling, mindspore.amp.StaticLossScaler):  # type: ignore[misc] # untyped base
    """A loss scale that never moves: a drop-in for ``mindspore.amp.StaticLossScaler``.

    Args:
        scale_value: the loss scale, >= 1.

    Raises:
        ValueError: ``scale_value`` is below 1, or not finite in float32.
        TypeError: ``scale_value`` is not a number.

    >>> from mindspore import Tensor
    >>> scaler = StaticLossScaler(scale_value=1024)
    >>> print(scaler.scale(Tensor([1.5])), scaler.unscale((Tensor(2048.0),))[0])
    [1536.] 2.0
    """

    def __init__(self, scale_value: float) -> None:
        super().__init__(_checks.loss_scale("scale_value", scale_value, lowest=1.0))


class _FactorError(ParameterError, TypeError):
    """A float that is not a factor. MindSpore's own scaler raises TypeError for any float."""


class DynamicLossScaler(WindowAndFactor, _Scaling, mindspore.amp.DynamicLossScaler):  # type: ignore[misc] # untyped base
    """A loss scale that moves: a drop-in for ``mindspore.amp.DynamicLossScaler``.

    All methods work in graph mode, in PyNative mode and inside ``mindspore.jit``. A compiled
    ``adjust`` keeps the window and the factor that it was compiled with.

    Args:
        scale_value: the scale before the first step, >= 1.
        scale_factor: the factor of growth, and the divisor of a backoff, > 1.
        scale_window: finite steps in a row before the scale grows.
        policy: the rule, in place of the three parameters: a :class:`gradscaler.DynamicScale`, a
            :class:`gradscaler.AmaxScale`, or any :class:`gradscaler.Policy` that moves the scale. A
            hysteresis above 1 adds a Parameter, ``nonfinite_steps``; an ``AmaxScale`` adds
            ``nonfinite_steps``, ``peak`` and ``reach``.

    Attributes:
        scale_value: the current scale, a float32 Parameter of shape ().
        counter: finite steps in a row, an int32 Parameter of shape ().

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind.

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
        try:
            policy = dynamic_policy(policy, "scale_value", scale_value, scale_factor, scale_window)
        except ParameterError as error:
            if isinstance(scale_factor, float):
                raise _FactorError(*error.args) from None
            raise
        scale = Tensor(first_scale(policy), mindspore.float32)
        self.scale_value = Parameter(scale, name="scale_value")
        self._policy = policy
        self.counter = Parameter(Tensor(0, mindspore.int32), name="counter")
        self._own_leaves = own_leaves(policy)
        for leaf in self._own_leaves:
            setattr(self, leaf.name, leaf)
        self._wants_amax = amax_interval(policy) > 0
        self._kind, self._has_constants = type(policy.init()), bool(constants_of(policy))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(scale_value={self.scale_value.asnumpy().item()!r}, "
            f"counter={self.counter.asnumpy().item()!r}, policy={self._policy!r})"
        )

    @in_turn
    def adjust(self, grads_finite: Tensor | bool, amax: Tensor | float | None = None) -> bool:
        """Move the scale after a step.

        Args:
            grads_finite: whether all gradients were finite, a bool or a bool Tensor of shape () or
                (1,).
            amax: the largest magnitude of the unscaled gradients, a number or a Tensor of one
                element, from :func:`gradscaler.mindspore.amax`. Required by a policy with an
                ``amax_interval``, ignored by others. If the interval is above 1, the policy needs
                it only in some steps; pass 0.0 in the others to save the measurement.

        Returns:
            True.

        Raises:
            TypeError: ``grads_finite`` is not a bool or a bool Tensor of shape () or (1,); or
                ``amax`` is missing though the policy needs it, or is not a number or a Tensor of
                one element. Nothing changes.
        """
        flag, largest = as_flag(grads_finite), as_amax(amax, self._wants_amax)
        leaves = (self.scale_value, self.counter, *self._own_leaves)
        values = [leaf.value() for leaf in leaves]
        if self._has_constants:
            assign(leaves, _adjusted(constants_of(self._policy), flag, largest, *values))
        else:
            found_inf = ops.logical_not(flag)
            move(self._policy, self._kind, leaves, tuple(values), found_inf, largest)
        return True
