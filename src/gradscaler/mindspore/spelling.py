"""The rule's parameters under the names that MindSpore's classes give them."""

from __future__ import annotations

import dataclasses
from typing import Any

import mindspore
from mindspore import Parameter, Tensor

from gradscaler.policies import DynamicScale, Policy, checks
from gradscaler.policies.spelling import check_alone, spelled

DEFAULTS = (2**24, 2, 2000)


def loss_scale(name: str, value: object) -> float:
    """``value`` if it can be a loss scale of MindSpore's, which is 1 at least."""
    return checks.loss_scale(name, value, lowest=1.0)


def dynamic_policy(policy: Policy | None, **parameters: Any) -> DynamicScale:
    """The policy, or MindSpore's rule with these: initial scale, factor and window, in order.

    Raises:
        TypeError, ValueError: one of them cannot work; the message names it.
        ParameterError: there are parameters beside a policy.
    """
    if policy is None:
        fields = {next(iter(parameters)): "init_loss_scale"}
        return spelled(DynamicScale.mindspore, fields, **parameters)
    check_alone(policy, DEFAULTS, **parameters)
    if not isinstance(policy, DynamicScale):
        raise TypeError(
            f"policy must be a DynamicScale, got {policy!r}; for a scale that never moves there "
            "are FixedLossScaleManager, FixedLossScaleUpdateCell and StaticLossScaler"
        )
    return policy


def with_factor(policy: DynamicScale, scale_factor: float) -> DynamicScale:
    """The policy with MindSpore's one factor: growth multiplies by it, a backoff divides."""
    factor = checks.growth_factor("scale_factor", scale_factor)
    return dataclasses.replace(policy, growth_factor=factor, backoff_factor=1 / factor)


def nonfinite_steps(policy: DynamicScale) -> Any:
    """The count towards a hysteresis: a Parameter, or a constant where the policy has none.

    A checkpoint then holds what MindSpore's own would.
    """
    zero = Tensor(0, mindspore.int32)
    return Parameter(zero, name="nonfinite_steps") if policy.hysteresis > 1 else zero
