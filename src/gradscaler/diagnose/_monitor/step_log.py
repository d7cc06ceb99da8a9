"""The log of the steps that a monitor has seen, and the decision that a run is stuck."""

from __future__ import annotations

import copy as copying
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from time import monotonic
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._graph.guard import passing
from gradscaler.diagnose._monitor.streaks import SkipStreak, continued, in_one_line, skip_of
from gradscaler.diagnose._monitor.teller import StuckError, StuckWarning, Teller
from gradscaler.diagnose._monitor.warning_filter import WarningFilter
from gradscaler.diagnose._record.events import Counted, Event, texts_of
from gradscaler.diagnose._record.finding import Finding, Verdict
from gradscaler.diagnose._record.lines import BadStep, Line, Sample, Skip, VerdictLine, Watched
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import MANY_CALLS, STAYED_PASSES
from gradscaler.diagnose._record.writer import RunFile, ScalarLog
from gradscaler.outcome import HISTORY_LENGTH

OnStuck = Literal["warn", "raise", "continue"]

logger = logging.getLogger("gradscaler")

_NONFINITE = "parameter", "state"  # kinds of findings
_length_of = attrgetter("length")  # of a streak
_LONGEST_UNWRITTEN = 1.0  # seconds of training that the file of a killed process may lack


class Observations(NamedTuple):
    """Observations other than losses and gradients; :class:`Sample` describes each field."""

    events: tuple[Counted, ...] = ()
    backward: frozenset[str] = frozenset()
    cut: Mapping[str, str] | None = None
    num_losses: int = 1

    def after(self, other: Observations) -> Observations:
        """These observations, followed by those of ``other``."""
        cut = self.cut if other.cut is None else other.cut
        most = max(self.num_losses, other.num_losses)
        return Observations(self.events + other.events, self.backward | other.backward, cut, most)


_NOTHING = Observations()


class Counts(NamedTuple):
    """The counts of a log. One assignment replaces them all, so no interrupt can split them."""

    step: int  # the number of the last step
    sampled: int  # the step of the last sample
    num_skipped: int = 0
    streaks: Mapping[int, SkipStreak] = MappingProxyType({})  # by optimizer
    is_finite_here: bool | None = None  # this process' gradients in all inspected skips
    evidence: Evidence = Evidence(0, 0)  # from the lines written so far
    optimizer: int | None = None  # the only one in the last step; None if there were several
    observed: Observations = _NOTHING  # since the last sample
    bad: int | None = None  # the latest step that was applied with gradients that were not finite


