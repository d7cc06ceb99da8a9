"""``mindspore.amp``'s functional scalers, for custom training loops."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mutable, ops

from gradscaler.errors import ParameterError
from gradscaler.mindspore._operations import as_amax, as_flag, compiled, scaled, unscaled
from gradscaler.mindspore._spelling import WindowAndFactor, dynamic_policy
from gradscaler.mindspore._state import assign, next_values, own_leaves
from gradscaler.policies import AmaxScale, DynamicScale, _checks, amax_interval

_map = ops.HyperMap()
_partial = ops.Partial()


# Functions of tensors, which all scalers share. MindSpore caches a compiled method by the id of its
# object, and would use it for a later object with the same id. It compiles anew for each Parameter.
@compiled
def _scale(scale: Any, inputs: Any) -> Any:
    return _map(_partial(scaled, scale), inputs)


@compiled
def _unscale(scale: Any, inputs: Any) -> Any:
    return _map(_partial(unscaled, scale), inputs)


@compiled
def _adjusted(parameters: Any, grads_finite: Any, amax: Any, *leaves: Any) -> Any:
    return next_values(parameters, leaves, ops.logical_not(grads_finite), amax)


class _Scaling(mindspore.amp.LossScaler):  # type: ignore[misc] # untyped base
    """Multiplies and divides by ``scale_value``."""

    def scale(self, inputs: Any) -> Any:
        """``inputs * scale_value``, in the dtype of each.

        Args:
            inputs: a tensor, or tensors in tuples, lists and dicts: a loss, or gradients.
        """
        return _scale(_value_of(self.scale_value), _tensors(inputs))

    def unscale(self, inputs: Any) -> Any:
        """``inputs / scale_value``, in the dtype of each.

        Args:
            inputs: a tensor, or tensors in tuples, lists and dicts: a loss, or gradients.
        """
        return _unscale(_value_of(self.scale_value), _tensors(inputs))


def _value_of(scale: Any) -> Any:
    """The scale as a tensor: a static scaler's may be a number."""
    return scale.value() if isinstance(scale, Parameter) else scale


def _tensors(inputs: Any) -> Any:
    if not isinstance(inputs, (Tensor, tuple, list, dict)):
        raise TypeError("inputs must be a tensor, or tensors in tuples, lists and dicts")
    return mutable(inputs)


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
        super().__init__(_checks.loss_scale("scale_value", scale_value, lowest=1.0))


class _FactorError(ParameterError, TypeError):
    """A float that cannot be a factor: MindSpore's scaler refuses each float for its type."""


class DynamicLossScaler(WindowAndFactor, _Scaling, mindspore.amp.DynamicLossScaler):  # type: ignore[misc] # untyped base
    """A loss scale that moves: a drop-in for ``mindspore.amp.DynamicLossScaler``.

    All methods work in either mode and inside ``mindspore.jit``. A compiled ``adjust`` keeps the
    window and the factor that it was compiled with.

    Args:
        scale_value: the scale before the first step, 1 at least.
        scale_factor: what growth multiplies and a backoff divides by, > 1.
        scale_window: finite steps in a row before the scale grows.
        policy: the rule as a whole, in place of the three parameters: a
            :class:`gradscaler.DynamicScale`, or a :class:`gradscaler.AmaxScale`. A hysteresis above
            1 adds a parameter, ``nonfinite_steps``; an ``AmaxScale`` adds it, ``peak`` and
            ``reach``.

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
        policy: DynamicScale | AmaxScale | None = None,
    ) -> None:
        try:
            policy = dynamic_policy(policy, "scale_value", scale_value, scale_factor, scale_window)
        except ParameterError as error:
            if isinstance(scale_factor, float):
                raise _FactorError(*error.args) from None
            raise
        scale = Tensor(policy.init_scale, mindspore.float32)
        self.scale_value = Parameter(scale, name="scale_value")
        self._policy = policy
        self.counter = Parameter(Tensor(0, mindspore.int32), name="counter")
        self._own_leaves = own_leaves(policy)
        for leaf in self._own_leaves:
            setattr(self, leaf.name, leaf)
        self._wants_amax = amax_interval(policy) > 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(scale_value={self.scale_value.asnumpy().item()!r}, "
            f"counter={self.counter.asnumpy().item()!r}, policy={self._policy!r})"
        )

    def adjust(self, grads_finite: Any, amax: Any = None) -> bool:
        """Move the scale after a step.

        Args:
            grads_finite: whether all gradients were finite, a bool or a bool Tensor of shape () or
                (1,).
            amax: for a policy that looks at it, the largest magnitude of the unscaled gradients, a
                number or a Tensor of one element, as :func:`gradscaler.mindspore.amax` finds it. In
                a step that the policy's ``amax_interval`` leaves out, 0.0 saves finding it. Other
                policies ignore it.

        Returns:
            True.

        Raises:
            TypeError: the flag is neither; or ``amax`` is missing under a policy that looks at it,
                or is of another kind. Nothing changes.
        """
        constants = tuple(self._policy._constants)  # a named one compiles at every call
        flag, largest = as_flag(grads_finite), as_amax(amax, self._wants_amax)
        leaves = (self.scale_value, self.counter, *self._own_leaves)
        values = [leaf.value() for leaf in leaves]
        assign(leaves, _adjusted(constants, flag, largest, *values))
        return True
