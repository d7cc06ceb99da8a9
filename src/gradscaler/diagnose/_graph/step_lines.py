"""The lines of calls that belong to a step, as its script's own code shows them."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType, FrameType

from gradscaler.diagnose._graph.call_site import is_installed, is_of_users_file, shown_line

_CALLS = {
    "backward": ("backward",),
    "clip": ("clip_grad_norm_", "clip_grad_value_"),
    "eval": ("eval",),
    "zero": ("zero_grad",),
}


def lines_around(frame: FrameType | None) -> dict[str, str]:
    """The lines of a step and of the calls that belong to it: ``{"clip": "train.py:12"}``.

    The step's own is that of the innermost frame of the user's. A call is looked for in the
    functions that lead to the step, from the innermost outwards, and then in the other functions of
    their file. One that two lines make is left out: only its order would tell which of them counts.
    """
    frames = [each for each in _frames_from(frame) if is_of_users_file(each.f_code.co_filename)]
    if not frames or _is_installed(frames[0]):
        return {}
    frames = [each for each in frames if not _is_installed(each)]
    codes = [each.f_code for each in frames]
    scripts = [code for code in codes if code.co_name == "<module>"]
    codes += [each for script in scripts for each in _within(script) if each not in codes]
    found = {"step": shown_line(_file(frames[0]), frames[0].f_lineno)}
    for name in (*_CALLS, "schedule"):
        seen = {(code.co_filename, line) for code in codes for line in _lines_of(name, code)}
        for code in codes[: len(frames)]:
            if own := {(code.co_filename, line) for line in _lines_of(name, code)}:
                seen = own
                break
        if len(seen) == 1:
            found[name] = shown_line(*seen.pop())
    return found


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_installed(frame: FrameType) -> bool:
    return is_installed(_file(frame))


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _within(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions that are written in some code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _within(constant)


def _lines_of(name: str, code: CodeType) -> set[int]:
    """The lines of some code that call what a name stands for."""
    loads = list(_loads_of(code))
    if name == "schedule":
        both = pairwise(loads)
        return {at for (_, a), (at, b) in both if "sched" in a.lower() and b == "step"}
    return {line for line, loaded in loads if loaded in _CALLS[name]}


def _loads_of(code: CodeType) -> Iterable[tuple[int, str]]:
    """The names that some code loads, each with its line."""
    lines = {at: line for start, end, line in code.co_lines() for at in range(start, end, 2)}
    for each in dis.get_instructions(code):
        if not each.opname.startswith("LOAD_") or each.opname == "LOAD_CONST":
            continue
        line = lines.get(each.offset)
        if line is not None and isinstance(each.argval, str):
            yield line, each.argval
