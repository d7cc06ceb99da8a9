"""Ends all watches before a second thread trains: they watch one, and would mix up both."""

from __future__ import annotations

import sys
import threading

from gradscaler.diagnose._graph.guard import guard

_REASON = "a second thread trains, and gradscaler watches one"
# Modules of Python in which a thread waits for others, as one does that has started them.
_WAITING = {"threading", "concurrent.futures.thread", "selectors"}
_latest: list[threading.Thread] = []  # the one that trained; none before the first of a watch


def forget() -> None:
    """Note that no watch is left: another one may begin in another thread."""
    _latest.clear()


def end_if_in_threads(*, is_new: bool = False, trains: bool = True) -> None:
    """End all watches if another thread trains, too. Call it in each step, as it takes no time.

    Args:
        is_new: whether this thread begins a training. The one before has ended if its thread waits.
        trains: whether this is a step, and not what comes before the first.
    """
    own = threading.current_thread()
    other = next(iter(_latest), own)
    if trains:
        _latest[:] = [own]
    if other is own or not other.is_alive() or (is_new and _waits(other)):
        return
    guard.end(_REASON, f"the watch ended, and the training goes on: {_REASON}.")


def _waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_globals.get("__name__") in _WAITING
