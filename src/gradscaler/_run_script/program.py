"""The user's program: found as ``python`` finds it, and run as ``__main__``."""

from __future__ import annotations

import builtins
import io
import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from gradscaler._run_script.tracebacks import show_from


class Program(NamedTuple):
    """A program that is ready to run.

    Attributes:
        name: its own name in ``sys.argv``.
        code: its code.
        names: what its module knows about itself, such as ``__file__``.
    """

    name: str
    code: CodeType
    names: dict[str, Any]

    def run(self, arguments: Sequence[str]) -> None:
        """Run it as ``__main__``; what it raises is shown without a frame of ours."""
        module = ModuleType("__main__")
        vars(module).update(self.names, __builtins__=builtins)
        sys.argv[:] = [self.name, *arguments]
        sys.modules["__main__"] = module  # where pickle looks for its classes
        try:
            exec(self.code, vars(module))
        except BaseException:
            show_from(self.code)
            raise


def program_of(target: str, is_module: bool) -> Program:
    """The program at a path, or in the module of a dotted name; ``sys.path`` begins with its place.

    Raises:
        OSError: the script cannot be read.
        ImportError: there is no such module, or no ``__main__.py`` in the folder or the archive.
        SyntaxError: the script is not Python.
    """
    if is_module:
        _look_first_in(Path.cwd())
        spec = _spec_of(target)
        return _of_spec(spec, spec.origin or target)
    if Path(target).is_dir() or zipfile.is_zipfile(target):
        _look_first_in(Path.cwd() / target)
        inner = PathFinder.find_spec("__main__", [target])
        return _of_spec(_found(inner, "__main__", f"{target!r} has no __main__.py"), target)
    _look_first_in(Path(target).resolve().parent)
    return _of_script(target)


def _look_first_in(folder: str | Path) -> None:
    """Replace the first place of imports, which Python set for gradscaler's own command."""
    if not getattr(sys.flags, "safe_path", False):  # with -P or -I, Python set none
        sys.path[0] = str(folder)


def _of_script(path: str) -> Program:
    is_full = Path(path).is_absolute()
    full = path if is_full else f"{Path.cwd()}{os.sep}{path}"  # with its dots, as Python has it
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", full)
    return Program(path, code, {"__file__": full, "__loader__": loader, "__cached__": None})


def _of_spec(spec: ModuleSpec, name: str) -> Program:
    loader: Any = spec.loader
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__package__": spec.parent}
    code = _found(loader.get_code(spec.name), spec.name, f"{spec.name} has no Python code")
    return Program(name, code, {**names, "__loader__": loader, "__spec__": spec})


def _spec_of(name: str) -> ModuleSpec:
    """The place of a module, or of the ``__main__`` of a package; imports the packages around."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = find_spec(name)
    found: ModuleSpec = _found(spec, name, f"No module named {name}")
    return found


def _found(it: Any, name: str, otherwise: str) -> Any:
    if it is None:
        raise ImportError(otherwise, name=name)
    return it
