"""The log of the steps that a monitor has seen, and the decision that a run is stuck."""

from __future__ import annotations

import copy as copying
import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._graph.guard import guard, passing
from gradscaler.diagnose._monitor.warning_filter import WarningFilter
from gradscaler.diagnose._record.events import Counted, Event, texts_of
from gradscaler.diagnose._record.finding import Finding, Verdict
from gradscaler.diagnose._record.kinds import kind_of
from gradscaler.diagnose._record.lines import BadStep, Line, Sample, Skip, VerdictLine, Watched
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.writer import RunFile, ScalarLog
from gradscaler.errors import levels_to_caller
from gradscaler.outcome import HISTORY_LENGTH, NonfiniteGradient

OnStuck = Literal["warn", "raise", "continue"]

logger = logging.getLogger("gradscaler")

MOST_NONFINITE = 10  # gradients that a line lists
MANY_CALLS = 10  # calls without a step that are worth a look
_NONFINITE = "parameter", "state"  # kinds of findings
_LONGEST_UNWRITTEN = 1.0  # seconds of training that the file of a killed process may lack


class FindingWarning(RuntimeWarning):
    """Something is wrong with the training; the message says what, and what to try."""


class StuckWarning(FindingWarning):
    """Step after step is skipped; the message is the verdict."""


class StuckError(RuntimeError):
    """Step after step is skipped; the message is the verdict, and how to go on."""


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


