"""Says findings to the user: as warnings, or by the function that the user gave for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from gradscaler.diagnose._graph.guard import guard, passing
from gradscaler.diagnose._record.finding import Finding, Verdict
from gradscaler.diagnose._record.kinds import kind_of
from gradscaler.errors import levels_to_caller


class FindingWarning(RuntimeWarning):
    """Something is wrong with the training; the message says what, and what to try."""


class StuckWarning(FindingWarning):
    """Step after step is skipped; the message is the verdict."""


class StuckError(RuntimeError):
    """Step after step is skipped; the message is the verdict, and how to go on."""


class Teller:
    """Says findings, each in a text of its own.

    Args:
        tell: what gets each finding; None for warnings.
        judge: gives the verdict of the steps so far.
    """

    def __init__(
        self, tell: Callable[[Finding], object] | None, judge: Callable[[], Verdict]
    ) -> None:
        self._tell, self._judge = tell, judge
        self._texts = set[str]()  # of the findings that were said
        self._blamed: tuple[int, Finding] | None = None  # the cause of failures said last, and when

    def says(self, finding: Finding) -> bool:
        """Whether a finding with this text was said."""
        return finding.text in self._texts

    def say(
        self,
        findings: Sequence[Finding],
        step: int,
        category: type[FindingWarning] = FindingWarning,
    ) -> None:
        """Say findings of a step, as warnings of this category if they are warnings."""
        for finding in findings:
            self._texts.add(finding.text)
            said = self._in_place(finding, step)
            with passing():
                if self._tell is not None:
                    self._tell(said)
                else:
                    warnings.warn(category(said.text), stacklevel=levels_to_caller("torch."))

    def _in_place(self, finding: Finding, step: int) -> Finding:
        """A finding that says so if it replaces the cause of failures that was told before.

        It does if the evidence no longer shows that one.
        """
        if not kind_of(finding.kind).explains_skips:
            return finding
        (at, before), self._blamed = self._blamed or (step, finding), (step, finding)
        if at == step or _is_same(before, finding):
            return finding
        if any(_is_same(before, each) for each in self._judge().findings):
            return finding
        return replace(finding, cause=f"In place of what was said at step {at}: {finding.cause}")

    def warn_of_replay(self, error: Exception) -> None:
        """Warn that a replay has raised; only say it if findings are no warnings either."""
        if self._tell is None:
            what = f"replay is called no more, and the training continues: {error!r}"
            with passing():
                warnings.warn(RuntimeWarning(what), stacklevel=levels_to_caller())
        else:
            guard.say(f"a failing step could not be run again, and the training goes on: {error!r}")


def _is_same(one: Finding, other: Finding) -> bool:
    """Whether two findings blame the same: one may know more of the place than the other."""
    if one.line is not None and one.line == other.line:
        return True
    places = (one.where, other.where), (one.line, other.line)
    return one.kind == other.kind and all(a == b or None in (a, b) for a, b in places)
