"""A weak mapping by identity, for objects that compare by value and have no hash."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")


class ByIdentity(Generic[ValueT]):
    """Values by objects such as optimizers. It does not keep the objects alive."""

    def __init__(self, objects: Iterable[Any] = (), value: Any = None) -> None:
        self._entries: dict[int, tuple[Callable[[], Any], ValueT]] = {}
        for each in objects:
            self[each] = value

    def __setitem__(self, key: Any, value: ValueT) -> None:
        entries, number = self._entries, id(key)
        entries[number] = weakref.ref(key, lambda _: entries.pop(number, None)), value

    def get(self, key: Any, otherwise: ValueT) -> ValueT:
        """The value of an object."""
        entry = self._entries.get(id(key))
        return otherwise if entry is None or entry[0]() is not key else entry[1]

    @property
    def ids(self) -> Set[int]:
        """The ids of the objects that are alive."""
        return self._entries.keys()

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __iter__(self) -> Iterator[Any]:
        alive = [entry[0]() for entry in list(self._entries.values())]
        return iter([each for each in alive if each is not None])

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all objects."""
        self._entries.clear()
