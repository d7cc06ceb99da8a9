"""A live view of a run in the terminal, redrawn as its file grows."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gradscaler.diagnose._findings.run import Run
from gradscaler.diagnose._record.reader import RunFollower
from gradscaler.diagnose.report._content import content_of
from gradscaler.diagnose.report._terminal import Printed
from gradscaler.diagnose.report._words import shown

_PAUSE = 0.5  # the shortest time in seconds between two reads of the file
_LONG = 60  # seconds without a new line that are shown; a monitor writes steps sooner than that


def watch(path: Path, console: Console) -> None:
    """Show a run in the terminal until an interrupt. The file need not exist yet.

    Raises:
        ValueError: the output is not a terminal.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        raise ValueError("watch redraws a terminal, and the output is not one; explain prints once")
    follower, before = RunFollower(path, Run), None
    with _ended_by_sigterm(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            start = time.monotonic()
            now = *_look(path, follower), console.size
            if now != before:
                live.update(view(path, *now[:2]), refresh=True)
            before = now
            time.sleep(max(_PAUSE, 4 * (time.monotonic() - start)))


def view(path: Path, run: Run | None, note: str) -> Group | Text:
    """The view of a run file at one moment; ``note`` describes the state of the file."""
    if run is None:
        return Text(f"Waiting: {shown(note, 600)}")
    title = f"{shown(path.name, 60)}  step {run.num_steps:,}  {note}"
    return Group(Text(title, no_wrap=True, overflow="ellipsis"), Printed(content_of(run)))


def _look(path: Path, follower: RunFollower[Run]) -> tuple[Run | None, str]:
    """Read the run so far, and describe the state of its file."""
    try:
        run = follower.read()
        if run is None:
            return None, f"{path} holds no run yet."
        quiet = time.time() - path.stat().st_mtime
        return run, f"(nothing new for {quiet // 60:,.0f} min)" if quiet > _LONG else ""
    except FileNotFoundError:
        return None, f"{path} does not exist yet."
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    except ValueError as error:
        return None, str(error)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the stack, so that the terminal's screen is restored."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
