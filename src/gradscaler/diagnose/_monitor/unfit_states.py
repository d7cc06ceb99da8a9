"""Calls of PyTorch's ``load_state_dict()`` that load nothing, or all.

Nothing is loaded if no key fits, which ``strict=False`` lets pass, or if the state is made of the
module's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import currentframe
from traceback import walk_stack
from types import FrameType
from typing import Any

from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor.by_identity import ByIdentity

places: list[str] = []
"""Each such call until an observer notes it, as ``"2 keys (such as a, not b) at train.py:3"``."""
copies: list[str] = []
"""The line, which may be empty, of each that copies a module onto itself, likewise."""
whole = ByIdentity[str]()
"""The line, which may be empty, that last loaded all of a module."""
loaded = ByIdentity[str]()
"""Those lines that no observer has noted."""


def noting(load: Callable[..., Any]) -> Any:
    """A function in place of PyTorch's ``load_state_dict``, which it calls."""
    note = guarded(_note)

    @in_place_of(load)
    def seen(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = _is_own(self, state_dict)
        found = load(self, state_dict, *args, **kwargs)
        note(self, state_dict, found, is_own, currentframe())
        return found

    return seen


def forget() -> None:
    """Forget the calls that no observer has noted."""
    places.clear()
    copies.clear()
    whole.clear()
    loaded.clear()


def loaded_among(parameters: Iterable[Any], lines: ByIdentity[str]) -> str | None:
    """The line, which may be empty, that loaded a module with one of these; None if none did."""
    ids = {id(each) for each in parameters}
    return next((lines.get(m, "") for m in lines if not _ids_of(m).isdisjoint(ids)), None)


def _ids_of(module: Any) -> set[int]:
    return {id(each) for each in module.parameters()}


def _is_own(module: Any, state: Mapping[str, Any]) -> bool:
    """Whether each parameter of a module would be loaded from its own memory."""
    with suppress(Exception):  # a tensor may have no memory of its own, or be no tensor
        named = list(module.named_parameters())
        return bool(named) and all(_has_memory_of(p, state.get(name)) for name, p in named)
    return False


def _has_memory_of(parameter: Any, other: Any) -> bool:
    place = 0 if other is None else other.data_ptr()
    return bool(place and place == parameter.data_ptr())


def _note(
    module: Any, state: Mapping[str, Any], found: Any, is_own: bool, frame: FrameType | None
) -> None:
    """Note a call that began in this frame, if it loads nothing or all."""
    given, missing = list(state), found.missing_keys
    is_unfit = given and missing and set(given) <= set(found.unexpected_keys)
    if missing and not is_unfit and not is_own:
        return
    line = users_line((each.f_code.co_filename, number) for each, number in walk_stack(frame))
    if is_own:
        copies.append(line or "")
        return
    if not missing:
        whole[module] = loaded[module] = line or ""
        return
    at = f" at {line}" if line else ""
    places.append(f"{len(given)} keys (such as {given[0]}, not {missing[0]}){at}")
