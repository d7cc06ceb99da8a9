"""Parameters that have two names: Paddle's own, and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

from gradscaler.errors import ParameterTypeError
from gradscaler.policies._presets import PADDLE

P = ParamSpec("P")

_OWN_NAMES = {"enabled": "enable", **{other: name for name, other in PADDLE.items()}}
"""Paddle's name of each parameter that also has PyTorch's."""


def one_name_each(init: Callable[P, None]) -> Callable[P, None]:
    """Refuse a call that gives both names of a parameter, even if one value is the default."""
    parameters = tuple(signature(init).parameters)

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        for other, name in _OWN_NAMES.items():
            if name in given and given.get(other) is not None:
                raise ParameterTypeError(
                    f"{other} is another name of {name}: give one of them, got "
                    f"{name}={given[name]!r} and {other}={given[other]!r}"
                )
        init(*args, **kwargs)

    return checked


def given(name: str, value: Any, other: str, other_value: Any) -> dict[str, Any]:
    """A parameter with two names, under the one that was given."""
    return {name: value} if other_value is None else {other: other_value}
