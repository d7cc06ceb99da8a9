"""Announces each call of PyTorch's ``backward``, of a loss or of ``torch.autograd``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.guard import guard, guarded


class BackwardListener:
    """An object that is told of backward passes."""

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """A backward pass of these scalars begins; there are none if it starts elsewhere."""

    def after_backward(self) -> None:
        """A backward pass has ended without an error."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced: list[Callable[..., None]] = []  # PyTorch's own function, while anyone listens
_trains: list[threading.Thread] = []  # the thread of the latest backward pass
_inside: set[int] = set()  # the ids of threads in a backward pass


def listen(listener: BackwardListener) -> None:
    """Tell an object of the backward passes from now on. It is not kept alive.

    No public hook knows the loss, so this replaces ``torch.autograd.backward``, which
    ``Tensor.backward`` calls too.
    """
    _listeners.add(listener)
    if not _replaced:
        torch: Any = sys.modules["torch"]
        _replaced.append(torch.autograd.backward)
        torch.autograd.backward = _announcing(torch.autograd.backward)


def ignore(listener: BackwardListener) -> None:
    """Tell an object of no more backward passes."""
    _listeners.discard(listener)
    if not _listeners:  # another watch may begin in another thread
        _trains.clear()
    torch: Any = sys.modules["torch"]
    is_ours = getattr(torch.autograd.backward, "__wrapped__", None) in _replaced
    if not _listeners and is_ours:  # else another tool has wrapped ours, which stays
        torch.autograd.backward = _replaced.pop()


def _announcing(backward: Callable[..., None]) -> Callable[..., None]:
    @wraps(backward)
    def announced(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        own = threading.get_ident()
        if _is_inside(own):
            backward(tensors, grad_tensors, *args, **kwargs)
            return
        _inside.add(own)
        try:
            listeners = _tell_before(_losses_in(tensors))
            backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            _inside.discard(own)
        _tell_after(listeners)

    return announced


def _is_inside(thread: int) -> bool:
    """Whether a thread calls ``backward`` in a backward pass, as a reentrant checkpoint does.

    A device has a thread of PyTorch's own for the passes of all threads.
    """
    if thread in _inside or not _inside:
        return thread in _inside
    known = [each for each in threading.enumerate() if each.ident == thread]
    return not known or isinstance(known[0], threading._DummyThread)


@guarded
def _tell_after(listeners: Sequence[BackwardListener]) -> None:
    for each in listeners:
        each.after_backward()


def _tell_before(losses: Sequence[Tensor]) -> list[BackwardListener]:
    """Tell all listeners of a backward pass that begins, also those that join meanwhile."""
    told: list[BackwardListener] = []
    _end_if_in_threads()
    _tell_each(told, losses)
    return told


@guarded
def _end_if_in_threads() -> None:
    """End all watches before a second thread trains: its backward pass writes what they read."""
    if not _listeners:
        return
    own = threading.current_thread()
    if any(each is not own and each.is_alive() for each in _trains):
        reason = "a second thread made a backward pass, and gradscaler watches one"
        guard.end(reason, f"the watch ended, and the training goes on: {reason}.")
    _trains[:] = [own]


@guarded
def _tell_each(told: list[BackwardListener], losses: Sequence[Tensor]) -> None:
    while joined := [each for each in _listeners if each not in told]:
        for each in joined:
            told.append(each)
            each.before_backward(losses)


def _losses_in(tensors: Any) -> list[Tensor]:
    torch: Any = sys.modules["torch"]
    roots = tensors if isinstance(tensors, Sequence) else [tensors]
    return [root for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
