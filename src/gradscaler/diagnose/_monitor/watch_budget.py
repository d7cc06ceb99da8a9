"""When a monitor may watch a step whose batch may be fine."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from time import perf_counter as clock

SHARE = 0.05  # of the time that training takes, which such steps may take in all
_ALLOWANCE = 0.5  # seconds beyond that, in the steps in which a failure is likely
_PERIODIC = 3  # failures at equal distances that make the next one expected


class WatchBudget:
    """Looks for failures that come now and then, in as much time as there is.

    A watched step counts with all of its time, from the end of the step before to its own. The
    next one may take as long as the latest. The first failure is worth a watch whatever that takes,
    and later ones, or the step when one is due, what is left of half a second.
    """

    def __init__(self) -> None:
        self._begin: float | None = None  # the end of the first step
        self._end = 0.0  # the end of the latest step
        self._spent = 0.0  # in steps that were watched
        self._latest = 0.0  # in the latest of them
        self._count = 0  # of them
        self._failures: deque[int] = deque(maxlen=_PERIODIC)

    def step_ended(self, step: int, watched: bool, failed: bool) -> None:
        """Note how long a step took; ``failed`` if it is one of those to be located."""
        now = clock()
        if self._begin is None:
            self._begin = now
        elif watched:
            self._latest = now - self._end
            self._spent += self._latest
            self._count += 1
        self._end = now
        if failed and step not in self._failures:
            self._failures.append(step)

    def allows(self, step: int) -> bool:
        """Whether to watch a step after a failure; where they are periodic, the next one alone."""
        if not self._failures or self._begin is None:
            return False
        gaps = {after - before for before, after in pairwise(self._failures)}
        is_periodic = len(self._failures) == _PERIODIC and len(gaps) == 1
        if is_periodic and (step - self._failures[-1]) % gaps.pop():
            return False
        spent, share = self._spent + self._latest, SHARE * (self._end - self._begin)
        is_likely = is_periodic or step == self._failures[-1] + 1
        return spent < share or (is_likely and (not self._count or spent < _ALLOWANCE + share))
