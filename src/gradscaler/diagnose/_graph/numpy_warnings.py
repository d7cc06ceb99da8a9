"""NumPy's warnings of an Inf or NaN, at the user's line: they may say what made a bad batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import numpy as np

from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of

_OF_INF = re.compile("^(divide by zero|overflow) encountered")
_OF_NAN = re.compile("^invalid value encountered|^Mean of empty slice|^Degrees of freedom <= 0")
_MOST = 20  # that are kept of a step; Python shows each line's once
_NUMPY = Path(np.__file__).parent


class _Warning(NamedTuple):
    text: str  # as ``"divide by zero encountered in log"``
    line: str  # as ``"data.py:12"``
    makes_inf: bool  # else NaN, which an Inf may become


class NumpyWarnings:
    """The warnings that NumPy gave before a training, in its present step, and in the one before.

    A loader may prepare a batch during the step before it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all warnings."""
        self.latest: list[_Warning] = []
        self._before: list[_Warning] = []  # in the step before
        self._early: list[_Warning] = []  # before the first step

    def note(self, message: Any) -> None:
        """Note a warning that is shown, in the thread that gave it."""
        text = str(message.message)
        makes_inf = _OF_INF.search(text) is not None
        if message.category is not RuntimeWarning or not (makes_inf or _OF_NAN.search(text)):
            return
        calls = ((each.f_code.co_filename, line) for each, line in walk_stack(currentframe()))
        line = users_line(each for each in calls if _NUMPY not in Path(each[0]).parents)
        is_next = not self.latest or self.latest[-1].line != line  # one call may give two
        if line is not None and is_next and len(self.latest) < _MOST:
            self.latest.append(_Warning(text, line, makes_inf))

    def step_ended(self, is_first: bool) -> None:
        """Note the end of a step."""
        if is_first:
            self._early = self.latest
        self._before, self.latest = self.latest, []

    def of(self, num_inf: int, num_nan: int) -> str | None:
        """The latest warning that may be of a tensor that holds so many; None if none may."""
        for each in reversed([*self._early, *self._before, *self.latest]):
            if num_nan or (each.makes_inf and num_inf):
                return f"{each.text} at {each.line}"
        return None


numpy_warnings = NumpyWarnings()


def noting(show: Callable[[Any], None]) -> Any:
    """A function in place of ``warnings._showwarnmsg``, which it calls.

    Each warning passes it that no filter leaves out, also one that the script records.
    """
    note = guarded(numpy_warnings.note)

    @in_place_of(show)
    def seen(message: Any) -> None:
        note(message)
        show(message)

    return seen
