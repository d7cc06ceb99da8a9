"""What the user reads on stderr: findings on the way, and the verdict at the end."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradscaler._frameworks import quoted
from gradscaler._run_script.undo import on_stop

# As wide as the documents. A word may be a path, which stays whole.
_PARAGRAPH = textwrap.TextWrapper(
    100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)

_NO_STEP = (
    "no optimizer of this process took a step after a call of backward(), so there is no verdict. "
    "Not seen are weights that the script updates by hand, but for a loss of Inf or NaN on a CPU, "
    "gradients of torch.autograd.grad, steps of Keras' LossScaleOptimizer in a loop of the "
    "script's own, and processes that it starts itself: start those by torchrun."
)

_STDERR = sys.stderr  # at the start; a script may replace it, and what it then holds is its own


class Voice:
    """Says everything that the user reads. A text says whether it comes on the way or at the end.

    A text is never a warning, which may be an error, and nothing happens if stderr is closed.
    """

    def __init__(self) -> None:
        self._options = argparse.Namespace(quiet=False)
        self._process = os.getpid()
        self._kept: list[str] = []  # notes that wait for the next last word
        self.rank: str | None = None  # of this process when the latest run began

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options of what is said, and when."""
        quiet = "say nothing during the training, and the verdict at its end"
        parser.add_argument("-q", "--quiet", action="store_true", help=quiet)

    def begin(self, options: argparse.Namespace) -> None:
        """Speak in this process from now on. Call it before what says a verdict begins."""
        self._options, self._process, self._kept = options, os.getpid(), []
        self.rank = None
        atexit.unregister(self._say_kept)
        atexit.register(self._say_kept)  # if no last word has said it
        on_stop.callback(self._end)

    def _end(self) -> None:
        self._say_kept()
        self.rank = None
        self._options = argparse.Namespace(quiet=False)  # the others keep the latest run alive

    @property
    def is_of_this_process(self) -> bool:
        """Whether it began to speak here, and not in a process that has forked this one."""
        return os.getpid() == self._process

    def note_rank(self) -> None:
        """Keep the rank with which a run begins, as the process may leave its group before."""
        self.rank = None
        self.rank = rank_of_process()

    def tell(self, text: str, *lines: str) -> bool:
        """Say a finding on the way. False if not, as this is quiet: the last word says it then."""
        if not self._options.quiet:
            _print(text, *lines)
        return not self._options.quiet

    def note(self, text: str) -> None:
        """Say on the way what no last word repeats; if this is quiet, before the next last word."""
        if self._options.quiet:
            self._kept.append(text)
        else:
            _print(text)

    def conclude(self, text: str, *lines: str) -> None:
        """Say a last word on a run, and lines below it, which stay whole."""
        self._say_kept()
        _print(text, *lines)

    def _say_kept(self) -> None:
        kept, self._kept = self._kept, []
        if self.is_of_this_process:  # else it is a forked child's, and the parent says it
            for each in kept:
                _print(each)


voice = Voice()
"""The voice of this process."""


def _print(text: str, *lines: str) -> None:
    rank = rank_of_process()
    speaker = "gradscaler" if rank is None else f"gradscaler (rank {rank})"
    wrapped = _PARAGRAPH.fill(f"{speaker}: {text}")
    with suppress(OSError, ValueError, AttributeError):
        if "tqdm" in sys.modules:  # a log file, too, has its bar
            _STDERR.write("\n")  # below its bar
        _STDERR.write("\n  ".join([wrapped, *lines]) + "\n")
        _STDERR.flush()


def conclude_without_step(options: argparse.Namespace) -> None:
    """Say why there is no verdict, unless the script ended early, as for ``--help``.

    Keras' ``fit`` on PyTorch steps by optimizers of its own.
    """
    if not options.has_raised and not options.is_watched:
        voice.conclude(_NO_STEP)


def attempt(call: Callable[[], object]) -> None:
    """Make a call; what goes wrong in it must not end a training."""
    try:
        call()
    except Exception as error:
        voice.note(f"cannot watch this training: {type(error).__name__}: {error}")


def rank_of_process() -> str | None:
    """The rank of this process, which a launcher or a group of several says; None without one.

    A process that has left its group by the end of a run has the rank that it began it with.
    """
    if (rank := os.environ.get("RANK")) is not None:
        return rank
    found: Any = getattr(sys.modules.get("torch"), "distributed", None)
    is_in_group = found is not None and found.is_available() and found.is_initialized()
    if is_in_group:
        return str(found.get_rank()) if found.get_world_size() > 1 else None
    return voice.rank if voice.is_of_this_process else None


def is_quiet_rank() -> bool:
    """Whether another rank says that nothing is wrong."""
    return rank_of_process() not in (None, "0")


def shown(path: Path) -> str:
    """A path as the user would type it."""
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return quoted(str(near))
