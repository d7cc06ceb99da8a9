"""Makes packages that construct scalers of PyTorch, DeepSpeed or Megatron get gradscaler's.

A package that has imported ``torch.amp.GradScaler`` holds its own reference to the class, so
replacing the attribute of ``torch.amp`` would come too late. None of the three frameworks has a
public way to change what a call of its classes returns. This file therefore replaces the
``__new__`` of their base class. It was tested with PyTorch 2.13, DeepSpeed 0.19.8 and megatron-core
0.16.1 on CPython 3.11, where no scaler class defines ``__new__``. If one does, :func:`install`
raises and changes nothing. If PyTorch lacks one of the deprecated classes, :func:`install` leaves
it out.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import torch

from gradscaler.errors import levels_to_caller
from gradscaler.torch.scaler import GradScaler


def _deprecated(module: str) -> Any:
    """The class ``GradScaler`` of a PyTorch module, or ``torch.amp``'s if the module has none."""
    try:
        return import_module(module).GradScaler
    except (ImportError, AttributeError):
        return torch.amp.GradScaler


_TORCH_CUDA: Any = _deprecated("torch.cuda.amp")
_TORCH_CPU: Any = _deprecated("torch.cpu.amp")


class _CudaGradScaler(GradScaler, _TORCH_CUDA):  # type: ignore[misc]
    """The class of objects that ``torch.cuda.amp.GradScaler(...)`` returns: a subclass of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _warn_as(_TORCH_CUDA)
        super().__init__("cuda", *args, **kwargs)


class _CpuGradScaler(GradScaler, _TORCH_CPU):  # type: ignore[misc]
    """The class of objects that ``torch.cpu.amp.GradScaler(...)`` returns: a subclass of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _warn_as(_TORCH_CPU)
        super().__init__("cpu", *args, **kwargs)


def _warn_as(deprecated: Any) -> None:
    """Give the warning of a deprecated constructor, at the line that calls ours."""
    if message := getattr(deprecated.__init__, "__deprecated__", None):
        warnings.warn(message, FutureWarning, stacklevel=levels_to_caller())


class _Replacement:
    """Switches a base class and its subclasses between constructing their own objects and ours.

    Args:
        base: the class whose ``__new__`` is replaced. All its subclasses inherit ``__new__``.
        ours: the class of ours that replaces each class of theirs.
    """

    def __init__(self, base: Any, ours: dict[type, type]) -> None:
        self.base, self.ours = base, ours
        self.raises_as_theirs = False

        # This becomes the `__new__` of their classes, so it runs under whatever name a package has
        # imported them. Python then calls `__init__` of the class of the returned object. Other
        # subclasses still get their own objects, because they rely on the code of their base.
        @wraps(base.__init__)  # packages read its signature
        def make_ours(cls: type, *args: object, **kwargs: object) -> object:
            made: Any = object.__new__(ours.get(cls, cls))
            if self.raises_as_theirs and cls in ours:
                made._allows_mixed = True
            return made

        # uninstall() sets this `__new__` instead of deleting ours, because a class whose `__new__`
        # was deleted takes no arguments (python/cpython#105888).
        @wraps(base.__init__)
        def make_theirs(cls: type, *args: object, **kwargs: object) -> object:
            return object.__new__(cls)

        self.make_ours, self.make_theirs = make_ours, make_theirs
        self._open: set[ExitStack] = set()

    def begin(self) -> AbstractContextManager[object]:
        """Construct ours until the returned context and all others are closed, in any order."""
        context = ExitStack()
        context.callback(self._end, context)
        self._open.add(context)
        self.base.__new__ = self.make_ours
        return context

    def _end(self, context: ExitStack) -> None:
        self._open.discard(context)
        if not self._open:
            self.end_all()

    def end_all(self) -> None:
        """Construct theirs again. Closing a context that was open has no effect then."""
        self._open.clear()
        if self.base.__new__ is self.make_ours:
            self.base.__new__ = self.make_theirs


