"""The learning rates and other settings of optimizers, and the schedules that change them."""

from __future__ import annotations

import math
import operator
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np

from gradscaler._in_memory import in_memory
from gradscaler.diagnose._monitor import new_optimizers
from gradscaler.diagnose._monitor.iterations import Iteration
from gradscaler.diagnose._monitor.parameters import groups_of, has_stepped, rates_of
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.thresholds import FADED, FEW_STILL, RATE_JUMPED, TOO_OFTEN

_SETTINGS = "lr", "weight_decay", "momentum", "betas", "eps"
# What makes a schedule of PyTorch's set a rate of 0, by its class; None if any number does in time.
_ENDS_AT_0 = {
    "StepLR": ("gamma", 0),
    "MultiStepLR": ("gamma", 0),
    "ExponentialLR": ("gamma", 0),
    "ConstantLR": ("factor", 0),
    "ReduceLROnPlateau": ("factor", 0),
    "LinearLR": ("end_factor", 0),
    "PolynomialLR": ("total_iters", None),
}


class LearningRates:
    """Notes what the settings of each optimizer show before its steps."""

    def __init__(self) -> None:
        self._usual: dict[int, list[Any]] = {}  # settings in which nothing was seen, by optimizer
        # Of those that had a state and whose rates do not fall: the rates then, and the latest.
        self._resumed: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
        self._peaks: dict[int, list[float]] = {}  # the largest rate of each group, by optimizer
        self._still = Counter[tuple[int, Event]]()  # steps at a rate of 0, or almost

    def see(self, optimizer: object, iteration: Iteration, is_new: bool) -> None:
        """Note in an iteration what an optimizer's settings show; it is new until it has stepped.

        Settings that are the same objects as in the step before show what they showed.
        """
        now = [group.get(name) for group in groups_of(optimizer) for name in _SETTINGS]
        usual = self._usual.pop(id(optimizer), [])
        is_usual = len(now) == len(usual) and all(map(operator.is_, now, usual))
        if is_new or not is_usual:
            num_events = len(iteration.events)
            self._see(optimizer, iteration, is_new)
            is_usual = len(iteration.events) == num_events
        if is_usual:
            self._usual[id(optimizer)] = now

    def _see(self, optimizer: object, iteration: Iteration, is_new: bool) -> None:
        for setting in _bad_settings_of(optimizer):
            iteration.note(Event.NONFINITE, setting)
        rates = rates_of(optimizer)
        if any(map(operator.lt, rates, repeat(0))):
            iteration.note(Event.UPHILL)
        if rates and not any(rates) and _is_made_to_move(optimizer):
            self._note_still(optimizer, iteration, Event.STILL)
        if self._have_faded(optimizer, rates):
            self._note_still(optimizer, iteration, Event.FADED)
        rate, others = new_optimizers.ignored.get(optimizer, ("", ()))
        if rate and rates == others and is_new:
            iteration.note(Event.IGNORED, rate)
        if jump := self._rescheduled(optimizer, rates, is_new):
            iteration.note(Event.RESCHEDULED, jump)

    def _have_faded(self, optimizer: object, rates: Sequence[float]) -> bool:
        """Whether each learning rate of an optimizer is almost 0 beside the largest it had."""
        peaks = self._peaks.get(id(optimizer), [])
        if rates == peaks:
            return False
        if len(peaks) != len(rates) or any(map(operator.gt, rates, peaks)):
            known = [*peaks, *rates[len(peaks) :]]
            self._peaks[id(optimizer)] = peaks = list(map(max, rates, known))
        moved = [(rate, peak) for rate, peak in zip(rates, peaks, strict=True) if peak > 0]
        return bool(moved) and all(rate <= FADED * peak for rate, peak in moved)

    def _rescheduled(self, optimizer: object, rates: Sequence[float], is_new: bool) -> str | None:
        """How a resumed optimizer's rates leave what they were, as ``"1e-4 to 0.1"``.

        None until one has risen far, without a fall of any, or if no new schedule of PyTorch's
        makes it: one that was resumed has counted more steps, and may begin a new cycle. It has set
        its first rate, too, if it was made after the optimizer's state was loaded. A fall counts
        if the schedule is that of the state, by the rates that it begins with.
        """
        key = id(optimizer)
        if is_new and has_stepped(optimizer):
            loaded = new_optimizers.rates.get(optimizer, rates)  # a schedule may have changed them
            self._resumed[key] = loaded, loaded
        before, latest = self._resumed.get(key, (rates, rates))
        if rates == latest:
            return None
        self._resumed.pop(key, None)
        if any(map(operator.lt, rates, latest)):
            far = (
                both for both in zip(latest, rates, strict=False) if RATE_JUMPED * both[1] < both[0]
            )
            is_far = latest == before and _begins_as_loaded(optimizer)
            return next((f"{a:g} to {b:g}" for a, b in far if is_far), None)
        is_made_anew = _has_new_schedule(optimizer) or _is_set_back(optimizer, before, rates)
        if latest == before and not is_made_anew:
            return None
        both = zip(before, rates, strict=False)
        jump = next(((a, b) for a, b in both if 0 < RATE_JUMPED * a <= b), None)
        if jump is None:
            self._resumed[key] = before, rates
            return None
        return f"{jump[0]:g} to {jump[1]:g}"

    def _note_still(self, optimizer: object, iteration: Iteration, event: Event) -> None:
        """Note a step at a rate of 0, or almost, and once the setting that makes it so.

        It is the setting of a schedule, as ``"gamma=0 of StepLR at train.py:7"``. A schedule that
        counts several steps for each of the optimizer's is noted, too.
        """
        iteration.note(event)
        self._still[id(optimizer), event] += 1
        if self._still[id(optimizer), event] != FEW_STILL:  # as a look at all objects takes long
            return
        schedules = _schedules_of(optimizer)
        if setting := next(filter(None, map(_zeroing, schedules)), ""):
            iteration.note(event, setting)
        calls = max((getattr(each, "last_epoch", 0) for each in schedules), default=0)
        is_resumed = optimizer in new_optimizers.continued or optimizer in new_optimizers.rates
        if calls >= TOO_OFTEN * iteration.number and not is_resumed:
            iteration.note(Event.HASTY, f"{calls} times in {iteration.number} steps")


