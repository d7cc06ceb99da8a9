"""A live view of a run in the terminal, redrawn as its file grows."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO

from gradscaler.diagnose._run.reader import RunFollower, read_run
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose._run.writer import has_writer
from gradscaler.diagnose.report._charts import BLOCKS, PLAIN_BLOCKS, curve, density
from gradscaler.diagnose.report._summary import ends_of, exponents_of, headline_of
from gradscaler.diagnose.report._texts import percent, shown
from gradscaler.diagnose.report._words import no_points

_PAUSE = 0.5  # seconds from one look at the file to the next
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, no cursor
_LEVELS = {"good": "1;32", "warning": "1;33", "bad": "1;31"}
_STYLES = {**_LEVELS, "curve": "34", "skips": "31", "dim": "2"}
_TALLEST = 8  # rows of a curve

_Line = tuple[str, str]  # a style, or an empty text for none; and the text


@dataclass(frozen=True)
class View:
    """What is known of a run file at one moment."""

    run: Run | None = None
    error: str = ""  # why there is no run, or no newer one
    is_written: bool | None = None  # whether a monitor has the file open; None if it is unknown


def watch(
    path: Path, output: TextIO, once: bool = False, say: Callable[[str], None] = lambda text: None
) -> None:
    """Show a run in the terminal until an interrupt, or once.

    If the output is not a terminal, it is shown once, when no monitor writes to the file any more;
    ``say`` is told what it waits for.

    Raises:
        ValueError, OSError: shown once, the file cannot be read; waiting for it, it is not a run.
    """
    is_terminal = output.isatty() and os.environ.get("TERM") != "dumb"
    follower = RunFollower(path)
    if once or not is_terminal:
        view = View(read_run(path)) if once else _last_view(path, follower, say)
        columns, rows = shutil.get_terminal_size()
        lines = frame(path, view, columns, rows, _blocks_for(output))
        is_coloured = is_terminal and not os.environ.get("NO_COLOR")
        output.write("".join(f"{_painted(line, is_coloured)}\n" for line in lines))
        output.flush()
        return
    with _own_screen(output):
        before: Any = None
        while True:
            now = _view_of(path, follower), _size_of(output)
            if now != before:
                view, (columns, rows) = now
                lines = frame(path, view, columns, rows, _blocks_for(output))
                _redraw(output, [*lines, ("dim", "Ctrl-C ends this view."[: columns - 1])])
            before = now
            time.sleep(_PAUSE)


def _last_view(path: Path, follower: RunFollower, say: Callable[[str], None]) -> View:
    """The view at the end of the run; waits for it."""
    if not path.exists():
        say(f"{path}: waiting; the file does not exist yet")
    while True:
        with suppress(FileNotFoundError):
            is_written = has_writer(path)  # before the last line is read
            view = View(follower.read(), is_written=is_written)
            if view.run is not None and not is_written:
                return view
        time.sleep(_PAUSE)


def _view_of(path: Path, follower: RunFollower) -> View:
    try:
        return View(follower.read(), is_written=has_writer(path))
    except FileNotFoundError:
        return View(error=f"{path} does not exist yet.")
    except OSError as error:
        return View(error=f"{path}: {error.strerror or error}")
    except ValueError as error:
        return View(error=str(error))


@contextmanager
def _own_screen(output: TextIO) -> Iterator[None]:
    """A screen that is gone afterwards, whatever ends it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        output.write(_ENTER)
        yield
    finally:
        output.write(_LEAVE)
        output.flush()
        signal.signal(signal.SIGTERM, before)


def _redraw(output: TextIO, lines: list[_Line]) -> None:
    is_coloured = not os.environ.get("NO_COLOR")
    painted = (f"{_painted(line, is_coloured)}\x1b[K" for line in lines)
    output.write("\x1b[H" + "\r\n".join(painted) + "\x1b[J")
    output.flush()


def _painted(line: _Line, is_coloured: bool) -> str:
    style, text = line
    if not is_coloured or not style:
        return text
    if style == "curve":
        text = re.sub("(!+)", "\x1b[1;31m\\1\x1b[0;34m", text)
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def _size_of(output: TextIO) -> tuple[int, int]:
    columns, rows = os.get_terminal_size(output.fileno())
    return columns or 80, rows or 24  # a terminal may not know its size


def _blocks_for(output: TextIO) -> str:
    try:
        BLOCKS.encode(output.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_BLOCKS
    return BLOCKS


def frame(path: Path, view: View, columns: int, rows: int, blocks: str) -> list[_Line]:
    """The lines of a view, for a terminal of this size.

    The last row stays free, and the last column: a letter there would be erased with the rest of
    its line.
    """
    width = max(1, columns - 1)
    run = view.run
    if run is None:
        text = view.error or f"{path} holds no run yet."
        lines: list[_Line] = [("", row) for row in wrap(f"Waiting: {shown(text, 600)}", width)]
    else:
        lines = _of_run(path, run, width, rows, blocks)
        if view.is_written is False:
            lines[0] = "", f"{lines[0][1]}  (no monitor writes to it now)"
    return [(style, _clipped(text, width)) for style, text in lines[: max(1, rows - 1)]]


def _of_run(path: Path, run: Run, width: int, rows: int, blocks: str) -> list[_Line]:
    headline, start = headline_of(run), run.starts[-1]
    policy = shown(str(start.policy.get("name", "")), 40)
    title = f"{shown(path.name, 60)}  step {run.num_steps:,}  {start.framework} {policy}"
    text = wrap(shown(run.verdict.text, 1000), width)[: max(0, rows - 11)]
    left = rows - 7 - len(text)  # for the two curves
    heights = [max(1, min(_TALLEST, share)) for share in ((left + 1) // 2, left // 2)]
    lines = [("", title), (headline.level, headline.headline), *(("", row) for row in text)]
    if not run.num_steps:
        return lines
    scales = dict(zip(*run.scales, strict=True))
    lines.append(("", f"loss scale  {ends_of(scales)}"))
    lines += _curve(exponents_of(run), run, width, blocks, heights[0])
    words = no_points("loss", run.losses)
    lines.append(("", words or f"loss  {ends_of(run.losses)}"))
    if run.losses:
        lines += _curve(run.losses, run, width, blocks, heights[1])
    first, last = run.longest_skips
    share = percent(len(run.skipped) / max(1, run.num_steps))
    lines.append(("", f"skipped  {len(run.skipped):,} ({share}), {last - first + 1:,} in a row"))
    if run.skipped:
        lines.append(("skips", density(run.skipped, run.num_steps, width, blocks)))
    return lines


def _curve(
    points: Mapping[int, float], run: Run, width: int, blocks: str, height: int
) -> list[_Line]:
    """The rows of a curve; one if it is flat."""
    is_flat = len(set(filter(math.isfinite, points.values()))) < 2
    rows = curve(points, run.num_steps, width, blocks, 1 if is_flat else height)
    return [("curve", row) for row in rows]


def _clipped(text: str, width: int) -> str:
    """The beginning of a text that fits into so many columns."""
    taken = 0
    for place, letter in enumerate(text):
        wide = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        taken += 0 if unicodedata.combining(letter) else wide
        if taken > width:
            return text[:place]
    return text
