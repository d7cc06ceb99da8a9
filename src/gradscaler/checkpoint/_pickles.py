"""Reading pickles of plain numbers without unpickling them: nothing in a pickle is ever called.

The opcodes are interpreted here. The values are numbers, texts, and names of what the pickle would
call. Only the names in pickles of NumPy's arrays are known.
"""

from __future__ import annotations

import pickletools
import warnings
from typing import IO, Any

import numpy as np

_MOST_OPCODES = 10_000  # the state of a loss scale takes about a hundred
_LONGEST_TUPLE = 16  # NumPy describes a dtype by 8 values
_LONGEST_NAME = 100  # of a module and of what is in it
_LARGEST_NUMBER = 8  # bytes


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

    A dict in that dict comes back empty. Work and memory stay in proportion to the pickle: it can
    put one value on the stack many times, so only short values are compared, copied or printed.

    Raises:
        RefusedError: it holds anything else, or too much.
        ValueError: it is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of escapes in damaged texts
            return _run(file)
    except LookupError:  # nothing on the stack, or nothing in the memo
        raise ValueError("the pickle uses what it does not hold") from None


def _run(file: IO[bytes]) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        name = opcode.name
        if count == _MOST_OPCODES:
            raise RefusedError("refused: it holds too much for the state of a loss scale")
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("SETITEM", "SETITEMS"):
            items = _taken(stack, 2) if name == "SETITEM" else _marked(stack)
            _set_items(stack[-1], items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(_tuple(_taken(stack, int(name[-1]))))
        elif name == "TUPLE":
            stack.append(_tuple(_marked(stack)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_name(*_taken(stack, 2)))
        elif name == "REDUCE":
            stack.append(_call(*_taken(stack, 2)))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name == "BINPERSID":
            raise RefusedError(_tensor(stack[-1]))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise RefusedError(f"refused: it holds more than numbers ({name})")
    (value,) = stack
    return value if type(value) is dict else _plain(value)


_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _taken(stack: list[Any], count: int) -> list[Any]:
    """The top ``count`` values, off the stack."""
    return [stack.pop() for _ in range(count)][::-1]


def _marked(stack: list[Any]) -> list[Any]:
    """The values since the last mark, off the stack with it."""
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    """A tuple as short and flat as those around an array's bytes, so that it cannot double."""
    if len(items) > _LONGEST_TUPLE or any(
        type(part) is tuple for item in items if type(item) is tuple for part in item
    ):
        raise RefusedError("refused: it holds more than numbers (long or nested tuples)")
    return tuple(items)


def _set_items(target: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(target) is not dict or type(key) is not str:
            raise RefusedError("refused: it holds more than numbers by name")
        target[key] = {} if type(value) is dict else _plain(value)  # a dict may hold itself


def _plain(value: Any) -> Any:
    """A number, a text, or None; an array of one number as that number."""
    if type(value) is _Number and value.value is not None:
        value = value.value
    if type(value) not in (int, float, bool, str, type(None)):
        raise RefusedError("refused: it holds more than numbers")
    return value


def _name(module: Any, attribute: Any) -> _Name:
    for text in (module, attribute):
        if type(text) is not str or len(text) > _LONGEST_NAME:
            raise RefusedError("refused: it would import something")
    return _Name(f"{module}.{attribute}")


def _call(called: Any, arguments: Any) -> Any:
    if type(called) is not _Name or type(arguments) is not tuple:
        raise RefusedError("refused: it would call something")
    # NumPy 1 and Python 2 had other names.
    name = called.replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
    made = _Number()
    if name == "numpy.dtype":
        made.dtype = _dtype(arguments[0])
        return made
    if name == "numpy._core.multiarray._reconstruct":
        return made
    if name == "numpy._core.multiarray.scalar":
        dtype, data = arguments
        made.value = _item(dtype, data)
        return made
    if name == "_codecs.encode":
        text, codec = arguments
        if type(text) is str and codec == "latin1":
            return text[: _LARGEST_NUMBER + 1].encode("latin1")  # one byte too many is refused
    if name == "builtins.tuple" and type(arguments[0]) is tuple:
        return arguments[0][-1]  # the array after a Paddle tensor's name
    raise RefusedError(f"refused: it would call {name}")


def _build(target: Any, state: Any) -> None:
    if type(target) is not _Number or type(state) is not tuple:
        raise RefusedError("refused: it holds more than numbers")
    if target.dtype is None:
        _, _, dtype, _, data = state
        target.value = _item(dtype, data)
        return
    _, order, *_ = state
    if order not in _ORDERS:
        raise RefusedError("refused: an array of more than numbers")
    target.dtype = target.dtype.newbyteorder(order)


_ORDERS = ("<", ">", "|", "=")
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def _dtype(code: Any) -> Any:
    if not isinstance(code, str) or len(code) > 2 * _LONGEST_NAME:
        raise RefusedError("refused: an array of more than numbers")
    if code not in _DTYPES:
        raise RefusedError(
            f"refused: it holds an array of dtype {code}; only bools, integers and floats of up to "
            "64 bits are read"
        )
    return np.dtype(code)


def _item(dtype: Any, data: Any) -> Any:
    """The one number in the bytes of an array."""
    if type(dtype) is not _Number or dtype.dtype is None or type(data) is not bytes:
        raise RefusedError("refused: an array of more than numbers")
    if len(data) != dtype.dtype.itemsize:
        raise RefusedError("refused: an array of more than one number")
    return np.frombuffer(data, dtype.dtype)[0].item()


def _tensor(storage: Any) -> str:
    """Why a torch tensor is refused. Its bytes are elsewhere in the file."""
    kind = storage[1] if type(storage) is tuple and len(storage) > 1 else None
    named = f" of {kind}" if type(kind) is _Name else ""
    return f"refused: it holds a tensor{named}, not a number; save tensor.item()"
