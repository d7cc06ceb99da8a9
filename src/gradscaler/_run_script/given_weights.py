"""The weights that a function of JAX is given, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

Array = Any


class GivenWeights:
    """The weights of a function's latest call, and what became of them since. It keeps no array."""

    def __init__(self) -> None:
        self._latest: list[Callable[[], Array | None]] = []
        # The first of the new weights that an optimizer made of them, until something takes it.
        self._made: Callable[[], Array | None] | None = None

    def see_updated(self, weights: Sequence[Array], made: Sequence[Array]) -> None:
        """Note that an optimizer made new weights, which may be of these."""
        first = self._latest[0]() if self._latest else None
        for old, new in zip(weights, made, strict=False):
            if old is first:
                self._made = ref(new)

    def see_taken(self, arrays: Sequence[Array]) -> None:
        """Note the arguments of a call of any function, which may take the new weights."""
        new = None if self._made is None else self._made()
        if new is not None and any(each is new for each in arrays):
            self._made = None

    def are_again(self, weights: Sequence[Array]) -> bool:
        """Note the weights of a call; whether they are the same, and nothing took the new ones.

        A healthy loop may give the same ones, too: those of a meta-learning are where several tasks
        begin, each of which takes what it makes of them; and those of an accumulation have no
        update between two calls.
        """
        latest, made, self._made = self._latest, self._made, None
        is_same = len(latest) == len(weights) and all(
            old() is new for old, new in zip(latest, weights, strict=True)
        )
        if not is_same:
            self._latest = [ref(each) for each in weights]
        return is_same and bool(weights) and made is not None
