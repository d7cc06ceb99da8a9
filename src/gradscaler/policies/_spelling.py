"""A policy's parameters under a framework's names, and ``policy=`` in their place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar

from gradscaler.errors import ParameterError
from gradscaler.policies.state import Policy

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


def spelled(
    make: Callable[..., T], fields: Mapping[str, str], /, *values: Any, **parameters: Any
) -> T:
    """``make(**parameters)``, where ``fields`` maps the caller's names to those of ``make``.

    Any ``values`` are those of ``fields``, in its order. An error of ``make`` names the parameter
    as the caller does. Other names stay as they are.
    """
    parameters.update(zip(fields, values, strict=False))
    names = {fields.get(name, name): name for name in parameters}
    try:
        return make(**{field: parameters[name] for field, name in names.items()})
    except (TypeError, ValueError) as error:
        rule, got, value = str(error).partition(", got")
        rule = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), rule)
        raise type(error)(rule + got + value) from None


def changed(policy: D, fields: Mapping[str, str], /, **changes: Any) -> D:
    """``policy`` with these parameters changed; names and errors are as in :func:`spelled`."""
    return spelled(partial(dataclasses.replace, policy), fields, **changes)


def check_alone(policy: object, defaults: tuple[Any, ...], /, **parameters: Any) -> None:
    """ParameterError if a parameter beside ``policy`` is not at its default."""
    given = tuple(parameters.values())
    if given != defaults:
        raise ParameterError(
            f"policy= already says how the scale moves: leave out {', '.join(parameters)}, "
            f"got {given!r} beside {policy!r}"
        )


def check_policy(policy: object, kind: type | UnionType = Policy, fixed: str = "") -> None:
    """TypeError unless ``policy`` is of this kind: by default, anything with a policy's methods.

    A kind without FixedScale gives in ``fixed`` what to use for a scale that never moves.
    """
    if isinstance(policy, type) or not isinstance(policy, kind):
        also = ", an AmaxScale or a FixedScale"
        if fixed:
            also = f" or an AmaxScale (for a scale that never moves, use {fixed})"
        got = repr(policy)
        if type(policy).__name__ == "DynamicScale":  # flax's, or gradscaler.jax's of that name
            got = f"a {type(policy).__module__}.DynamicScale, which is no gradscaler.DynamicScale"
        raise TypeError(
            f"policy must be a DynamicScale{also}, got {got}; an example is "
            "DynamicScale(init_scale=1024.0)"
        )
