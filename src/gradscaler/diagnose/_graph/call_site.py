"""The call sites of PyTorch's operations: the user's line, and the name that users know."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from gradscaler._notebook import shell
from gradscaler.diagnose._graph import stand_ins
from gradscaler.diagnose._graph.autograph import written_at
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import canonical, names_with

_INNER = re.compile(
    r"^_|_$|^(native|cudnn|miopen|mkldnn|safe|fused)_|_(forward|for_cpu|interface)$"
)
_REFLECTED = re.compile(r"^__r(?=\w+__)|(?<=\w)__$")  # 1 / x is x.__rdiv__(1)
_FRAMEWORKS = (
    *("torch", "tensorplay", "paddle", "mindspore", "jax", "flax", "equinox", "optax"),
    *("tensorflow", "keras", "tf_keras", "optree"),  # Keras calls through optree
)
_FUNCTIONS = "functional.py", str(Path("nn", "functional.py")), "_tensor.py"
_NOT_NAMED = ("wrapped", "multi_head_attention_forward")  # less telling than the operation inside
_MOVES = names_with(Role.MOVES)
_MOST_FORMS = 8  # in a row; a slice of a view of a cast is three
LOGDET = "logdet"
_PASSED = "calls.py", "search.py"  # the user's calls pass through them
_FOR_FIT = "../_monitor/fit_batches.py"  # it calls the user's model in place of Keras' fit
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON = Path(os.__file__).parent  # its own library
_COMPILED = "<eval_with_key>"  # the file of code that PyTorch's compiler writes

Node = Any


class Frame(NamedTuple):
    """A call in a traceback: the file, the number of the line, and the function's name."""

    file: str
    number: int
    function: str


def called_from(frames: Iterable[Frame]) -> tuple[str | None, str | None]:
    """PyTorch's public function that called an operation, and the user's line; None if unknown.

    The frames are those of the operation, innermost first. In compiled code, its line is not known.
    """
    function: str | None = None
    frames = iter(frames)
    for frame in frames:
        if frame.file.startswith(_COMPILED):
            break
        whose = _whose(frame.file)
        if whose == "user":
            return function, _with_caller(frame, frames)
        if whose == "functions":
            function = function or _public(frame.function)
    return function, None


def _with_caller(frame: Frame, outer: Iterable[Frame]) -> str:
    """A line; if it is an installed package's, also the user's line that led to it.

    The outer frames are innermost first.
    """
    line = shown_line(frame.file, frame.number)
    if is_installed(frame.file):
        own = (
            each for each in outer if _whose(each.file) == "user" and not is_installed(each.file)
        )
        if caller := next(own, None):
            return f"{line} (called from {shown_line(caller.file, caller.number)})"
    return line


@cache
def is_installed(filename: str) -> bool:
    """Whether a file is of an installed package, or of Python itself."""
    path = Path(filename)
    return not _INSTALLED.isdisjoint(path.parts) or _PYTHON in path.parents


def _public(function: str) -> str | None:
    """The name of a public function of PyTorch, as users write it; None if it is not telling."""
    name = _REFLECTED.sub("", function)
    return None if name.startswith("_") or name in _NOT_NAMED else canonical(name)


def stack_from(frame: FrameType | None) -> tuple[list[Frame], list[Any]]:
    """The calls of a thread from a frame on, and the modules of PyTorch in them, innermost first.

    PyTorch's compiler wraps a module in one of its own, which is left out. A layer of Keras is a
    module, too, with a call of its own.
    """
    kinds = [sys.modules["torch"].nn.Module, *keras_layers()]
    ways_in = {getattr(unwrap(kind.__call__), "__code__", None) for kind in kinds}
    calls, modules = [], []
    while frame is not None:
        calls.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if frame.f_code in ways_in:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return calls, [each for each in modules if not type(each).__module__.startswith("torch._")]


def keras_layers() -> list[Any]:
    """The class of Keras' layers, if Keras is imported."""
    found = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", None)
    return [] if found is None else [found]


def is_own(frames: Iterable[Frame]) -> bool:
    """Whether gradscaler called an operation; the frames are its calls, innermost first."""
    owners = (_whose(frame.file) for frame in frames)
    return next((who for who in owners if who in ("user", "fit", "gradscaler")), "") == "gradscaler"


