"""Functions that stand in for those of PyTorch, and pass for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

# Python counts no frame of importlib's bootstrap for a warning's `stacklevel`, so a warning names
# the user's line as if the function that we call were called there. It looks for these two words.
# PyTorch's compiler knows such files by "<frozen importlib", and would compile no call from one.
FILE = "<gradscaler like importlib._bootstrap>"


def in_place_of(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a decorated function that calls another one pass for it, in warnings too."""

    def passing(own: Any) -> Any:
        own.__code__ = own.__code__.replace(co_filename=FILE)
        return wraps(function)(own)

    return passing
