"""Checks of the values in a run file's lines; an error names the value and what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_LARGEST_COUNT = 2**63 - 1
_FARTHEST_EXPONENT = 1100  # float64 ends at 1023, and at -1074


def loads(line: bytes) -> dict[str, Any]:
    """The JSON object in a line.

    Raises:
        ValueError: the line is not a JSON object.
        RecursionError: it is nested too deeply.
    """
    try:
        value = json.loads(line.decode(), parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {shown(value)}")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def shown(value: object) -> str:
    """A value for an error message: one line, and a short one."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    return text if len(text) <= 60 else text[:60] + "..."


def value_as(kind: Any, value: Any) -> Any:
    """A JSON value as an instance of a type: one of the lines, or of their fields.

    Keys that a later version may add are left out.

    Raises:
        ValueError: it does not fit the type, or the check that an ``Annotated`` type brings.
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
        if key not in found:
            raise ValueError(f"{key} is missing")
    return kind(**{key: _field(key, type_, found[key]) for key, type_ in types.items()})


@lru_cache
def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a class' fields, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in getattr(kind, "_fields", kind.__match_args__)}


def number(value: Any) -> float:
    """Any float: a number, or the text for one that JSON has no word for."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int that no float can hold
        pass
    raise ValueError(f"must be a number, got {shown(value)}")


def share(value: Any) -> float:
    """From 0 to 1."""
    if not 0 <= (checked := number(value)) <= 1:
        raise ValueError(f"must be a share from 0 to 1, got {shown(value)}")
    return checked


def _integer(value: Any, least: int, most: int) -> int:
    if type(value) is int and least <= value <= most:
        return value
    raise ValueError(f"must be an integer from {least} to {most}, got {shown(value)}")


def count(value: Any) -> int:
    """From 0 to the largest that 64 bits hold."""
    return _integer(value, 0, _LARGEST_COUNT)


def exponent(value: Any) -> int:
    """Of 2, that a float64 can have."""
    return _integer(value, -_FARTHEST_EXPONENT, _FARTHEST_EXPONENT)


def bin_counts(value: Any) -> tuple[int, ...]:
    """An array of counts, one for each exponent at most."""
    if not isinstance(value, list) or len(value) > 2 * _FARTHEST_EXPONENT:
        most = 2 * _FARTHEST_EXPONENT
        raise ValueError(f"must be an array of at most {most}, got {shown(value)}")
    return tuple(map(count, value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, got {shown(value)}")
    return value


def _plain(value: Any) -> Any:
    """A text, a flag, null or a number."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return value if isinstance(value, int) and abs(value) <= _LARGEST_COUNT else number(value)


_CHECKS: dict[Any, Callable[[Any], Any]] = {int: count, float: number, str: _text, Any: _plain}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {shown(value)}")
    return value


def _array(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        of = "" if length is None else f" of {length}"
        raise ValueError(f"must be an array{of}, got {shown(value)}")
    return value


def _field(key: str, kind: Any, value: Any) -> Any:
    try:
        return value_as(kind, value)
    except ValueError as error:
        raise ValueError(f"{shown(key)[1:-1]}: {error}") from None
