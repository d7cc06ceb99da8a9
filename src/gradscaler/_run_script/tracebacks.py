"""Tracebacks of a program's errors without the frames of gradscaler."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

_OWN = str(Path(__file__).parents[1])


def show_from(code: CodeType | None) -> None:
    """Let the hook for an uncaught exception see the frames from a program's first on.

    Frames of gradscaler below it stay only if gradscaler itself raised the error, and not a warning
    that the user's call gives without it, too.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next
        error.__traceback__ = trace
        each: BaseException | None = error
        while each is not None:
            each.__traceback__ = _without_own(each.__traceback__, isinstance(each, Warning))
            each = each.__cause__ or each.__context__
        shown(kind, error, error.__traceback__)

    sys.excepthook = show


def _without_own(trace: TracebackType | None, is_warning: bool) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    users = [each for each in entries if not _is_own(each)]
    is_ours = bool(entries) and _is_own(entries[-1]) and not is_warning
    kept = entries if is_ours else users
    for before, after in pairwise([*kept, None]):
        if before is not None:
            before.tb_next = after
    return kept[0] if kept else None


def _is_own(entry: TracebackType) -> bool:
    frame = entry.tb_frame  # a function that stands in for PyTorch's names another file
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package == "gradscaler" or frame.f_code.co_filename.startswith(_OWN)
