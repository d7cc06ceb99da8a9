"""The user's line that a verdict names, with the lines around it."""

from __future__ import annotations

import linecache
from calendar import timegm
from contextlib import suppress
from pathlib import Path
from time import strptime
from typing import NamedTuple

_AROUND = 2  # lines before and after


class Source(NamedTuple):
    """Some lines of a file, by their numbers."""

    title: str
    lines: dict[int, str]
    number: int  # of the line that the verdict names


def source_of(line: str | None, started: str) -> Source | None:
    """The lines around one, such as ``"train.py:12"``; None if they cannot be read.

    A run file may come from anywhere, so only Python files are shown. ``started`` is the time of
    the run's start; a file that was changed later may show another line.
    """
    name, _, number = (line or "").rpartition(":")
    path = Path(name)
    if path.suffix != ".py" or not number.isdecimal() or not path.is_file():
        return None
    linecache.checkcache(name)
    lines = dict(enumerate(linecache.getlines(name), 1))
    first, last = int(number) - _AROUND, int(number) + _AROUND
    found = {n: _shown(text) for n, text in lines.items() if first <= n <= last}
    if int(number) not in found:
        return None
    changed = " (the file was changed after the run began)" * _is_later(path, started)
    return Source(f"{line}{changed}", found, int(number))


def _is_later(path: Path, started: str) -> bool:
    """Whether a file was changed after a time; False if that is unknown."""
    with suppress(ValueError, OSError):
        return path.stat().st_mtime > timegm(strptime(started, "%Y-%m-%dT%H:%M:%SZ")) + 1
    return False


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text.rstrip().expandtabs(4))[:200]
