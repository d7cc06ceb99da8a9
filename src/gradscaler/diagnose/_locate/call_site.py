"""The call sites of PyTorch's operations: the user's line, and the name that users know."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import gradscaler

# The names that users know, by PyTorch's internal names.
_CALLED = {
    **dict.fromkeys(("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"), "matmul"),
    "convolution": "conv",
    "linalg_vector_norm": "norm",
    "to_copy": "to",
}
_INNER = re.compile(
    r"^_|_$|^(native|cudnn|miopen|mkldnn|safe|fused)_|_(forward|for_cpu|interface)$"
)
_REFLECTED = re.compile(r"^__r(?=\w+__)|(?<=\w)__$")  # 1 / x is x.__rdiv__(1)
_FRAMEWORKS = "torch", "tensorplay", "paddle", "jax", "keras", "flax", "equinox", "optax"
_FUNCTIONS = "functional.py", str(Path("nn", "functional.py")), "_tensor.py"
_NOT_NAMED = ("wrapped", "multi_head_attention_forward")  # less telling than the operation inside
# Nodes that only reshape, cast, copy or select their input.
_FORMS = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|Reshape\w*|Expand|ToCopy|Clone|Slice|Select|Alias"
    r"|Squeeze|Unsqueeze)Backward\d"
)
_MOST_FORMS = 8
_COMPILED = "<eval_with_key>"  # the file of code that PyTorch's compiler writes

Node = Any


class Frame(NamedTuple):
    """A call in a traceback: the file, the number of the line, and the function's name."""

    file: str
    number: int
    function: str


@dataclass
class Caller:
    """The caller of an operation, from the stack of its thread.

    Attributes:
        within: the function of torch.autograd that is running, ``"grad"`` or ``"backward"``; empty
            if neither is.
        function: PyTorch's public Python function that called the operation, such as
            ``cross_entropy``; None if there is none.
        line: the innermost line that is neither PyTorch's nor gradscaler's. In a backward pass,
            only lines that it calls count: those of a custom function or a checkpointed block.
        outer: the line that called the backward pass, if there is one.
        modules: the running modules, innermost first; in a backward pass, only those it calls.
    """

    within: Literal["", "grad", "backward"] = ""
    function: str | None = None
    line: str | None = None
    outer: str | None = None
    modules: list[Any] = field(default_factory=list)


def caller_of(  # noqa: C901 # a case for each kind of frame
    frame: FrameType | None, thread: int
) -> Caller | None:
    """The caller of the operation in a frame, or None if gradscaler called it.

    ``thread`` identifies the thread that runs forward passes.
    """
    torch: Any = sys.modules["torch"]
    passes: dict[CodeType, Literal["grad", "backward"]] = {
        torch.autograd.grad.__code__: "grad",
        torch.autograd.backward.__code__: "backward",
    }
    call = torch.nn.Module.__call__.__code__
    found = Caller()
    while frame is not None:
        code = frame.f_code
        whose = _whose(code.co_filename)
        if whose == "user" and found.within:
            found.outer = found.outer or shown_line(code.co_filename, frame.f_lineno)
        elif whose == "user":
            found.line = found.line or shown_line(code.co_filename, frame.f_lineno)
        elif code is call and found.within != "backward":
            found.modules.append(frame.f_locals["self"])
        elif found.within:
            pass
        elif code in passes:
            found.within = passes[code]
        elif found.line:
            pass
        elif whose == "gradscaler":
            return None
        elif whose == "functions" and found.function is None:
            found.function = _public(code.co_name)
        frame = frame.f_back
    if not found.within and threading.get_ident() != thread:
        found.within = "backward"
    return found


def called_from(frames: Iterable[Frame]) -> tuple[str | None, str | None]:
    """PyTorch's public function that called an operation, and the user's line; None if unknown.

    The frames are those of the operation, innermost first. In compiled code, its line is not known.
    """
    function: str | None = None
    for frame in frames:
        if frame.file.startswith(_COMPILED):
            break
        whose = _whose(frame.file)
        if whose == "user":
            return function, shown_line(frame.file, frame.number)
        if whose == "functions":
            function = function or _public(frame.function)
    return function, None


def _public(function: str) -> str | None:
    """The name of a public function of PyTorch, as users write it; None if it is not telling."""
    name = _REFLECTED.sub("", function)
    return None if name.startswith("_") or name in _NOT_NAMED else name


def users_line(frames: Iterable[tuple[str, int]]) -> str | None:
    """The first line that is neither a framework's nor gradscaler's; frames are (file, number)."""
    lines = (shown_line(*frame) for frame in frames if _whose(frame[0]) == "user")
    return next(lines, None)


def called(own: str) -> str:
    """The name that users know for an operation, from PyTorch's internal name.

    >>> called("_softmax"), called("addmm"), called("native_layer_norm"), called("mul_")
    ('softmax', 'matmul', 'layer_norm', 'mul')
    """
    name = own
    while (shorter := _INNER.sub("", name)) not in ("", name):
        name = shorter
    return _CALLED.get(name, name)


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


def source_of(node: Node) -> Node:
    """The nearest node, from this one back, that does more than reshape, cast, copy or select."""
    for _ in range(_MOST_FORMS):
        if node is None or not is_form(node):
            break
        node = node.next_functions[0][0]
    return node


def is_form(node: Node) -> bool:
    """Whether a node's operation only reshapes, casts, copies or selects."""
    return bool(_FORMS.fullmatch(node.name()))


def operation_of(node: Node) -> str:
    """The operation of the forward pass whose gradient a node computes."""
    name: str = node.name()
    return differentiated(name) if name[-1].isdigit() else name.removesuffix("Backward")


@cache
def _whose(filename: str) -> Literal["user", "functions", "framework", "gradscaler"]:
    """The owner of a file; ``"functions"`` are the files of PyTorch's public Python functions."""
    path, own = Path(filename), Path(gradscaler.__file__).parent
    if own in path.parents:
        return "user" if own / "demo" in path.parents else "gradscaler"
    loaded = (sys.modules[name] for name in _FRAMEWORKS if name in sys.modules)
    packages = {Path(str(framework.__file__)).parent for framework in loaded}
    for package in packages.intersection(path.parents):
        is_function = str(path.relative_to(package)) in _FUNCTIONS
        return "functions" if package.name == "torch" and is_function else "framework"
    return "framework" if filename.startswith(("<frozen ", _COMPILED)) else "user"


def shown_line(filename: str, number: int) -> str:
    """A line as ``file:number``; the path is relative if the file is in the working directory.

    A line of a notebook's cell is shown as ``In[2]:3``: its file has a random name.
    """
    notebook: Any = sys.modules.get("IPython")
    shell = notebook and notebook.get_ipython()
    if shell and (cell := shell.compile.format_code_name(filename)):
        return f"{cell[1]}:{number}"
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        filename = str(path.relative_to(Path.cwd()))
    return f"{filename}:{number}"
