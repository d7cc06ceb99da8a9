"""Checks of the values in a run file's lines, and mappings of them in little memory."""

from __future__ import annotations

import json
import marshal
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import lru_cache, partial
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from gradscaler.diagnose._gradients.formats import FORMATS, format_named
from gradscaler.policies._checks import LARGEST_SCALE

_LARGEST_COUNT = 2**63 - 1
_MOST_STEPS = 10**11  # three years of a step each millisecond
_SMALLEST_SCALE = 2.0**-149  # that float32 can hold
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
    return _reader_of(kind)(value)


@lru_cache
def _reader_of(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 # a case for each kind of type
    """What makes an instance of a type from a JSON value; a file holds millions of some."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        return arguments[1]  # type: ignore[no-any-return]
    if kind in _CHECKS:
        return _CHECKS[kind]
    if get_origin(kind) is Literal:
        return partial(_one_of, arguments)
    if NoneType in arguments:
        return partial(_optional, _reader_of(arguments[0]))
    if get_origin(kind) is Mapping:
        return partial(_mapping, _reader_of(arguments[1]))
    if arguments and arguments[-1] is ...:
        return partial(_tuple, _reader_of(arguments[0]))
    if arguments:
        return partial(_tuple_of, tuple(map(_reader_of, arguments)))
    readers = {key: _reader_of(type_) for key, type_ in _types_of(kind).items()}
    if issubclass(kind, tuple):
        return partial(_named_tuple, kind, tuple(readers.values()))
    return partial(_line, kind, readers)


def _flag(value: Any) -> bool:
    return bool(_checked(isinstance(value, bool), value, "true or false"))


def _one_of(choices: tuple[str, ...], value: Any) -> Any:
    return _checked(value in choices, value, f"one of {', '.join(choices)}")


def _optional(reader: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else reader(value)


def _mapping(reader: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {key: _field(key, reader, item) for key, item in _object(value).items()}


def _tuple(reader: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    return tuple(map(reader, _array(value)))


def _tuple_of(readers: Sequence[Callable[[Any], Any]], value: Any) -> tuple[Any, ...]:
    items = _array(value, len(readers))
    return tuple(reader(item) for reader, item in zip(readers, items, strict=True))


def _named_tuple(kind: Any, readers: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    return kind(*_tuple_of(readers, value))


def _line(kind: Any, readers: Mapping[str, Callable[[Any], Any]], value: Any) -> Any:
    found = _object(value)
    for key in readers:
        if key not in found and not _has_default(kind, key):  # older files lack some
            raise ValueError(f"{key} is missing")
    given = {key: reader for key, reader in readers.items() if key in found}
    line = kind(**{key: _field(key, reader, found[key]) for key, reader in given.items()})
    if hasattr(line, "check"):
        line.check()
    return line


@lru_cache
def _has_default(kind: Any, key: str) -> bool:
    """Whether a field of a class has a default, or what makes one."""
    field = getattr(kind, "__dataclass_fields__", {}).get(key)
    return hasattr(kind, key) or (field is not None and field.default_factory is not MISSING)


def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a class' fields, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in getattr(kind, "_fields", kind.__match_args__)}


def number(value: Any) -> float:
    """Any float: a number, or the text for one that JSON has no word for."""
    if type(value) is float and abs(value) < math.inf:  # as most are
        return value
    if value in ("nan", "inf", "-inf"):
        return float(value)
    is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return float(_checked(is_finite, value, "a number"))


def share(value: Any) -> float:
    """From 0 to 1."""
    checked = number(value)
    _checked(0 <= checked <= 1, value, "a share from 0 to 1")
    return checked


def scale(value: Any) -> float:
    """A loss scale, which is kept in float32."""
    checked = number(value)
    _checked(_SMALLEST_SCALE <= checked <= LARGEST_SCALE, value, "positive and finite in float32")
    return checked


def magnitude(value: Any) -> float:
    """From 0 to Inf, or NaN."""
    checked = number(value)
    _checked(not checked < 0, value, "a magnitude")
    return checked


def finite_magnitude(value: Any) -> float:
    """From 0 to below Inf."""
    checked = number(value)
    _checked(0 <= checked < math.inf, value, "a finite magnitude")
    return checked


def _integer(least: int, most: int, value: Any) -> int:
    if type(value) is int and least <= value <= most:
        return value
    raise ValueError(f"must be an integer from {least} to {most}, got {shown(value)}")


count = partial(_integer, 0, _LARGEST_COUNT)

num_steps = partial(_integer, 0, _MOST_STEPS)

step = partial(_integer, 1, _MOST_STEPS)
"""The number of a step."""

exponent = partial(_integer, -_FARTHEST_EXPONENT, _FARTHEST_EXPONENT)
"""Of 2, that a float64 can have."""


def bin_counts(value: Any) -> tuple[int, ...]:
    """An array of counts, one for each exponent at most."""
    most = 2 * _FARTHEST_EXPONENT
    is_valid = isinstance(value, list) and len(value) <= most
    counts = _checked(is_valid, value, f"an array of at most {most}")
    if {*map(type, counts)} == {int} and min(counts) >= 0 and max(counts) <= _LARGEST_COUNT:
        return tuple(counts)
    return tuple(map(count, counts))


def dtype(value: Any) -> str:
    """The name of a format that gradients can be measured against."""
    name = str(_text(value))
    try:
        format_named(name)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(FORMATS)}, got {shown(name)}") from None
    return name


def check_steps(key: str, steps: Sequence[int], first: int, last: int) -> None:
    """Check that steps rise from ``first`` or later to ``last`` or earlier."""
    if any(before >= after for before, after in pairwise((first - 1, *steps, last + 1))):
        raise ValueError(f"{key}: must be steps that rise, from {first} to {last}")


def _text(value: Any) -> Any:
    return _checked(isinstance(value, str), value, "a text")


def _plain(value: Any) -> Any:
    """A text, a flag, null or a number."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return value if isinstance(value, int) and abs(value) <= _LARGEST_COUNT else number(value)


_CHECKS: dict[Any, Callable[[Any], Any]] = {
    bool: _flag,
    int: count,
    float: number,
    str: _text,
    Any: _plain,
}


def _object(value: Any) -> Any:
    return _checked(isinstance(value, dict), value, "an object")


def _array(value: Any, length: int | None = None) -> Any:
    is_valid = isinstance(value, list) and length in (None, len(value))
    return _checked(is_valid, value, "an array" if length is None else f"an array of {length}")


def _field(key: str, reader: Callable[[Any], Any], value: Any) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise ValueError(f"{shown(key)[1:-1]}: {error}") from None


class PackedMapping(Mapping[str, Any]):
    """A mapping of a JSON object's values, as instances of a type, packed until they are used.

    Verdicts and figures look at the parameters of a few samples, and a file may hold thousands.
    The constructor checks the values, and raises as :func:`value_as` does.
    """

    __slots__ = "_data", "_kind", "_length"

    def __init__(self, kind: Any, value: Any) -> None:
        self._length = len(value_as(Mapping[str, kind], value))
        self._kind = kind
        self._data = zlib.compress(marshal.dumps(value), 1)

    def __getitem__(self, key: str) -> Any:
        return _unpacked(self._kind, self._data)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(_unpacked(self._kind, self._data))

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return repr(dict(self))


@lru_cache(maxsize=20)
def _unpacked(kind: Any, data: bytes) -> Mapping[str, Any]:
    unpacked: Mapping[str, Any] = value_as(Mapping[str, kind], marshal.loads(zlib.decompress(data)))
    return unpacked
