"""Runs a rule on a state: on the host's scalars, or on the tensors of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from gradscaler.policies.state import Scalar, State, Where, host_where, on_host, where_for

S = TypeVar("S", bound=State)
C = TypeVar("C", bound=NamedTuple)


class HasConstants(Protocol):
    """A policy with the constants of its rule, which are a named tuple, in two types.

    The second has NumPy's float32 in place of floats, because NumPy 1 turns float32 * float into
    float64.
    """

    @property
    def _constants(self) -> Any: ...

    @property
    def _host_constants(self) -> Any: ...


def rounded(constants: C, to_float32: Callable[[float], Scalar]) -> C:
    """The constants, with each float converted by ``to_float32``."""
    values = (to_float32(v) if isinstance(v, float) else v for v in constants)
    return type(constants)(*values)


def prepared(state: S, found_inf: Scalar, where: Where | None) -> tuple[S, Scalar, Where]:
    """The arguments of ``update`` as a rule takes them: on the host, or in the scale's library.

    On the host, a state's floats become float32, and its counts int: also arrays of no dimension.
    """
    scale, finite_steps, nonfinite_steps, *others = state
    if where is None and on_host(scale):
        counts = int(finite_steps), int(nonfinite_steps)
        kind: Callable[..., S] = type(state)
        state = kind(np.float32(scale), *counts, *map(_on_host, others))
        return state, bool(found_inf), host_where
    where = where or where_for(scale)
    if isinstance(found_inf, (bool, np.bool_)) and not on_host(scale):
        # This makes a tensor of True or False, in the library of the scale.
        found_inf = scale == scale if found_inf else scale != scale  # noqa: PLR0124
    return state, found_inf, where


def moved(
    rule: Callable[..., tuple[Scalar, ...]],
    policy: HasConstants,
    state: S,
    found_inf: Scalar,
    where: Where,
    *inputs: Scalar,
) -> S:
    """The state that a rule, a function of plain values, makes of prepared arguments."""
    kind: Callable[..., S] = type(state)
    if not isinstance(state.scale, (np.ndarray, np.generic)):
        return kind(*rule(policy._constants, *state, found_inf, where, *inputs))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return kind(*rule(policy._host_constants, *state, found_inf, where, *inputs))


def _on_host(value: Scalar) -> Scalar:
    """A policy's own field as int or float32."""
    return int(value) if np.asarray(value).dtype.kind in "iu" else np.float32(value)
