"""Reads the numbers in a pickle without unpickling it: nothing in it is imported or called.

This module interprets the pickle's opcodes itself. Values are numbers, texts, dicts of these, and
the names of functions that the pickle would call. It knows only the functions in pickles of NumPy
arrays and of dicts. Anything else, such as a tensor, a list or an object, becomes an ``Unread``. A
``pickle.Unpickler`` that finds no class is shorter, but a pickle of nine bytes that names a long
value makes it ask for all of the memory.
"""

from __future__ import annotations

import pickletools
import warnings
from functools import cache
from typing import IO, Any

import numpy as np

_MOST_OPCODES = 2**21  # a tensor in a checkpoint takes about 40
_MOST_BYTES = 2**25  # of the opcodes' arguments, without long values, which are skipped
_LONGEST_VALUE = 2**16  # bytes of a text or an array
_LONGEST_LINE = 2**10  # bytes
_LONGEST_TUPLE = 16  # NumPy describes a dtype by 8 values
_LONGEST_NAME = 100  # characters of a module's name, and of the name in it
_LARGEST_NUMBER = 8  # bytes

Value = Any  # on the stack: a number, text, bytes, dict, tuple, or an object of a class below


class RefusedError(ValueError):
    """A pickle that holds too much."""


class Unread:
    """A part of a pickle that is not a number, a text or a dict; ``why`` describes it."""

    __slots__ = ("_names", "_reason")

    def __init__(self, reason: str, *names: str) -> None:
        self._reason, self._names = reason, names  # not formatted yet: many objects share both

    @property
    def why(self) -> str:
        return f"refused: {self._reason % self._names}"


class _Name(str):
    """The name of something that a pickle would import."""

    __slots__ = ()


class _Number:
    """A NumPy dtype of one kind of number, or an array of one number, while it is being made."""

    __slots__ = ("dtype", "value")

    def __init__(self, dtype: np.dtype[Any] | None = None, value: Value = None) -> None:
        self.dtype, self.value = dtype, value


_MARK = object()
_MORE = Unread("it holds more than numbers")
_ARRAY = Unread("an array of more than numbers")