class SkipStreak(NamedTuple):
    """A streak of consecutive skipped steps of one optimizer."""

    length: int
    first_scale: float  # of the first skipped step
    skips: tuple[Skip, ...]  # the latest skips
    verdict: VerdictLine | None = None  # the latest verdict on this streak


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
        self._tell_user = _warn if tell is None else tell
        self._told = set[str]()  # texts
        self._blamed: tuple[int, Finding] | None = None  # the cause of failures told last, and when
        self.counts = Counts(step, sampled=step)
        self._written_at = monotonic()  # the time of the last sample
        self._idle = step, 0  # the last step, and how many steps without a gradient came before
        self._stopped = Counted(Event.STOPPED, count=0)  # the latest steps without a gradient
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
        before = counts.observed if self.num_steps else _NOTHING  # the first step has them too
        streaks, skip = counts.streaks, _skip_of(step) if step.skipped else None
        if streaks or skip is not None:
            streaks = self._continued(streaks, step, skip, optimizers or {0: step.skipped})
        if not self.history or self.history[-1].step < number:
            self.history.append(step)
        self.counts = counts._replace(
            step=number,
            num_skipped=counts.num_skipped + step.skipped,
            streaks=streaks,
            is_finite_here=is_finite_here,
            optimizer=last,
            observed=before if observed is _NOTHING else before.after(observed),
            evidence=counts.evidence.after(skip) if is_inspected and skip else counts.evidence,
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
        new = [each for each in self._judge(self).findings if each.text not in self._told]
        for finding in new[:1]:  # a later streak may show no more than the first
            self._filter.note(finding)
            if self._on_stuck != "continue":
                self._tell([finding], line.step)

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

    def note_early(self, events: Sequence[Counted]) -> None:
        """Note the events before a run's first step, the latest last."""
        if self.num_steps:
            return
        self.counts = self.counts._replace(observed=Observations(tuple(events)))
        if events.count(events[-1]) == MANY_CALLS:
            self._tell(self._look(is_last=False))

    def note_idle(self, name: str, count: int) -> None:
        """Note a number of steps without a gradient, of an optimizer that has made no other.

        Others that step meanwhile have samples, which tell of it.
        """
        step, since = self._idle
        if step != self.counts.step:
            self._idle = step, since = self.counts.step, count - 1
        if self.num_steps and count - since == MANY_CALLS:
            self._keep(
                Watched(self.counts.step, calls=texts_of([Counted(Event.IDLE, name, count)]))
            )
            self._tell(self._look(is_last=False))

    def note_stopped(self, step: int, why: str) -> None:
        """Note a step without a gradient after a step of this number, and why, if it is known."""
        before = self._stopped
        if before.where.partition(" ")[0] == str(step):  # of another optimizer, maybe
            self._stopped = replace(before, count=before.count + 1)
        else:
            self._stopped = Counted(Event.STOPPED, f"{step} {why}".rstrip())
        if self._stopped.count == MANY_CALLS:
            self._tell(self._look(is_last=False))

    def _stop(self) -> Watched | None:
        """The line of the latest steps without a gradient; None if they are few."""
        if self._stopped.count < MANY_CALLS:
            return None
        return Watched(self.counts.step, calls=texts_of([self._stopped]))

    @property
    def evidence(self) -> Evidence:
        """The evidence of the steps so far, as their file would give it if closed now."""
        counts = self.counts
        found = counts.evidence
        if counts.step > counts.sampled:
            found = found.after(self._sample())
        elif not self.num_steps:
            found = found.after(self._calls())
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
        self.check_stuck()
        if self._filter.is_due(self.counts.step):
            findings = self._look(is_last=False)
            self._filter.has_looked()
            self._tell(findings)

    def _tell(self, findings: Sequence[Finding], step: int | None = None) -> None:
        """Tell findings, of the latest step or of this one."""
        for finding in findings:
            self._told.add(finding.text)
            told = self._in_place(finding, step or self.counts.step)
            with passing():
                self._tell_user(told)

    def _in_place(self, finding: Finding, step: int) -> Finding:
        """A finding that says so if it replaces the cause of failures that was told before.

        It does if the evidence no longer shows that one.
        """
        if not kind_of(finding.kind).explains_skips:
            return finding
        (at, before), self._blamed = self._blamed or (step, finding), (step, finding)
        if at == step or _is_same(before, finding):
            return finding
        if any(_is_same(before, each) for each in self._judge(self).findings):
            return finding
        return replace(finding, cause=f"In place of what was said at step {at}: {finding.cause}")

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

    def warn_of_replay(self, error: Exception) -> None:
        """Warn that a replay has raised; only say it if findings are no warnings either."""
        if self._tell_user is _warn:
            what = f"replay is called no more, and the training continues: {error!r}"
            with passing():
                warnings.warn(RuntimeWarning(what), stacklevel=levels_to_caller())
        else:
            guard.say(f"a failing step could not be run again, and the training goes on: {error!r}")

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
        if self._on_stuck == "warn" and self._tell_user is _warn:
            with passing():
                text = self._in_place(line.findings[0], line.step).text
                warnings.warn(StuckWarning(text), stacklevel=levels_to_caller())
        elif self._on_stuck == "warn":
            self._tell(line.findings[:1])

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
        was_applied = self.num_steps > self.counts.num_skipped
        return step.has_bad_loss or (step.is_hopeless and was_applied)

    @property
    def stuck_streak(self) -> SkipStreak | None:
        """The longest streak of skips if it has at least ``stuck_after`` skips, else None."""
        if not (streaks := self.counts.streaks):
            return None
        streak = max(streaks.values(), key=lambda streak: streak.length)
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
        streaks = self.counts.streaks.values()
        return any(0 < streak.length == self._stuck_after - 1 for streak in streaks)

    def _continued(
        self,
        streaks: Mapping[int, SkipStreak],
        step: Step,
        skip: Skip | None,
        optimizers: Mapping[int, bool],
    ) -> dict[int, SkipStreak]:
        """The streaks after a step of ``optimizers``; ``skip`` is None if it was applied.

        A skip lengthens its optimizer's streak. A streak ends if its optimizer applies a step, or
        if its latest skip is more than ``stuck_after`` steps ago.
        """
        kept = {
            optimizer: streak
            for optimizer, streak in streaks.items()
            if step.step - streak.skips[-1].step <= self._stuck_after
            and optimizers.get(optimizer, optimizer != 0)
        }
        for optimizer, skipped in optimizers.items():
            if skip is not None and skipped:
                streak = kept.get(optimizer, SkipStreak(0, skip.scale, ()))
                skips = (*streak.skips, skip)[-self._stuck_after :]
                kept[optimizer] = streak._replace(length=streak.length + 1, skips=skips)
        return kept

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
            writers, self._writers = self._writers, ()  # an interrupted call writes no more
            for writer in writers or ():
                writer.close()
        self._tell(findings)  # last, as warnings may be errors

    def _write(self, line: Line) -> None:
        if self._writers is not None and isinstance(line, Skip):
            # Importing Paddle shows each record at level INFO.
            logger.debug("%s", _in_one_line(line))
        for writer in self._writers or ():
            writer.write(line)


@dataclass(eq=False, repr=False)
class StepSource:
    """The base class of objects that add a scaler's steps to a log."""

    scaler: Any  # in its state before the first step; or a loop without one
    framework: str  # such as "torch"
    model: Any  # gives the parameters their names, or None
    log: StepLog
    every: int  # steps from one sample to the next
    forensics: int  # inspect every n-th skipped step; 0 disables
    dtype: str  # the format for samples
    world_size: int  # processes that train together
    located: Located | None = field(init=False, default=None)  # in the latest streak of skips

    def __post_init__(self) -> None:
        """Note the scaler's present state."""

    @property
    def waiting(self) -> Sequence[Any]:
        """The steps that are over; the latest may not be in the log yet."""
        raise NotImplementedError

    def note_unzeroed(self, name: str) -> None:
        """Note that a backward pass adds to gradients that a step has used."""
        raise NotImplementedError

    def read(self) -> None:
        """Add the waiting steps to the log; waits for the device."""
        self._add_to(self.log, self.waiting)

    def snapshot(self) -> StepLog:
        """A copy of the log as :meth:`read` would leave it; any thread may call this."""
        waiting = self.waiting  # before the copy, as the log may add some meanwhile
        log = self.log.copy()
        self._add_to(log, waiting)
        return log

    @staticmethod
    def _add_to(log: StepLog, steps: Sequence[Any]) -> None:
        for step in steps:
            if step.number > log.counts.step:
                step.add_to(log)

    def break_off(self) -> None:
        """Add the waiting steps to the log after an error, as far as that can be done."""
        with suppress(Exception):
            self.read()

    def close(self, finish: Callable[[], None]) -> None:
        """Stop observing, add the waiting steps to the log, and call ``finish``."""
        self.read()
        finish()

    @property
    def _inspects_next_skip(self) -> bool:
        return self.forensics > 0 and (self.log.counts.num_skipped + 1) % self.forensics == 0


def _is_same(one: Finding, other: Finding) -> bool:
    """Whether two findings blame the same: one may know more of the place than the other."""
    places = (one.where, other.where), (one.line, other.line)
    return one.kind == other.kind and all(a == b or None in (a, b) for a, b in places)


def _skip_of(step: Step) -> Skip:
    """The line of a skipped step."""
    found = step.nonfinite or ()
    listed = None if step.nonfinite is None else _listed(found)
    return Skip(step.step, step.scale, step.loss, listed, len(found[MOST_NONFINITE:]))


def _listed(found: tuple[NonfiniteGradient, ...]) -> tuple[NonfiniteGradient, ...]:
    """The gradients that a line lists: the first ones, and one with an Inf if any holds one."""
    first, rest = found[:MOST_NONFINITE], found[MOST_NONFINITE:]
    inf = next((each for each in rest if each.num_inf), None)
    is_missing = inf is not None and not any(each.num_inf for each in first)
    return (*first[:-1], inf) if is_missing and inf is not None else first


def _warn(finding: Finding) -> None:
    warnings.warn(FindingWarning(finding.text), stacklevel=levels_to_caller("torch."))


def _in_one_line(skip: Skip) -> str:
    """One line on a skipped step, for the log."""
    listed = "; ".join(
        f"{g.name} ({'x'.join(map(str, g.shape)) or 'scalar'} {g.dtype}): {g.num_inf} Inf, "
        f"{g.num_nan} NaN"
        + ("" if math.isnan(g.largest_finite) else f", largest of the rest {g.largest_finite:g}")
        for g in skip.nonfinite or ()
    )
    found = listed or "this process' gradients are finite"
    more = f"; and {skip.more} more" if skip.more else ""
    line = f"step {skip.step} skipped at loss scale {skip.scale:g}: {found}{more}"
    return "".join(letter if letter.isprintable() else " " for letter in line)
