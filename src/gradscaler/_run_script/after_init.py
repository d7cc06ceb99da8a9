"""Calls a function after objects are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of


def after_init(kind: Any, call: Callable[[Any], None]) -> None:
    """Call a function with each new object of a class, once it is initialized."""
    initialize, safe = kind.__init__, guarded(call)

    @in_place_of(initialize)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        safe(self)

    kind.__init__ = initialized