def users_line(frames: Iterable[tuple[str, int]]) -> str | None:
    """The first line that is neither a framework's nor gradscaler's; frames are (file, number).

    The frames are innermost first. A line of an installed package has the user's beside it.
    """
    calls = (Frame(*written_at(file, number), "") for file, number in frames)
    first = next((each for each in calls if _whose(each.file) == "user"), None)
    return None if first is None else _with_caller(first, calls)


def is_of_users_file(filename: str) -> bool:
    """Whether a file is neither a framework's nor gradscaler's."""
    return _whose(filename) == "user"


def is_of_user(function: object) -> bool:
    """Whether a function was written by the user, and not by a framework or a library of it."""
    function = getattr(function, "func", function)  # of functools.partial
    code = getattr(unwrap(function), "__code__", None) if callable(function) else None
    if code is None:  # an object that is called, such as a module
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code is not None and _whose(code.co_filename) == "user"


def called(own: str) -> str:
    """The name that users know for an operation, from PyTorch's internal name.

    >>> called("_softmax"), called("addmm"), called("native_layer_norm"), called("mul_")
    ('softmax', 'matmul', 'layer_norm', 'mul')
    """
    name = own
    while (shorter := _INNER.sub("", name)) not in ("", name):
        name = shorter
    return canonical(name)


@cache  # a graph has the same few names again and again
def differentiated(node: str) -> str:
    """The operation whose gradient a node of PyTorch's graph computes, from the node's name.

    >>> differentiated("NativeLayerNormBackward0"), differentiated("AddmmBackward0")
    ('layer_norm', 'matmul')
    """
    return called(aten_name(node))


def aten_name(node: str) -> str:
    """PyTorch's internal name of the operation whose gradient a node computes.

    >>> aten_name("Log1PBackward0"), aten_name("ToCopyBackward0")
    ('log1p', 'to_copy')
    """
    words = r"(?<=[a-z])(?=[A-Z])|(?<=[0-9])(?=[A-Z][a-z])"
    return re.sub(words, "_", node.partition("Backward")[0]).lower()


def behind_forms(node: Node) -> Node:
    """The nearest node, from this one back, that does more than reshape, cast, copy or select."""
    for _ in range(_MOST_FORMS):
        if node is None or not is_form(node):
            break
        node = node.next_functions[0][0]
    return node


def is_form(node: Node) -> bool:
    """Whether a node's operation only reshapes, casts, copies or selects."""
    name: str = node.name()
    return name[-1:].isdigit() and differentiated(name) in _MOVES


def operation_of(node: Node) -> str:
    """The operation of the forward pass whose gradient a node computes."""
    name: str = node.name()
    if name.endswith("CopySlices"):
        return "copy"
    if name.startswith("WhereBackward") and _is_of_determinant(node):
        return LOGDET
    return differentiated(name) if name[-1].isdigit() else name.removesuffix("Backward")


def _is_of_determinant(node: Node) -> bool:
    """Whether a choice is that of logdet, which is NaN where the determinant is negative."""
    below = [each for each, _ in node.next_functions if each is not None]
    return len(below) == 1 and "Slogdet" in below[0].name()


@cache
def _whose(filename: str) -> Literal["user", "functions", "framework", "fit", "gradscaler"]:
    """The owner of a file; ``"functions"`` are the files of PyTorch's public Python functions."""
    path, own = Path(filename), Path(__file__).parents[2]
    if path in [Path(__file__).with_name(each) for each in _PASSED]:
        return "framework"
    if path == Path(__file__).parent.joinpath(_FOR_FIT).resolve():
        return "fit"
    if own in path.parents:
        return "user" if own / "demo" in path.parents else "gradscaler"
    loaded = (sys.modules[name] for name in _FRAMEWORKS if name in sys.modules)
    packages = {Path(str(framework.__file__)).parent for framework in loaded}
    for package in packages.intersection(path.parents):
        is_function = str(path.relative_to(package)) in _FUNCTIONS
        return "functions" if package.name == "torch" and is_function else "framework"
    return "framework" if filename.startswith(("<frozen ", stand_ins.FILE, _COMPILED)) else "user"


def shown_line(filename: str, number: int) -> str:
    """A line as ``file:number``; the path is relative if the file is in the working directory.

    A line of a notebook's cell is shown as ``In[2]:3``: its file has a random name.
    """
    if (notebook := shell()) and (cell := notebook.compile.format_code_name(filename)):
        return f"{cell[1]}:{number}"
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        filename = str(path.relative_to(Path.cwd()))
    return f"{filename}:{number}"
