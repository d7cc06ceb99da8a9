"""What the user reads on stderr: findings on the way, and the verdict at the end."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# As wide as the documents. A word may be a path, which stays whole.
_PARAGRAPH = textwrap.TextWrapper(
    100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)

_NO_STEP = (
    "no optimizer of this process took a step after a call of backward(), so there is no verdict. "
    "Not seen are weights that the script updates by hand, gradients of torch.autograd.grad, and "
    "processes that it starts itself: start those by torchrun."
)

_STDERR = sys.stderr  # at the start; a script may replace it, and what it then holds is its own


def say(text: str, *lines: str) -> None:
    """Print a text on stderr, and lines below it, which stay whole.

    It is never a warning, which may be an error, and nothing happens if stderr is closed.
    """
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    wrapped = _PARAGRAPH.fill(f"gradscaler{rank}: {text}")
    with suppress(OSError, ValueError, AttributeError):
        if "tqdm" in sys.modules and _STDERR.isatty():
            _STDERR.write("\n")  # below its bar
        _STDERR.write("\n  ".join([wrapped, *lines]) + "\n")
        _STDERR.flush()


def say_no_step(options: argparse.Namespace) -> None:
    """Say why there is no verdict, unless the script ended early, as for ``--help``.

    Keras' ``fit`` on PyTorch steps by optimizers of its own.
    """
    if not options.has_raised and not options.is_watched:
        say(_NO_STEP)


def attempt(call: Callable[[], None]) -> None:
    """Make a call; what goes wrong in it must not end a training."""
    try:
        call()
    except Exception as error:
        say(f"cannot watch this training: {type(error).__name__}: {error}")


def is_quiet_rank() -> bool:
    """Whether another rank says that nothing is wrong."""
    return os.environ.get("RANK", "0") != "0"


def shown(path: Path) -> str:
    """A path as the user would type it."""
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(near))
