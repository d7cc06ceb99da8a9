"""Reading pickles of plain numbers without unpickling them: nothing that is in one is ever called.

The opcodes are interpreted here, over values that are numbers, texts, and names of what the pickle
would call. Of those names a few are known, from which pickles of NumPy's arrays are made.
"""

from __future__ import annotations

import pickletools
from typing import IO, Any

import numpy as np


class RefusedError(ValueError):
    """A pickle that holds more than numbers."""


class _Name(str):
    """What a pickle would import."""


class _Number:
    """A NumPy dtype of one kind of number, or an array of one number, while it is being made."""

    dtype: Any = None
    value: Any = None


_MARK = object()


def load(file: IO[bytes]) -> Any:
    """The value of the next pickle in a file: a dict of numbers and texts, or one of those.

    Raises:
        RefusedError: there is anything else in it.
        Exception: it is damaged.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else _marked(stack)
            _set_items(stack[-1], items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(_marked(stack)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Name(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module}.{attribute}" if type(module) is str else ""))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_call(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name == "STOP":
            (value,) = stack
            return value.value if isinstance(value, _Number) else value
        elif name not in ("PROTO", "FRAME"):
            raise RefusedError(f"refused: it holds more than numbers ({name})")
    raise EOFError("the pickle has no end")


_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _marked(stack: list[Any]) -> list[Any]:
    """What was put on the stack since the last mark."""
    start = len(stack) - 1
    while stack[start] is not _MARK:
        start -= 1
    items = stack[start + 1 :]
    del stack[start:]
    return items


def _set_items(target: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str:
            raise RefusedError("refused: it holds more than numbers by name")
        target[key] = value.value if isinstance(value, _Number) else value


def _call(called: Any, arguments: Any) -> Any:
    # NumPy 1 and Python 2 had other names.
    name = str(called).replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
    if not isinstance(called, _Name) or not isinstance(arguments, tuple):
        name = "something"
    made = _Number()
    if name == "numpy.dtype" and isinstance(arguments[0], str):
        made.dtype = _dtype(arguments[0])
        return made
    if name == "numpy._core.multiarray._reconstruct":
        return made
    if name == "numpy._core.multiarray.scalar":
        made.value = _item(*arguments)
        return made
    if name == "_codecs.encode" and arguments[1:] == ("latin1",):
        return str(arguments[0]).encode("latin1")
    if name == "builtins.tuple" and isinstance(arguments[0], tuple):
        return arguments[0][-1]  # of a Paddle tensor's name and its array
    raise RefusedError(f"refused: it would call {name[:80]}")


def _build(target: Any, state: Any) -> None:
    if not isinstance(target, _Number) or not isinstance(state, tuple):
        raise RefusedError("refused: it holds more than numbers")
    if target.dtype is not None:
        _, order, *rest = state
        if any(part is not None for part in rest[:3]):
            raise RefusedError("refused: an array of more than numbers")
        target.dtype = target.dtype.newbyteorder(order)
    else:
        _, _, dtype, _, data = state
        target.value = _item(dtype, data)


def _dtype(code: str) -> Any:
    if code.lstrip("<>|=") not in (
        "b1",
        "i1",
        "i2",
        "i4",
        "i8",
        "u1",
        "u2",
        "u4",
        "u8",
        "f2",
        "f4",
        "f8",
    ):
        raise RefusedError("refused: an array of more than numbers")
    return np.dtype(code)


def _item(dtype: Any, data: Any) -> Any:
    """The one number in the bytes of an array."""
    if not isinstance(dtype, _Number) or dtype.dtype is None or not isinstance(data, bytes):
        raise RefusedError("refused: an array of more than numbers")
    if len(data) != dtype.dtype.itemsize:
        raise RefusedError("refused: an array of more than one number")
    return np.frombuffer(data, dtype.dtype)[0].item()
