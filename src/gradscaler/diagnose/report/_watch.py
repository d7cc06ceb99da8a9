"""A live view of a run in the terminal, redrawn as its file grows."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gradscaler.diagnose._run.reader import RunFollower, read_run
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose._run.writer import has_writer
from gradscaler.diagnose.report._terminal import Explained
from gradscaler.diagnose.report._words import shown

_PAUSE = 0.5  # seconds from one look at the file to the next


def watch(
    path: Path,
    console: Console,
    once: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Show a run in the terminal until an interrupt, or once.

    If the output is not a terminal, it is shown once, when no monitor writes to the file any more;
    ``say`` is told what it waits for.

    Raises:
        ValueError, OSError: shown once, the file cannot be read; waiting for it, it is not a run.
    """
    if once:
        console.print(view(path, read_run(path)))
    elif not console.is_terminal or console.is_dumb_terminal:
        console.print(view(path, _last(path, say)))
    else:
        _follow(path, console)


def view(path: Path, run: Run | None, note: str = "") -> Group | Text:
    """What is known of a run file at one moment; ``note`` is what the file's state is."""
    if run is None:
        return Text(f"Waiting: {shown(note, 600)}")
    start = run.starts[-1]
    policy = shown(str(start.policy.get("name", "")), 40)
    title = f"{shown(path.name, 60)}  step {run.num_steps:,}  {shown(start.framework, 40)} {policy}"
    return Group(Text(f"{title}  {note}", no_wrap=True, overflow="ellipsis"), Explained(run))


def _last(path: Path, say: Callable[[str], None]) -> Run:
    """The run at its end; waits for it."""
    if not path.exists():
        say(f"{path}: waiting; the file does not exist yet")
    follower = RunFollower(path)
    while True:
        with suppress(FileNotFoundError):
            is_written = has_writer(path)  # before the last line is read
            run = follower.read()
            if run is not None and not is_written:
                return run
        time.sleep(_PAUSE)


def _follow(path: Path, console: Console) -> None:
    follower, before = RunFollower(path), None
    with _ended_by_sigterm(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = *_look(path, follower), console.size
            if now != before:
                live.update(view(path, *now[:2]), refresh=True)
            before = now
            time.sleep(_PAUSE)


def _look(path: Path, follower: RunFollower) -> tuple[Run | None, str]:
    """The run so far, and the state of its file in words."""
    try:
        run = follower.read()
        if run is None:
            return None, f"{path} holds no run yet."
        return run, "(no monitor writes to it now)" if has_writer(path) is False else ""
    except FileNotFoundError:
        return None, f"{path} does not exist yet."
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    except ValueError as error:
        return None, str(error)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the terminal gets its screen back."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
