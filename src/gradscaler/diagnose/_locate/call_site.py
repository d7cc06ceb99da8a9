"""Where PyTorch's operations are called: the user's line, and the name that the user knows."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import gradscaler

# PyTorch's own names of what users call by another.
_CALLED = {
    "addbmm": "matmul",
    "addmm": "matmul",
    "addmv": "matmul",
    "baddbmm": "matmul",
    "bmm": "matmul",
    "convolution": "conv",
    "dot": "matmul",
    "linalg_vector_norm": "norm",
    "mm": "matmul",
    "mv": "matmul",
    "to_copy": "to",
}
_INNER = re.compile(r"^_|_$|^(native|cudnn|miopen|mkldnn|safe|fused)_|_forward$|_for_cpu$")
_REFLECTED = re.compile(r"^__r(?=\w+__)|(?<=\w)__$")  # 1 / x is x.__rdiv__(1)
_NOT_NAMED = ("wrapped", "multi_head_attention_forward")  # say less than the operation in them


class Site(NamedTuple):
    """An operation of the forward pass, and where it was called."""

    operation: str | None
    line: str | None
    module: str | None  # as in Located
    type: str


class Caller(NamedTuple):
    """Who called an operation, by the stack of its thread.

    Attributes:
        function: the public function of PyTorch's that is not an operation itself, such as
            ``cross_entropy``.
        line: the innermost line that is neither PyTorch's nor gradscaler's. In a backward pass,
            only what that calls: a line of a custom function, or of a checkpointed block.
        outer: the line that called the backward pass, if there is one.
        within: ``"grad"`` or ``"backward"``: the function of torch.autograd that is running.
        is_own: whether gradscaler called it.
    """

    function: str | None = None
    line: str | None = None
    outer: str | None = None
    within: Literal["", "grad", "backward"] = ""
    is_own: bool = False


def caller_of(frame: FrameType | None, thread: int) -> Caller:
    """Who called the operation in a frame; ``thread`` is where forward passes run."""
    autograd: Any = sys.modules["torch.autograd"]
    passes: dict[CodeType, Literal["grad", "backward"]] = {
        autograd.grad.__code__: "grad",
        autograd.backward.__code__: "backward",
    }
    found = Caller(within="" if threading.get_ident() == thread else "backward")
    while frame is not None:
        code = frame.f_code
        whose = _whose(code.co_filename)
        if whose == "user":
            line = shown_line(code.co_filename, frame.f_lineno)
            if found.within:
                return found._replace(outer=line)
            if not found.line:
                found = found._replace(line=line)
        elif code in passes and not found.within:
            found = found._replace(within=passes[code])
            if found.line:
                return found
        elif found.line or found.within:
            pass
        elif whose == "gradscaler":
            return found._replace(is_own=True)
        elif whose == "functions" and found.function is None:
            name = _REFLECTED.sub("", code.co_name)
            if not name.startswith("_") and name not in _NOT_NAMED:
                found = found._replace(function=name)
        frame = frame.f_back
    return found


def calling_line(framework: Any) -> str | None:
    """The innermost line on the stack that is neither a framework's nor gradscaler's."""
    packages = Path(framework.__file__).parent, Path(gradscaler.__file__).parent
    frame = inspect.currentframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if not any(package in Path(filename).parents for package in packages):
            return shown_line(filename, frame.f_lineno)
        frame = frame.f_back
    return None


def called(own: str) -> str:
    """An operation as users know it, from PyTorch's own name for it.

    >>> called("_softmax"), called("addmm"), called("native_layer_norm"), called("mul_")
    ('softmax', 'matmul', 'layer_norm', 'mul')
    """
    name = own
    while (shorter := _INNER.sub("", name)) not in ("", name):
        name = shorter
    return _CALLED.get(name, name)


def differentiated(node: str) -> str:
    """The operation that a node of PyTorch's graph is the gradient of.

    >>> differentiated("NativeLayerNormBackward0"), differentiated("AddmmBackward0")
    ('layer_norm', 'matmul')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.partition("Backward")[0])
    return called(words.lower())


@cache
def _whose(filename: str) -> Literal["user", "functions", "torch", "gradscaler"]:
    """Whose a file is; ``"functions"`` are PyTorch's that are written in Python."""
    path = Path(filename)
    torch: Any = sys.modules["torch"]
    package, own = Path(torch.__file__).parent, Path(gradscaler.__file__).parent
    functions = "functional.py", "nn/functional.py", "_tensor.py"
    if path in [package / name for name in functions]:
        return "functions"
    if package in path.parents or filename.startswith(("<frozen ", "<eval_with_key>")):
        return "torch"
    is_own = own in path.parents and own / "demo" not in path.parents
    return "gradscaler" if is_own else "user"


def shown_line(filename: str, number: int) -> str:
    """A line of a file, as seen from the working directory if the file is there."""
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        filename = str(path.relative_to(Path.cwd()))
    return f"{filename}:{number}"
