"""Calls a function once a module was imported, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from gradscaler._run_script.undo import on_stop
from gradscaler._run_script.voice import attempt


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call a function at the end of the first import of a module; now, if it was imported."""
    if name in sys.modules:
        attempt(call)
    else:
        finder = _Finder(name, call)
        sys.meta_path.insert(0, finder)
        on_stop.callback(finder.forget)


class _Finder:
    """Finds one module where the other finders do, and lets its loader make a call at its end."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call
        self._is_asking = False

    def forget(self) -> None:
        """Wait no more."""
        with suppress(ValueError):  # it was imported
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of the module; None for another one."""
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Of the instance: the loader is as it was, also if another call comes after it.
            vars(loader).pop("exec_module", None)
            execute(module)
            with suppress(ValueError):  # another thread was first
                sys.meta_path.remove(self)
                attempt(self._call)

        loader.exec_module = exec_module
