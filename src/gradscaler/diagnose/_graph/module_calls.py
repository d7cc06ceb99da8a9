"""Announces each call of a module of PyTorch, and leaves nothing on the modules."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gradscaler.diagnose._graph.stand_ins import in_place_of

Module = Any


class CallListener:
    """An object that is told of the calls of modules. What goes wrong in it reaches no call."""

    def enter_module(self, module: Module, *inputs: object) -> bool:
        """A call begins, with these arguments of both kinds; return whether to tell its end."""
        return False

    def leave_module(self, module: Module, outputs: object) -> None:
        """The call has returned."""

    def end_module(self) -> None:
        """The call is over, also if it raised an error or was interrupted."""


_listeners: dict[int, Callable[[], Any]] = {}  # weak references by ids
_replaced: list[Callable[..., Any]] = []  # PyTorch's own method, while anyone listens


def listen(listener: CallListener) -> None:
    """Tell an object of the calls from now on. It is not kept alive.

    A hook on a module would go where the module goes: into its copies, files and scripted forms. A
    hook on all modules is not told if a call is interrupted. So this replaces the method of their
    class.
    """
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _drop(key))
    kind: Any = sys.modules["torch"].nn.Module
    if not (_replaced and hasattr(kind.__call__, "__wrapped__")):  # an interrupt may come between
        _replaced[:] = [kind.__call__]
        kind.__call__ = _announcing(kind.__call__)


def ignore(listener: CallListener) -> None:
    """Tell an object of no more calls, except the ends of those that it was told of."""
    _drop(id(listener))


def _drop(key: int) -> None:
    if _listeners.pop(key, None) is None:
        return
    kind: Any = sys.modules["torch"].nn.Module
    is_ours = getattr(kind.__call__, "__wrapped__", None) in _replaced
    if not _listeners and is_ours:  # else another tool has wrapped ours, which stays
        kind.__call__ = _replaced.pop()


def _announcing(call: Callable[..., Any]) -> Callable[..., Any]:
    torch: Any = sys.modules["torch"]
    unseen = torch._C.DisableTorchFunction  # by modes, and by subclasses of tensors

    @in_place_of(call)
    def announced(self: Module, *args: Any, **kwargs: Any) -> Any:
        # A graph that is made of a call would hold what we compute in it, too.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return call(self, *args, **kwargs)
        told: list[CallListener] = []
        try:
            for alive in list(_listeners.values()):
                with suppress(Exception), unseen():
                    if (each := alive()) is not None and each.enter_module(self, args, kwargs):
                        told.append(each)
            outputs = call(self, *args, **kwargs)
            for each in told:
                with suppress(Exception), unseen():
                    each.leave_module(self, outputs)
            return outputs
        finally:
            for each in told:
                with suppress(Exception):
                    each.end_module()

    passing: Callable[..., Any] = announced
    return passing
