"""The policy's parameters under MindSpore's names."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from mindspore import Tensor

from gradscaler.errors import ParameterError
from gradscaler.policies import DynamicScale, Policy, _checks
from gradscaler.policies._spelling import (
    changed,
    check_alone,
    check_policy,
    defaults_of,
    replaced,
    spelled,
)


def dynamic_policy(
    policy: Policy | None,
    name: str,
    loss_scale: object,
    scale_factor: object,
    scale_window: object,
) -> Policy:
    """The policy, if given, or else MindSpore's rule with these parameters.

    ``name`` is the name of the parameter ``loss_scale``.
    """
    parameters = {name: loss_scale, "scale_factor": scale_factor, "scale_window": scale_window}
    if policy is None:
        return spelled(DynamicScale.mindspore, {name: "init_loss_scale"}, **parameters)
    check_alone(policy, defaults_of(DynamicScale.mindspore), **parameters)
    fixed = "FixedLossScaleManager, FixedLossScaleUpdateCell or StaticLossScaler"
    check_policy(policy, fixed=fixed)
    return policy


def as_number(name: str, value: Any) -> Any:
    """The element of a tensor or array of one element; anything else unchanged.

    MindSpore's managers and update cells take such a scale; its functional scalers do not.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if value.size != 1:
            raise ParameterError(f"{name} must have one element, got the shape {value.shape}")
        return value.item()
    return value


def fixed_scale(name: str, value: Any) -> float:
    """``value`` as a number, which must be >= 1. An int stays an int."""
    value = as_number(name, value)
    _checks.loss_scale(name, value, lowest=1.0)
    return value  # type: ignore[no-any-return]


class HasPolicy(Protocol):
    """An object with a policy."""

    _policy: Policy


_DEFAULTS = DynamicScale.mindspore()


def parameter_of(policy: Policy, name: str) -> Any:
    """A parameter of the rule; MindSpore's default, without effect, if the policy lacks it."""
    return getattr(policy, name, getattr(_DEFAULTS, name))


def parameter(own: str, field: str, doc: str) -> property:
    """A property that reads and sets a field of ``_policy`` under MindSpore's name."""

    def get(self: HasPolicy) -> object:
        return parameter_of(self._policy, field)

    def set_(self: HasPolicy, value: object) -> None:
        self._policy = changed(self._policy, {own: field}, **{own: value})

    return property(get, set_, doc=doc)


class WindowAndFactor:
    """Mixin for managers and scalers: properties for the window and the factor of ``_policy``."""

    _policy: Policy

    @property
    def policy(self) -> Policy:
        """The rule by which the scale moves."""
        return self._policy

    scale_window = parameter(
        "scale_window", "growth_interval", "Finite steps in a row before the scale grows."
    )

    @property
    def scale_factor(self) -> float:
        """The factor of growth, and the divisor of a backoff."""
        return float(parameter_of(self._policy, "growth_factor"))

    @scale_factor.setter
    def scale_factor(self, scale_factor: float) -> None:
        factor = _checks.growth_factor("scale_factor", scale_factor)
        self._policy = replaced(self._policy, growth_factor=factor, backoff_factor=1 / factor)
