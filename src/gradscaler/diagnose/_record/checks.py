"""Checks of the values in a run file's lines, and a compressed mapping of such values."""

from __future__ import annotations

import json
import marshal
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gradscaler.policies._checks import LARGEST_SCALE

T = TypeVar("T")

Reader = Callable[[object], Any]
"""Converts a JSON value, or raises ValueError."""

_LARGEST_COUNT = 2**63 - 1
_MOST_STEPS = 10**11  # three years at one step per millisecond
_SMALLEST_SCALE = 2.0**-149  # the smallest subnormal of float32
_FARTHEST_EXPONENT = 1100  # float64's exponents go from -1074 to 1023


def loads(line: bytes) -> dict[str, Any]:
    """Parse a line; ValueError if it is not a JSON object, RecursionError if nested deeply."""
    try:
        value = json.loads(line.decode(), parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {str(error)[:200]}") from None
    return _checked(isinstance(value, dict), value, "a JSON object")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def shown(value: object) -> str:
    """A value for an error message, on one short line."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    return text if len(text) <= 60 else text[:60] + "..."


def _checked(is_valid: bool, value: T, what: str) -> T:
    """Return the value if it is valid; otherwise raise an error that says what it must be."""
    if not is_valid:
        raise ValueError(f"must be {what}, got {shown(value)}")
    return value


def value_as(kind: object, value: object) -> Any:
    """Convert a JSON value to a type: the type of a line, or of a field of a line.

    Unknown keys are ignored, because a later version may add some.

    Raises:
        ValueError: the value does not fit the type, or fails the check of an ``Annotated`` type.
    """
    return _reader_of(kind)(value)


@lru_cache
def _reader_of(kind: Any) -> Reader:  # noqa: PLR0911 # a case for each kind of type
    """The converter from JSON values to a type; cached, because a file may hold millions."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return arguments[1]  # type: ignore[no-any-return]
    if kind in _CHECKS:
        return _CHECKS[kind]
    if origin is Literal:
        return one_of(arguments)
    if is_dataclass(kind):
        return partial(_instance, kind, _readers_of(kind))
    if hasattr(kind, "_fields"):  # a named tuple
        readers = [*_readers_of(kind).values()]
        return lambda value: kind(*_each(readers, value))
    if origin is tuple and arguments[-1] is not ...:
        readers = [*map(_reader_of, arguments)]
        return lambda value: tuple(_each(readers, value))
    of = _reader_of(arguments[origin is Mapping])
    if origin is tuple:
        return lambda value: tuple(map(of, _array(value)))
    if origin is Mapping:
        return lambda value: {key: _field(key, of, item) for key, item in _object(value).items()}
    return lambda value: None if value is None else of(value)


def _readers_of(kind: Any) -> dict[str, Reader]:
    """The converter of each field of a dataclass or a named tuple, by the field's name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _reader_of(hints[name]) for name in kind.__match_args__}


def _each(readers: Sequence[Reader], value: object) -> list[Any]:
    """Convert the items of an array, which must have one item for each reader."""
    items = _array(value, len(readers))
    return [reader(item) for reader, item in zip(readers, items, strict=True)]


def _instance(kind: Any, readers: Mapping[str, Reader], value: object) -> Any:
    """Convert an object to a dataclass; a field that has a default may be missing."""
    found = _object(value)
    for field in fields(kind):
        if field.name not in found and field.default is field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    given = {key: _field(key, read, found[key]) for key, read in readers.items() if key in found}
    line = kind(**given)
    if hasattr(line, "check"):
        line.check()
    return line


def number(value: Any) -> float:
    """Convert a number, or the text ``"nan"``, ``"inf"`` or ``"-inf"``, to a float."""
    if type(value) is float and abs(value) < math.inf:  # the common case, checked first for speed
        return value
    if value in ("nan", "inf", "-inf"):
        return float(value)
    is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return float(_checked(is_finite, value, "a number"))


def _number_that(is_valid: Callable[[float], bool], what: str, value: object) -> float:
    checked = number(value)
    _checked(is_valid(checked), value, what)
    return checked


_share = partial(_number_that, lambda share: 0 <= share <= 1, "a share from 0 to 1")
Share = Annotated[float, _share]

_scale = partial(
    _number_that,
    lambda scale: _SMALLEST_SCALE <= scale <= LARGEST_SCALE,
    "positive and finite in float32",
)
Scale = Annotated[float, _scale]
"""A loss scale: positive, and finite in float32."""

Magnitude = Annotated[float, partial(_number_that, lambda size: not size < 0, "a magnitude")]
"""A float from 0 to Inf, or NaN."""

_finite = partial(_number_that, lambda size: 0 <= size < math.inf, "a finite magnitude")
FiniteMagnitude = Annotated[float, _finite]


def _integer(least: int, most: int, value: object) -> int:
    if type(value) is int and least <= value <= most:
        return value
    raise ValueError(f"must be an integer from {least} to {most}, got {shown(value)}")


_count = partial(_integer, 0, _LARGEST_COUNT)

NumSteps = Annotated[int, partial(_integer, 0, _MOST_STEPS)]

Step = Annotated[int, partial(_integer, 1, _MOST_STEPS)]
"""The number of a step, from 1."""

Exponent = Annotated[int, partial(_integer, -_FARTHEST_EXPONENT, _FARTHEST_EXPONENT)]
"""A binary exponent that a float64 can have."""


def _bin_counts(value: Any) -> tuple[int, ...]:
    """Check an array of counts, which has at most one count for each exponent."""
    most = 2 * _FARTHEST_EXPONENT
    is_valid = isinstance(value, list) and len(value) <= most
    counts = _checked(is_valid, value, f"an array of at most {most}")
    if {*map(type, counts)} == {int} and min(counts) >= 0 and max(counts) <= _LARGEST_COUNT:
        return tuple(counts)
    return tuple(map(_count, counts))


BinCounts = Annotated[tuple[int, ...], _bin_counts]


def one_of(names: Sequence[str]) -> Reader:
    """A check that a value is one of some texts."""
    return lambda value: _checked(value in names, value, f"one of {', '.join(names)}")


def check_steps(key: str, steps: Sequence[int], first: int, last: int) -> None:
    """Check that the steps rise, and that all are from ``first`` to ``last``."""
    if any(before >= after for before, after in pairwise((first - 1, *steps, last + 1))):
        raise ValueError(f"{key}: must be steps that rise, from {first} to {last}")


def _instance_of(kind: type[object], what: str, value: object) -> Any:
    return _checked(isinstance(value, kind), value, what)


_object = partial(_instance_of, dict, "an object")


def _plain(value: object) -> Any:
    """Check that a value is a text, a flag, null or a number."""
    if value is None or isinstance(value, (str, bool)):
        return value
    return value if isinstance(value, int) and abs(value) <= _LARGEST_COUNT else number(value)


_CHECKS: dict[Any, Reader] = {
    bool: partial(_instance_of, bool, "true or false"),
    int: _count,
    float: number,
    str: partial(_instance_of, str, "a text"),
    Any: _plain,
}


def _array(value: object, length: int | None = None) -> Any:
    is_valid = isinstance(value, list) and length in (None, len(value))
    return _checked(is_valid, value, "an array" if length is None else f"an array of {length}")


def _field(key: str, reader: Reader, value: object) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise ValueError(f"{shown(key)[1:-1]}: {error}") from None


class PackedMapping(Mapping[str, Any]):
    """A compressed mapping from a JSON object's keys to its values, as instances of a type.

    A file may hold thousands of samples, and verdicts and figures use the parameters of only a few.
    The values are therefore compressed until they are used. The constructor checks them, and raises
    the same errors as :func:`value_as`.
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