def load(file: IO[bytes]) -> Value:
    """The value of the next pickle in a file: a dict, a number, a text, None or an ``Unread``.

    The values in a dict are of the same kinds; a dict may contain itself. Keys are texts; a number
    as a key becomes a text, and entries with other keys are left out.

    Time and memory are bounded by the size of the pickle. Long values are skipped. A pickle may use
    one value many times, so only short values are compared, copied or printed.

    Raises:
        RefusedError: the pickle holds too much.
        ValueError: the pickle is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of escapes in damaged texts
            return _run(_Opcodes(file))
    except LookupError:  # the stack is empty, or the memo lacks the entry
        raise ValueError("the pickle refers to a value that it does not hold") from None


class _Opcodes:
    """The opcodes of a pickle, with arguments of bounded length."""

    def __init__(self, file: IO[bytes]) -> None:
        start = file.tell()
        self._file, self._end, self._left = file, file.seek(0, 2), _MOST_BYTES
        file.seek(start)

    def next(self) -> tuple[pickletools.OpcodeInfo, Value]:
        """An opcode and its argument, which is an ``Unread`` if it is long."""
        code = self._file.read(1)
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise ValueError(f"unknown opcode {code!r}" if code else "the pickle has no end")
        if opcode.arg is None:
            return opcode, None
        width = _LENGTHS.get(opcode.arg.n)
        if width is not None:
            length = int.from_bytes(self.read(width), "little")
            if length > _LONGEST_VALUE:
                if length > self._end - self._file.tell():
                    raise ValueError("the pickle has no end")
                self._file.seek(length, 1)
                return opcode, Unread("it holds a long value, not a number")
            self._file.seek(-width, 1)
        return opcode, opcode.arg.reader(self)  # type: ignore[arg-type]  # it only reads

    def read(self, size: int) -> bytes:
        return self._spent(self._file.read(size))

    def readline(self) -> bytes:
        return self._spent(self._file.readline(_LONGEST_LINE))

    def _spent(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise RefusedError(_TOO_MUCH)
        return data


_OPCODES = {opcode.code.encode("latin1"): opcode for opcode in pickletools.opcodes}
_TOO_MUCH = "refused: it holds too much for a checkpoint"
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # bytes of the length before an argument, by its kind


def _run(opcodes: _Opcodes) -> Value:  # noqa: C901, PLR0912 # a case for each opcode
    stack: list[Value] = []
    memo: list[Value] = []
    for _ in range(_MOST_OPCODES):
        opcode, argument = opcodes.next()
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
            items = _taken(stack, 2) if name == "SETITEM" else _marked(stack)
            _set_items(stack[-1], items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(_tuple(_taken(stack, int(name[-1]))))
        elif name == "TUPLE":
            stack.append(_tuple(_marked(stack)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            _put(memo, argument, stack[-1])
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_name(*_taken(stack, 2)))
        elif name == "REDUCE":
            stack.append(_call(*_taken(stack, 2)))
        elif name == "BUILD":
            stack.append(_built(*_taken(stack, 2)))
        elif name == "BINPERSID":
            stack.append(_tensor(stack.pop()))
        elif name == "STOP":
            break
        else:
            _replace(stack, opcode)
    else:
        raise RefusedError(_TOO_MUCH)
    if len(stack) != 1:
        raise ValueError("the pickle does not end with one value")
    return _plain(stack[0])


_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _taken(stack: list[Value], count: int) -> list[Value]:
    """Take the top ``count`` values off the stack."""
    return [stack.pop() for _ in range(count)][::-1]


def _marked(stack: list[Value]) -> list[Value]:
    """Take the values since the last mark, and the mark, off the stack."""
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _replace(stack: list[Value], opcode: pickletools.OpcodeInfo) -> None:
    """Interpret any other opcode: put an ``Unread`` in place of each value that it makes."""
    below = opcode.stack_before
    if pickletools.markobject in below:
        _marked(stack)
        below = below[: below.index(pickletools.markobject)]
    _taken(stack, len(below))
    stack.extend(_made_by(opcode.name) for _ in opcode.stack_after)


@cache
def _made_by(name: str) -> Unread:
    return Unread("it holds more than numbers (%s)", name)


def _put(memo: list[Value], place: int, value: Value) -> None:
    """Put a value into the memo, whose numbers must be nearly without gaps.

    The memo is a list, because a dict takes long for numbers whose hashes collide. A pickle of
    Python 2 counts from 1.
    """
    if place > len(memo) + 1:
        raise ValueError("the pickle's memo has gaps")
    memo.extend([_MORE] * (place + 1 - len(memo)))
    memo[place] = value


def _tuple(items: list[Value]) -> tuple[Any, ...] | Unread:
    """A tuple, if it is as short and flat as those in a pickled array.

    Nested tuples that use one value twice could double in size at each level.
    """
    if len(items) > _LONGEST_TUPLE or any(
        type(part) is tuple for item in items if type(item) is tuple for part in item
    ):
        return _LONG
    return tuple(items)


_LONG = Unread("it holds more than numbers (long or nested tuples)")


def _set_items(target: Value, items: list[Value]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(target) is dict and type(key) in (str, int, float, bool, type(None)):
            target[str(key)] = _plain(value)


def _plain(value: Value) -> Value:
    """A number, a text, None or a dict. An array of one number becomes that number."""
    if type(value) is _Number and value.value is not None:
        return value.value
    if type(value) in (int, float, bool, str, type(None), dict, Unread):
        return value
    return _MORE


def _name(module: Value, attribute: Value) -> _Name | Unread:
    for text in (module, attribute):
        if type(text) is not str or len(text) > _LONGEST_NAME:
            return Unread("it would import something")
    return _Name(f"{module}.{attribute}")


def _call(called: Value, arguments: Value) -> Value:  # noqa: C901, PLR0911 # a case for each function
    if type(called) is not _Name or type(arguments) is not tuple:
        unread = [part for part in (arguments, called) if type(part) is Unread]
        return unread[0] if unread else Unread("it would call something")
    for argument in arguments:
        if type(argument) is Unread:
            return argument
    # NumPy 1 and Python 2 had other names.
    name = called.replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
    if name in ("collections.OrderedDict", "collections.defaultdict"):
        return {}
    if name == "numpy._core.multiarray._reconstruct":
        return _Number()
    if name == "numpy.dtype" and arguments:
        return _dtype(arguments[0])
    if name == "numpy._core.multiarray.scalar" and len(arguments) == 2:
        return _Number(value=_item(*arguments))
    if name == "_codecs.encode" and len(arguments) == 2:
        text, codec = arguments
        if type(text) is str and codec == "latin1":
            return _encoded(text[: _LARGEST_NUMBER + 1])  # a longer text is cut, and refused later
    if name == "builtins.tuple" and arguments and type(arguments[0]) is tuple:
        return arguments[0][-1] if arguments[0] else ()  # a Paddle tensor: its name, and its array
    return Unread("it would call %s", called)


def _encoded(text: str) -> bytes | Unread:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        return _ARRAY


def _built(target: Value, state: Value) -> Value:
    """``target`` with its state. The state of a dict, such as ``_metadata``, is left out."""
    if type(target) is dict or type(target) is Unread:
        return target
    if type(target) is not _Number or type(state) is not tuple:
        return _MORE
    if target.dtype is None:
        target.value = _item(*state[2::2]) if len(state) == 5 else _ARRAY
    elif len(state) > 1 and state[1] in _ORDERS:
        target.dtype = target.dtype.newbyteorder(state[1])
    else:
        return _ARRAY
    return target


_ORDERS = ("<", ">", "|", "=")
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def _dtype(code: Value) -> _Number | Unread:
    if not isinstance(code, str) or len(code) > 2 * _LONGEST_NAME:
        return _ARRAY
    if code not in _DTYPES:
        return Unread(
            "it holds an array of dtype %s; only bools, integers and floats of up to 64 bits are "
            "read",
            code,
        )
    return _Number(np.dtype(code))


def _item(dtype: Value, data: Value) -> Value:
    """The number in the bytes of an array of one element."""
    for part in (dtype, data):
        if type(part) is Unread:
            return part
    if type(dtype) is not _Number or dtype.dtype is None or type(data) is not bytes:
        return _ARRAY
    if len(data) != dtype.dtype.itemsize:
        return Unread("an array of more than one number")
    return np.frombuffer(data, dtype.dtype)[0].item()


def _tensor(storage: Value) -> Unread:
    """The ``Unread`` for a torch tensor, whose bytes are elsewhere in the file."""
    kind = storage[1] if type(storage) is tuple and len(storage) > 1 else None
    if type(kind) is not _Name:
        return Unread("it holds a tensor, not a number; save tensor.item()")
    return Unread("it holds a tensor of %s, not a number; save tensor.item()", kind)
