"""Puts ours in place of PyTorch's scalers, for packages that make a scaler themselves.

A package that has imported ``torch.amp.GradScaler`` holds the class itself, under a name that
nobody else knows. PyTorch has no public way to change what the class makes, so this file alone
replaces its ``__new__``. That was tried with PyTorch 2.13 on CPython 3.11, where neither that class
nor the deprecated ones have a ``__new__`` of their own. Where one has, :func:`install` raises, and
changes nothing. A deprecated class that a release of PyTorch lacks is left out.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from gradscaler.torch.scaler import GradScaler


def _deprecated(module: str) -> Any:
    """The class ``GradScaler`` of a module of PyTorch, or ``torch.amp``'s where it is gone."""
    try:
        return import_module(module).GradScaler
    except (ImportError, AttributeError):
        return torch.amp.GradScaler


_TORCH_CUDA: Any = _deprecated("torch.cuda.amp")
_TORCH_CPU: Any = _deprecated("torch.cpu.amp")


class _CudaGradScaler(GradScaler, _TORCH_CUDA):  # type: ignore[misc]
    """What ``torch.cuda.amp.GradScaler(...)`` makes: an instance of the class that was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class _CpuGradScaler(GradScaler, _TORCH_CPU):  # type: ignore[misc]
    """The same for ``torch.cpu.amp.GradScaler(...)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


_OURS: dict[type, type[GradScaler]] = {
    _TORCH_CUDA: _CudaGradScaler,
    _TORCH_CPU: _CpuGradScaler,
    torch.amp.GradScaler: GradScaler,  # last, for it may stand for those above
}


# Torch's classes stay in place, and only what they make changes: whoever imported them, and by
# whatever name, calls this. Python then calls the constructor of the class that this chooses.
# A subclass of torch's classes stays what it is, because it relies on torch's code.
@wraps(torch.amp.GradScaler.__init__)  # packages read its signature
def _make_ours(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(_OURS.get(cls, cls))


# In place of the `__new__` that torch's class did not have: once one was deleted from a class, the
# class takes no arguments any more (python/cpython#105888).
@wraps(torch.amp.GradScaler.__init__)
def _make_torch_s(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)


def install() -> AbstractContextManager[object]:
    """Let ``torch.amp.GradScaler(...)`` make a :class:`gradscaler.torch.GradScaler` from now on.

    ``torch.cuda.amp.GradScaler(...)`` and ``torch.cpu.amp.GradScaler(...)`` do so too, and it does
    not matter when or under which name a package imported the class. This is for packages that
    make a scaler themselves; where you can hand one over, do. It holds for the whole process until
    :func:`uninstall`. In a ``with`` statement it holds for the block.

    Arguments mean what they mean to torch, so ``GradScaler("cuda")`` without CUDA warns and is
    disabled. Scalers made before stay torch's. So do those of subclasses, such as FSDP's
    ``ShardedGradScaler``.

    Returns:
        A context manager. Its exit restores what was there before the call.

    Raises:
        RuntimeError: a class of torch's has a ``__new__`` that is not ours to replace.

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
    """Let ``torch.amp.GradScaler(...)`` make torch's own scaler again.

    Scalers made in between stay ours. Nothing happens if nothing is installed.
    """
    if torch.amp.GradScaler.__new__ is _make_ours:
        _put(_make_torch_s)


def _put(make: Any) -> None:
    torch.amp.GradScaler.__new__ = make  # type: ignore[method-assign]
