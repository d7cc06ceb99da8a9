"""The objects of a class that are in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, compress
from operator import methodcaller
from typing import Any


def in_memory(kinds: Any) -> list[Any]:
    """The objects in memory of a class, or of one of a tuple, among those that Python collects.

    isinstance() would run code of proxies, so the class of each is compared. No thread may run
    while all objects are held: another one may be within ``tuple(generator)``, which Python lets
    nobody else hold, and would end with a SystemError. So one call holds, finds and lets go of
    them, without a line of Python in between.

    This takes 0.02 s and more.
    """
    ids = set(map(id, _with_those_below(kinds if isinstance(kinds, tuple) else (kinds,))))
    every: list[Any] = []
    found: list[Any] = []
    steps = (
        partial(every.extend, chain.from_iterable(map(gc.get_objects, (None,)))),
        partial(found.extend, compress(every, map(ids.__contains__, map(id, map(type, every))))),
        every.clear,
    )
    any(map(methodcaller("__call__"), steps))
    return found


def _with_those_below(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _with_those_below(type.__subclasses__(kind))