_OF_TORCH = _Replacement(
    torch.amp.GradScaler,
    {
        _TORCH_CUDA: _CudaGradScaler,
        _TORCH_CPU: _CpuGradScaler,
        torch.amp.GradScaler: GradScaler,  # last, because a missing class above has this key too
    },
)


@contextmanager
def raise_as_theirs() -> Iterator[None]:
    """Let scalers that are made in place of PyTorch's raise no error that PyTorch's do not."""
    _OF_TORCH.raises_as_theirs = True
    try:
        yield
    finally:
        _OF_TORCH.raises_as_theirs = False


def is_theirs(scaler: object) -> bool:
    """Whether a scaler is PyTorch's, and would be ours if it were made after :func:`install`."""
    return type(scaler) in _OF_TORCH.ours


def replace_sharded() -> None:
    """Let :func:`install` replace FSDP's ``ShardedGradScaler``, too, which takes long to import."""
    from torch.distributed.fsdp import sharded_grad_scaler

    from gradscaler.torch.sharded import ShardedGradScaler

    _OF_TORCH.ours[sharded_grad_scaler.ShardedGradScaler] = ShardedGradScaler


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


def _replacement(engine: str) -> _Replacement:
    """The replacement for an engine's name; there is one for each engine."""
    if engine not in ("torch", *_ENGINES):
        raise ValueError(f"engine must be 'torch', 'deepspeed' or 'megatron', got {engine!r}")
    return _OF_TORCH if engine == "torch" else _replacement_in(engine)


@cache
def _replacement_in(engine: str) -> _Replacement:
    """The replacement of the classes in an engine's package."""
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
def _reduce_as_theirs(self: object) -> tuple[object, ...]:
    theirs = type(self).__bases__[1]
    return partial(copyreg.__newobj__, theirs), (), vars(self)  # type: ignore[attr-defined]


def install(engine: str = "torch") -> AbstractContextManager[object]:
    """Let ``torch.amp.GradScaler(...)`` return a :class:`gradscaler.torch.GradScaler`.

    ``torch.cuda.amp.GradScaler(...)`` and ``torch.cpu.amp.GradScaler(...)`` return one too. It does
    not matter when, or under which name, a package has imported the class. Use this function for
    packages that construct a scaler themselves; if a package takes a scaler as an argument, pass
    one instead. The effect covers the whole process and lasts until :func:`uninstall`. In a
    ``with`` statement, it lasts for the block.

    ``install("deepspeed")`` makes DeepSpeed's ``LossScaler`` and ``DynamicLossScaler`` return those
    of :mod:`gradscaler.torch.deepspeed`. ``install("megatron")`` makes megatron-core's
    ``ConstantGradScaler`` and ``DynamicGradScaler`` return those of
    :mod:`gradscaler.torch.megatron`.

    Arguments have the meaning that they have in the called class. For example,
    ``GradScaler("cuda")`` without CUDA warns and is disabled. Scalers that already exist do not
    change, nor do other subclasses, such as FSDP's ``ShardedGradScaler``.

    Args:
        engine: the package whose classes are replaced: ``"torch"``, ``"deepspeed"`` or
            ``"megatron"``.

    Returns:
        A context manager. Its exit undoes this call; the classes return their own scalers again
        when the last open one exits, in whatever order.

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
    return replacement.begin()


def uninstall(engine: str = "torch") -> None:
    """Let ``torch.amp.GradScaler(...)``, or an engine's classes, return their own scalers again.

    Scalers that were constructed after :func:`install` do not change. Without :func:`install`, this
    does nothing.

    Args:
        engine: the package, as in :func:`install`.

    Raises:
        ValueError: ``engine`` is another name.
        ModuleNotFoundError: the engine, or a package that it imports, is not installed.
    """
    _replacement(engine).end_all()
