"""Raises an error in each function of gradscaler's that a watched training calls, in turn."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gradscaler

# The guard itself has no public name.
from gradscaler.diagnose._graph import guard as guards

_OWN = Path(gradscaler.__file__).parent
_ROOMS = str(_OWN / "diagnose"), str(_OWN / "_run_script")
# They stand in for functions that the user calls, and all else in them is guarded.
_STAND_INS = (
    *("initialized", "seen", "seen_call", "seen_gradient", "seen_run", "seen_backward"),
    *("transformed", "call", "__call__", "__get__", "is_off", "keep", "see_and_return"),
    *("unseen", "_is_busy", "_kept", "remove_all", "is_looking"),
    *("_has_no_word", "own"),  # these seven are too plain to fail
    *("on_train_begin", "on_train_end", "on_train_batch_end", "on_epoch_begin", "on_epoch_end"),
)


class InjectedError(RuntimeError):
    """Stands for any error of ours."""


def _fail(_: CodeType) -> None:
    raise InjectedError


def _is_own(frame: FrameType | None) -> bool:
    """Whether a frame is of our code, and not of the guard or of a function that guards a call."""
    if frame is None or frame.f_code.co_name == "safe":
        return False
    file = frame.f_code.co_filename
    return file.startswith(_ROOMS) and file != guards.__file__


@contextmanager
def _seeing_calls(see: Callable[[CodeType], object], code: CodeType | None) -> Iterator[None]:
    """Call ``see`` with each function of ours that others call, or a stand-in.

    If ``code`` is given, only its calls are seen.
    """

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if code is not None and frame.f_code is not code:
            return
        caller, name = frame.f_back, frame.f_code.co_name
        is_unguarded = not _is_own(caller) or (caller and caller.f_code.co_name in _STAND_INS)
        if _is_own(frame) and is_unguarded and name not in _STAND_INS and name[0] != "<":
            see(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def wrong_after_errors(training: Callable[[], object], folder: Path) -> dict[str, str]:
    """What goes wrong in a training under ``gradscaler.watch()``, by the function that raises."""
    native = training()

    def problem(see: Callable[[CodeType], object], code: CodeType | None = None) -> str:
        with gradscaler.watch(folder, every=2, step=4):
            guards.guard.say = guards._print
            try:
                with _seeing_calls(see, code):
                    return "" if training() == native else "other bits"
            except InjectedError:
                return "it reached the training"
            finally:
                gc.collect()

    seen: dict[CodeType, None] = {}
    assert problem(lambda code: seen.setdefault(code)) == ""
    assert len(seen) > 3
    found = {f"{code.co_filename}:{code.co_firstlineno}": problem(_fail, code) for code in seen}
    return {place: each for place, each in found.items() if each}
