"""The weights that a function of JAX is given, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

from gradscaler.diagnose._record.thresholds import LEAST_FACTOR, RATE_JUMPED, SAME_FACTORS

Array = Any


class GivenWeights:
    """The weights of a function's latest call, and what became of them since. It keeps no array.

    Attributes:
        are_updated: whether an optimizer has made new weights of them.
    """

    def __init__(self) -> None:
        self.are_updated = False
        self._latest: list[Callable[[], Array | None]] = []
        # The first of the new weights that an optimizer made of them, until something takes it.
        self._made: Callable[[], Array | None] | None = None
        # That of the results of the latest call, and of the one before, until something takes it.
        self._returned: list[Callable[[], Array | None]] = []
        self._is_same = False  # whether the latest call was given the same as the one before
        self._sizes: list[float] = []  # of the updates since, as far as they may be a search

    def see_updated(
        self, weights: Sequence[Array], updates: Sequence[Array], made: Sequence[Array]
    ) -> None:
        """Note that an optimizer made new weights by updates, which may be of these."""
        first = self._latest[0]() if self._latest else None
        for old, update, new in zip(weights, updates, made, strict=False):
            if old is first:
                self._made, self.are_updated = ref(new), True
                if self._is_same and (len(self._sizes) < 2 or self._are_of_search):
                    self._sizes.append(float(abs(update).max()))

    def see_taken(self, arrays: Sequence[Array]) -> None:
        """Note the arguments of a call of any function, which may take the new weights."""
        new = None if self._made is None else self._made()
        if new is not None and any(each is new for each in arrays):
            self._made = None
        if any(each is old() for old in self._returned for each in arrays):
            self._returned.clear()

    def see_returned(self, new: Array | None) -> None:
        """Note the first of the new weights that a call returns; None if it returns none."""
        self._returned = [] if new is None else [*self._returned[-1:], ref(new)]

    def are_again(self, weights: Sequence[Array]) -> str:
        """Note the weights of a call; why they are the same, if the script loses the new ones.

        An optimizer has made new ones, which nothing took (``"given"``), or the function itself has
        returned new ones, and the script has dropped them (``"dropped"``). Empty if neither is so.

        A healthy loop may give the same ones, too: those of a meta-learning are where several tasks
        begin, each of which takes what it makes of them; those of an accumulation have no update
        between two calls; and those of a search for a learning rate are where each rate begins.
        """
        latest, made, self._made = self._latest, self._made, None
        self._is_same = len(latest) == len(weights) and all(
            old() is new for old, new in zip(latest, weights, strict=True)
        )
        if not self._is_same:
            self._latest, self._sizes = [ref(each) for each in weights], []
        if not self._is_same or not weights:
            return ""
        if made is not None and not (self._sizes[1:] and self._are_of_search):
            return "given"
        return "dropped" * (len(self._returned) == 2 and self._returned[0]() is None)

    @property
    def _are_of_search(self) -> bool:
        """Whether updates grow as those of rates do that are tried one after the other."""
        factors = [new / old if old else 0.0 for old, new in pairwise(self._sizes)]
        least, most = min(factors), max(factors)
        return least >= RATE_JUMPED or LEAST_FACTOR < least >= most / SAME_FACTORS
