"""Announces each call of PyTorch's ``backward``, of a loss or of ``torch.autograd``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

from gradscaler.diagnose._gradients.reading import Tensor


class BackwardListener(Protocol):
    """An object that is told of backward passes."""

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """A backward pass of these scalars begins; there are none if it starts elsewhere."""

    def after_backward(self) -> None:
        """A backward pass has ended without an error."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced: list[Callable[..., None]] = []  # PyTorch's own function, while anyone listens


class _State(threading.local):
    is_inside = False  # a reentrant checkpoint calls backward() in a backward pass


_state = _State()


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
    torch: Any = sys.modules["torch"]
    is_ours = getattr(torch.autograd.backward, "__wrapped__", None) in _replaced
    if not _listeners and is_ours:  # else another tool has wrapped ours, which stays
        torch.autograd.backward = _replaced.pop()


def _announcing(backward: Callable[..., None]) -> Callable[..., None]:
    @wraps(backward)
    def announced(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if _state.is_inside:
            backward(tensors, grad_tensors, *args, **kwargs)
            return
        _state.is_inside = True
        try:
            listeners = _tell_before(_losses_in(tensors))
            backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            _state.is_inside = False
        for each in listeners:
            each.after_backward()

    return announced


def _tell_before(losses: Sequence[Tensor]) -> list[BackwardListener]:
    """Tell all listeners of a backward pass that begins, also those that join meanwhile."""
    told: list[BackwardListener] = []
    while joined := [each for each in _listeners if each not in told]:
        for each in joined:
            told.append(each)
            each.before_backward(losses)
    return told


def _losses_in(tensors: Any) -> list[Tensor]:
    torch: Any = sys.modules["torch"]
    roots = tensors if isinstance(tensors, Sequence) else [tensors]
    return [root for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
