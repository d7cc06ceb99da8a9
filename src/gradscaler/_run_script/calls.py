"""Calls a function after objects are made, and before a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def after_init(kind: Any, call: Callable[[Any], None]) -> None:
    """Call a function with each new object of a class, once it is initialized."""
    initialize = kind.__init__

    @wraps(initialize)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        call(self)

    kind.__init__ = initialized


def before_next_backward(call: Callable[[], None]) -> None:
    """Call a function before the next backward pass, which may then be announced to a monitor.

    No public hook is called there, so this replaces ``torch.autograd.backward`` until then.
    """
    backward: Any = torch.autograd.backward
    calls = [call]

    @wraps(backward)
    def announced(*args: Any, **kwargs: Any) -> None:
        if not calls:  # another tool has wrapped this one, which stays
            backward(*args, **kwargs)
            return
        if torch.autograd.backward is announced:
            torch.autograd.backward = backward
        calls.pop()()
        now = torch.autograd.backward
        (backward if now is announced else now)(*args, **kwargs)

    torch.autograd.backward = announced
