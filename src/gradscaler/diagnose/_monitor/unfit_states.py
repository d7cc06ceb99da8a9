"""Calls of PyTorch's ``load_state_dict(strict=False)`` that loaded nothing, as no key fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import currentframe
from traceback import walk_stack
from types import FrameType
from typing import Any

from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of

places: list[str] = []
"""Each such call until an observer notes it, as ``"2 keys (such as a, not b) at train.py:3"``."""


def noting(load: Callable[..., Any]) -> Any:
    """A function in place of PyTorch's ``load_state_dict``, which it calls."""
    note = guarded(_note)

    @in_place_of(load)
    def seen(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, state_dict, *args, **kwargs)
        note(state_dict, found, currentframe())
        return found

    return seen


def _note(state: Mapping[str, Any], found: Any, frame: FrameType | None) -> None:
    """Note a call that began in this frame, if none of its keys was expected, and others were."""
    given, own = list(state), found.missing_keys
    if not given or not own or not set(given) <= set(found.unexpected_keys):
        return
    line = users_line((each.f_code.co_filename, number) for each, number in walk_stack(frame))
    at = f" at {line}" if line else ""
    places.append(f"{len(given)} keys (such as {given[0]}, not {own[0]}){at}")
