"""Replaces PyTorch's scalers by ours in packages that construct a scaler themselves.

A package that has imported ``torch.amp.GradScaler`` refers to the class by a name of its own, so
replacing the attribute of ``torch.amp`` comes too late. PyTorch has no public way to change what
calling the class returns, so this file replaces the ``__new__`` of the class. This was tested with
PyTorch 2.13 on CPython 3.11, where no scaler class of PyTorch defines ``__new__``. If one does,
:func:`install` raises and changes nothing. If a release of PyTorch lacks one of the deprecated
classes, :func:`install` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from gradscaler.torch.scaler import GradScaler


def _deprecated(module: str) -> Any:
    """The class ``GradScaler`` of a module of PyTorch, or ``torch.amp``'s if it has none."""
    try:
        return import_module(module).GradScaler
    except (ImportError, AttributeError):
        return torch.amp.GradScaler


_TORCH_CUDA: Any = _deprecated("torch.cuda.amp")
_TORCH_CPU: Any = _deprecated("torch.cpu.amp")


class _CudaGradScaler(GradScaler, _TORCH_CUDA):  # type: ignore[misc]
    """The class of objects that ``torch.cuda.amp.GradScaler(...)`` returns: a subclass of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class _CpuGradScaler(GradScaler, _TORCH_CPU):  # type: ignore[misc]
    """The class of objects that ``torch.cpu.amp.GradScaler(...)`` returns: a subclass of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


_OURS: dict[type, type[GradScaler]] = {
    _TORCH_CUDA: _CudaGradScaler,
    _TORCH_CPU: _CpuGradScaler,
    torch.amp.GradScaler: GradScaler,  # last: it is the key of any class above that is missing
}


# This becomes the `__new__` of torch's classes, so it runs whatever name a package has given them.
# Python then calls the constructor of the class that it chooses. It leaves subclasses of torch's
# classes alone, because they rely on torch's code.
@wraps(torch.amp.GradScaler.__init__)  # packages read its signature
def _make_ours(cls: type, *args: object, **kwargs: object) -> object:
    return object.__new__(_OURS.get(cls, cls))


# uninstall() sets this `__new__` instead of deleting ours: a class whose `__new__` was deleted
# takes no arguments (python/cpython#105888).
@wraps(torch.amp.GradScaler.__init__)
def _make_torch_s(cls: type, *args: object, **kwargs: object) -> object:
    return object.__new__(cls)


def install() -> AbstractContextManager[object]:
    """Let ``torch.amp.GradScaler(...)`` return a :class:`gradscaler.torch.GradScaler`.

    So do ``torch.cuda.amp.GradScaler(...)`` and ``torch.cpu.amp.GradScaler(...)``, whenever and
    under whatever name a package has imported the class. Use this for packages that construct a
    scaler themselves; if a package takes a scaler as an argument, pass one instead. It lasts until
    :func:`uninstall`, in the whole process; in a ``with`` statement, it lasts for the block.

    Arguments mean the same as in torch, so ``GradScaler("cuda")`` without CUDA warns and is
    disabled. Scalers that exist already stay torch's. So do objects of subclasses, such as FSDP's
    ``ShardedGradScaler``.

    Returns:
        A context manager. Its exit undoes this call.

    Raises:
        RuntimeError: a scaler class of torch's defines ``__new__`` itself, which cannot be
            replaced.

    >>> import torch
    >>> with install():
    ...     scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    >>> type(scaler)
    <class 'gradscaler.torch.scaler.GradScaler'>
    >>> type(torch.amp.GradScaler("cpu"))
    <class 'torch.amp.grad_scaler.GradScaler'>
    """
    for cls in _OURS:
        if cls.__new__ not in (object.__new__, _make_ours, _make_torch_s):
            raise RuntimeError(
                f"install() replaces __new__, and {cls.__module__}.{cls.__qualname__} of PyTorch "
                f"{torch.__version__} already has one, {cls.__new__!r}: make a "
                "gradscaler.torch.GradScaler yourself and hand it over"
            )
    stack = ExitStack()
    stack.callback(_put, vars(torch.amp.GradScaler).get("__new__", _make_torch_s))
    _put(_make_ours)
    return stack


def uninstall() -> None:
    """Let ``torch.amp.GradScaler(...)`` return torch's own scaler again.

    Scalers that :func:`install` has given out stay ours. Without :func:`install`, this does
    nothing.
    """
    if torch.amp.GradScaler.__new__ is _make_ours:
        _put(_make_torch_s)


def _put(make: Callable[..., Any]) -> None:
    torch.amp.GradScaler.__new__ = make  # type: ignore[method-assign]
