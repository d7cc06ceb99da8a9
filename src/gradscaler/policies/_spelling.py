"""A policy's parameters under a framework's names, and checks of an argument ``policy``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import UnionType
from typing import TypeVar

from gradscaler.errors import ParameterError
from gradscaler.policies.state import Policy, is_fixed

T = TypeVar("T")


def spelled(
    make: Callable[..., T], fields: Mapping[str, str], /, *values: object, **parameters: object
) -> T:
    """Call ``make`` with parameters under the caller's names.

    Args:
        make: makes a policy. Its errors are raised again with the caller's names in them.
        fields: maps the caller's names to those of ``make``. Names that are not in it are the same.
        values: the values of the parameters in ``fields``, in its order.
        parameters: further parameters.
    """
    parameters.update(zip(fields, values, strict=False))
    names = {fields.get(name, name): name for name in parameters}
    try:
        return make(**{field: parameters[name] for field, name in names.items()})
    except (TypeError, ValueError) as error:
        rule, got, value = str(error).partition(", got")
        rule = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), rule)
        raise type(error)(rule + got + value) from None


def changed(policy: T, fields: Mapping[str, str], /, **changes: object) -> T:
    """``policy`` with some parameters changed, with names and errors as in :func:`spelled`."""
    return spelled(partial(replaced, policy), fields, **changes)


def replaced(policy: T, /, **changes: object) -> T:
    """A copy of any policy with some parameters changed.

    Raises:
        TypeError: the policy lacks a parameter, or has it other than as a field of a dataclass.
    """
    fields = dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()
    names = {field.name for field in fields if field.init}
    for name, value in changes.items():
        if not hasattr(policy, name):
            raise TypeError(f"{policy!r} has no {name} to set")
        if name not in names:
            raise TypeError(
                f"{policy!r} cannot be copied with another {name}, because it has no field {name} "
                f"of a dataclass: construct the policy with {name}={value!r}, and the scaler "
                "with GradScaler(policy=...)"
            )
    changed: T = dataclasses.replace(policy, **changes)  # type: ignore[type-var] # has the fields
    return changed


def defaults_of(preset: Callable[..., object]) -> tuple[object, ...]:
    """The defaults of a preset's parameters, which are an adapter's too.

    >>> from gradscaler import DynamicScale
    >>> defaults_of(DynamicScale.torch)
    (65536.0, 2.0, 0.5, 2000)
    """
    return tuple(each.default for each in signature(preset).parameters.values())


def check_alone(policy: object, defaults: tuple[object, ...], /, **parameters: object) -> None:
    """Raise ParameterError if a parameter that ``policy`` replaces is not at its default."""
    given = tuple(parameters.values())
    if given != defaults:
        raise ParameterError(
            f"policy= already says how the scale moves: leave out {', '.join(parameters)}, "
            f"got {given!r} beside {policy!r}"
        )


def check_policy(policy: object, kind: type | UnionType = Policy, fixed: str = "") -> None:
    """Raise TypeError if ``policy`` is not of a kind.

    Args:
        policy: the argument to check.
        kind: a class, or a union of classes; by default, any class with a policy's methods.
        fixed: if a fixed scale is refused, the names of classes for one.
    """
    refused = bool(fixed) and is_fixed(policy)
    if isinstance(policy, type) or refused or not isinstance(policy, kind):
        also = ", an AmaxScale or a FixedScale"
        if fixed:
            also = f" or an AmaxScale (for a scale that never moves, use {fixed})"
        got = repr(policy)
        if type(policy).__name__ == "DynamicScale":  # flax's, or gradscaler.jax's of that name
            got = f"a {type(policy).__module__}.DynamicScale, which is not gradscaler.DynamicScale"
        raise TypeError(
            f"policy must be a DynamicScale{also}, got {got}; an example is "
            "DynamicScale(init_scale=1024.0)"
        )
