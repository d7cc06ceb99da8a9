"""What one process recorded of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, starmap
from operator import le
from statistics import median
from typing import TypeVar

from gradscaler.diagnose._findings import Evidence, Verdict, judge
from gradscaler.diagnose._findings.evidence import Before, min_scale_of
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

_FEW = 5  # losses, of which the median counts


@dataclass(frozen=True)
class Run:
    """The lines of a run file, by kind, in their order.

    Attributes:
        ranks: if several ranks' files were read, their runs by rank, the rank at fault first.
    """

    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    skips: tuple[Skip, ...]
    verdicts: tuple[VerdictLine, ...]
    ranks: Mapping[int, Run] = field(default_factory=dict)
    watched: tuple[Watched, ...] = ()
    before: Before | None = None  # the end of what the same file held before

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

        In the latest streak of skips, up to its last step that was inspected; Inf if they do not.
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
        is_sorted = all(starmap(le, pairwise(found)))  # as in most files, of which some are long
        return found if is_sorted else dict(sorted(found.items()))

    @cached_property
    def norms(self) -> dict[int, float]:
        """The norm of the unscaled gradients by step, where they were seen."""
        return {sample.step: sample.norm for sample in self.samples if sample.norm is not None}

    @cached_property
    def shares(self) -> dict[int, Shares]:
        """What became of the gradients by step, where they were seen."""
        return {sample.step: sample.shares for sample in self.samples if sample.shares is not None}

    @cached_property
    def scales(self) -> dict[int, float]:
        """The scale that was used at some steps, each until the next of them."""
        used = {step: scale for sample in self.samples for step, scale in sample.scales}
        used |= {sample.step: sample.scale for sample in self.samples}
        used |= {skip.step: skip.scale for skip in self.skips}
        return {step: used[step] for step in sorted(used)}

    @cached_property
    def fit(self) -> Fit | None:
        """The loss scales that fit the latest samples; None if no gradient is placed by size."""
        return fit_of(self.samples, self.starts[-1].dtype)

    @cached_property
    def verdict(self) -> Verdict:
        """The monitor's last verdict.

        If there is none, or if a later step was not skipped, so that the run recovered, it is what
        the samples say. In a file that was continued, it is on the steps since then, and says so.
        """
        start = self.starts[-1]
        if self.latest is not self:
            verdict = self.latest.verdict
            num_runs = len({start.step for start in self.starts})  # one without a step is none
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
        """How the latest of the runs in the file ended; None if its losses were not seen."""
        latest = self._from(self.starts[-1].step, self.num_steps)
        losses = [loss for loss in latest.losses.values() if math.isfinite(loss)]
        if not losses or not latest.scales:
            return None
        scale = latest.scales[max(latest.scales)]
        return Before(scale, median(losses[:_FEW]), median(losses[-_FEW:]))

    @cached_property
    def latest(self) -> Run:
        """The run without those before it in the same file, but for how the last one ended."""
        start = self.starts[-1]
        previous = [each.step for each in self.starts if each.step < start.step]
        if not previous:
            return self
        before = self._from(previous[-1], start.step).ended
        return replace(self._from(start.step, self.num_steps), starts=(start,), before=before)

    def _from(self, first: int, last: int) -> Run:
        """The lines of the steps after ``first``, up to ``last``."""

        def within(lines: tuple[LineT, ...]) -> tuple[LineT, ...]:
            return tuple(line for line in lines if first < line.step <= last)

        starts = tuple(start for start in self.starts if start.step == first)
        lines = within(self.samples), within(self.skips), within(self.verdicts)
        return Run(starts, *lines, {}, within(self.watched))

    def _whole_samples(self) -> list[Sample]:
        """The samples; one more if lines of skips follow, as where a process was killed."""
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
