"""The time that watches of a training may take."""

from __future__ import annotations

from time import perf_counter as clock
from time import thread_time as processor_clock

SHARE = 0.05  # of the training time, for all watches of a kind together
WATCHED = 20  # mean step times that a watch of the modules must be able to take
CREDIT = 1.0  # seconds beyond it: too few to be missed in a training that fails
LOOKED_AT = 2  # the same, if their outputs are only looked at


class Budget:
    """Limits the time of all watches to a share of the training time.

    Args:
        credit: seconds that may be used beyond that share.
        share: the share.
        of_processor: whether watches take the time of the processor alone: another process may
            stop a watch that is much shorter than a step.

    Attributes:
        began: the start of the running watch; None if none is running.
    """

    def __init__(
        self, credit: float = 0.0, share: float = SHARE, of_processor: bool = False
    ) -> None:
        self._credit, self._share, self._of_processor = credit, share, of_processor
        self._first: tuple[int, float] | None = None  # the first step, and when it ended
        self.began: float | None = None
        self._may_take = 0.0  # seconds for the running watch
        self._spent = 0.0
        self._longest = 0.0

    def step_ended(self, step: int) -> None:
        """Note the time if this is the end of the first step."""
        if self._first is None:
            self._first = step, clock()

    def usual(self, step: int) -> float:
        """The mean time of a step, without what watches took."""
        first, began = self._first or (step, clock())
        return max(clock() - began - self._spent, 0.0) / max(step - first, 1)

    def left(self, step: int, factor: float = 0.0) -> float | None:
        """The seconds that are left for a watch after a step; None if they are not enough.

        A watch must be able to take ``factor`` times the mean step time. Unless it only looks at
        modules (``LOOKED_AT``), it must be able to take as long as the longest watch so far.
        """
        if self._first is None:
            return self._credit or None
        first, began = self._first
        total = clock() - began
        left = self._share * total + self._credit - self._spent
        expected = factor * total / max(step - first, 1)
        if factor != LOOKED_AT:
            expected = max(expected, self._longest)
        return left if expected <= left else None

    @property
    def is_used_up(self) -> bool:
        """Whether the running watch has exceeded its time."""
        now = processor_clock() if self._of_processor else clock()
        return self.began is not None and now - self.began > self._may_take

    def begin(self, seconds: float, usual: float = 0.0) -> None:
        """Begin a watch that may take ``seconds`` more than what it watches usually takes."""
        if self.began is not None:
            self.end()
        now = processor_clock() if self._of_processor else clock()
        self.began, self._may_take = now + usual, seconds

    def end(self) -> None:
        """End the running watch.

        A watch that exceeded its time was cut off. A complete one is assumed to take twice as long.
        """
        if self.began is not None:
            now = processor_clock() if self._of_processor else clock()
            took = max(now - self.began, 0.0)
            self._spent += took
            self._longest = max(self._longest, 2 * took if took > self._may_take else took)
            self.began = None
