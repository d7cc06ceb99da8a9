"""A policy's state on the device, and compiled code that moves it."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, ops

from gradscaler.policies import (
    AmaxState,
    Policy,
    Scalar,
    ScaleState,
    amax,
    counts_nonfinite_steps,
    dynamic,
    first_scale,
    leaf_dtypes,
)


def own_leaves(policy: Policy) -> tuple[Parameter, ...]:
    """Parameters for the fields of the policy's state after the scale and the finite steps.

    A count of non-finite steps that the policy does not use is left out, so that a checkpoint has
    the same parameters as one of MindSpore's own class.
    """
    if not counts_nonfinite_steps(policy):
        return ()
    first = policy.init()
    fields = list(zip(first._fields, first, leaf_dtypes(first), strict=True))[2:]
    return tuple(Parameter(Tensor(dtype(value)), name=name) for name, value, dtype in fields)


def constants_of(policy: Policy) -> tuple[Scalar, ...]:
    """The constants of the rule, for compiled code; empty for a policy of a user's own."""
    return tuple(getattr(policy, "_constants", ()))  # a named tuple would compile at every call


def own_parameters(policy: Policy) -> tuple[Parameter, ...]:
    """Parameters for the scale and the finite steps of a policy of a user's own."""
    scale = Parameter(Tensor(first_scale(policy), mindspore.float32), name="moved_scale")
    return scale, Parameter(Tensor(0, mindspore.int32), name="moved_finite_steps")


def move(
    policy: Policy,
    kind: type[Any],
    leaves: tuple[Parameter, ...],
    values: tuple[Tensor, ...],
    found_inf: Tensor,
    largest: Tensor | None,
) -> None:
    """Assign the fields of a state, of type ``kind``, after one step of a user's own policy.

    Compiled code that calls this has the policy's ``update`` compiled, too. It loses the dtypes in
    a named tuple, so each field is assigned as it is, with no computation before.
    """
    looks: Any = policy  # takes the largest gradient, too, if it needs it
    if largest is None:
        moved = looks.update(kind(*values), found_inf, ops.where)
    else:
        moved = looks.update(kind(*values), found_inf, ops.where, amax=largest)
    for index, leaf in enumerate(leaves):
        ops.assign(leaf, moved[index])


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
