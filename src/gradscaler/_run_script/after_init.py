"""Calls a function after objects are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def after_init(kind: Any, call: Callable[[Any], None]) -> None:
    """Call a function with each new object of a class, once it is initialized."""
    initialize = kind.__init__

    @wraps(initialize)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        call(self)

    kind.__init__ = initialized
