"""Parameters with two names and two orders: Paddle's and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from numbers import Real
from typing import TypeVar, cast

from gradscaler.errors import ParameterTypeError
from gradscaler.policies._presets import PADDLE

Init = TypeVar("Init", bound=Callable[..., None])

_OWN_NAMES = {"enabled": "enable", **{other: name for name, other in PADDLE.items()}}
"""Maps PyTorch's names of parameters to Paddle's."""

_TORCH_ORDER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
"""The order of ``torch.cuda.amp.GradScaler``; ``torch.amp.GradScaler`` takes ``device`` first."""


def either_spelling(init: Init) -> Init:
    """Let ``init`` take arguments in Paddle's order or in PyTorch's, under one name each.

    Arguments are in PyTorch's order if the first is a string, or a number that is not a bool. Two
    names of one parameter raise TypeError, even if one value is the default.
    """
    own_order = tuple(signature(init).parameters)[1:]

    @wraps(init)
    def read(self: object, *args: object, **kwargs: object) -> None:
        order = _torch_order(args, kwargs)
        if order is not None:
            if len(args) > len(order):
                raise TypeError(f"PyTorch's order is {', '.join(order)}: got {len(args)} values")
            named = dict(zip(order, args, strict=False))
            for name in named.keys() & kwargs.keys():
                raise TypeError(f"{name} is given by position and by name: give it once")
            args, kwargs = (), named | kwargs
        given = {**dict(zip(own_order, args, strict=False)), **kwargs}
        for other, name in _OWN_NAMES.items():
            if name in given and given.get(other) is not None:
                raise ParameterTypeError(
                    f"{other} is another name of {name}: give one of them, got "
                    f"{name}={given[name]!r} and {other}={given[other]!r}"
                )
        init(self, *args, **kwargs)

    return cast(Init, read)


def _torch_order(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[str, ...] | None:
    """The names of ``args``, if they are in PyTorch's order.

    Raises:
        TypeError: the first is 0 or 1, so it may be ``enable`` or the scale.
    """
    first = args[0] if args else None
    if isinstance(first, str):
        return ("device", *_TORCH_ORDER)
    if isinstance(first, bool) or not isinstance(first, Real) or len(args) > len(_TORCH_ORDER):
        return None
    if first in (0, 1) and not {"enable", "enabled"} & kwargs.keys():
        if {"init_loss_scaling", "init_scale"} & kwargs.keys():
            return None
        raise TypeError(
            f"{first!r} may be Paddle's enable or PyTorch's init_scale: write "
            f"enable={bool(first)} or init_scale={first!r}"
        )
    return _TORCH_ORDER


def given(name: str, value: object, other: str, other_value: object) -> dict[str, object]:
    """The value of a parameter with two names, under the name that the caller used."""
    return {name: value} if other_value is None else {other: other_value}
