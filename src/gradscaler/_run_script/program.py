"""The user's program: found and run as ``python`` does, its errors shown without our frames."""

from __future__ import annotations

import builtins
import io
import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from gradscaler._run_script.undo import on_stop, replace

_OWN = str(Path(__file__).parents[1])


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
        on_stop.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
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
        on_stop.callback(sys.path.__setitem__, 0, sys.path[0])
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


def show_from(code: CodeType | None) -> None:
    """Let the hook for an uncaught exception see the frames from a program's first on.

    Frames of gradscaler below it stay only if gradscaler itself raised the error, and not a warning
    that the user's call gives without it, too.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next
        error.__traceback__ = trace
        each: BaseException | None = error
        while each is not None:
            each.__traceback__ = _without_own(each.__traceback__, isinstance(each, Warning))
            each = each.__cause__ or each.__context__
        shown(kind, error, error.__traceback__)

    replace(sys, "excepthook", show)


def _without_own(trace: TracebackType | None, is_warning: bool) -> TracebackType | None:
    # Without a watched call it may not be imported; an import here loses an interrupt's status.
    stand_ins: Any = sys.modules.get("gradscaler.diagnose._graph.stand_ins")
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    users: list[TracebackType] = []
    for each in entries:
        if stand_ins is not None and stand_ins.calls_for(each.tb_frame):
            if users and stand_ins.gives_to_a_mode(users[-1].tb_frame):
                del users[-2:]
        elif not _is_own(each):
            users.append(each)
    is_ours = bool(entries) and _is_own(entries[-1]) and not is_warning
    kept = entries if is_ours else users
    for before, after in pairwise([*kept, None]):
        if before is not None:
            before.tb_next = after
    return kept[0] if kept else None


def _is_own(entry: TracebackType) -> bool:
    frame = entry.tb_frame  # a function that stands in for PyTorch's names another file
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package == "gradscaler" or frame.f_code.co_filename.startswith(_OWN)