class StepLog:
    """A log of steps, in order.

    ``step`` is the number of steps before this log. ``on_stuck`` says what to do after
    ``stuck_after`` skips in a row. An interrupt may stop any method. Repeating the call continues
    from there, and counts nothing twice.

    Attributes:
        history: the latest steps.
        counts: the counts so far.
        num_before: the number of steps before this log.
    """

    def __init__(
        self,
        writers: Sequence[RunFile | ScalarLog],
        step: int,
        on_stuck: OnStuck,
        stuck_after: int,
        judge: Callable[[StepLog], Verdict],
        tell: Callable[[Finding], object] | None = None,
    ) -> None:
        self.history: deque[Step] = deque(maxlen=HISTORY_LENGTH)
        self._writers: Sequence[RunFile | ScalarLog] | None = writers  # a copy has None
        self.num_before = step
        self._on_stuck = on_stuck
        self._stuck_after = stuck_after
        self._judge = judge
        self.teller = Teller(tell, partial(judge, self))
        self.counts = Counts(step, sampled=step)
        self._written_at = monotonic()  # the time of the last sample
        self._idle = step, 0  # the last step, and how many steps without a gradient came before
        self._stopped = Counted(Event.STOPPED, count=0)  # the latest steps without a gradient
        self._stayed = Counted(Event.STAYED, count=0)  # the latest backward passes without a step
        self._watched = step  # the last step that add_watched was called for
        self._has_made = False  # whether a watch that the user asked for has found the maker
        self._filter = WarningFilter(step)
        self._nonfinite: dict[str, str | None] = {}  # the names last written

    def copy(self) -> StepLog:
        """A copy of the log that writes nothing; any thread may make one."""
        twin = copying.copy(self)
        twin._writers = None
        twin._filter = WarningFilter(self.num_before)  # it reports nothing
        twin.counts = self.counts  # before the history, which may grow meanwhile
        kept = (step for step in tuple(self.history) if step.step <= twin.counts.step)
        twin.history = deque(kept, maxlen=HISTORY_LENGTH)
        return twin

    @property
    def num_steps(self) -> int:
        """The number of steps added to this log."""
        return self.counts.step - self.num_before

    def add(
        self,
        step: Step,
        optimizers: Mapping[int, bool] | None = None,
        observed: Observations = _NOTHING,
    ) -> None:
        """Add a step, unless it was added before; :meth:`check_stuck` gives the verdict.

        A step counts as skipped if any optimizer skipped it. ``optimizers`` says for each
        optimizer, by id, whether it skipped. None stands for a single optimizer, and the id 0 for
        all of them.
        """
        counts, number = self.counts, step.step
        if number <= counts.step:
            return
        if counts.step - counts.sampled >= HISTORY_LENGTH:  # else older losses are lost
            self.add_sample()
            counts = self.counts
        is_inspected = step.skipped and step.nonfinite is not None
        is_finite_here = counts.is_finite_here
        if is_inspected:
            is_finite_here = is_finite_here is not False and not step.nonfinite
        last = (next(iter(optimizers)) or None) if optimizers and len(optimizers) == 1 else None
        if last is not None and counts.optimizer not in (None, last):
            unscaled = [Counted(Event.UNSCALED)] * (step.loss is None)
            observed = observed.after(Observations((Counted(Event.SWITCHED), *unscaled)))
        is_first = counts.step == self.num_before  # what came before it is in `observed`, too
        before = _NOTHING if is_first else counts.observed
        streaks, skip = counts.streaks, skip_of(step) if step.skipped else None
        if streaks or skip is not None:
            streaks = continued(
                streaks, step, skip, optimizers or {0: step.skipped}, self._stuck_after
            )
        if not self.history or self.history[-1].step < number:
            self.history.append(step)
        self.counts = Counts(
            step=number,
            sampled=counts.sampled,
            num_skipped=counts.num_skipped + step.skipped,
            streaks=streaks,
            is_finite_here=is_finite_here,
            optimizer=last,
            observed=before if observed is _NOTHING else before.after(observed),
            evidence=counts.evidence.after(skip) if is_inspected and skip else counts.evidence,
            bad=counts.bad,
        )
        if is_inspected and skip is not None:
            self._write(skip)
        if observed.cut:
            self._filter.note_event("cut")
        if step.skipped or observed.events or not math.isfinite(step.loss or 0.0):
            self._note_events(step, observed.events)

    def _note_events(self, step: Step, events: Sequence[Counted]) -> None:
        """Note what a look at the evidence after this step may find."""
        is_failed = self.has_failed(step) or (step.is_hopeless and step.scale <= 1)
        for event in {*events, *["failure"] * is_failed}:
            self._filter.note_event(event)

    def add_bad(self, line: BadStep) -> None:
        """Note a step that was applied with gradients that were not finite, and report the first.

        Only the first of a streak of such steps is written, and the first that was left out.
        """
        before = self.counts
        if line.is_left_out:
            is_known = before.evidence.bad_step is not None
        else:
            is_known = before.bad in (line.step - 1, line.step)
            self.counts = before._replace(bad=line.step)
        if is_known:
            return
        self._keep(line)
        new = [each for each in self._judge(self).findings if not self.teller.says(each)]
        for finding in new[:1]:  # a later streak may show no more than the first
            self._filter.note(finding)
            if self._on_stuck != "continue":
                self.teller.say([finding], line.step)

    def add_sample(self, loss: float | None = None, **measured: object) -> None:
        """Write a sample: the steps since the last one, and the measurements of the last step."""
        counts = self.counts
        if counts.step == counts.sampled:
            return
        sample = self._sample(loss, **measured)
        self._write(sample)
        if measured:
            self._filter.note_event("sample")
        self._written_at = monotonic()
        evidence = counts.evidence.after(sample)
        self.counts = counts._replace(sampled=counts.step, observed=_NOTHING, evidence=evidence)

    @property
    def is_write_due(self) -> bool:
        """Whether there is a file to write to, and no sample was written for a second."""
        return bool(self._writers) and monotonic() - self._written_at >= _LONGEST_UNWRITTEN

    def note_early(self, events: Sequence[Counted], backward: frozenset[str] = frozenset()) -> None:
        """Note the events before a run's first step, the latest last, and its backward passes."""
        if self.num_steps:
            return
        self.counts = self.counts._replace(observed=Observations(tuple(events), backward))
        if events.count(events[-1]) == MANY_CALLS:
            self.teller.say(self._look(is_last=False), self.counts.step)

    def note_idle(self, name: str, count: int, astray: str | None = None) -> None:
        """Note a number of steps without a gradient, of an optimizer that has made no other.

        Others that step meanwhile have samples, which tell of it. ``astray`` is what the loss
        depends on.
        """
        step, since = self._idle
        if step != self.counts.step:
            self._idle = step, since = self.counts.step, count - 1
        if self.num_steps and count - since == MANY_CALLS:
            events = [Counted(Event.IDLE, name, count)]
            events += [Counted(Event.ASTRAY, astray)] if astray else []
            self._keep(Watched(self.counts.step, calls=texts_of(events)))
            self.teller.say(self._look(is_last=False), self.counts.step)

    def note_stopped(self, step: int, why: str) -> None:
        """Note a step without a gradient after a step of this number, and why, if it is known."""
        before = self._stopped
        if before.where.partition(" ")[0] == str(step):  # of another optimizer, maybe
            self._stopped = replace(before, count=before.count + 1)
        else:
            self._stopped = Counted(Event.STOPPED, f"{step} {why}".rstrip())
        if self._stopped.count == MANY_CALLS:
            self.teller.say(self._look(is_last=False), self.counts.step)

    def note_nan_left(self, name: str) -> None:
        """Note a variable of the script's that is NaN in the end."""
        self._note_last(Counted(Event.NAN_LEFT, name))

    def note_at_start(self, what: str) -> None:
        """Note what normalizes by the statistics of its start in the end."""
        self._note_last(Counted(Event.AT_START, what))

    def note_held_late(self) -> None:
        """Note that an optimizer holds in the end what none held in samples."""
        self._note_last(Counted(Event.HELD_LATE))

    def _note_last(self, event: Counted) -> None:
        if self.num_steps:
            self._keep(Watched(self.counts.step, calls=texts_of([event])))

    def note_stayed(self, name: str, count: int) -> None:
        """Note backward passes without a step, before which a gradient held an Inf or NaN.

        Args:
            name: its parameter.
            count: how many passes there were since those that were noted before.
        """
        where, before = f"{self.counts.step} {name}", self._stayed
        num_before = before.count if before.where == where else 0
        self._stayed = Counted(Event.STAYED, where, num_before + count)
        if num_before < STAYED_PASSES <= self._stayed.count:
            self.teller.say(self._look(is_last=False), self.counts.step)

    @property
    def has_stopped(self) -> bool:
        """Whether it was told that steps find no gradient any more."""
        return self._stopped.count >= MANY_CALLS

    def _stop(self) -> Watched | None:
        """The line of what came after the last step, without another; None if that is little."""
        seen = (self._stopped, MANY_CALLS), (self._stayed, STAYED_PASSES)
        found = [each for each, enough in seen if each.count >= enough]
        return Watched(self.counts.step, calls=texts_of(found)) if found else None

    @property
    def evidence(self) -> Evidence:
        """The evidence of the steps so far, as their file would give it if closed now."""
        counts = self.counts
        found = counts.evidence
        if counts.step > counts.sampled:
            found = found.after(self._sample())
        elif not self.num_steps:
            found = replace(found.after(self._calls()), backward=counts.observed.backward)
        if (stop := self._stop()) is not None:
            found = found.after(stop)
        return replace(found, steps=self.num_steps, skipped=counts.num_skipped)

    def _sample(self, loss: float | None = None, **measured: Any) -> Sample:
        """The sample of the steps since the last one."""
        counts, observed = self.counts, self.counts.observed
        steps = [step for step in self.history if step.step > counts.sampled]
        losses = tuple(step.loss for step in steps)
        scales = [(step.step, step.scale) for step in steps]
        moved = (now for before, now in pairwise(scales) if before[1] != now[1])
        return Sample(
            step=counts.step,
            scale=steps[-1].scale,
            scales=(scales[0], *moved),
            steps=len(steps),
            skips=tuple(step.step for step in steps if step.skipped),
            loss=loss,
            losses=() if losses.count(None) == len(losses) else losses,
            backward=tuple(sorted(observed.backward)),
            calls=texts_of(observed.events),
            cut=observed.cut,
            num_losses=observed.num_losses,
            batch=steps[-1].batch,
            **measured,
        )

    def _calls(self) -> Watched:
        """The line with the calls of a run that has made no step."""
        return Watched(self.counts.step, calls=texts_of(self.counts.observed.events))

    def add_watched(self, located: Located | None) -> None:
        """Write the place that a watch found in the last step, once, and only if it is new."""
        step, known = self.counts.step, self.counts.evidence.watched
        if self._watched == step:
            return
        is_known = located is not None and known is not None and located.is_at(known)
        if located is not None and not (is_known or self._has_made):
            self._keep(Watched(step, located))
            self._filter.hurry()
        self._watched = step

    def add_made(self, located: Located) -> None:
        """Write where a watch that the user asked for found the Inf or NaN of the present step."""
        self._keep(Watched(self.counts.step + 1, located))
        self._has_made = True

    def break_off(self, reason: str) -> None:
        """Write why the watch ended before the training did."""
        self._keep(Watched(self.counts.step, ended=reason))

    def _keep(self, line: BadStep | Watched) -> None:
        self.counts = self.counts._replace(evidence=self.counts.evidence.after(line))
        self._write(line)

    def check(self) -> None:
        """Report a stuck run (see :meth:`check_stuck`) and, if a look is due, other findings."""
        if self.counts.streaks:
            self.check_stuck()
        if self._filter.is_due(self.counts.step):
            findings = self._look(is_last=False)
            self._filter.has_looked()
            new = [each for each in findings if not self.teller.says(each)]
            self.teller.say(new, self.counts.step)

    def _look(self, is_last: bool) -> list[Finding]:
        """The findings to warn of; writes which parameter or optimizer state is not finite."""
        if self.stuck_streak is not None:
            return []
        findings = self._judge(self).findings
        found = {each.kind: each.where for each in findings if each.kind in _NONFINITE}
        if found and found != self._nonfinite:
            self._nonfinite = found
            parameter, state = (found.get(kind) for kind in _NONFINITE)
            self._write(Watched(self.counts.step, parameter=parameter, state=state))
        selected = self._filter.select(findings, self.counts.step, self.counts.sampled, is_last)
        return selected if self._on_stuck != "continue" else []

    def check_stuck(self) -> None:
        """Give the verdict if ``stuck_after`` steps in a row were skipped, once in that streak.

        While a lower scale may end the skips, nothing is reported, and each further skip is judged
        again. A second call after the same step repeats the report, because an interrupt may have
        stopped the first one.

        Raises:
            StuckError: the run is stuck, and ``on_stuck`` is ``"raise"``.
        """
        streak = self.stuck_streak
        if streak is None or not self.needs_verdict:
            return
        line = streak.verdict
        if line is None or line.step < self.counts.step:
            verdict = self._judge(self)
            if line is not None and line.verdict == verdict.kind:
                return
            line = self._add_verdict(streak, verdict)
        if line.verdict == "normal":
            return
        if self._on_stuck == "raise":
            with passing():
                raise StuckError(line.text)
        self._filter.note(line.findings[0])
        if self._on_stuck == "warn":
            self.teller.say(line.findings[:1], line.step, StuckWarning)

    def _add_verdict(self, streak: SkipStreak, verdict: Verdict) -> VerdictLine:
        """Write the verdict on a streak, and keep it with the streak."""
        found = verdict.kind, verdict.text, verdict.where, verdict.findings
        line = VerdictLine(self.counts.step, *found)
        self.add_sample()
        self._write(line)
        streaks = {
            optimizer: streak._replace(verdict=line) if other is streak else other
            for optimizer, other in self.counts.streaks.items()
        }
        evidence = self.counts.evidence.after(line)
        self.counts = self.counts._replace(streaks=streaks, evidence=evidence)
        return line

    def _renew_verdict(self) -> None:
        """Say the verdict on a streak again if it has gone on, with the skips since then."""
        streak = self.stuck_streak
        line = None if streak is None else streak.verdict
        if streak is not None and line is not None and line.step < self.counts.step:
            verdict = self._judge(self)
            if verdict.kind == line.verdict:
                self._add_verdict(streak, verdict)

    def has_failed(self, step: Step) -> bool:
        """Whether a step failed in a way that no loss scale fixes.

        If no step was applied yet, the scale may be far too large.
        """
        return step.has_bad_loss or (step.is_hopeless and self.num_steps > self.counts.num_skipped)

    @property
    def stuck_streak(self) -> SkipStreak | None:
        """The longest streak of skips if it has at least ``stuck_after`` skips, else None."""
        if not (streaks := self.counts.streaks):
            return None
        streak = max(streaks.values(), key=_length_of)
        return streak if streak.length >= self._stuck_after else None

    @property
    def needs_verdict(self) -> bool:
        """Whether there is a :attr:`stuck_streak` without a final verdict from an earlier step."""
        streak = self.stuck_streak
        line = None if streak is None else streak.verdict
        is_final = line is not None and line.verdict != "normal" and line.step < self.counts.step
        return streak is not None and not is_final

    @property
    def is_nearly_stuck(self) -> bool:
        """Whether one more skip makes a :attr:`stuck_streak`."""
        return self._stuck_after - 1 in map(_length_of, self.counts.streaks.values())

    def close(self) -> None:
        """Write what is left, close the files, and warn of the last findings."""
        try:
            findings = self._look(is_last=True)
            self._renew_verdict()
        finally:
            if not self.num_steps and self.counts.observed.events:
                self._write(self._calls())
            self.add_sample()
            if (stop := self._stop()) is not None:
                self._keep(stop)
                self._stopped = Counted(Event.STOPPED, count=0)
                self._stayed = Counted(Event.STAYED, count=0)
            writers, self._writers = self._writers, ()  # an interrupted call writes no more
            for writer in writers or ():
                writer.close()
        self.teller.say(findings, self.counts.step)  # last, as warnings may be errors

    def _write(self, line: Line) -> None:
        if self._writers is not None and isinstance(line, Skip):
            # Importing Paddle shows each record at level INFO.
            logger.debug("%s", in_one_line(line))
        for writer in self._writers or ():
            writer.write(line)
