"""The choice of the findings to warn of during a run, and of when to look for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from time import perf_counter as clock

from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.kinds import kind_of
from gradscaler.diagnose._record.thresholds import FIRST_EVENTS, LONG_RUN, WORSE

_LEAST_NEW = 10  # steps from one look to the next
_SHARE = 0.01  # of the training time, for looks


class WarningFilter:
    """Lets each kind of finding through once, and again when it gets worse.

    An uncertain finding is reported if a later look finds it again, after as many steps as it says,
    or at the end of a long run. A kind is also reported again once its line in the user's code is
    known, unless another kind was reported with this line.
    """

    def __init__(self, step: int) -> None:
        self._first = self._looked_at = step
        self._next = 0.0  # the earliest time of the next look
        self._events = Counter[Hashable]()
        self._told: dict[str, int] = {}  # by kind, and by line: the steps that showed it then
        self._placed: set[str] = set()  # the kinds that were reported with a line
        # By kind: the latest step and the latest sample when it was first found.
        self._found: dict[str, tuple[int, int]] = {}

    def is_due(self, step: int) -> bool:
        """Whether to look at the evidence after a step; if so, the time of the look starts."""
        now = clock()
        if step - self._looked_at < _LEAST_NEW or now < self._next:
            return False
        self._looked_at, self._began = step, now
        return True

    def note_event(self, kind: Hashable) -> None:
        """Look after this step if it is one of the first six, the 8th, 12th, 16th ... of a kind.

        So what an event shows is reported in that step, whatever the clock says. The numbers grow
        by a factor of about 1.4, so that a run of a million events looks 40 times for them.
        """
        self._events[kind] += 1
        number = self._events[kind]
        if (
            number <= FIRST_EVENTS
            or number.bit_count() == 1
            or (number % 3 == 0 and (number // 3).bit_count() == 1)
        ):
            self.hurry()

    def hurry(self) -> None:
        """Look at the evidence after the next step, as there is news."""
        self._looked_at, self._next = self._looked_at - _LEAST_NEW, 0.0

    def has_looked(self) -> None:
        """Note the end of a look; the longer it took, the later the next one is due."""
        now = clock()
        self._next = now + (now - self._began) / _SHARE

    def select(
        self, findings: Sequence[Finding], step: int, sampled: int, is_last: bool
    ) -> list[Finding]:
        """The findings to report.

        Args:
            findings: all findings that the evidence shows now.
            step: the latest step.
            sampled: the step of the latest sample.
            is_last: whether the run has ended.
        """
        before = self._found
        self._found = {each.kind: before.get(each.kind, (step, sampled)) for each in findings}
        is_long = step - self._first >= LONG_RUN
        selected = []
        for finding in findings:
            kind, count = finding.kind, max(finding.count, 1)
            found_at, sampled_then = before.get(kind, (step, sampled))
            is_found_again = step - found_at >= _LEAST_NEW
            if kind_of(kind).is_of_sample:
                is_found_again = sampled_then < sampled
            is_found_again &= step - found_at >= finding.lasts
            is_sure = finding.is_certain or is_found_again or (is_last and is_long)
            line = finding.line or ""
            is_new = count >= WORSE * self._told.get(line, self._told.get(kind, 0))
            is_placed = bool(line) and kind not in self._placed and line not in self._told
            if kind != "normal" and is_sure and (is_new or is_placed):
                self.note(finding)
                selected.append(finding)
        return selected

    def note(self, finding: Finding) -> None:
        """Note that a finding was reported."""
        self._told[finding.kind] = max(finding.count, 1)
        if finding.line is not None:
            self._told[finding.line] = max(finding.count, 1)
            self._placed.add(finding.kind)
