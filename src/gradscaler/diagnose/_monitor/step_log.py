"""The steps that a monitor has seen, and when it says that a run is stuck."""

from __future__ import annotations

import copy as copying
import inspect
import logging
import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._findings import Evidence, Finding, Verdict
from gradscaler.diagnose._locate.located import Located
from gradscaler.diagnose._monitor.news import News
from gradscaler.diagnose._run.lines import Line, Sample, Skip, VerdictLine, Watched
from gradscaler.diagnose._run.writer import EventFile, RunFile
from gradscaler.outcome import HISTORY_LENGTH, NonfiniteGradient

OnStuck = Literal["warn", "raise", "continue"]

logger = logging.getLogger("gradscaler")

_MOST_NONFINITE = 10  # gradients that a line lists
_MANY_CALLS = 10  # that no step came of
_NONFINITE = "parameter", "state"  # kinds
_LONGEST_UNWRITTEN = 1.0  # seconds; who reads the file of a killed process misses no more


class FindingWarning(RuntimeWarning):
    """Something is wrong with the training; the message says what, and what to try."""


class StuckWarning(FindingWarning):
    """Step after step is skipped; the message is the verdict."""


class StuckError(RuntimeError):
    """Step after step is skipped; the message is the verdict, and how to go on."""


class Step(NamedTuple):
    """One step of the training.

    Attributes:
        step: its number, from 1.
        scale: the loss scale that it used.
        skipped: whether its gradients held an Inf or a NaN.
        loss: the unscaled loss, if it was read.
        nonfinite: the gradients that held an Inf or a NaN, if the step was skipped and inspected;
            else None.
    """

    step: int
    scale: float
    skipped: bool
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss was read, and is NaN or Inf."""
        return self.loss is not None and not math.isfinite(self.loss)


class Seen(NamedTuple):
    """What was seen beside losses and gradients; see :class:`Sample` for each of them."""

    calls: tuple[str, ...] = ()
    backward: frozenset[str] = frozenset()
    cut: Mapping[str, str] | None = None

    def after(self, other: Seen) -> Seen:
        """Both, one after the other."""
        cut = self.cut if other.cut is None else other.cut
        return Seen(self.calls + other.calls, self.backward | other.backward, cut)


_NOTHING = Seen()


class SkipStreak(NamedTuple):
    """A streak of consecutive skipped steps of one optimizer."""

    length: int
    first_scale: float  # of the first step
    skips: tuple[Skip, ...]  # the latest of them
    verdict: VerdictLine | None = None  # the latest on them


class Counts(NamedTuple):
    """What a log has counted; one assignment replaces it, so an interrupt leaves it whole."""

    step: int  # the number of the last step
    sampled: int  # the step of the last sample
    num_skipped: int = 0
    streaks: Mapping[int, SkipStreak] = MappingProxyType({})  # by optimizer
    is_finite_here: bool | None = None  # this process' part in the skips that were inspected
    evidence: Evidence = Evidence(0, 0)  # from what was written
    optimizer: int | None = None  # the one that alone took the last step
    seen: Seen = _NOTHING  # since the last sample


class StepLog:
    """Steps, in their order.

    There were ``step`` steps before. ``on_stuck`` says what to do after ``stuck_after`` skips in a
    row. An interrupt may stop any method. The same call again continues from there, and counts
    nothing twice.

    Attributes:
        history: the latest steps.
        counts: what was counted.
    """

    def __init__(
        self,
        writers: Sequence[RunFile | EventFile],
        step: int,
        on_stuck: OnStuck,
        stuck_after: int,
        judge: Callable[[StepLog], Verdict],
    ) -> None:
        self.history: deque[Step] = deque(maxlen=HISTORY_LENGTH)
        self._writers: Sequence[RunFile | EventFile] | None = writers  # a copy has None
        self._step_before = step
        self._on_stuck = on_stuck
        self._stuck_after = stuck_after
        self._judge = judge
        self.counts = Counts(step, sampled=step)
        self._written_at = monotonic()  # the last sample
        self._watched = step  # the last step that add_watched was called for
        self._dtypes: Mapping[str, str] = {}
        self._news = News(step)
        self._nonfinite: dict[str, str | None] = {}  # the names that were written

    def copy(self) -> StepLog:
        """A log that goes on from here without writing anything; any thread may make one."""
        twin = copying.copy(self)
        twin._writers = None
        twin.counts = self.counts  # first: the history may grow meanwhile
        kept = (step for step in tuple(self.history) if step.step <= twin.counts.step)
        twin.history = deque(kept, maxlen=HISTORY_LENGTH)
        return twin

    @property
    def num_steps(self) -> int:
        """How many steps were added."""
        return self.counts.step - self._step_before

    def add(
        self, step: Step, optimizers: Mapping[int, bool] | None = None, seen: Seen = _NOTHING
    ) -> None:
        """Add a step, once; :meth:`check_stuck` gives the verdict.

        It is skipped if any optimizer skipped it. ``optimizers`` says which did, by id; None stands
        for a single one.
        """
        counts, number = self.counts, step.step
        if number <= counts.step:
            return
        if counts.step - counts.sampled >= HISTORY_LENGTH:  # older losses leave the history
            self.add_sample()
            counts = self.counts
        found = step.nonfinite or ()
        listed = None if step.nonfinite is None else found[:_MOST_NONFINITE]
        skip = Skip(number, step.scale, step.loss, listed, len(found[_MOST_NONFINITE:]))
        is_inspected = step.skipped and listed is not None
        is_finite_here = counts.is_finite_here
        if is_inspected:
            is_finite_here = is_finite_here is not False and not found
        last = next(iter(optimizers)) if optimizers and len(optimizers) == 1 else None
        if last is not None and counts.optimizer not in (None, last):
            seen = seen.after(Seen(("switched", *["unscaled"] * (step.loss is None))))
        before = counts.seen if self.num_steps else _NOTHING  # else the step has those calls, too
        if not self.history or self.history[-1].step < number:
            self.history.append(step)
        self.counts = counts._replace(
            step=number,
            num_skipped=counts.num_skipped + step.skipped,
            streaks=self._continued(counts.streaks, skip, optimizers or {0: step.skipped}),
            is_finite_here=is_finite_here,
            optimizer=last,
            seen=before if seen is _NOTHING else before.after(seen),
        )
        if is_inspected:
            self._write(skip)

    def add_sample(self, loss: float | None = None, **measured: Any) -> None:
        """Write what happened since the last sample, and what was measured at the last step."""
        counts = self.counts
        if counts.step == counts.sampled:
            return
        sample = self._sample(loss, **measured)
        self._write(sample)
        self._written_at = monotonic()
        evidence = counts.evidence.after(sample)
        self.counts = counts._replace(sampled=counts.step, seen=_NOTHING, evidence=evidence)

    @property
    def is_write_due(self) -> bool:
        """Whether a file waits, and nothing was written for a second."""
        return bool(self._writers) and monotonic() - self._written_at >= _LONGEST_UNWRITTEN

    def note_calls(self, calls: Sequence[str]) -> None:
        """Note the calls so far of a run without a step, the latest last: see :class:`Sample`."""
        if self.num_steps:
            return
        self.counts = self.counts._replace(seen=Seen(tuple(calls)))
        if calls.count(calls[-1]) == _MANY_CALLS:
            _warn(self._look(is_last=False))

    @property
    def evidence(self) -> Evidence:
        """What the steps so far say, as their file does when it is closed now."""
        counts = self.counts
        found = counts.evidence
        if counts.step > counts.sampled:
            found = found.after(self._sample())
        elif not self.num_steps:
            found = found.after(self._calls())
        return replace(found, steps=self.num_steps, skipped=counts.num_skipped)

    def _sample(self, loss: float | None = None, **measured: Any) -> Sample:
        """What happened since the last sample."""
        counts, seen = self.counts, self.counts.seen
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
            backward=tuple(sorted(seen.backward)),
            calls=Counter(seen.calls),
            cut=seen.cut,
            **measured,
        )

    def _calls(self) -> Watched:
        """The calls that no step came of, in a run without one."""
        return Watched(self.counts.step, calls=Counter(self.counts.seen.calls))

    def add_watched(self, located: Located | None, dtypes: Mapping[str, str]) -> None:
        """Write what was seen in the last step, once; dtypes only if they changed."""
        step = self.counts.step
        if self._watched == step:
            return
        line = Watched(step, located, {} if dtypes == self._dtypes else dict(dtypes))
        if located is not None:
            self.counts = self.counts._replace(evidence=self.counts.evidence.after(line))
        if located is not None or line.dtypes:
            self._write(line)
        self._watched, self._dtypes = step, dict(dtypes)

    def check(self) -> None:
        """Say what is wrong, as soon as it is known; see :meth:`check_stuck`."""
        self.check_stuck()
        if self._news.is_due(self.counts.step):
            news = self._look(is_last=False)
            self._news.has_looked()
            _warn(news)

    def _look(self, is_last: bool) -> list[Finding]:
        """The findings to warn of; what is not finite, and no gradient, is written."""
        if self.stuck_streak is not None:
            return []
        findings = self._judge(self).findings
        found = {each.kind: each.where for each in findings if each.kind in _NONFINITE}
        if found and found != self._nonfinite:
            self._nonfinite = found
            parameter, state = (found.get(kind) for kind in _NONFINITE)
            self._write(Watched(self.counts.step, parameter=parameter, state=state))
        news = self._news.of(findings, self.counts.step, self.counts.sampled, is_last)
        return news if self._on_stuck != "continue" else []

    def check_stuck(self) -> None:
        """Give the verdict if ``stuck_after`` steps in a row were skipped, once in that streak.

        While a lower scale may cure them, nothing is said, and each further skip is judged again.
        A second call after the same step repeats what an interrupt may have kept from the user.

        Raises:
            StuckError: if that was asked for.
        """
        streak = self.stuck_streak
        if streak is None or not self.needs_verdict:
            return
        line = streak.verdict
        if line is None or line.step < self.counts.step:
            verdict = self._judge(self)
            if line is not None and line.verdict == verdict.kind:
                return
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
        if line.verdict == "normal":
            return
        if self._on_stuck == "raise":
            raise StuckError(line.text)
        self._news.note(line.verdict, streak.length)
        if self._on_stuck == "warn":
            warnings.warn(StuckWarning(line.text), stacklevel=_levels_to_caller())

    @property
    def stuck_streak(self) -> SkipStreak | None:
        """The longest streak of skips, if it is too long."""
        streak = max(self.counts.streaks.values(), key=lambda streak: streak.length, default=None)
        return streak if streak is not None and streak.length >= self._stuck_after else None

    @property
    def needs_verdict(self) -> bool:
        """Whether a streak is too long, and no earlier verdict on it is final."""
        streak = self.stuck_streak
        line = None if streak is None else streak.verdict
        is_final = line is not None and line.verdict != "normal" and line.step < self.counts.step
        return streak is not None and not is_final

    @property
    def is_nearly_stuck(self) -> bool:
        """Whether one more skip makes a streak too long."""
        streaks = self.counts.streaks.values()
        return any(0 < streak.length == self._stuck_after - 1 for streak in streaks)

    def _continued(
        self, streaks: Mapping[int, SkipStreak], skip: Skip, optimizers: Mapping[int, bool]
    ) -> dict[int, SkipStreak]:
        """Lengthen streaks; end those of optimizers that stepped, or that were unused for long."""
        kept = {
            optimizer: streak
            for optimizer, streak in streaks.items()
            if skip.step - streak.skips[-1].step <= self._stuck_after
            and optimizers.get(optimizer, True)
        }
        for optimizer, skipped in optimizers.items():
            if skipped:
                streak = kept.get(optimizer, SkipStreak(0, skip.scale, ()))
                skips = (*streak.skips, skip)[-self._stuck_after :]
                kept[optimizer] = streak._replace(length=streak.length + 1, skips=skips)
        return kept

    def close(self) -> None:
        """Write what is left to write."""
        news = self._look(is_last=True)
        if not self.num_steps and self.counts.seen.calls:
            self._write(self._calls())
        self.add_sample()
        writers, self._writers = self._writers, ()  # a call that this interrupts writes no more
        for writer in writers or ():
            writer.close()
        _warn(news)  # last, as a user may have made warnings errors

    def _write(self, line: Line) -> None:
        if self._writers is not None and isinstance(line, Skip):
            logger.info("%s", _in_one_line(line))
        for writer in self._writers or ():
            writer.write(line)


@dataclass(eq=False, repr=False)
class StepSource:
    """Learns of a scaler's steps, and adds them to a log."""

    scaler: Any  # as it is before the first step
    model: Any  # gives the parameters their names, or None
    log: StepLog
    every: int  # steps from one sample to the next
    forensics: int  # inspect every n-th skipped step; 0 disables
    dtype: str  # the format for samples
    world_size: int  # processes that train together
    parameters: Any = field(init=False)  # of the training: what is not finite, and the optimizers
    located: Located | None = field(init=False, default=None)  # in the latest streak of skips

    def __post_init__(self) -> None:
        """Note where the scaler stands."""

    @property
    def waiting(self) -> Sequence[Any]:
        """The steps that are over, of which the log may not have the latest."""
        raise NotImplementedError

    def read(self) -> None:
        """Add the steps that wait to the log; waits for the device."""
        self._add_to(self.log, self.waiting)

    def seen(self) -> StepLog:
        """The log as :meth:`read` would leave it; any thread may ask, and nothing changes."""
        waiting = self.waiting  # before the log, which may add some meanwhile
        log = self.log.copy()
        self._add_to(log, waiting)
        return log

    @staticmethod
    def _add_to(log: StepLog, steps: Sequence[Any]) -> None:
        for step in steps:
            if step.number > log.counts.step:
                step.add_to(log)

    def close(self, finish: Callable[[], None]) -> None:
        """Observe no more, add the steps that wait, and call ``finish``."""
        self.read()
        finish()

    @property
    def _inspects_next_skip(self) -> bool:
        return self.forensics > 0 and (self.log.counts.num_skipped + 1) % self.forensics == 0


def _warn(findings: Sequence[Finding]) -> None:
    for finding in findings:
        warnings.warn(FindingWarning(finding.text), stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """How many calls above the caller of this the first is that is not gradscaler's."""
    frame, levels = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("gradscaler."):
        frame, levels = frame.f_back, levels + 1
    return levels


def _in_one_line(skip: Skip) -> str:
    """A skipped step, for the log."""
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
