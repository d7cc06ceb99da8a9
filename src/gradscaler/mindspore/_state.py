"""A policy's state on the device, and compiled code that moves it."""

from __future__ import annotations

from mindspore import Parameter, Tensor, ops

from gradscaler.policies import (
    AmaxScale,
    AmaxState,
    DynamicScale,
    Scalar,
    ScaleState,
    amax,
    dynamic,
    leaf_dtypes,
)


def own_leaves(policy: DynamicScale | AmaxScale) -> tuple[Parameter, ...]:
    """Parameters for the fields of the policy's state after the scale and the finite steps.

    A count of non-finite steps that the policy does not use is left out, so that a checkpoint has
    the same parameters as one of MindSpore's own class.
    """
    if isinstance(policy, DynamicScale) and policy.hysteresis == 1:
        return ()
    first = policy.init()
    fields = list(zip(first._fields, first, leaf_dtypes(first), strict=True))[2:]
    return tuple(Parameter(Tensor(dtype(value)), name=name) for name, value, dtype in fields)


def next_values(
    parameters: tuple[Scalar, ...],
    leaves: tuple[Tensor, ...],
    found_inf: Tensor,
    largest: Tensor | None,
) -> tuple[Tensor, ...]:
    """The fields of a state after one step.

    Args:
        parameters: the policy's constants, a tuple.
        leaves: the fields of the state, a tuple. It lacks the count of non-finite steps if the
            policy does not use it.
        found_inf: a bool Tensor.
        largest: the largest gradient, a float32 Tensor; None if the policy does not need it.
    """
    if len(leaves) == len(AmaxState._fields):
        values = *leaves, found_inf, ops.where, largest
        return amax.next_values(amax.Constants(*parameters), *values)
    if len(leaves) < len(ScaleState._fields):
        leaves = (*leaves, leaves[1] * 0)
    values = *leaves, found_inf, ops.where
    return dynamic.next_values(dynamic.Constants(*parameters), *values)


def assign(leaves: tuple[Parameter, ...], values: tuple[Tensor, ...]) -> None:
    """Assign a value to each Parameter; further values are ignored."""
    for leaf, value in zip(leaves, values):  # noqa: B905 # MindSpore's compiler has no strict
        ops.assign(leaf, value)
