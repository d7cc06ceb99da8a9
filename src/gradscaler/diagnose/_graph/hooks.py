"""Hooks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Protocol


class Handle(Protocol):
    """A framework's handle of a hook."""

    def remove(self) -> None:
        """Remove the hook."""


def weakly(method: Callable[..., object], may_raise: bool = False) -> Callable[..., Any]:
    """A function that calls a method, and does not keep its object alive.

    Python's garbage collector cannot see into PyTorch's graph, so a hook there that holds the
    object would keep it alive for ever. Errors are suppressed, unless it ``may_raise`` them.
    """
    own = weakref.WeakMethod(method)

    def call(*args: object) -> Any:
        bound = own()
        with nullcontext() if may_raise else suppress(Exception):
            return None if bound is None else bound(*args)

    return call


def remove_all(handles: list[Handle]) -> None:
    """Remove the hooks of handles, and clear the list."""
    for handle in handles:
        handle.remove()
    handles.clear()
