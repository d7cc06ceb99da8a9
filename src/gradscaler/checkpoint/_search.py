"""Finds a scaler's state in a checkpoint, by its key or as the only one there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from gradscaler._formats.layouts import Values
from gradscaler._formats.reading import layout_of

_MOST_NAMES = 12  # in a message

Path = tuple[Any, object]  # the path of the dict that holds an entry, None at the top; and its key


def find(saved: Any, key: str | None, option: str = "key=") -> tuple[str | None, Values]:
    """The key of a scaler's state in ``saved``, and the state.

    The search starts at the entry ``key``, or at ``saved`` itself if ``key`` is None. If the keys
    of this dict match a format, it is the state. Otherwise the state is the only dict in it, at any
    depth, whose keys match. If there is none, the result is the dict that was searched.

    Args:
        saved: a state dict, or a checkpoint.
        key: where to start; None is ``saved`` itself.
        option: the name of the user's option for ``key``, for an error.

    Raises:
        TypeError: ``saved`` or its entry is not a dict, or ``key`` is not a str.
        ValueError: there is no such key, or there are several states.
    """
    if not isinstance(key, str | None):
        raise TypeError(f"key must be a str, got {type(key).__name__}")
    start = saved
    if key is not None and isinstance(saved, Mapping):
        start = entry(saved, key)
        if not isinstance(start, Mapping):
            raise TypeError(f"{key:.80} is a {type(start).__name__}, not a dict")
    if layout_of(start):
        return key, start
    first = None if key is None else (None, key)
    found = list(islice(_states(start, first), _MOST_NAMES + 1))
    if not found:
        return key, start
    names = [_spelled(path) for path, _ in found]
    if len(found) > 1:
        raise ValueError(f"scalers' states are under several keys: {_listed(names)}; pass {option}")
    return names[0], found[0][1]


def entry(saved: Values, key: str) -> object:
    """The entry under a key. A dot leads to an entry of an entry, or is part of a key itself.

    Raises:
        ValueError: there is no such entry; the message lists the keys where the search ended.
    """
    todo = [(saved, key)]
    seen = {(id(saved), key)}  # a dict may hold itself
    for place, rest in todo:
        entries = {str(name): value for name, value in place.items()}
        if rest in entries:
            return entries[rest]
        for name, value in entries.items():
            after = rest[len(name) + 1 :]
            step = id(value), after
            if isinstance(value, Mapping) and rest.startswith(f"{name}.") and step not in seen:
                seen.add(step)
                todo.append((value, after))
    place, rest = min(todo, key=lambda step: len(step[1]))
    inside = f" in {key[: -len(rest) - 1]:.80}" if rest != key else ""
    raise ValueError(f"there is no key {key!r:.80}; the keys{inside} are {_listed(place)}")


def _states(saved: Values, first: Path | None) -> Iterator[tuple[Path, Values]]:
    """The dicts in ``saved`` that match a layout, with their paths.

    Each dict is searched only once, so that the search ends even if a dict contains itself.
    """
    seen = {id(saved)}
    todo = [(first, saved)]
    for path, place in todo:
        for name, value in place.items():
            if not isinstance(value, Mapping) or id(value) in seen:
                continue
            here = (path, name)
            if layout_of(value):
                yield here, value
            else:
                seen.add(id(value))
                todo.append((here, value))


def _spelled(path: Path | None) -> str:
    names = []
    while path is not None:
        path, name = path
        names.append(str(name))
    return ".".join(reversed(names))


def _listed(names: Iterable[object]) -> str:
    """A text of the first names, for a message."""
    listed = [f"{name!s:.80}" for name in islice(names, _MOST_NAMES + 1)]
    more = [] if len(listed) <= _MOST_NAMES else ["and more"]
    return ", ".join(listed[:_MOST_NAMES] + more)
