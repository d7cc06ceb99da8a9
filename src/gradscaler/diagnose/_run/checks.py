"""Checks of the values in a run file's lines; an error names the value and what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import lru_cache, partial
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_LARGEST_COUNT = 2**63 - 1
_FARTHEST_EXPONENT = 1100  # float64 ends at 1023, and at -1074


def loads(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; ValueError if it is not one, RecursionError if nested deeply."""
    try:
        value = json.loads(line.decode(), parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {str(error)[:200]}") from None
    return _checked(isinstance(value, dict), value, "a JSON object")  # type: ignore[no-any-return]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def shown(value: object) -> str:
    """A value for an error message: one line, and a short one."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    return text if len(text) <= 60 else text[:60] + "..."


def _checked(is_valid: bool, value: Any, what: str) -> Any:
    """The value if it is valid; else an error that says what it must be."""
    if not is_valid:
        raise ValueError(f"must be {what}, got {shown(value)}")
    return value


def value_as(kind: Any, value: Any) -> Any:
    """A JSON value as an instance of a type: one of the lines, or of their fields.

    Keys that a later version may add are left out. What fits neither the type nor the check that
    an ``Annotated`` type brings is a ValueError.
    """
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        return arguments[1](value)
    if kind in _CHECKS:
        return _CHECKS[kind](value)
    if NoneType in arguments:
        return None if value is None else value_as(arguments[0], value)
    if get_origin(kind) is Mapping:
        return {key: _field(key, arguments[1], item) for key, item in _object(value).items()}
    if arguments and arguments[-1] is ...:
        return tuple(value_as(arguments[0], item) for item in _array(value))
    if arguments:
        return tuple(map(value_as, arguments, _array(value, len(arguments))))
    types = _types_of(kind)
    if issubclass(kind, tuple):
        return kind(*map(value_as, types.values(), _array(value, len(types))))
    found = _object(value)
    for key in types:
        if key not in found and not _has_default(kind, key):  # older files lack some
            raise ValueError(f"{key} is missing")
    given = {key: type_ for key, type_ in types.items() if key in found}
    return kind(**{key: _field(key, type_, found[key]) for key, type_ in given.items()})


def _has_default(kind: Any, key: str) -> bool:
    """Whether a field of a class has a default, or what makes one."""
    field = getattr(kind, "__dataclass_fields__", {}).get(key)
    return hasattr(kind, key) or (field is not None and field.default_factory is not MISSING)


@lru_cache
def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a class' fields, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in getattr(kind, "_fields", kind.__match_args__)}


def number(value: Any) -> float:
    """Any float: a number, or the text for one that JSON has no word for."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return float(_checked(is_finite, value, "a number"))


def share(value: Any) -> float:
    """From 0 to 1."""
    checked = number(value)
    _checked(0 <= checked <= 1, value, "a share from 0 to 1")
    return checked


def _integer(least: int, most: int, value: Any) -> int:
    if type(value) is int and least <= value <= most:
        return value
    raise ValueError(f"must be an integer from {least} to {most}, got {shown(value)}")


count = partial(_integer, 0, _LARGEST_COUNT)

exponent = partial(_integer, -_FARTHEST_EXPONENT, _FARTHEST_EXPONENT)
"""Of 2, that a float64 can have."""


def bin_counts(value: Any) -> tuple[int, ...]:
    """An array of counts, one for each exponent at most."""
    most = 2 * _FARTHEST_EXPONENT
    is_valid = isinstance(value, list) and len(value) <= most
    return tuple(map(count, _checked(is_valid, value, f"an array of at most {most}")))


def _text(value: Any) -> Any:
    return _checked(isinstance(value, str), value, "a text")


def _plain(value: Any) -> Any:
    """A text, a flag, null or a number."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return value if isinstance(value, int) and abs(value) <= _LARGEST_COUNT else number(value)


_CHECKS: dict[Any, Callable[[Any], Any]] = {int: count, float: number, str: _text, Any: _plain}


def _object(value: Any) -> Any:
    return _checked(isinstance(value, dict), value, "an object")


def _array(value: Any, length: int | None = None) -> Any:
    is_valid = isinstance(value, list) and length in (None, len(value))
    return _checked(is_valid, value, "an array" if length is None else f"an array of {length}")


def _field(key: str, kind: Any, value: Any) -> Any:
    try:
        return value_as(kind, value)
    except ValueError as error:
        raise ValueError(f"{shown(key)[1:-1]}: {error}") from None
