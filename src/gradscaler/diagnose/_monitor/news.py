"""Which findings a user is told of while a run goes on, and when the evidence is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter as clock

from gradscaler.diagnose._findings import Finding

_LEAST_NEW = 10  # steps from one look to the next
_SHARE = 0.01  # of the time, which looks may take
_WORSE = 10  # times as many steps
_FEWEST = 50  # steps, of which an uncertain finding may be
_OF_SAMPLES = "misuse", "underflow", "range", "dead", "stalled"  # which later ones may disprove


class News:
    """Findings that are told once for each kind, and again when they get worse.

    One that is not certain is told if a later look finds it again, or if the run has ended.
    """

    def __init__(self, step: int) -> None:
        self._first = self._looked_at = step
        self._next = 0.0  # the earliest time of the next look
        self._told: dict[str, int] = {}  # kinds, and how many steps showed them
        self._found: dict[str, int] = {}  # kinds, and the sample before they were found

    def is_due(self, step: int) -> bool:
        """Whether to look at the evidence after a step; looking has begun then."""
        now = clock()
        if step - self._looked_at < _LEAST_NEW or now < self._next:
            return False
        self._looked_at, self._began = step, now
        return True

    def has_looked(self) -> None:
        """Note how long a look took, which puts off the next one."""
        now = clock()
        self._next = now + (now - self._began) / _SHARE

    def of(
        self, findings: Sequence[Finding], step: int, sampled: int, is_last: bool
    ) -> list[Finding]:
        """Those to tell of.

        Args:
            findings: all that the evidence shows now.
            step: the latest.
            sampled: that of the latest sample.
            is_last: whether the run has ended.
        """
        before = self._found
        self._found = {each.kind: before.get(each.kind, sampled) for each in findings}
        is_long = step - self._first >= _FEWEST
        news = []
        for finding in findings:
            kind, count = finding.kind, max(finding.count, 1)
            is_stale = kind in _OF_SAMPLES and before.get(kind) == sampled
            is_found_again = kind in before and not is_stale
            is_sure = finding.is_certain or is_found_again or (is_last and is_long)
            if kind != "normal" and is_sure and count >= _WORSE * self._told.get(kind, 0):
                self._told[kind] = count
                news.append(finding)
        return news

    def note(self, kind: str, count: int) -> None:
        """Note that a user was told of a kind in another way."""
        self._told[kind] = count
