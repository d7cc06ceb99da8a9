"""A run as one process recorded it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TypeVar

from gradscaler.diagnose._findings import Evidence, Verdict, judge
from gradscaler.diagnose._findings.evidence import min_scale_of
from gradscaler.diagnose._findings.step import Before
from gradscaler.diagnose._fitting_scales import Fit, fit_of
from gradscaler.diagnose._run.lines import (
    Line,
    Sample,
    Shares,
    Skip,
    Start,
    VerdictLine,
    Watched,
)
from gradscaler.outcome import HISTORY_LENGTH

LineT = TypeVar("LineT", bound=Line)

_FEW = 5  # losses at each end of a run whose median is taken


@dataclass(frozen=True)
class Run:
    """The lines of a run file, grouped by kind, in the order of the file.

    Attributes:
        ranks: the runs by rank, the rank at fault first, if the files of several ranks were read.
    """

    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    skips: tuple[Skip, ...]
    verdicts: tuple[VerdictLine, ...]
    ranks: Mapping[int, Run] = field(default_factory=dict)
    watched: tuple[Watched, ...] = ()
    before: Before | None = None  # how the previous run in the same file ended

    @cached_property
    def num_steps(self) -> int:
        """The number of the last step."""
        lines: tuple[Line, ...] = (*self.starts, *self.samples, *self.skips, *self.verdicts)
        return max((line.step for line in lines), default=0)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were skipped."""
        seen = {step for sample in self.samples for step in sample.skips}
        return tuple(sorted(seen | {skip.step for skip in self.skips}))

    @cached_property
    def nonfinite_since(self) -> float:
        """The step since which this rank's own gradients hold an Inf or a NaN.

        Only the latest streak of skips counts, up to its last inspected step. The value is Inf if
        there is no such step, or its gradients are finite.
        """
        since, skipped = math.inf, set(self.skipped)
        first = max(skipped, default=0)
        while first - 1 in skipped:
            first -= 1
        for skip in reversed(self.skips):
            if skip.step < first or not skip.nonfinite:
                break
            since = skip.step
        return since

    @cached_property
    def losses(self) -> dict[int, float]:
        """The unscaled loss by step, where it was seen."""
        found: dict[int, float] = {}
        for sample in self.samples:
            losses = sample.losses or (sample.loss,)
            steps = enumerate(losses, sample.step + 1 - len(losses))
            found |= {step: loss for step, loss in steps if loss is not None}
        found |= {skip.step: skip.loss for skip in self.skips if skip.loss is not None}
        return {step: found[step] for step in sorted(found)}

    @cached_property
    def norms(self) -> dict[int, float]:
        """The norm of the unscaled gradients by step, where it was seen."""
        return {sample.step: sample.norm for sample in self.samples if sample.norm is not None}

    @cached_property
    def shares(self) -> dict[int, Shares]:
        """The shares of the gradients by step, where they were seen."""
        return {sample.step: sample.shares for sample in self.samples if sample.shares is not None}

    @cached_property
    def scales(self) -> dict[int, float]:
        """The loss scale by step; a step that is not a key used the scale of the key before it."""
        used = {step: scale for sample in self.samples for step, scale in sample.scales}
        used |= {sample.step: sample.scale for sample in self.samples}
        used |= {skip.step: skip.scale for skip in self.skips}
        return {step: used[step] for step in sorted(used)}

    @cached_property
    def fit(self) -> Fit | None:
        """The loss scales that fit the latest samples; None if no sample has sizes of gradients."""
        return fit_of(self.samples, self.starts[-1].dtype)

    @cached_property
    def verdict(self) -> Verdict:
        """The monitor's last verdict, or one that is judged from the samples.

        The samples decide if the monitor gave no verdict, or if a later step was not skipped, so
        that the run recovered. If the file holds several runs, the verdict is on the latest run,
        and its text says so.
        """
        start = self.starts[-1]
        if self.latest is not self:
            verdict = self.latest.verdict
            num_runs = len({start.step for start in self.starts})  # a run without steps adds none
            text = (
                f"The file holds {num_runs:,} runs, one after another; this is on the "
                f"latest, from step {start.step + 1:,} on. {verdict.text}"
            )
            return replace(verdict, text=text)
        if self.verdicts and not self._has_stepped_since(self.verdicts[-1].step):
            return self.verdicts[-1].in_full
        evidence = Evidence(
            self.num_steps - start.step,
            len(self.skipped),
            start.dtype,
            min_scale=min_scale_of(start.policy),
            before=self.before,
            world_size=start.world_size,
            is_finite_here=bool(self.skips) and not any(skip.nonfinite for skip in self.skips),
        )
        lines: tuple[Sample | VerdictLine | Watched, ...]
        lines = (*self._whole_samples(), *self.verdicts, *self.watched)
        for line in lines:
            evidence = evidence.after(line)
        return judge(evidence)

    @cached_property
    def ended(self) -> Before | None:
        """The end of the latest run in the file; None if its losses or scales were not seen."""
        latest = self._from(self.starts[-1].step, self.num_steps)
        losses = [loss for loss in latest.losses.values() if math.isfinite(loss)]
        if not losses or not latest.scales:
            return None
        scale = latest.scales[max(latest.scales)]
        return Before(scale, median(losses[:_FEW]), median(losses[-_FEW:]))

    @cached_property
    def latest(self) -> Run:
        """The latest run in the file. Its ``before`` says how the run before it ended."""
        start = self.starts[-1]
        previous = [each.step for each in self.starts if each.step < start.step]
        if not previous:
            return self
        before = self._from(previous[-1], start.step).ended
        return replace(self._from(start.step, self.num_steps), starts=(start,), before=before)

    def _from(self, first: int, last: int) -> Run:
        """A run with only the lines of the steps after ``first``, up to ``last``."""

        def within(lines: tuple[LineT, ...]) -> tuple[LineT, ...]:
            return tuple(line for line in lines if first < line.step <= last)

        starts = tuple(start for start in self.starts if start.step == first)
        lines = within(self.samples), within(self.skips), within(self.verdicts)
        return Run(starts, *lines, {}, within(self.watched))

    def _whole_samples(self) -> list[Sample]:
        """The samples, and one made of the skips after the last sample, if there are any.

        Skips without a sample remain where a process was killed.
        """
        last = self.samples[-1].step if self.samples else self.starts[0].step
        late = {skip.step: skip for skip in self.skips if skip.step > last}
        if not late:
            return [*self.samples]
        end = max(late)
        scales = {last + 1: late[min(late)].scale, **{n: skip.scale for n, skip in late.items()}}
        steps = range(max(last, end - HISTORY_LENGTH) + 1, end + 1)
        losses = tuple(late[step].loss if step in late else None for step in steps)
        ending = Sample(end, scales[end], (*scales.items(),), end - last, (*late,), losses=losses)
        return [*self.samples, ending]

    def _has_stepped_since(self, step: int) -> bool:
        """Whether a sample counts a later step that was not skipped."""
        return any(
            min(sample.steps, sample.step - step) > sum(skip > step for skip in sample.skips)
            for sample in self.samples
        )
