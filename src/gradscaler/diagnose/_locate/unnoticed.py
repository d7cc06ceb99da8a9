"""Runs code of the user's once more, unnoticed by the training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from threading import get_ident
from typing import Any

import numpy as np


@contextmanager
def unnoticed() -> Iterator[None]:
    """Run code once more: what this thread prints is left out, and no random number is used up.

    Those are the global ones of Python and NumPy. In TensorFlow, ``tf.print`` prints nothing
    either, and no summary is written.
    """
    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 # the user's
        if "tensorflow" in sys.modules:
            _leave_out_output_of_tensorflow(undo)
        undo.callback(setattr, sys, "stdout", sys.stdout)
        sys.stdout = _OfOthers(sys.stdout)
        yield


def _leave_out_output_of_tensorflow(undo: ExitStack) -> None:
    tensorflow: Any = sys.modules["tensorflow"]
    undo.enter_context(tensorflow.summary.record_if(condition=False))
    operations: Any = import_module("tensorflow.python.ops.gen_logging_ops")
    undo.callback(setattr, operations, "print_v2", operations.print_v2)
    operations.print_v2 = partial(_unless_of, get_ident(), operations.print_v2)


def _unless_of(thread: int, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call unless this is the thread."""
    return None if get_ident() == thread else call(*args, **kwargs)


class _OfOthers:
    """A stream that takes what other threads write, and not what this one does."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, get_ident()

    def write(self, text: str) -> int:
        """Write a text if another thread calls."""
        return len(text) if get_ident() == self._thread else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
