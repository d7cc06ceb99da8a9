"""The arguments of a ``LossScaleOptimizer``, as a policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradscaler.policies import DynamicScale, FixedScale, Rule
from gradscaler.policies.spelling import changed, check_alone, check_policy


def policy_from(
    dynamic: object, initial_scale: object, dynamic_growth_steps: object, policy: Rule | None
) -> Rule:
    """The policy that the arguments ask for.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, or two contradict each other.
    """
    if not isinstance(dynamic, bool | np.bool_):
        raise TypeError(
            '"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, '
            f"but got: {dynamic!r}. If it is the scale, write initial_scale={dynamic!r}"
        )
    if policy is not None:
        check_alone(
            policy,
            (True, None, None),
            dynamic=dynamic,
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
        )
        check_policy(policy, Rule)
        return policy
    if not dynamic and initial_scale is None:
        raise ValueError(
            '"initial_scale" must be specified if "dynamic" is False: it is the loss scale for '
            "good. (For a constant factor and no skipped steps, use no LossScaleOptimizer; in "
            "Keras 3, set `loss_scale_factor` on the inner optimizer)"
        )
    rule: Rule = DynamicScale.keras() if dynamic else FixedScale(1.0)
    if initial_scale is not None:
        rule = with_initial_scale(rule, initial_scale)
    if dynamic_growth_steps is not None:
        rule = with_growth_steps(rule, dynamic_growth_steps)
    return rule


def with_initial_scale(policy: Rule, initial_scale: Any) -> Rule:
    """The policy with another scale to start from; ValueError or TypeError if it cannot have it."""
    field = "init_scale" if isinstance(policy, DynamicScale) else "scale"
    return changed(policy, {"initial_scale": field}, initial_scale=initial_scale)


def with_growth_steps(policy: Rule, dynamic_growth_steps: Any) -> Rule:
    """The policy with another growth interval; ValueError or TypeError if it cannot have it."""
    if isinstance(policy, FixedScale):
        if dynamic_growth_steps is None:
            return policy
        raise ValueError(
            '"dynamic_growth_steps" must be None if "dynamic" is False, '
            f"but got: {dynamic_growth_steps!r}"
        )
    if isinstance(dynamic_growth_steps, float) and dynamic_growth_steps.is_integer():
        dynamic_growth_steps = int(dynamic_growth_steps)  # Keras accepts 2000.0, too
    fields = {"dynamic_growth_steps": "growth_interval"}
    return changed(policy, fields, dynamic_growth_steps=dynamic_growth_steps)
