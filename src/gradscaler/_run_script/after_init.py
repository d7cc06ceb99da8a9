"""Calls a function with the objects of a class."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from gradscaler._run_script.undo import replace
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of


def after_init(kind: Any, call: Callable[[Any], None]) -> None:
    """Call a function with each object of a class that is in memory, or is initialized later."""
    initialize, safe = kind.__init__, guarded(call)

    @in_place_of(initialize)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        safe(self)

    replace(kind, "__init__", initialized)
    for each in in_memory(kind):
        safe(each)


def in_memory(kind: Any) -> list[Any]:
    """The objects of a class that Python's garbage collector knows."""
    # isinstance() would run code of proxies.
    return [each for each in gc.get_objects() if kind in type(each).__mro__]
