"""What PyTorch's optimizers were before they stepped: who made them, and the rates they loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import currentframe
from traceback import walk_stack
from types import FrameType
from typing import Any

from gradscaler.diagnose._graph.call_site import users_line
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._monitor.parameters import held_by, numbers_of, rates_of

lines = ByIdentity[str]()
"""The user's line that made each optimizer, and each schedule."""
ignored = ByIdentity[tuple[str, Sequence[float]]]()
"""The rate that each was made with in vain, as its groups had those of another one, and those."""
rates = ByIdentity[Sequence[float]]()
"""The learning rates of each that loaded a state, before a new schedule set others."""
first_rates = ByIdentity[Sequence[float]]()
"""Those at which the schedule of that state began; empty if it had none."""


continued = ByIdentity[str]()
"""The line, which may be empty, that loaded the state of a schedule of each, which goes on."""


def of_parameter(parameter: Any) -> str:
    """The line that made a parameter's optimizer, after ``"scheduled "`` if a schedule has stepped.

    Else it follows ``"alone "``, as it does where no optimizer is known.
    """
    held = [each for each in lines if any(p is parameter for p in held_by(each))]
    of = [each for each in lines if any(getattr(each, "optimizer", None) is own for own in held)]
    has_stepped = any(getattr(each, "last_epoch", 0) > 0 for each in of)
    line = lines.get(held[-1], "") if held else ""
    return f"{'scheduled' if has_stepped else 'alone'} {line}".rstrip()


def noting_progress(load: Callable[..., Any]) -> Any:
    """A function in place of ``load_state_dict`` of a schedule's class, which it calls."""
    note = guarded(_note_progress)

    @in_place_of(load)
    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        note(self, currentframe())
        return found

    return seen


def _note_progress(schedule: Any, frame: FrameType | None) -> None:
    """Note a schedule that has counted steps, in the call of a frame."""
    if getattr(schedule, "last_epoch", 0) > 0:
        continued[schedule.optimizer] = _line_around(frame)


def _line_around(frame: FrameType | None) -> str:
    """The user's line in the calls from a frame on; empty if there is none."""
    calls = ((each.f_code.co_filename, number) for each, number in walk_stack(frame))
    return users_line(calls) or ""


def noting_rates(load: Callable[..., Any]) -> Any:
    """A function in place of PyTorch's ``load_state_dict``, which it calls."""
    note = guarded(_note_rates)

    @in_place_of(load)
    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        note(self)
        return found

    return seen


def _note_rates(optimizer: Any) -> None:
    rates[optimizer] = rates_of(optimizer)
    first_rates[optimizer] = numbers_of(optimizer, "initial_lr")


def note_made(made: Any, frame: FrameType | None) -> None:
    """Note the line that makes an optimizer or a schedule, from a frame of that call on."""
    line = _line_around(frame)
    if _shares_groups(made):
        own, others = made.defaults.get("lr"), rates_of(made)
        if isinstance(own, (int, float)) and others and own not in others:
            by = f" at {line}" if line else ""
            ignored[made] = f"lr={own:g} of {type(made).__name__}{by}", others
    if line:
        lines[made] = line


def _shares_groups(optimizer: Any) -> bool:
    """Whether an optimizer's groups are the same dicts as those of one that was made before."""
    own = {id(group) for group in getattr(optimizer, "param_groups", ())}
    others = (getattr(each, "param_groups", ()) for each in lines if each is not optimizer)
    return any(id(group) in own for groups in others for group in groups)
