"""Replaces the scalers of PyTorch, DeepSpeed and Megatron by ours where packages construct them.

A package that has imported ``torch.amp.GradScaler`` refers to the class by a name of its own, so
replacing the attribute of ``torch.amp`` comes too late. None of the three has a public way to
change what calling its classes returns, so this file replaces the ``__new__`` of their base class.
This was tested with PyTorch 2.13, DeepSpeed 0.19.8 and megatron-core 0.16.1 on CPython 3.11, where
no scaler class defines ``__new__``. If one does, :func:`install` raises and changes nothing. If a
release of PyTorch lacks one of the deprecated classes, :func:`install` leaves it out.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial, wraps
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


class _Replacement:
    """What a base class and its subclasses construct: their own objects, or ours.

    Args:
        base: the class whose ``__new__`` is replaced. All its subclasses inherit that.
        ours: for each class of theirs, the class of ours that stands in for it.
    """

    def __init__(self, base: Any, ours: Mapping[type, type]) -> None:
        self.base, self.ours = base, ours

        # This becomes the `__new__` of their classes, so it runs whatever name a package has given
        # them. Python then calls the constructor of the class that it chooses. It leaves other
        # subclasses alone, because they rely on the code of their base.
        @wraps(base.__init__)  # packages read its signature
        def make_ours(cls: type, *args: object, **kwargs: object) -> object:
            return object.__new__(ours.get(cls, cls))

        # uninstall() sets this `__new__` instead of deleting ours: a class whose `__new__` was
        # deleted takes no arguments (python/cpython#105888).
        @wraps(base.__init__)
        def make_theirs(cls: type, *args: object, **kwargs: object) -> object:
            return object.__new__(cls)

        self.make_ours, self.make_theirs = make_ours, make_theirs

    def put(self, make: Callable[..., Any]) -> None:
        """Replace the ``__new__`` of the base class."""
        self.base.__new__ = make


_OF_TORCH = _Replacement(
    torch.amp.GradScaler,
    {
        _TORCH_CUDA: _CudaGradScaler,
        _TORCH_CPU: _CpuGradScaler,
        torch.amp.GradScaler: GradScaler,  # last: it is the key of any class above that is missing
    },
)

# For each engine: its package, the module of its scalers, their base class and its subclasses.
_ENGINES = {
    "deepspeed": (
        "deepspeed",
        "deepspeed.runtime.fp16.loss_scaler",
        "LossScalerBase",
        ("LossScaler", "DynamicLossScaler"),
    ),
    "megatron": (
        "megatron.core",
        "megatron.core.optimizer.grad_scaler",
        "MegatronGradScaler",
        ("ConstantGradScaler", "DynamicGradScaler"),
    ),
}


@cache
def _replacement(engine: str) -> _Replacement:
    """The one replacement for a name that :func:`install` takes."""
    if engine == "torch":
        return _OF_TORCH
    if engine not in _ENGINES:
        raise ValueError(f"engine must be 'torch', 'deepspeed' or 'megatron', not {engine!r}")
    package, module, base, names = _ENGINES[engine]
    try:
        theirs = import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"install({engine!r}) needs {package}, and {error.name} is not installed",
            name=error.name,
        ) from error
    ours = import_module(f"gradscaler.torch.{engine}")
    members = {"__reduce__": _reduce_as_theirs} if engine == "deepspeed" else {}
    return _Replacement(
        getattr(theirs, base),
        {
            getattr(theirs, name): type(name, (getattr(ours, name), getattr(theirs, name)), members)
            for name in names
        },
    )


# DeepSpeed pickles its scaler into its checkpoints. This pickle refers to DeepSpeed's class only,
# so it loads without gradscaler. It loads as ours where install("deepspeed") is in force.
def _reduce_as_theirs(self: Any) -> tuple[Any, ...]:
    theirs = type(self).__bases__[1]
    return partial(copyreg.__newobj__, theirs), (), vars(self)  # type: ignore[attr-defined]


def install(engine: str = "torch") -> AbstractContextManager[object]:
    """Let ``torch.amp.GradScaler(...)`` return a :class:`gradscaler.torch.GradScaler`.

    So do ``torch.cuda.amp.GradScaler(...)`` and ``torch.cpu.amp.GradScaler(...)``, whenever and
    under whatever name a package has imported the class. Use this for packages that construct a
    scaler themselves; if a package takes a scaler as an argument, pass one instead. It lasts until
    :func:`uninstall`, in the whole process; in a ``with`` statement, it lasts for the block.

    ``install("deepspeed")`` does the same to ``LossScaler`` and ``DynamicLossScaler`` of DeepSpeed,
    which then return those of :mod:`gradscaler.torch.deepspeed`. ``install("megatron")`` does it to
    ``ConstantGradScaler`` and ``DynamicGradScaler`` of megatron-core and
    :mod:`gradscaler.torch.megatron`.

    Arguments mean the same as in the class that is called, so ``GradScaler("cuda")`` without CUDA
    warns and is disabled. Scalers that exist already stay theirs. So do objects of other
    subclasses, such as FSDP's ``ShardedGradScaler``.

    Args:
        engine: ``"torch"``, ``"deepspeed"`` or ``"megatron"``: whose classes to replace.

    Returns:
        A context manager. Its exit undoes this call.

    Raises:
        ValueError: ``engine`` is another name.
        ModuleNotFoundError: the engine, or a package that it imports, is not installed.
        RuntimeError: a scaler class defines ``__new__`` itself, which cannot be replaced.

    >>> import torch
    >>> with install():
    ...     scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    >>> type(scaler)
    <class 'gradscaler.torch.scaler.GradScaler'>
    >>> type(torch.amp.GradScaler("cpu"))
    <class 'torch.amp.grad_scaler.GradScaler'>
    """
    replacement = _replacement(engine)
    for cls in replacement.ours:
        if cls.__new__ not in (object.__new__, replacement.make_ours, replacement.make_theirs):
            raise RuntimeError(
                f"install({engine!r}) replaces __new__, and {cls.__module__}.{cls.__qualname__} "
                f"of the installed version already has one, {cls.__new__!r}: construct a scaler of "
                "gradscaler.torch yourself and pass it"
            )
    stack = ExitStack()
    stack.callback(replacement.put, vars(replacement.base).get("__new__", replacement.make_theirs))
    replacement.put(replacement.make_ours)
    return stack


def uninstall(engine: str = "torch") -> None:
    """Let ``torch.amp.GradScaler(...)``, or an engine's classes, return their own scalers again.

    Scalers that :func:`install` has given out stay ours. Without :func:`install`, this does
    nothing.

    Args:
        engine: as for :func:`install`.

    Raises:
        ValueError: ``engine`` is another name.
        ModuleNotFoundError: the engine, or a package that it imports, is not installed.
    """
    replacement = _replacement(engine)
    if replacement.base.__new__ is replacement.make_ours:
        replacement.put(replacement.make_theirs)
