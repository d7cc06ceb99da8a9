"""A last word before SIGTERM ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def before_termination(call: Callable[[], None]) -> None:
    """Call a function when SIGTERM comes, then let it end the process; a user's handler stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _LastWord(call))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_restore)


class _LastWord:
    """A handler that passes for ``SIG_DFL``.

    ``signal.getsignal`` looks for an equal constant, and returns that. So a program that installs
    its own handler only where there is none, as Lightning does, still does.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._call()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __eq__(self, other: object) -> bool:
        return other is self or other == signal.SIG_DFL.value

    def __hash__(self) -> int:
        return hash(signal.SIG_DFL.value)


def _restore() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # ours passes for it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