def _has_new_schedule(optimizer: object) -> bool:
    """Whether an optimizer has schedules of PyTorch's, none of which counts more than one step."""
    own = [getattr(each, "last_epoch", 0) for each in _schedules_of(optimizer)]
    return bool(own) and max(own) <= 1


def _begins_as_loaded(optimizer: object) -> bool:
    """Whether the schedules of an optimizer are new, and begin as that of its loaded state did."""
    first = new_optimizers.first_rates.get(optimizer, ())
    bases = [getattr(each, "base_lrs", None) for each in _schedules_of(optimizer)]
    return bool(first) and first in bases and _has_new_schedule(optimizer)


def _is_set_back(optimizer: object, loaded: Sequence[float], rates: Sequence[float]) -> bool:
    """Whether the rates are the first of a schedule, whose own state says that they are others."""
    for each in _schedules_of(optimizer):
        with suppress(Exception):  # one of the user's own class may have none
            if each.base_lrs == list(rates) and each.get_last_lr() == list(loaded):
                return True
    return False


def _schedules_of(optimizer: object) -> list[Any]:
    """The schedules of PyTorch's that an optimizer has."""
    kinds = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", ())
    return [each for each in in_memory(kinds) if getattr(each, "optimizer", None) is optimizer]


def _zeroing(schedule: Any) -> str:
    """The setting with which a schedule has set a rate of 0; empty if that is not known."""
    name = type(schedule).__name__
    setting, needed = _ENDS_AT_0.get(name, ("", None))
    value = getattr(schedule, setting, None)
    before = max(getattr(schedule, "base_lrs", ()), default=0.0)
    latest: Sequence[float] = ()
    with suppress(Exception):  # one of the user's own class may have none
        latest = schedule.get_last_lr()
    is_at_0 = all(rate <= FADED * before for rate in latest)
    if value is None or needed not in (None, value) or not is_at_0:
        return ""
    line = new_optimizers.lines.get(schedule, "")
    return f"{setting}={value:g} of {name}" + (f" at {line}" if line else "")


def _bad_settings_of(optimizer: object) -> Iterator[str]:
    """An optimizer's settings that are NaN or Inf, such as ``"lr of group 0"``."""
    for number, group in enumerate(groups_of(optimizer)):
        for name in _SETTINGS:
            value = group.get(name)
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, (float, np.floating)) and not math.isfinite(each):
                    yield f"{name} of group {number}"


def _is_made_to_move(optimizer: object) -> bool:
    """Whether an optimizer was made with a learning rate other than 0, as far as it tells."""
    defaults = getattr(optimizer, "defaults", None)
    rate = defaults.get("lr") if isinstance(defaults, Mapping) else None
    return isinstance(rate, (int, float)) and rate != 0
