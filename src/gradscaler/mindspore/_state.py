"""The state that a policy moves: on the device, and what compiled code makes of it."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor, ops

from gradscaler.policies import (
    AmaxScale,
    AmaxState,
    DynamicScale,
    ScaleState,
    amax,
    leaf_dtypes,
    rule,
)


def own_leaves(policy: DynamicScale | AmaxScale) -> tuple[Any, ...]:
    """What the policy moves beside the scale and the count of finite steps, as Parameters.

    A count of non-finite steps that the policy does not use is left out: a checkpoint then holds
    what MindSpore's own would.
    """
    if isinstance(policy, DynamicScale) and policy.hysteresis == 1:
        return ()
    first = policy.init()
    fields = list(zip(first._fields, first, leaf_dtypes(first), strict=True))[2:]
    return tuple(Parameter(Tensor(dtype(value)), name=name) for name, value, dtype in fields)


def next_values(parameters: Any, leaves: Any, found_inf: Any, largest: Any) -> Any:
    """The leaves after one step, by the rule whose constants these are.

    Args:
        parameters: the policy's constants, a tuple.
        leaves: the state, a tuple; it may end before a count that the policy does not use.
        found_inf: a bool Tensor.
        largest: a float32 Tensor, if the policy looks at the largest gradient.
    """
    if len(leaves) == len(AmaxState._fields):
        values = *leaves, found_inf, ops.where, largest
        return amax.next_values(amax.Constants(*parameters), *values)
    if len(leaves) < len(ScaleState._fields):
        leaves = (*leaves, leaves[1] * 0)
    values = *leaves, found_inf, ops.where
    return rule.next_values(rule.Constants(*parameters), *values)


def assign(leaves: Any, values: Any) -> None:
    """Give each Parameter its value; more values than Parameters are left out."""
    for leaf, value in zip(leaves, values):  # noqa: B905 # MindSpore's compiler has no strict
        ops.assign(leaf, value)
