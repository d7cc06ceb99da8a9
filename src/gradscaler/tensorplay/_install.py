"""Makes a script that constructs TensorPlay's own scaler get gradscaler's."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import tensorplay

from gradscaler.tensorplay.scaler import WITHOUT_CUDA, GradScaler

_THEIRS: Any = tensorplay.amp.GradScaler


class _InPlaceOfTheirs(GradScaler):
    """What ``tensorplay.amp.GradScaler(...)`` returns, with its defaults and errors."""

    def __init__(  # theirs
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and device == "cuda" and not tensorplay.cuda.is_available():
            warnings.warn(WITHOUT_CUDA, stacklevel=2)
            enabled = False
        given = init_scale, growth_factor, backoff_factor, growth_interval, enabled
        object.__new__(_THEIRS).__init__("cpu", *given)  # raises what theirs raises
        super().__init__(device, *given)
        self._allows_mixed = True  # it raises no error that theirs does not

    def __reduce__(self) -> tuple[object, ...]:  # a file names the public class
        return partial(copyreg.__newobj__, GradScaler), (), self.__getstate__()  # type: ignore[attr-defined]


_InPlaceOfTheirs.__init__.__qualname__ = _THEIRS.__init__.__qualname__  # for errors of a call


@contextmanager
def install() -> Iterator[None]:
    """Construct ours in place of theirs; their subclasses rely on the code of their base.

    Another ``__new__`` takes the place of ours at the end, as a class whose ``__new__`` was deleted
    takes no arguments (python/cpython#105888).
    """

    def making(kind: type | None) -> Callable[..., Any]:
        @wraps(_THEIRS.__init__)
        def make(cls: type, *args: object, **kwargs: object) -> Any:
            return object.__new__(kind if kind is not None and cls is _THEIRS else cls)

        return make

    _THEIRS.__new__ = ours = making(_InPlaceOfTheirs)
    try:
        yield
    finally:
        if _THEIRS.__new__ is ours:
            _THEIRS.__new__ = making(None)
