"""The user's line that a verdict names, with the lines around it."""

from __future__ import annotations

import linecache
import time
from calendar import timegm
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NamedTuple

from gradscaler._notebook import lines_of_cell, shell, show

_AROUND = 2  # lines before and after


class Source(NamedTuple):
    """Some lines of a file or a cell, by their numbers."""

    title: str
    lines: dict[int, str]
    number: int  # of the line that the verdict names

    @property
    def text(self) -> str:
        """The title and the lines; the one at fault is marked."""
        width = len(str(max(self.lines)))
        marks = {self.number: ">"}
        lines = [f"{marks.get(n, ' ')} {n:{width}}  {text}" for n, text in self.lines.items()]
        return "\n".join([self.title, *lines])

    @property
    def html(self) -> str:
        """The title and the lines in HTML; the one at fault is marked."""
        width = len(str(max(self.lines)))
        lines = [
            f"<{tag}>{number:{width}}  {escape(text)}</{tag}>"
            for number, text in self.lines.items()
            for tag in ["mark" if number == self.number else "span"]
        ]
        title = escape(_shown(self.title))
        return f'<p class="dim">{title}</p>\n<pre>{chr(10).join(lines)}</pre>\n'


def source_of(line: str | None, started: str | None = None) -> Source | None:
    """The lines around one, such as ``"train.py:12"``; None if they cannot be read.

    A run file may come from anywhere, so only Python files, and cells of this notebook, are shown.
    ``started`` is the time of the run's start, by default now; a file that was changed later may
    show another line.
    """
    own = (line or "").rpartition("(called from ")[2].removesuffix(")")  # of an installed package
    name, _, number = own.rpartition(":")
    path, since = Path(name), time.time() if started is None else _seconds(started)
    if not number.isdecimal():
        return None
    if path.suffix == ".py" and path.is_file():
        linecache.checkcache(name)
        lines = dict(enumerate(linecache.getlines(name), 1))
    else:
        lines = dict(enumerate(lines_of_cell(name, since), 1))
    first, last = int(number) - _AROUND, int(number) + _AROUND
    found = {n: _shown(text) for n, text in lines.items() if first <= n <= last}
    if int(number) not in found:
        return None
    changed = " (the file was changed after the run began)" * _is_later(path, since)
    return Source(f"{line}{changed}", found, int(number))


def show_source_of(line: str | None) -> None:
    """Show a line under the cell that runs, if this is a notebook and the line can be read."""
    if shell() is not None and (source := source_of(line)) is not None:
        show(source.text, source.html)


def _seconds(started: str) -> float:
    """The seconds of a time; 0 if it is unknown."""
    with suppress(ValueError):
        return timegm(time.strptime(started, "%Y-%m-%dT%H:%M:%SZ"))
    return 0.0


def _is_later(path: Path, since: float) -> bool:
    """Whether a file was changed after a time; False if that is unknown."""
    with suppress(OSError):
        return since > 0 and path.stat().st_mtime > since + 1
    return False


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text.rstrip().expandtabs(4))[:200]
