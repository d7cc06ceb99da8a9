"""Checks of the values in a run file's lines; an error names the value and what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Check = Callable[[Any], T]
"""Turns a JSON value into what it stands for; raises ValueError if it cannot."""

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


def _integer(least: int, most: int) -> Check[int]:
    def check(value: Any) -> int:
        if type(value) is int and least <= value <= most:
            return value
        raise ValueError(f"must be an integer from {least} to {most}, got {shown(value)}")

    return check


count = _integer(0, _LARGEST_COUNT)
exponent = _integer(-_FARTHEST_EXPONENT, _FARTHEST_EXPONENT)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, got {shown(value)}")
    return value


def _optional(check: Check[T]) -> Check[T | None]:
    """Null, or a value that passes."""
    return lambda value: None if value is None else check(value)


def _sequence(check: Check[T], longest: int | None = None) -> Check[tuple[T, ...]]:
    """An array of values that each pass."""

    def check_each(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list) or (longest is not None and len(value) > longest):
            limit = "" if longest is None else f" of at most {longest}"
            raise ValueError(f"must be an array{limit}, got {shown(value)}")
        return tuple(map(check, value))

    return check_each


def _together(make: Callable[..., T], *checks: Check[Any]) -> Check[T]:
    """An array of as many values as there are checks."""

    def check(value: Any) -> T:
        if not isinstance(value, list) or len(value) != len(checks):
            raise ValueError(f"must be an array of {len(checks)}, got {shown(value)}")
        return make(*(check(item) for check, item in zip(checks, value, strict=True)))

    return check


def _mapping(check: Check[T]) -> Check[dict[str, T]]:
    """An object whose values each pass."""

    def check_values(value: Any) -> dict[str, T]:
        return {key: _named(key, check, item) for key, item in _object(value).items()}

    return check_values


def _record(make: Callable[..., T], **checks: Check[Any]) -> Check[T]:
    """An object with these keys; other keys, which a later version may add, are left out."""

    def check(value: Any) -> T:
        found = _object(value)
        for key in checks:
            if key not in found:
                raise ValueError(f"{key} is missing")
        return make(**{key: _named(key, check, found[key]) for key, check in checks.items()})

    return check


def _plain(value: Any) -> Any:
    """A text, a flag, null or a number."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return value if isinstance(value, int) and abs(value) <= _LARGEST_COUNT else number(value)


bin_counts = _sequence(count, longest=2 * _FARTHEST_EXPONENT)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {shown(value)}")
    return value


def _named(key: str, check: Check[T], value: Any) -> T:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{shown(key)[1:-1]}: {error}") from None


_BY_TYPE: dict[Any, Check[Any]] = {int: count, float: number, str: _text, Any: _plain}


def check_for(kind: Any) -> Check[Any]:
    """The check for a type of lines, or of their fields; ``Annotated`` types bring their own."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        return arguments[1]  # type: ignore[no-any-return]
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if type(None) in arguments:
        return _optional(check_for(arguments[0]))
    if get_origin(kind) is Mapping:
        return _mapping(check_for(arguments[1]))
    if arguments:
        *items, last = arguments
        if last is ...:
            return _sequence(check_for(*items))
        return _together(lambda *values: values, *map(check_for, arguments))
    hints = get_type_hints(kind, include_extras=True)
    if issubclass(kind, tuple):
        return _together(kind, *map(check_for, hints.values()))
    return _record(kind, **{field.name: check_for(hints[field.name]) for field in fields(kind)})
