"""One guard around every call into a training that is watched: no error of ours reaches it.

The first error of ours ends all watches of the process, as they share PyTorch's hooks and modes. It
is told once, and the training goes on. An interrupt, and what the user's own functions and warnings
raise, pass through.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any, Protocol, TypeVar

CallT = TypeVar("CallT", bound=Callable[..., Any])

_OWN = "an error of gradscaler's own ended"
_REPORT = "Please report this line to gradscaler"
_PASSES = "gradscaler_passes"  # in the attributes of an error that is the user's


class Watch(Protocol):
    """Something that watches a training."""

    def break_off(self, reason: str) -> None:
        """Watch no more, whatever state this is in; ``reason`` is for the verdict."""


def _print(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        sys.stderr.write(f"gradscaler: {text}\n")
        sys.stderr.flush()


class Guard:
    """Ends all watches of the process at the first error.

    Attributes:
        say: called with what the user reads.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = _print
        self._watches = weakref.WeakSet[Any]()
        self.lock = threading.RLock()  # of one thread at a time, in all that watches

    def add(self, watch: Watch) -> None:
        """End a watch at an error. It is not kept alive."""
        self._watches.add(watch)

    def remove(self, watch: Watch) -> None:
        """Note that a watch has ended."""
        self._watches.discard(watch)

    def handle(self, error: Exception) -> None:
        """End all watches because of an error, or raise it if it is the user's."""
        if _PASSES in vars(error) or _is_of_handler(error):
            raise error
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        told = f"{_OWN} the watch, and the training goes on. {_REPORT}: {what} ({_at(error)})"
        self.end(f"{_OWN} it ({what})", told)

    def end(self, reason: str, told: str) -> None:
        """End all watches, and tell why if there were any."""
        watches = list(self._watches)
        self._watches.clear()
        if watches:
            with suppress(Exception):
                self.say(told)
        for watch in watches:
            with suppress(Exception):
                watch.break_off(reason)

    def renew_lock(self) -> None:
        """Make a lock that no thread holds, as in a forked child, where its holder is missing."""
        self.lock = threading.RLock()


guard = Guard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=guard.renew_lock)


def guarded(call: CallT) -> CallT:
    """A function that makes a call into a training; returns None at an error of ours."""

    @wraps(call)
    def safe(*args: Any, **kwargs: Any) -> Any:
        try:
            with guard.lock:
                return call(*args, **kwargs)
        except Exception as error:
            guard.handle(error)

    return safe  # type: ignore[return-value]


@contextmanager
def passing() -> Iterator[None]:
    """Let errors of the user's own functions, and warnings that are errors, reach the training."""
    try:
        yield
    except Exception as error:
        vars(error)[_PASSES] = True
        raise


def _is_of_handler(error: Exception) -> bool:
    """Whether a signal's handler raised an error, as a time limit does; it may come anywhere."""
    handlers = {getattr(signal.getsignal(each), "__code__", None) for each in signal.Signals}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))


def _at(error: Exception) -> str:
    """Where an error of ours was raised, and the versions."""
    own = Path(__file__).parents[2]
    calls = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    ours = [(Path(code.co_filename), line) for code, line in calls]
    at = [f"{path.relative_to(own)}:{line}" for path, line in ours if own in path.parents]
    torch: Any = sys.modules.get("torch")
    version = sys.modules["gradscaler"].__version__
    versions = f"gradscaler {version}, Python {platform.python_version()}"
    versions += f", PyTorch {torch.__version__}" if torch is not None else ""
    return ", ".join([*at[-1:], versions])
