"""Calls a function with the objects of a class."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from gradscaler._in_memory import in_memory
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
    if in_memory(kind):
        gc.collect()  # those of a training before, which nothing refers to any more
    for each in in_memory(kind):
        safe(each)
