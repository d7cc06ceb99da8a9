"""The variables of the user's functions, what they hold, and the loss among them."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from inspect import CO_OPTIMIZED
from linecache import getlines
from numbers import Real
from traceback import walk_tb
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch.nn import Module

from gradscaler.diagnose._gradients.reading import read
from gradscaler.diagnose._graph.call_site import is_installed, is_of_users_file

_NOT_USERS = "torch.", "gradscaler."
# Names of what an evaluation makes; in a list of classes, one that has no row is NaN.
_EVALUATES = re.compile(
    r"loss|metric|score|perplex|accura|(^|_)(val|valid|validation|eval|acc|ppl)(_|\d|$)",
    re.IGNORECASE,
)
_READ_NAMES = frozenset({"locals", "vars", "dir", "eval", "exec", "currentframe", "_getframe"})
# A script that writes a NaN, or leaves NaN out of a mean, means it to stand for what is missing.
_MEANS_NAN = re.compile(r"""["'][+-]?nan["']|\.nan\b|\bnan[a-z_]+\(""", re.IGNORECASE)
_OF_CLASSES = re.compile(r"class|(^|_)per_", re.IGNORECASE)


def variables_of(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any]]:
    """The variables of the user's functions among frames, and what they hold."""
    for frame in frames:
        if _is_users(frame):
            yield from within(_locals_of(frame))
            yield from within(frame.f_globals)


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's local variables, which keeps no graph of a loss alive.

    Before Python 3.13, a frame keeps the dict of its local variables, and so what it holds.
    """
    kept = frame.f_locals
    found = dict(kept)
    if frame.f_code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13):
        for name, value in found.items():
            if issubclass(type(value), torch.Tensor):
                del kept[name]
    return found


def within(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables, then the attributes of objects such as ``self`` and the entries of dicts."""
    values = [(name, value) for name, value in list(names.items()) if not name.startswith("__")]
    yield from values
    for _, value in values:
        yield from ((name, each) for name, each in _inside(value) if type(name) is str)


def _inside(value: Any) -> list[tuple[Any, Any]]:
    """The entries of a dict, or the attributes of an object, without code of its own."""
    if type(value) is dict:
        return list(value.items())
    is_model = issubclass(type(value), (Module, ModuleType))
    with suppress(Exception):
        return [] if is_model else list(object.__getattribute__(value, "__dict__").items())
    return []  # it has no attributes


def loss_left_out(trace: TracebackType | None) -> torch.Tensor | None:
    """The latest loss in the user's variables that is Inf or NaN; None if there is none.

    A loss is a scalar with a graph. The variables are those of the functions in a traceback, and of
    the script's module.
    """
    frames = [frame for frame, _ in walk_tb(trace)]
    every = (*variables_of(frames[::-1]), *within(vars(sys.modules["__main__"])))
    bad = [value for _, value in every if issubclass(type(value), torch.Tensor) and _is_bad(value)]
    return max(bad, key=lambda loss: int(loss.grad_fn._sequence_nr()), default=None)


def nonfinite_left(trace: TracebackType | None) -> str:
    """The latest variable of the user's innermost function in a traceback that holds an Inf or NaN.

    Returns:
        such as ``"cost held 8 Inf or NaN in float16"``; empty if there is none. What holds no Inf
        or NaN but -Inf may be a mask.
    """
    frames = [frame for frame, _ in walk_tb(trace)]
    users = [frame for frame in frames if _is_users(frame)]
    for frame in reversed(users):
        for name, value in reversed(list(_locals_of(frame).items())):
            if not issubclass(type(value), torch.Tensor):
                continue
            with suppress(Exception):  # it may have no data
                detached = value.detach()
                if read(detached).state == "bad":
                    count, dtype = int((~detached.isfinite()).sum()), str(value.dtype)
                    return f"{name} held {count:,} Inf or NaN in {dtype.removeprefix('torch.')}"
    return ""


def nan_among(names: Mapping[str, Any]) -> str:
    """The name of a variable, or of an entry, in which an evaluation left a NaN; empty if none did.

    It is a number, or a list of which the latest is one. Constants are left out, as such a NaN may
    stand for what is missing, and attributes of objects that are not of the script's own classes.
    """
    return next(_nans_in(names, Real, torch.Tensor), ("", None))[0]


def _nans_in(names: Mapping[str, Any], *kinds: type) -> Iterator[tuple[str, Any]]:
    """The names, as of :func:`nan_among`, with their latest number, if of one of the kinds."""
    own = {name: value for name, value in names.items() if _may_hold(value)}
    for name, value in within(own):
        latest = value[-1] if type(value) in (list, deque) and value else value
        is_number = issubclass(type(latest), kinds) and _is_of_evaluation(name)
        if is_number and _is_nan(latest):
            yield name, latest


class RunningNans:
    """What evaluations leave as NaN in functions that run, whose variables are gone at the end.

    A NaN that stays may stand for an evaluation that is yet to come. So there must be another one
    in its place at a later look. Tensors are not read, as that may wait for a device.

    Attributes:
        name: the variable's name at the latest look; empty if there was no such NaN.
    """

    def __init__(self) -> None:
        self.name = ""
        self._first: dict[str, Any] = {}  # the NaN that was seen first, by its name

    def look(self) -> None:
        """Look at the functions of the script that run in this thread."""
        found: dict[str, Any] = {}
        frame = None if sys.gettrace() else sys._getframe()  # else a debugger reads them, too
        while frame is not None:
            if _may_be_read(frame.f_code):
                kept = frame.f_locals
                found |= dict(_nans_in(kept, Real))
                if sys.version_info < (3, 13):  # the frame keeps this copy
                    kept.clear()
            frame = frame.f_back
        changed = (n for n, each in found.items() if self._first.get(n, each) is not each)
        self.name = next(changed, "")
        self._first = {name: self._first.get(name, each) for name, each in found.items()}


@cache
def means_nan(file: str) -> bool:
    """Whether the code in a file makes NaN on purpose."""
    return _MEANS_NAN.search("".join(getlines(file))) is not None


def _may_be_read(code: CodeType) -> bool:
    """Whether code is of a function of the script's that does not read its own variables by name.

    What ``locals()`` has returned changes if they are read, before Python 3.13.
    """
    is_own = is_of_users_file(code.co_filename) and not is_installed(code.co_filename)
    is_function = bool(code.co_flags & CO_OPTIMIZED)
    may_be_read = is_own and is_function and _READ_NAMES.isdisjoint(code.co_names)
    return may_be_read and not means_nan(code.co_filename)


def _may_hold(value: Any) -> bool:
    kind = type(value)
    is_number = issubclass(kind, (Real, torch.Tensor))
    return is_number or kind in (dict, list, deque) or kind.__module__ == "__main__"


def _is_of_evaluation(name: str) -> bool:
    is_other = name.isupper() or _OF_CLASSES.search(name)
    return not is_other and _EVALUATES.search(name) is not None


def _is_nan(value: Any) -> bool:
    with suppress(Exception):  # it may have no data
        if issubclass(type(value), torch.Tensor):
            return value.ndim == 0 and bool(value.detach().isnan())
        return bool(value != value)  # noqa: PLR0124
    return False


def _is_users(frame: FrameType) -> bool:
    return not f"{frame.f_globals.get('__name__')}.".startswith(_NOT_USERS)


def _is_bad(value: torch.Tensor) -> bool:
    """Whether a tensor is a loss that is Inf or NaN."""
    with suppress(Exception):  # it may have no data
        is_loss = value.grad_fn is not None and value.numel() == 1
        return is_loss and not bool(value.detach().isfinite())
    return False
