"""Hooks that keep nothing alive."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from traceback import walk_stack
from types import FrameType
from typing import Any, Protocol

from gradscaler.diagnose._graph.guard import guard, guarded

_Call = Callable[..., object]


class Handle(Protocol):
    """A framework's handle of a hook."""

    def remove(self) -> None:
        """Remove the hook."""


def weakly(method: Any) -> Callable[..., Any]:
    """A guarded function that calls a method, and does not keep its object alive.

    Python's garbage collector cannot see into PyTorch's graph, so a hook there that holds the
    object would keep it alive for ever.
    """
    own, call = weakref.ref(method.__self__), method.__func__

    def safe(*args: object) -> Any:  # as a guarded WeakMethod, in a third of the calls
        try:
            with guard.lock:
                alive = own()
                return None if alive is None else call(alive, *args)
        except Exception as error:
            guard.handle(error)

    return safe


class OneCallHooks:
    """Hooks that are removed at their first call, so that a graph that is kept collects none."""

    def __init__(self) -> None:
        self._handles: dict[object, Handle] = {}
        weakref.finalize(self, _remove_each, self._handles).atexit = False

    def add(self, register: Callable[[Callable[..., None]], Handle], call: _Call) -> None:
        """Register a hook that calls a function."""
        handles, key = self._handles, object()  # not self, which the hook must not keep alive

        def once(*args: object) -> None:
            if (handle := handles.pop(key, None)) is not None:
                handle.remove()
                call(*args)

        handles[key] = register(guarded(once))

    def remove(self) -> None:
        """Remove the hooks that were not called."""
        if self._handles:
            _remove_each(self._handles)


def _remove_each(handles: dict[object, Handle]) -> None:
    while handles:
        _, handle = handles.popitem()
        handle.remove()


# Of owners that the collector freed within a step: it may come anywhere.
_left_over: list[Handle] = []


class StepHooks:
    """Hooks of the steps of all of PyTorch's optimizers, which go with their owner."""

    def __init__(self, owner: object) -> None:
        self._handles: list[Handle] = []
        weakref.finalize(owner, _remove_or_leave, self._handles).atexit = False

    def add(self, before: _Call | None, after: _Call) -> None:
        """Call functions before each step, and after it, unless some are called already.

        A step that is compiled calls them, too, and PyTorch's compiler does not trace them. While
        another thread steps, none is added: PyTorch may be going through them there, and a watch is
        of one thread.
        """
        if self._handles:
            return
        from torch.compiler import disable
        from torch.optim import optimizer as hooks

        ours = None if before is None else disable(before), disable(after)
        own = threading.get_ident()
        if _are_stepping(frame for key, frame in sys._current_frames().items() if key != own):
            return
        if ours[0] is not None:
            self._handles.append(hooks.register_optimizer_step_pre_hook(ours[0]))
        self._handles.append(hooks.register_optimizer_step_post_hook(ours[1]))

    def remove(self) -> None:
        """Remove the hooks, unless PyTorch may be going through them in some thread.

        It raises an error if one is removed then. The hooks that stay must do nothing any more.
        """
        if (self._handles or _left_over) and not _are_stepping(sys._current_frames().values()):
            remove_all(self._handles)
            remove_all(_left_over)


def _remove_or_leave(handles: list[Handle]) -> None:
    """Remove the hooks of handles; while an optimizer steps, leave them to those that end later."""
    if handles and _are_stepping(sys._current_frames().values()):
        _left_over.extend(handles)
    else:
        remove_all(handles)


def _are_stepping(frames: Iterable[FrameType]) -> bool:
    """Whether one of these threads is in a step of an optimizer of PyTorch's."""
    file = sys.modules["torch.optim.optimizer"].__file__
    return any(each.f_code.co_filename == file for own in frames for each, _ in walk_stack(own))


def remove_all(handles: list[Handle]) -> None:
    """Remove the hooks of handles, and clear the list."""
    for handle in handles:
        handle.remove()
    handles.clear()
