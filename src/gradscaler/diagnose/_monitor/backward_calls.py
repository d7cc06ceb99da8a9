"""Announces each call of PyTorch's ``backward``, of a loss or of ``torch.autograd``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph import threads
from gradscaler.diagnose._graph.guard import guarded


class BackwardListener:
    """An object that is told of backward passes."""

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """A backward pass of these scalars begins; there are none if it starts elsewhere."""

    def after_backward(self) -> None:
        """A backward pass has ended without an error."""


_listeners: set[weakref.ref[BackwardListener]] = set()  # of those that are alive
_replaced: list[Callable[..., None]] = []  # PyTorch's own function, while anyone listens
_inside: set[int] = set()  # the ids of threads in a backward pass


def listen(listener: BackwardListener) -> None:
    """Tell an object of the backward passes from now on. It is not kept alive.

    No public hook knows the loss, so this replaces ``torch.autograd.backward``, which
    ``Tensor.backward`` calls too.
    """
    _listeners.add(weakref.ref(listener, _listeners.discard))
    if not _replaced:
        torch: Any = sys.modules["torch"]
        _replaced.append(torch.autograd.backward)
        torch.autograd.backward = _announcing(torch.autograd.backward)


def ignore(listener: BackwardListener) -> None:
    """Tell an object of no more backward passes."""
    _listeners.discard(weakref.ref(listener))  # references to one object are equal
    if not _listeners:
        threads.forget()
    torch: Any = sys.modules["torch"]
    is_ours = getattr(torch.autograd.backward, "__wrapped__", None) in _replaced
    if not _listeners and is_ours:  # else another tool has wrapped ours, which stays
        torch.autograd.backward = _replaced.pop()


def _announcing(backward: Callable[..., None]) -> Callable[..., None]:
    @wraps(backward)
    def announced(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        own = threading.get_ident()
        if _inside and _is_inside(own):
            backward(tensors, grad_tensors, *args, **kwargs)
            return
        told: list[BackwardListener] = []
        _inside.add(own)
        try:
            _tell_before(told, _losses_in(tensors))
            backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            _inside.discard(own)
        _tell_after(told)

    return announced


def _is_inside(thread: int) -> bool:
    """Whether a thread calls ``backward`` in a backward pass, as a reentrant checkpoint does.

    A device has a thread of PyTorch's own for the passes of all threads.
    """
    if thread in _inside:
        return True
    known = [each for each in threading.enumerate() if each.ident == thread]
    return not known or isinstance(known[0], threading._DummyThread)


@guarded
def _tell_before(told: list[BackwardListener], losses: Sequence[Tensor]) -> None:
    """Tell all listeners of a backward pass that begins, also those that join meanwhile."""
    if _listeners:
        threads.end_if_in_threads()  # before a pass writes what they read
    while joined := [
        each for own in list(_listeners) if (each := own()) is not None and each not in told
    ]:
        for each in joined:
            told.append(each)
            each.before_backward(losses)


@guarded
def _tell_after(told: Sequence[BackwardListener]) -> None:
    for each in told:
        each.after_backward()


def _losses_in(tensors: Any) -> list[Tensor]:
    torch: Any = sys.modules["torch"]
    if isinstance(tensors, torch.Tensor):  # most are, and another test makes more calls
        roots: Sequence[Any] = [tensors]
    else:
        roots = tensors if isinstance(tensors, Sequence) else ()
    return [root for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
